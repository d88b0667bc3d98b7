"""A picture of trials on pretrained towers: nDCG@10 over queries/s, a panel for each dataset."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pretrained_tables import NDCG, QUALITY

PANELS_ACROSS = 3
SHOWN_SHARE = 0.2  # of the best nDCG@10
SPEEDS = (1, 1_000_000)  # queries/s from the left edge to the right one
SLOW = 110  # queries/s; the labels of slower towers stand on their left, those of others on their right
LABEL_LINES, LABEL_DECADES = 36, 1.5  # of a panel's height; how wide a label is, of queries/s


def plot(tables: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Write the picture of the tables of quality and cost."""
    from matplotlib.figure import Figure

    titles = [title for title in tables if title.startswith(QUALITY)]
    across = min(len(titles), PANELS_ACROSS)
    down = -(-len(titles) // across)
    figure = Figure(figsize=(5.6 * across, 4.4 * down), layout="constrained")
    for number, title in enumerate(titles, start=1):
        axes = figure.add_subplot(down, across, number)
        axes.set(xscale="log", title=title.removeprefix(QUALITY), xlabel="queries/s of a core", ylabel=NDCG)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, tables[title])
    figure.savefig(path, dpi=150)


def draw(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the query sides of a dataset; what is untrained or finds little is left to the tables."""
    values = {row["query side"]: float(row[NDCG].split(" ")[0]) for row in rows}
    best = max(values.values())
    points = {
        name: (row["queries/s"], values[name])
        for row in rows
        if not (name := row["query side"]).endswith(", untrained") and values[name] >= SHOWN_SHARE * best
    }
    if points.pop("bm25", None) is not None:  # has no query tower
        axes.axhline(values["bm25"], color="#8a8f98", linewidth=0.8, linestyle=":")
        axes.annotate("bm25", (0.01, values["bm25"]), xycoords=("axes fraction", "data"), fontsize=7)
    slow = {name: point for name, point in points.items() if point[0] < SLOW}
    fast = {name: point for name, point in points.items() if point[0] >= SLOW}
    heights = label_heights(slow, gap=best / LABEL_LINES) | label_heights(fast, gap=best / LABEL_LINES)
    for name, (speed, value) in points.items():
        axes.plot(speed, value, "o" if "SmolLM2" in name else "s", color="#0f8b8d", markersize=4)
        line = {"arrowstyle": "-", "color": "#c5c9cf", "linewidth": 0.5}
        away, side = (1 / 1.25, "right") if name in slow else (1.25, "left")
        style = {"fontsize": 6, "va": "center", "ha": side, "arrowprops": line}
        axes.annotate(name, (speed, value), xytext=(speed * away, heights[name]), **style)
    axes.set(xlim=SPEEDS, ylim=(0, 1.05 * best))


def label_heights(points: Mapping[str, tuple[float, float]], *, gap: float) -> dict[str, float]:
    """Where the labels of points (x on a log axis, y) stand so that no two overlap: at their y or below."""
    heights: dict[str, float] = {}
    for name, (x, y) in sorted(points.items(), key=lambda point: -point[1][1]):
        beside = [
            heights[other] for other in heights if abs(math.log10(points[other][0] / x)) < LABEL_DECADES
        ]
        while any(abs(y - other) < gap for other in beside):
            y -= gap / 4
        heights[name] = y
    return heights
