"""Plots of the report: numbers in, SVG text out that takes its ink from the page, light or dark."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Told apart also by readers who do not see red and green alike (Okabe and Ito), on white and on black.
COLOURS = ("#0f8b8d", "#e69f00", "#cc6f9c", "#4c8bd6", "#8a8f98", "#d55e00", "#59a14f", "#9a79c4")
_INK = "#010203"  # stands for the page's text colour until the SVG is written


def recall_bars(methods: Mapping[str, Mapping[str, float]]) -> str:
    """Grouped bars: for each R@K, one bar per method."""
    cutoffs = [name for name in next(iter(methods.values())) if name.startswith("R@")]
    width = 0.8 / len(methods)
    figure, axes = _figure(8.4, 3.6)
    drawn = []
    for i, row in enumerate(methods.values()):
        left = [place - 0.4 + (i + 0.5) * width for place in range(len(cutoffs))]
        bars = axes.bar(
            left,
            [row[name] for name in cutoffs],
            width=width * 0.9,
            color=COLOURS[i % len(COLOURS)],
        )
        drawn.append(bars)
        if len(methods) <= 5:
            axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, color=_INK)
    axes.set_xticks(range(len(cutoffs)), cutoffs)
    axes.set_ylabel("share of queries")
    axes.set_ylim(0, 1.08)
    # Given with their bars: found by labels, one that begins with an underscore would be left out. Between
    # dollars matplotlib would read a formula.
    names = [method.replace("$", r"\$") for method in methods]
    beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)}
    axes.legend(drawn, names, **beside, frameon=False, labelcolor=_INK, fontsize=9)
    return _svg(figure, name="recall of the methods")


def index_bars(index: Mapping[str, float]) -> str:
    """Horizontal bars: what share of the exact answer the index returns."""
    names = [name for name in ("recall@100", "recall@10") if name in index]
    figure, axes = _figure(8.4, 0.7 + 0.45 * len(names))
    bars = axes.barh(names, [index[name] for name in names], color=COLOURS[0], height=0.6)
    axes.bar_label(bars, fmt="%.3f", fontsize=9, padding=4, color=_INK)
    axes.set_xlim(0, 1.08)
    axes.set_xlabel("share of the exact answer")
    return _svg(figure, name="recall of the index")


def stage_bars(seconds: Mapping[str, float]) -> str:
    """Horizontal bars: how long each stage took."""
    stages: Sequence[str] = list(seconds)[::-1]
    figure, axes = _figure(8.4, 0.7 + 0.3 * len(stages))
    bars = axes.barh(stages, [seconds[stage] for stage in stages], color=COLOURS[3], height=0.6)
    axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=4, color=_INK)
    axes.margins(x=0.1)
    axes.set_xlabel("seconds")
    return _svg(figure, name="time of the stages")


def discrepancy(found: Mapping[str, Any]) -> str:
    """Histogram: how much farther apart the teacher puts two queries than the student does."""
    edges = found["edges"]
    figure, axes = _figure(8.4, 2.6)
    axes.bar(edges[:-1], found["counts"], width=edges[1] - edges[0], align="edge", color=COLOURS[0])
    axes.set_xlabel("distance by the teacher less distance by the student")
    axes.set_ylabel("pairs of queries")
    return _svg(figure, name="discrepancy of pairwise distances")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="tight")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_INK)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)
    return figure, axes


def _svg(figure: Figure, *, name: str) -> str:
    stream = io.StringIO()
    # Salt and date fixed: equal numbers give equal bytes. Text stays text, to be read aloud and searched.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # names nobody refers to, and every plot would repeat
    return text.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
