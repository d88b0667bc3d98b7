"""What a report says beside its main table: each part of report.json comes in, a titled table goes out.

Markdown and the page show the same sections. A part that a run has nothing for is not there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scalingnote.evaluate.retrieval import in_order

Report = dict[str, Any]
BETTER, WORSE = "▲", "▼"


@dataclass(frozen=True)
class Section:
    """A title, what to know when reading it, and a table of text; the first column names the row."""

    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def sections(report: Report) -> list[Section]:
    """All of them, in the order in which they are read."""
    return [*_significance(report)]


def mark(report: Report, method: str, measure: str) -> str:
    """How a method compares with the baseline in a measure: significantly better, worse, or nothing."""
    told = report.get("significance", {})
    found = told.get("differences", {}).get(method, {}).get(measure)
    if found is None or found["p_holm"] is None or found["p_holm"] >= told["alpha"]:
        return ""
    return BETTER if found["difference"] > 0 else WORSE


def _significance(report: Report) -> Iterator[Section]:
    told = report.get("significance")
    if not told or not told["differences"]:
        return
    names = in_order(name for row in told["differences"].values() for name in row)
    level = f"{100 * (1 - told['alpha']):g} %"
    text = (
        f"Mean difference over queries, its {level} interval ({told['resamples']:,} bootstrap resamples of "
        f"the queries) and p (paired two-sided t-test, Holm's correction over the methods). {BETTER} and "
        f"{WORSE}: better and worse than {told['baseline']}, p < {told['alpha']:g}."
    )
    rows = [
        [method, *(_difference(row[name]) + mark(report, method, name) for name in names)]
        for method, row in told["differences"].items()
    ]
    yield Section(f"Against {told['baseline']}", text, ["method", *names], rows)


def _difference(found: dict[str, float | None]) -> str:
    p = found["p_holm"]
    known = "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.3f}"
    return f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]{known} "
