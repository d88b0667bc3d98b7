"""Building blocks of reports: Markdown and HTML tables, and a self-contained HTML page."""

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


def definitions(items: Mapping[str, object]) -> str:
    """Names and values as an HTML list."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in items.items())
    return f"<dl>{''.join(rows)}</dl>"


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
