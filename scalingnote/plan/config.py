"""Settings of ladders, dry runs and capacity plans, and their constants.

constants.json states the source of each constant: "measured" (with file, table, row and key of the value in
docs/results), "design", "assumed", or "maker". `python -m benchmarks.scale --costs FILE`
fits the costs of offline stages to runs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from scalingnote.core import GIB
from scalingnote.core.config import Config
from scalingnote.models.config import BackboneConfig, Scratch

GpuName = Literal["H200", "H100", "A100", "L40S", "L4"]
QueryTower = Literal["bert-int8", "lookup"]
CONSTANTS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("constants.json").read_text(encoding="utf-8")
)


def constant(name: str) -> float:
    """Return the value of a constant."""
    return float(CONSTANTS["constants"][name]["value"])


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, with the figures of its manufacturer."""

    memory: float  # bytes that a program can use
    peak: float  # dense bfloat16 operations per second
    price: float  # US dollars per hour


GPUS: dict[GpuName, Gpu] = {
    name: Gpu(gpu["memory GiB"] * GIB, gpu["peak"], gpu["USD an hour"])
    for name, gpu in CONSTANTS["gpus"].items()
}


class GpuAssumptions(Config):
    """The GPUs of a dry run or a plan, all of one kind."""

    model_config = ConfigDict(allow_inf_nan=False)

    gpu: GpuName = Field("H100", description="kind of GPU")
    mfu: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the GPU's peak that is reached; measured so far: 0.26, for padded rows of a "
        "7B tower on an H100",
    )


class Assumptions(GpuAssumptions):
    """Assumptions of a dry run: one GPU per training worker. Repeated passes count as work."""

    rows: int | None = Field(None, ge=1, description="training rows; null: steps and days are left out")
    query_tokens: float | None = Field(None, gt=0, description="mean length; null: max_length of the tower")
    document_tokens: float | None = Field(
        None, gt=0, description="mean length; null: max_length of the tower"
    )


class PlanConfig(GpuAssumptions):
    """A corpus, its traffic, and other assumptions."""

    documents: int = Field(ge=1, description="documents of the corpus")
    tokens: float = Field(gt=0, description="mean tokens of a document, including its prompt")
    model: str = Field(description="backbone of both towers: a published name or a folder with config.json")
    qps: float = Field(gt=0, description="queries per second at the peak")
    recall: float = Field(0.95, gt=0, le=1, description="recall of the exact 100 best documents")
    gpus: int = Field(8, ge=1, description="GPUs that work at the same time")
    query_tokens: float = Field(16.0, gt=0, description="mean tokens of a query")
    dim: int = Field(128, ge=1, description="dimension of the stored and indexed embeddings")
    pairs: int = Field(100_000_000, ge=1, description="training pairs; the paper chose 10^8 for 7B")
    lora: int | None = Field(None, ge=1, description="rank of both towers' adapters; null: all weights learn")
    queries: int | None = Field(
        None,
        ge=1,
        description="distinct training queries that `collect` ranks by BM25 and `mine` searches, each over "
        "all documents; null: a tenth of the pairs",
    )
    query_tower: QueryTower = Field("bert-int8", description="query tower of the service")
    node_memory: tuple[Annotated[int, Field(ge=16)], ...] = Field(
        (64, 128, 256, 512, 1024), min_length=1, description="GB of the nodes that searchers may run on"
    )
    cores: int = Field(256, ge=1, description="CPU cores that the offline stages run on")
    replicas: int = Field(2, ge=1, description="least number of copies of each serving process: one may die")


def _rung(layers: int, hidden: int, heads: int) -> Scratch:
    return Scratch(layers=layers, hidden=hidden, heads=heads, intermediate=2 * hidden)


class LadderConfig(Config):
    """Sizes of stage I, in all combinations, for the scaling laws (ScalingNote, section 4.4)."""

    backbones: tuple[BackboneConfig, ...] = Field(
        (_rung(1, 16, 1), _rung(1, 32, 1), _rung(1, 48, 2), _rung(2, 64, 2), _rung(2, 96, 3)),
        min_length=1,
        description="backbones of both towers",
    )
    pairs: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (896, 1792, 3584, 7168),
        min_length=1,
        description="numbers of training pairs, each seen once; rounded down to full batches",
    )
    seeds: tuple[int, ...] = Field(
        (0, 1, 2), min_length=1, description="seeds of training; each seed is a separate run"
    )
    lr_by_width: float = Field(
        1.0,
        ge=0,
        description="power p: a rung's peak_lr is that of train times (narrowest width / its width)^p; 0: "
        "the same peak_lr",
    )
