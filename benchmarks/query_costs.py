"""What a query costs: how many a core encodes in a second, by the form of a tower, and in US dollars."""

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.distillation import LIGHTRETRIEVER, Row
from benchmarks.pretrained import SHORT, ZERO_QUERY
from scalingnote.scaling.capacity import core_price
from scalingnote.scaling.config import PlanConfig

MILLION = 1_000_000


def speeds(sides: Mapping[str, Row]) -> dict[str, float]:
    """Queries/s by label: the best of all query towers of its form, since what is slower was disturbed."""
    best: dict[str, float] = {}
    timed = {name: row.speed for name, row in sides.items() if row.speed is not None}
    for name, speed in timed.items():
        best[form(name)] = max(speed, best.get(form(name), 0.0))
    return {name: best[form(name)] for name in timed}


def form(name: str) -> str:
    """What a query costs depends on this part of a label: how much is read of which model."""
    label, plus, _ = name.partition(" + bm25")
    method, kind = label.split(", ")[:2]
    if method == ZERO_QUERY or kind == SHORT["scratch"]:
        return name
    if method in ("published", "scalingdual"):
        return f"all layers, {kind}{plus}"
    if method.startswith((LIGHTRETRIEVER, "lookup")):
        return f"{method}, {kind}{plus}"
    return f"two layers, {'M3E' if kind == 'M3E' else 'MiniLM'}{plus}"  # SmolLM2's small towers are MiniLM's


def dollars(speed: float | None, *, teacher: float | None = None, share: float = 0.0) -> str:
    """Of a million queries: encoded, a share by the teacher too, and searched among a million vectors."""
    if speed is None:
        return "-"
    seconds = 1 / speed + (share / teacher if teacher else 0.0) + search_seconds()
    return f"{MILLION * seconds / 3600 * hour():.3f}"


def search_seconds() -> float:
    """Core seconds of a search of docs/results/index.json: a million vectors, the default family."""
    report = json.loads(Path("docs/results/index.json").read_text(encoding="utf-8"))
    return float(report["family"][0]["us, batch 1"]) * 1e-6


def hour() -> float:
    """US dollars of a core's hour, as `scalingnote plan` assumes it."""
    return core_price(PlanConfig(documents=MILLION, tokens=64, model="any", qps=1))
