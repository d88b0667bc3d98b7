"""What the offline stages take for a corpus of any size: straight lines through measured runs.

    python -m benchmarks.scale measures every stage at several sizes ─► stage_costs.json
    a line through a stage's two largest sizes ─► core hours, bytes, requests, the driver's memory

A line holds because every stage works part by part; the benchmark compares what the smaller sizes predict
with its largest run. The measured documents have 18 words and embeddings of 32 dimensions: work and bytes of
texts are multiplied by a corpus's tokens / 18, those of embeddings by its dimensions / 32.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

MEASURED_TOKENS, MEASURED_DIM = 18, 32
MEASURED_CORES = 2
# Stages whose rows are embeddings; the rows of the others are texts.
VECTOR_STAGES = ("quantize", "index", "mine", "evaluate")
FIGURES = ("seconds", "driver GB", "read MB", "written MB", "requests")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class StageCost:
    """What one offline stage takes."""

    name: str
    core_hours: float
    hours: float  # on all nodes
    read_gb: float
    written_gb: float
    requests: float  # to the object store
    cost: float  # US dollars, of cores and requests
    driver_gb: float  # resident memory


def measured_rows() -> list[Row]:
    """Measured figures of every stage and size, as benchmarks/scale.py wrote them."""
    text = files("scalingnote.scaling").joinpath("stage_costs.json").read_text(encoding="utf-8")
    rows: list[Row] = json.loads(text)
    return rows


def predict(rows: Sequence[Row], *, documents: int) -> dict[str, float]:
    """Figures of one stage for this number of documents.

    Args:
        rows: measured figures of the stage, at two sizes or more; the two largest count.
        documents: of the corpus to predict.

    Returns:
        Every figure of `FIGURES`; ``fixed seconds`` is the part of the seconds that does not grow.
    """
    small, large = sorted(rows, key=lambda row: row["documents"])[-2:]
    found = {}
    for figure in FIGURES:
        slope = (large[figure] - small[figure]) / (large["documents"] - small["documents"])
        slope = max(slope, 0.0)  # noise of a stage that does not grow
        found[figure] = large[figure] + slope * (documents - large["documents"])
        if figure == "seconds":
            found["fixed seconds"] = max(large[figure] - slope * large["documents"], 0.0)
    return found


def stage_costs(
    *, documents: int, tokens: float, dim: int, cores: int, core_price: float, request_price: float
) -> list[StageCost]:
    """What every measured stage takes.

    Args:
        documents: of the corpus.
        tokens: mean tokens of a document.
        dim: of the embeddings.
        cores: that work at the same time. Work that grows with the corpus is divided evenly among them.
        core_price: US dollars of a core's hour, with its memory.
        request_price: US dollars of a million requests.
    """
    rows = measured_rows()
    costs = []
    for name in dict.fromkeys(row["stage"] for row in rows):
        found = predict([row for row in rows if row["stage"] == name], documents=documents)
        times = dim / MEASURED_DIM if name in VECTOR_STAGES else tokens / MEASURED_TOKENS
        growing = (found["seconds"] - found["fixed seconds"]) * MEASURED_CORES * times
        core_hours = (growing + found["fixed seconds"]) / 3600
        costs.append(
            StageCost(
                name,
                core_hours=core_hours,
                hours=(growing / cores + found["fixed seconds"]) / 3600,
                read_gb=found["read MB"] * times / 1e3,
                written_gb=found["written MB"] * times / 1e3,
                requests=found["requests"],
                cost=core_hours * core_price + found["requests"] / 1e6 * request_price,
                driver_gb=found["driver GB"],
            )
        )
    return costs
