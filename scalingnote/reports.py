"""Building blocks of reports: Markdown and HTML tables, plots, and a self-contained HTML page."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template


class Markup(str):
    """Text that is HTML already, and is not escaped."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 1) -> str:
    """A Markdown table that also lines up as plain text.

    Args:
        head: names of the columns.
        rows: their cells.
        text: the first `text` columns are words, aligned left; the others are numbers, aligned right.
    """
    widths = [max(2, *(len(line[i]) for line in (head, *rows))) for i in range(len(head))]
    aligned = [
        [
            cell.ljust(width) if i < text else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in (head, *rows)
    ]
    rule = [f":{'-' * (w - 1)}" if i < text else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:]))


def html(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 1) -> str:
    """An HTML table that scrolls sideways by itself; its arguments are those of :func:`markdown`.

    The first cell of a row is its heading. Cells are escaped, except for :class:`Markup`.
    """
    classes = [' class="text"' if column < text else "" for column in range(len(head))]
    names = "".join(f'<th scope="col"{c}>{escape(name)}</th>' for c, name in zip(classes, head, strict=True))
    body = "".join(
        f'<tr><th scope="row"{classes[0]}>{_escaped(first)}</th>'
        + "".join(f"<td{c}>{_escaped(cell)}</td>" for c, cell in zip(classes[1:], cells, strict=True))
        + "</tr>"
        for first, *cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def section(title: str, *parts: str, text: str = "") -> str:
    """A titled section of a page: a small text, then `parts`, which are HTML."""
    small = f'<p class="small">{escape(text)}</p>\n' if text else ""
    body = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{small}{body}\n</section>"


def environment_line(environment: Mapping[str, object]) -> str:
    """Versions and hardware as one line of text."""
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def definitions(items: Mapping[str, object]) -> str:
    """Names and values as an HTML list."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in items.items())
    return f"<dl>{''.join(rows)}</dl>"


# --- plots: inline SVG whose text and lines have the page's colour ------------------------------------------

_BARS_WIDTH, _LABEL_WIDTH = 620, 130  # of horizontal bars, in pixels
_COLUMNS_HEIGHT = 200
# Distinguishable with red-green blindness (Okabe and Ito), on white and on black.
COLOURS = ("#0f8b8d", "#e69f00", "#cc6f9c", "#4c8bd6", "#8a8f98", "#d55e00", "#59a14f", "#9a79c4")


def bars(
    name: str, values: Mapping[str, int | float], *, number: str = "{:,.1f}", end: int | float | None = None
) -> str:
    """Horizontal bars with their values, from 0 to `end`, by default the largest."""
    scale = (_BARS_WIDTH - _LABEL_WIDTH - 60) / (end or max(values.values()) or 1)
    lines = [
        _text(_LABEL_WIDTH - 8, 15 + 22 * row, label, anchor="end")
        + _box(_LABEL_WIDTH, 3 + 22 * row, scale * value, 16, COLOURS[0])
        + _text(_LABEL_WIDTH + scale * value + 6, 15 + 22 * row, number.format(value))
        for row, (label, value) in enumerate(values.items())
    ]
    return _figure(name, _BARS_WIDTH, 22 * len(values), lines)


def columns(
    name: str,
    groups: Mapping[str, Sequence[int | float]],
    *,
    legend: Sequence[str] = (),
    end: int | float | None = None,
) -> str:
    """Groups of vertical bars, from 0 to `end`, by default the highest; a legend names a group's bars."""
    each = max(len(group) for group in groups.values())
    width = 560 / len(groups)
    scale = (_COLUMNS_HEIGHT - 20) / (end or max(map(max, groups.values())) or 1)
    shapes = []
    for place, (label, group) in enumerate(groups.items()):
        shapes.append(_text(width * (place + 0.5), _COLUMNS_HEIGHT + 16, label, anchor="middle"))
        for number, value in enumerate(group):
            left, height = width * (place + 0.1 + 0.8 * number / each), scale * value
            colour = COLOURS[number % len(COLOURS)]
            shapes.append(_box(left, _COLUMNS_HEIGHT - height, 0.72 * width / each, height, colour))
            if end and each <= 5:
                middle = left + 0.36 * width / each
                shapes.append(
                    _text(middle, _COLUMNS_HEIGHT - height - 4, f"{value:.2f}", anchor="middle", size=9)
                )
    for number, label in enumerate(legend):
        shapes.append(_box(580, 8 + 18 * number, 12, 12, COLOURS[number % len(COLOURS)]))
        shapes.append(_text(598, 18 + 18 * number, label))
    return _figure(name, 800 if legend else 560, max(_COLUMNS_HEIGHT + 24, 18 * len(legend) + 12), shapes)


def scatter(
    name: str, points: Mapping[str, tuple[int | float | None, int | float]], *, x: str, y: str
) -> str:
    """Named points over a logarithmic x; one without x is a dashed line at its y."""
    known = [place for place, _ in points.values() if place]
    low = math.floor(math.log10(min(known)))
    high = max(math.ceil(math.log10(max(known))), low + 1)
    top = max(value for _, value in points.values()) or 1
    shapes = [_line(60, 260, 560, 260), _line(60, 20, 60, 260), _text(310, 298, x, anchor="middle")]
    shapes += [_text(60, 12, y, anchor="middle")]
    for power in range(low, high + 1):
        at = 60 + 500 * (power - low) / (high - low)
        shapes += [_line(at, 260, at, 264), _text(at, 278, f"{10.0**power:,g}", anchor="middle")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        shapes.append(_text(54, 264 - 230 * share, f"{top * share:.2f}", anchor="end", size=10))
    for number, (label, (place, value)) in enumerate(points.items()):
        colour, height = COLOURS[number % len(COLOURS)], 260 - 230 * value / top
        if place:
            at = 60 + 500 * (math.log10(place) - low) / (high - low)
            shapes.append(f'<circle cx="{at:.1f}" cy="{height:.1f}" r="5" fill="{colour}"/>')
        else:
            shapes.append(_line(60, height, 560, height, colour=colour, dashed=True))
        shapes += [
            _box(590, 22 + 20 * number, 12, 12, colour),
            _text(608, 32 + 20 * number, f"{label}: {value:.3f}"),
        ]
    return _figure(name, 860, max(306, 20 * len(points) + 40), shapes)


def _figure(name: str, width: int, height: int, shapes: Sequence[str]) -> str:
    return (
        f'<figure><svg role="img" aria-label="{escape(name)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" fill="currentColor" font-size="12">{"".join(shapes)}</svg></figure>'
    )


def _text(x: int | float, y: int | float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _line(
    x: int | float,
    y: int | float,
    to_x: int | float,
    to_y: int | float,
    *,
    colour: str = "currentColor",
    dashed: bool = False,
) -> str:
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{colour}"{dashes}/>'


def _box(x: int | float, y: int | float, width: int | float, height: int | float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def page(title: str, *, subject: str, header: str, sections: Sequence[str]) -> str:
    """An HTML page that needs no other file.

    Args:
        title: heading of the page.
        subject: follows the title in the browser's tab.
        header: HTML below the heading.
        sections: HTML of the body.
    """
    template = Template(Path(__file__).with_name("reports.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title), subject=escape(subject), header=header, body="\n\n".join(sections)
    )


def four_digits(value: float) -> str:
    """A number with four significant digits if it is not a small whole number: 1,234 or 6.526e9."""
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    if 1e-3 <= abs(value) < 1e7:
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.4g}"
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def _escaped(cell: str) -> str:
    return cell if isinstance(cell, Markup) else escape(cell)
