"""Columns of a user's documents: id, title and text, by known names or as the caller chose.

The layout of a file is found from its first rows, before any work. Columns with known names are read, unless
the caller chose others. A file without a text column, or with two candidates, is an error that lists its
columns.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.datasets.file_heads import (
    ID_NAMES,
    LISTS,
    NUMBERS,
    OBJECTS,
    SUMMARY_NAMES,
    TEXT_LINES,
    TEXT_NAMES,
    TEXTS,
    WHOLE_NUMBERS,
    FileHead,
    file_head,
    list_columns,
)
from scalingnote.datasets.input_files import File, RawRow, UnreadableRow, shown_row
from scalingnote.storage import filesystem as fs

log = get_logger("datasets")
# Names of public layouts with these columns of id and text.
_LAYOUTS = {
    ("_id", "text"): "BEIR",
    ("id", "contents"): "Pyserini",
    ("docid", "text"): "Tevatron or MIRACL",
    ("pid", "passage"): "MS MARCO passages",
    ("docid", "body"): "MS MARCO documents",
    ("docid", "segment"): "MS MARCO segments",
}
_BLANK_SHARE = 0.9  # of the first rows: with more blank ones, a warning is logged
_OPTIONS = {"content": "text", "doc_id": "id", "title": "title"}


@dataclass(frozen=True)
class FileLayout:
    """The columns of a file that are read."""

    columns: Mapping[str, str]  # our name -> the file's
    head: FileHead
    name: str = ""  # of a public layout

    @functools.cached_property
    def unread(self) -> list[str]:
        """Columns of the file that are not read."""
        columns_read = set(self.columns.values())
        return [column for column in self.head.kinds if column not in columns_read]

    @functools.cached_property
    def _usual(self) -> dict[str, set[str]]:
        """All columns of the first rows that have an id, and of the first rows that have a text."""
        return {
            ours: set[str]().union(*(shape for shape in self.head.shapes if column in shape))
            for ours, column in self.columns.items()
            if ours in ("content", "doc_id")
        }

    def __str__(self) -> str:
        """Describe the columns that are read and the others."""
        absent = {"content": "no text", "doc_id": "ids are numbers of rows", "title": "no title"}
        phrases = [
            f"{_OPTIONS.get(ours, ours)} from {self.columns[ours]!r}"
            if ours in self.columns
            else absent[ours]
            for ours in dict.fromkeys((*_OPTIONS, *self.columns))
        ]
        unread = f"; not read: {list_columns(self.unread)}" if self.unread else ""
        return ", ".join(phrases) + (f" ({self.name} layout)" if self.name else "") + unread

    def is_like(self, other: "FileLayout") -> bool:
        """Return whether id and text have the same columns; a file without rows is like any other."""
        same_columns = all(
            self.columns.get(name) == other.columns.get(name) for name in ("doc_id", "content")
        )
        return same_columns or not (self.head.rows and other.head.rows)

    def row(self, row: RawRow) -> RawRow | UnreadableRow:
        """Rename a row of the file to our names; UnreadableRow if its columns differ from the first rows."""
        for ours, known_names in (("content", TEXT_NAMES), ("doc_id", ID_NAMES)):
            column = self.columns.get(ours)
            if column in row or (column is None and ours == "doc_id"):
                continue
            others = {
                name
                for name in row.keys() & {*known_names} - {*self.columns.values()}
                if ours == "doc_id" or isinstance(row[name], str | bytes)
            }
            if others or (column is not None and row.keys() - self._usual[ours]):
                return UnreadableRow(
                    shown_row(row), f"its {_OPTIONS[ours]} is not in the column of the first rows"
                )
        our_row = {name: row[column] for name, column in self.columns.items() if column in row}
        if self.columns.get("content") == "contents":
            our_row["content"] = without_title(our_row.get("content"), our_row.get("title"))
        return our_row


def without_title(content: Any, title: Any) -> Any:
    """Remove the title at the beginning of Pyserini's contents, because the title is a separate column."""
    if title and {type(content), type(title)} in ({str}, {bytes}) and content.startswith(title):
        rest = content[len(title) :]
        if rest[:1] in ("\n", b"\n"):
            return rest.lstrip()
    return content


def find_layouts(
    files: Sequence[File],
    columns: Mapping[str, str],
    *,
    names: Sequence[str],
    numbered: bool = False,
    tabs: bool = False,
) -> dict[File, FileLayout]:
    """Find the layout of each file.

    Args:
        files: Parquet, JSON lines, text lines (.txt), or fields separated by tabs (any other name).
        columns: our names -> those of the file, as the caller chose them; they are not guessed.
        names: our columns that are read; those other than id, title and text only by these names.
        numbered: whether files without ids are read, with their rows numbered.
        tabs: whether a .txt file has fields too.

    Raises:
        DataError: a file lacks a chosen column, has no column of a known name, or several texts.
    """
    find_layout = functools.partial(
        _layout_of, columns=dict(columns), names=names, numbered=numbered, tabs=tabs
    )
    return dict(zip(files, fs.map_files(find_layout, files), strict=True))


