"""Pictures of the reports by matplotlib, as SVG within a page: text and lines have the page's colour."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any
from warnings import catch_warnings, simplefilter

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INK = "#010203"  # replaced by the page's colour
_STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in the reader's font
    "text.parse_math": False,  # a name may contain $
}
# Distinguishable with red-green blindness (Okabe and Ito), on white and on black.
COLOURS = ("#0f8b8d", "#e69f00", "#cc6f9c", "#4c8bd6", "#8a8f98", "#d55e00", "#59a14f", "#9a79c4")
# Ids of groups, to which nothing refers and which every picture has; and namespaces, which HTML knows.
_UNUSED = re.compile(r' id="[a-zA-Z\d.]+_[\d_]+"| xmlns(:\w+)?="[^"]*"')


def svg(name: str, draw: Callable[[Axes], None]) -> str:
    """An SVG element with what `draw` draws; equal for equal drawings.

    Args:
        name: describes the picture to those who do not see it; different for each picture of a page.
        draw: draws into the axes of the picture.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}), catch_warnings():
        simplefilter("ignore", UserWarning)  # of letters that are not in matplotlib's own font
        figure = Figure(figsize=(8, 3), layout="constrained")
        draw(figure.subplots())
        written = io.StringIO()
        unwritten = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=unwritten)
    text = written.getvalue()
    text = _UNUSED.sub("", text[text.index("<svg") :]).replace(_INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)


def draw_quality_and_cost(
    axes: Axes, points: Mapping[str, tuple[float | None, float]], *, measure: str
) -> None:
    """Methods by the queries per second that their encoder does and by a measure; without encoder: a line."""
    drawn: list[Artist] = []
    for number, (rate, value) in enumerate(points.values()):
        colour = COLOURS[number % len(COLOURS)]
        if rate:
            drawn.append(axes.scatter([rate], [value], color=colour))
        else:
            drawn.append(axes.axhline(value, color=colour, linestyle="--"))
    axes.set(xscale="log", xlabel="queries per second and core", ylabel=measure)
    axes.set_ylim(0, 1.1 * max(value for _, value in points.values()) or 1)
    axes.xaxis.set_major_formatter("{x:,g}")
    _add_legend(axes, drawn, [f"{name}: {value:.3f}" for name, (_, value) in points.items()])


def draw_groups(axes: Axes, groups: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    """Bars from 0 to 1 in groups: for each group a bar per name."""
    width = 0.8 / len(names)
    drawn: list[Artist] = []
    for number in range(len(names)):
        places = [place + number * width for place in range(len(groups))]
        values = [group[number] for group in groups.values()]
        bars = axes.bar(places, values, width, align="edge", color=COLOURS[number % len(COLOURS)])
        drawn.append(bars[0])
    axes.set_xticks([place + 0.4 for place in range(len(groups))], list(groups))
    axes.set_ylim(0, 1)
    _add_legend(axes, drawn, names)


def _add_legend(axes: Axes, drawn: Sequence[Artist], names: Sequence[str]) -> None:
    """Name what is drawn, to the right; given with its names, because matplotlib hides labels like _a."""
    axes.legend(drawn, names, loc="center left", bbox_to_anchor=(1, 0.5))
