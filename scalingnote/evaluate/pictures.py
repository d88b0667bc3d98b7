"""Pictures of the reports by matplotlib, as SVG in a page; text and lines have the page's colour."""

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
    "svg.fonttype": "none",  # text remains text, in the reader's font
    "text.parse_math": False,  # a name may contain $
}
# Distinguishable with red-green blindness (Okabe and Ito), on white and on black.
COLOURS = ("#0f8b8d", "#e69f00", "#cc6f9c", "#4c8bd6", "#8a8f98", "#d55e00", "#59a14f", "#9a79c4")
# Ids of groups, which are unused and the same in every picture; and namespaces, which HTML does not need.
_UNUSED = re.compile(r' id="[a-zA-Z\d.]+_[\d_]+"| xmlns(:\w+)?="[^"]*"')


def svg(name: str, draw: Callable[[Axes], None]) -> str:
    """Return an SVG element with the drawing of `draw`; equal drawings give equal elements.

    Args:
        name: text that describes the picture to readers who cannot see it; unique in a page.
        draw: function that draws on the axes of the picture.
    """
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}), catch_warnings():
        simplefilter("ignore", UserWarning)  # for letters that are not in matplotlib's font
        figure = Figure(figsize=(8, 3), layout="constrained")
        draw(figure.subplots())
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    text = buffer.getvalue()
    text = _UNUSED.sub("", text[text.index("<svg") :]).replace(_INK, "currentColor")
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)


def draw_quality_and_cost(
    axes: Axes, points: Mapping[str, tuple[float | None, float]], *, measure: str
) -> None:
    """Draw a point per method by its encoded queries per second and a measure; a line without encoder."""
    artists: list[Artist] = []
    for number, (rate, value) in enumerate(points.values()):
        colour = COLOURS[number % len(COLOURS)]
        if rate:
            artists.append(axes.scatter([rate], [value], color=colour))
        else:
            artists.append(axes.axhline(value, color=colour, linestyle="--"))
    axes.set(xscale="log", xlabel="queries per second and core", ylabel=measure)
    axes.set_ylim(0, 1.1 * max(value for _, value in points.values()) or 1)
    axes.xaxis.set_major_formatter("{x:,g}")
    _add_legend(axes, artists, [f"{name}: {value:.3f}" for name, (_, value) in points.items()])


def draw_groups(axes: Axes, groups: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    """Draw bars from 0 to 1 in groups, with a bar per name in each group."""
    width = 0.8 / len(names)
    artists: list[Artist] = []
    for number in range(len(names)):
        positions = [group + number * width for group in range(len(groups))]
        values = [group[number] for group in groups.values()]
        bars = axes.bar(positions, values, width, align="edge", color=COLOURS[number % len(COLOURS)])
        artists.append(bars[0])
    axes.set_xticks([group + 0.4 for group in range(len(groups))], list(groups))
    axes.set_ylim(0, 1)
    _add_legend(axes, artists, names)


def _add_legend(axes: Axes, artists: Sequence[Artist], names: Sequence[str]) -> None:
    """Add a legend on the right, with explicit names because matplotlib hides labels like _a."""
    axes.legend(artists, names, loc="center left", bbox_to_anchor=(1, 0.5))