def _layout_of(
    file: File, *, columns: Mapping[str, str], names: Sequence[str], numbered: bool, tabs: bool
) -> FileLayout:
    head = file_head(file, chosen=[*columns.values()], tabs=tabs, values=True)
    if head.fields == TEXT_LINES:
        if columns:
            raise DataError(
                f"{file.uri} has one text per line and no columns to choose: leave it out of the path"
            )
        return FileLayout({"content": "line"}, head, "text lines")
    if missing := [column for column in columns.values() if column not in head.kinds and head.rows]:
        raise DataError(f"{file.uri} {head.lack(missing)}: choose one of them")
    our_columns = dict(columns)
    our_columns |= {
        name: name for name in names if name not in {*_OPTIONS, *our_columns} and name in head.kinds
    }
    for ours, choose_column in (("content", _content), ("doc_id", _doc_id), ("title", _title)):
        if ours in names and ours not in our_columns:
            column = choose_column(head, taken=set(our_columns.values()))
            our_columns |= {} if column is None else {ours: column}
    for ours, column in our_columns.items():
        if ours in _OPTIONS and head.rows and head.kind(column) in (LISTS, OBJECTS):
            raise DataError(
                f"{file.uri}: column {column!r} holds {head.kind(column)}, the {_OPTIONS[ours]} of a row is "
                f"one string: join the values, or {_how(ours)}"
            )
    name = (
        "" if columns else _LAYOUTS.get((our_columns.get("doc_id", ""), our_columns.get("content", "")), "")
    )
    layout = FileLayout(our_columns, head, name)
    if head.rows:
        _check(layout, numbered=numbered)
    return layout


def _content(head: FileHead, *, taken: set[str]) -> str | None:
    texts = head.with_values([name for name in (*TEXT_NAMES, *SUMMARY_NAMES) if name not in taken], TEXTS)
    if TEXT_NAMES[0] in texts:
        return TEXT_NAMES[0]
    preferred = [name for name in texts if name in TEXT_NAMES] or texts
    if len(preferred) > 1:
        raise DataError(
            f"{head.uri} has several columns that may be the text, {list_columns(preferred)}: "
            f"{_how('content')}"
        )
    # Else a column that is blank in the first rows, or has texts in lists; numbers are numbers of chunks.
    fallbacks = [name for name in (*TEXT_NAMES, *SUMMARY_NAMES) if name in head.kinds and name not in taken]
    return next(
        iter((*preferred, *(name for name in fallbacks if head.kind(name) in ("", TEXTS, LISTS, OBJECTS)))),
        None,
    )


def _doc_id(head: FileHead, *, taken: set[str]) -> str | None:
    ids = head.with_values([name for name in ID_NAMES if name not in taken], TEXTS, WHOLE_NUMBERS, NUMBERS)
    return next((name for name in (*ids, *ID_NAMES) if name in head.kinds and name not in taken), None)


def _title(head: FileHead, *, taken: set[str]) -> str | None:
    has_title = "title" in head.kinds and "title" not in taken and head.kind("title") in (TEXTS, "")
    return "title" if has_title else None


def _check(layout: FileLayout, *, numbered: bool) -> None:
    """Raise DataError for a layout without texts or, if needed, ids; warn if most texts are blank."""
    head, content = layout.head, layout.columns.get("content")
    others = [column for column in layout.unread if head.kind(column) == TEXTS]
    if content is None and (others or "title" not in layout.columns):
        raise DataError(
            f"{head.uri} has no column of texts by a known name ({', '.join((*TEXT_NAMES, *SUMMARY_NAMES))}),"
            f" only {list_columns(head.kinds)}: {_how('content')}"
        )
    if not numbered and "doc_id" not in layout.columns:
        raise DataError(
            f"{head.uri} has no column of ids by a known name ({', '.join(ID_NAMES)}), only "
            f"{list_columns(head.kinds)}: {_how('doc_id')}"
        )
    blank = 0 if content is None else head.kinds[content][""] + head.rows - head.kinds[content].total()
    if blank >= _BLANK_SHARE * head.rows:
        log.warning(
            "%s: column %r is empty in %d of the first %d rows, only their titles are read: if wrong, %s",
            *(head.uri, content, blank, head.rows, _how("content")),
        )


def _how(ours: str) -> str:
    option = _OPTIONS[ours]
    return (
        f"choose the column by --{option}-column NAME ({option}_column= in Python, "
        f"columns: {{{ours}: NAME}} in a config)"
    )


def tell(layouts: Mapping[File, FileLayout]) -> None:
    """Log each layout once, with the files that have it."""
    files: dict[str, list[str]] = {}
    for file, layout in layouts.items():
        if layout.head.rows:
            files.setdefault(str(layout), []).append(file.uri)
    for description, uris in files.items():
        more = f" and {len(uris) - 1:,} more" if len(uris) > 1 else ""
        _say(f"{uris[0]}{more}: {description}")


@functools.cache
def _say(line: str) -> None:
    """Log a line unless it was logged before: a command reads its texts twice, first only to check them."""
    log.info("%s", line)
