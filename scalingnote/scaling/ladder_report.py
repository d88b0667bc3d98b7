"""A ladder's report as Markdown: rungs, laws, what models not run would reach, best splits of budgets."""

from typing import Any

import pyarrow as pa

from scalingnote import tables

LAWS = {
    "size": "L(N) = (C/N)^α + δ, at the most data",
    "data": "L(D) = (C/D)^α + δ, at the largest model",
    "joint": "L(N, D) = [(A/N)^(α/β) + B/D]^β + δ",
}


def markdown(table: pa.Table, told: dict[str, Any]) -> str:
    """The whole page."""
    rungs = [
        [
            f"{r['parameters']:,}",
            f"{r['examples']:,}",
            f"{r['contrastive_entropy']:.4f}",
            f"{r['operations']:.2g}",
        ]
        for r in table.to_pylist()
    ]
    header = ["parameters", "pairs", "contrastive entropy", "operations"]
    parts = ["# Ladder", tables.markdown(header, rungs, text=0)]
    level = f"{told['level']:.0%}"
    for kind, law in told["laws"].items():
        lines = [[name, *(f"{v:.4g}" for v in values)] for name, values in law["constants"].items()]
        free = law["degrees_of_freedom"]
        quality = (
            f"{law['runs']} runs, R² = {law['r2']:.4f} with {free} degree{'s' * (free != 1)} of freedom, "
            f"scatter of a run {law['scatter']:.3f}."
        )
        parts += [
            f"## {LAWS[kind]}",
            quality,
            tables.markdown(["constant", "value", f"{level} from", "to"], lines),
        ]
    if told["predictions"]:
        header = ["parameters", "pairs", "law", "entropy", f"{level} from", "to"]
        rows = [row for point in told["predictions"] for row in _foretold(point)]
        parts += [
            "## What models not run would reach",
            "Intervals are the curve's: a single run scatters around it.",
            tables.markdown(header, rows, text=0),
        ]
    if told["splits"]:
        header = ["operations", "parameters", f"{level}", "pairs", f"{level}", "entropy", f"{level}"]
        parts += [
            "## Best splits of a budget",
            tables.markdown(header, [_split(split) for split in told["splits"]], text=0),
        ]
    if len(told["laws"]) < len(LAWS):
        parts.append(
            "A law that is missing here needs more sizes: four for one of N or D, three of each for both."
        )
    return "\n\n".join(parts) + "\n"


def _foretold(point: dict[str, Any]) -> list[list[str]]:
    """A row for every law that tells, or one that says so."""
    size = [f"{point['parameters']:.4g}", f"{point['data']:.4g}"]
    rows = [[*size, kind, *(f"{v:.4g}" for v in values)] for kind, values in point["entropy"].items()]
    return rows or [[*size, "none tells", "", "", ""]]


def _split(split: dict[str, Any]) -> list[str]:
    cells = [f"{split['operations']:.3g}"]
    for name in ("parameters", "data", "entropy"):
        value, low, high = split[name]
        cells += [f"{value:.4g}", f"{low:.3g} to {high:.3g}"]
    return cells
