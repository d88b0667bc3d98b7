"""Tables of reports: Markdown that also lines up as plain text, and HTML."""

from collections.abc import Sequence
from html import escape


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, text: int = 1) -> str:
    """The first `text` columns stand to the left, as words do, all others to the right."""
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


def html(head: Sequence[str], rows: Sequence[str]) -> str:
    """A table that scrolls sideways by itself; `rows` are ``<tr>`` elements."""
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
