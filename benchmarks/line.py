"""One line of docs/performance.md: our number, the compared one, their ratio, the bar and whether it was met.

A peer's bar is 1. A guarantee has its own bar: nothing lost, the recall tuned for, an export's cosine. A
floor (a forward pass alone, an application that does nothing) has none, because nothing can be better.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.directions import Better, rule

Report = Mapping[str, Any]
ARROWS: Mapping[Better, str] = {"higher": " ↑", "lower": " ↓", "zero": "", "either": ""}


@dataclass(frozen=True)
class Line:
    """What was measured, as text; `metric` is the name in the JSON of the ratio or of what is ours."""

    what: str
    ours: str
    beside: str = "-"
    ratio: float | None = None
    better: Better = "higher"
    metric: str = ""
    bar: str = ""

    def cells(self) -> dict[str, str]:
        """As a row of the table; the arrow says where better is."""
        return {
            "what was measured": self.what,
            "ours": self.ours,
            "compared with": self.beside,
            "ratio": "-" if self.ratio is None else number(self.ratio) + ARROWS[self.better],
            "metric": f"`{self.metric}`" if self.metric else "-",
            "bar": self.bar or "-",
        }


Lines = Iterator[Line]


def ratio(r: Report, metric: str, what: str, ours: str, beside: str, *, bar: float | None = None) -> Line:
    """Two things measured in one run, as a metric divides them."""
    found, better = r["metrics"][metric], _better(metric)
    return Line(what, ours, beside, found, better, metric, judged(found, better, bar))


def value(
    r: Report, metric: str, what: str, unit: str = "", beside: str = "-", *, bar: float | None = None
) -> Line:
    """A metric that stands for itself."""
    found, better = r["metrics"][metric], _better(metric)
    return Line(
        what, f"{number(found)} {unit}".strip(), beside, None, better, metric, judged(found, better, bar)
    )


def plain(what: str, ours: str, beside: str, over: float, *, bar: float | None = None) -> Line:
    """Two things of a table, and how many times better ours is."""
    return Line(what, ours, beside, over, "higher", "", judged(over, "higher", bar))


def judged(found: float, better: Better, bar: float | None) -> str:
    """The bar, and whether it was met; what must be 0 needs none to be named."""
    if better == "zero":
        sign, bar, met = "=", 0.0, found == 0
    elif bar is None:
        return ""
    elif better == "lower":
        sign, met = "≤", found <= bar
    else:
        sign, met = "≥", found >= bar
    return f"{sign} {bar:g}: {'met' if met else '**not met**'}"


def mean(shown: str | float) -> float:
    """0.979 of "0.979 ± 0.006", with a star or without."""
    return float(str(shown).split(" ")[0].rstrip("*"))


def number(found: float) -> str:
    """Three digits, or whole numbers from a hundred on."""
    if abs(found) >= 100:
        return f"{found:,.0f}"
    # A cosine of 0.9989 is no 0.999.
    return f"{found:.4g}" if 0.99 < abs(found) < 1 else f"{found:.3g}"


def _better(metric: str) -> Better:
    known = rule(metric)
    return known.better if known else "either"
