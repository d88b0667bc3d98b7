"""Reports as data, and the Jinja2 templates that turn their tables and sections into Markdown or HTML.

ReportPage ─► templates/report.md, templates/report.html
facts      ─► templates/tower_card.md, templates/router_card.md
plans      ─► templates/plan.txt, templates/dry_run.txt, templates/ladder.md
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


class StrongCell(str):
    """A cell in bold type, for example the best value of its column."""


class CodeCell(str):
    """A cell that contains an identifier or a path."""


@dataclass(frozen=True)
class ReportTable:
    """A table of text: its first `text` columns are words, the others are numbers and aligned right."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: int = 1

    @property
    def markdown(self) -> str:
        """The table as Markdown that also lines up as plain text."""
        lines = [[_markdown_cell(cell) for cell in line] for line in (self.head, *self.rows)]
        widths = [max(2, *map(len, column)) for column in zip(*lines, strict=True)]
        is_words = [number < self.text for number in range(len(widths))]
        rule = [
            f":{'-' * (w - 1)}" if words else f"{'-' * (w - 1)}:"
            for w, words in zip(widths, is_words, strict=True)
        ]
        aligned = [
            [
                cell.ljust(width) if words else cell.rjust(width)
                for cell, width, words in zip(line, widths, is_words, strict=True)
            ]
            for line in lines
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in (aligned[0], rule, *aligned[1:]))


@dataclass(frozen=True)
class ReportSection:
    """A title, an explanation, tables, and pictures, which only HTML shows."""

    title: str
    text: str = ""
    tables: Sequence[ReportTable] = ()
    pictures: Sequence[str] = ()
    """SVG of :func:`scalingnote.evaluate.pictures.svg`."""


@dataclass(frozen=True)
class ReportPage:
    """The contents of a report, in their order."""

    title: str
    sections: Sequence[ReportSection]
    summary: str = ""
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()


def render(template: str, **values: Any) -> str:
    """Render a file of ``templates/``. Values are escaped in HTML; an unknown name raises UndefinedError."""
    return _templates().get_template(template).render(values)


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.tests |= {"strong": lambda cell: isinstance(cell, StrongCell)}
    templates.tests |= {"code": lambda cell: isinstance(cell, CodeCell)}
    return templates


def _markdown_cell(cell: str) -> str:
    text = " ".join(cell.splitlines()).replace("|", "\\|")
    match cell:
        case StrongCell():
            return f"**{text}**"
        case CodeCell():
            return f"`{text}`"
        case _:
            return text


def markdown_text(parts: Iterable[str | ReportTable]) -> str:
    """Join paragraphs and tables as Markdown, with an empty line between them."""
    return "\n\n".join(part.markdown if isinstance(part, ReportTable) else part for part in parts)


def align_columns(text: str, *, label: int, cell: int) -> str:
    """Pad the cells of lines such as ``label | cell | cell`` to these widths in characters."""
    lines = []
    for line in text.rstrip().split("\n"):
        first, *cells = line.split(" | ")
        padded = f"{first:<{label}}" + "".join(f"{one:<{cell}}  " for one in cells) if cells else first
        lines.append(padded.rstrip())
    return "\n".join(lines)


def environment_line(environment: Mapping[str, object]) -> str:
    """Join versions and hardware into one line of text."""
    return ", ".join(f"{name} {value}" for name, value in environment.items())
