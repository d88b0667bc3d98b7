"""Columns of a user's documents: which one is the id, the title and the text, by known names or as chosen.

A file is judged by its first rows, before any work: columns of known names are read, those that the caller
chose in their place. A file with none, or with two that may be the text, is an error that names its columns.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.datasets.input_files import (
    HEAD_BYTES,
    File,
    FileSlice,
    RawRow,
    RawRows,
    UnreadableRow,
    delimited_lines,
    json_lines,
    lines,
    parquet_footer,
    readable_rows,
    shown_row,
    whole,
)
from scalingnote.storage import filesystem as fs

log = get_logger("datasets")
# Names of each column in public and in users' files, our own first.
ID_NAMES = ("doc_id", "_id", "id", "pid", "passage_id", "chunk_id", "docid", "document_id", "url")
TEXT_NAMES = (
    "content",
    "text",
    "contents",
    "passage",
    "segment",
    "chunk",
    "document",
    "body",
    "page_content",
)
SUMMARY_NAMES = ("abstract", "description")  # the text of files without a column of TEXT_NAMES
# What these columns of id and text are called together.
_LAYOUTS = {
    ("_id", "text"): "BEIR",
    ("id", "contents"): "Pyserini",
    ("docid", "text"): "Tevatron or MIRACL",
    ("pid", "passage"): "MS MARCO passages",
    ("docid", "body"): "MS MARCO documents",
    ("docid", "segment"): "MS MARCO segments",
}
# Columns of tab-separated files without a header, by their number.
_WITHOUT_HEADER = {
    2: ("pid", "passage"),
    3: ("pid", "title", "passage"),
    4: ("docid", "url", "title", "body"),
}
_ARROW_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
TEXT_LINES = ("line",)  # the fields of a .txt file
_HEAD_ROWS = 1000  # of a Parquet file
_BLANK_SHARE = 0.9  # of the first rows: a warning
_STRAY_SHARE = 0.1  # of the rows of the fullest column: another with fewer is not its rival
_SHOWN_COLUMNS = 20
_OPTIONS = {"content": "text", "doc_id": "id", "title": "title"}
_TEXT = "text"  # the kind of a value; "" of one that is null or blank


@dataclass(frozen=True)
class FileHead:
    """The columns of a file's first rows."""

    uri: str
    rows: int
    kinds: Mapping[str, Counter[str]]  # column -> kind of value -> how often
    shapes: frozenset[frozenset[str]] = frozenset()  # the columns of a row, where rows may differ
    fields: tuple[str, ...] = ()  # of a file without names: of its columns in their order
    header: bool = False  # the first line has the names

    def kind(self, column: str) -> str:
        """The most frequent kind of a column's values; "" of one that is blank."""
        kinds = [kind for kind, _ in self.kinds[column].most_common() if kind]
        return kinds[0] if kinds else ""

    def with_values(self, columns: Iterable[str], *kinds: str) -> list[str]:
        """Those of the columns with values of these kinds; a few rows of another file do not count."""
        counts = {
            column: sum(self.kinds[column][kind] for kind in kinds)
            for column in columns
            if column in self.kinds
        }
        most = max(counts.values(), default=0)
        return [column for column, count in counts.items() if count > _STRAY_SHARE * most]


@dataclass(frozen=True)
class FileLayout:
    """Where the columns of a file are found."""

    columns: Mapping[str, str]  # our name -> the file's
    head: FileHead
    name: str = ""  # of a public layout

    @functools.cached_property
    def unread(self) -> list[str]:
        """Columns of the file that are not read."""
        read = set(self.columns.values())
        return [column for column in self.head.kinds if column not in read]

    @functools.cached_property
    def _usual(self) -> dict[str, set[str]]:
        """Columns of the first rows that have an id, and of those that have a text."""
        return {
            ours: set[str]().union(*(shape for shape in self.head.shapes if column in shape))
            for ours, column in self.columns.items()
            if ours in ("content", "doc_id")
        }

    def __str__(self) -> str:
        """Every column that is read and every other one."""
        absent = {"content": "no text", "doc_id": "ids are numbers of rows", "title": "no title"}
        said = [
            f"{_OPTIONS.get(ours, ours)} from {self.columns[ours]!r}"
            if ours in self.columns
            else absent[ours]
            for ours in dict.fromkeys((*_OPTIONS, *self.columns))
        ]
        unread = f"; not read: {_list_columns(self.unread)}" if self.unread else ""
        return ", ".join(said) + (f" ({self.name} layout)" if self.name else "") + unread

    def is_like(self, other: "FileLayout") -> bool:
        """Whether id and text have the same columns; files without rows are like all."""
        same = all(self.columns.get(name) == other.columns.get(name) for name in ("doc_id", "content"))
        return same or not (self.head.rows and other.head.rows)

    def row(self, row: RawRow) -> RawRow | UnreadableRow:
        """A row of the file under our names; one of other columns than the first rows is set aside."""
        for ours, known in (("content", TEXT_NAMES), ("doc_id", ID_NAMES)):
            column = self.columns.get(ours)
            if column in row or (column is None and ours == "doc_id"):
                continue
            others = {
                name
                for name in row.keys() & {*known} - {*self.columns.values()}
                if ours == "doc_id" or isinstance(row[name], str | bytes)
            }
            if others or (column is not None and row.keys() - self._usual[ours]):
                return UnreadableRow(
                    shown_row(row), f"its {_OPTIONS[ours]} is not in the column of the first rows"
                )
        found = {name: row[column] for name, column in self.columns.items() if column in row}
        if self.columns.get("content") == "contents":
            found["content"] = without_title(found.get("content"), found.get("title"))
        return found


def without_title(content: Any, title: Any) -> Any:
    """Contents of Pyserini, which begin with the title, without it; the title has a column of its own."""
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
    """The layout of each file.

    Args:
        files: Parquet, JSON lines, text lines (.txt), or fields separated by tabs (any other name).
        columns: our names -> those of the file, as the caller chose them; they are not guessed.
        names: our columns that are read; those that are no id, title or text by these names only.
        numbered: files without ids are read, their rows are numbered.
        tabs: a .txt file has fields, too.

    Raises:
        DataError: a file lacks a column that was chosen, has none of a known name, or several texts.
    """
    look = functools.partial(_layout_of, columns=dict(columns), names=names, numbered=numbered, tabs=tabs)
    return dict(zip(files, fs.map_files(look, files), strict=True))


def _layout_of(
    file: File, *, columns: Mapping[str, str], names: Sequence[str], numbered: bool, tabs: bool
) -> FileLayout:
    if file.uri.endswith(".txt") and not tabs:
        if columns:
            raise DataError(
                f"{file.uri} has a text a line and no columns to choose: leave it out of the path"
            )
        return FileLayout(
            {"content": "line"}, FileHead(file.uri, file.size, {}, fields=TEXT_LINES), "text lines"
        )
    head = _head(file, [*columns.values()])
    if missing := [column for column in columns.values() if column not in head.kinds and head.rows]:
        where = "" if file.is_parquet else f" in its first {HEAD_BYTES >> 10} kB"
        raise DataError(
            f"{file.uri} has no column {missing}{where}, only {_list_columns(head.kinds)}: choose one of them"
        )
    found = dict(columns)
    found |= {name: name for name in names if name not in {*_OPTIONS, *found} and name in head.kinds}
    for ours, choose in (("content", _content), ("doc_id", _doc_id), ("title", _title)):
        if ours in names and ours not in found:
            column = choose(head, taken=set(found.values()))
            found |= {} if column is None else {ours: column}
    for ours, column in found.items():
        if ours in _OPTIONS and head.rows and head.kind(column) in ("lists", "objects"):
            raise DataError(
                f"{file.uri}: column {column!r} holds {head.kind(column)}, the {_OPTIONS[ours]} of a row is "
                f"one string: join the values, or {_how(ours)}"
            )
    name = "" if columns else _LAYOUTS.get((found.get("doc_id", ""), found.get("content", "")), "")
    layout = FileLayout(found, head, name)
    if head.rows:
        _check(layout, numbered=numbered)
    return layout


def _content(head: FileHead, *, taken: set[str]) -> str | None:
    texts = head.with_values([name for name in (*TEXT_NAMES, *SUMMARY_NAMES) if name not in taken], _TEXT)
    if TEXT_NAMES[0] in texts:
        return TEXT_NAMES[0]
    chosen = [name for name in texts if name in TEXT_NAMES] or texts
    if len(chosen) > 1:
        raise DataError(
            f"{head.uri} has several columns that may be the text, {_list_columns(chosen)}: {_how('content')}"
        )
    # Else a column that is blank in the first rows, or has texts in lists; numbers are those of a chunk.
    others = [name for name in (*TEXT_NAMES, *SUMMARY_NAMES) if name in head.kinds and name not in taken]
    return next(iter((*chosen, *(name for name in others if head.kind(name) != "numbers"))), None)


def _doc_id(head: FileHead, *, taken: set[str]) -> str | None:
    ids = head.with_values([name for name in ID_NAMES if name not in taken], _TEXT, "numbers")
    return next((name for name in (*ids, *ID_NAMES) if name in head.kinds and name not in taken), None)


def _title(head: FileHead, *, taken: set[str]) -> str | None:
    has_title = "title" in head.kinds and "title" not in taken and head.kind("title") in (_TEXT, "")
    return "title" if has_title else None


def _check(layout: FileLayout, *, numbered: bool) -> None:
    """DataError for a layout without texts or, if needed, ids; a warning where texts are blank."""
    head, content = layout.head, layout.columns.get("content")
    others = [column for column in layout.unread if head.kind(column) == _TEXT]
    if content is None and (others or "title" not in layout.columns):
        raise DataError(
            f"{head.uri} has no column of texts by a known name ({', '.join((*TEXT_NAMES, *SUMMARY_NAMES))}),"
            f" only {_list_columns(head.kinds)}: {_how('content')}"
        )
    if not numbered and "doc_id" not in layout.columns:
        raise DataError(
            f"{head.uri} has no column of ids by a known name ({', '.join(ID_NAMES)}), only "
            f"{_list_columns(head.kinds)}: {_how('doc_id')}"
        )
    blank = 0 if content is None else head.kinds[content][""] + head.rows - head.kinds[content].total()
    if blank >= _BLANK_SHARE * head.rows:
        log.warning(
            "%s: column %r is empty in %d of the first %d rows, whose titles alone are read: if wrong, %s",
            *(head.uri, content, blank, head.rows, _how("content")),
        )


def _how(ours: str) -> str:
    option = _OPTIONS[ours]
    return (
        f"choose the column by --{option}-column NAME ({option}_column= in Python, "
        f"columns: {{{ours}: NAME}} in a config)"
    )


def _list_columns(columns: Iterable[str]) -> str:
    names = [repr(column) for column in columns]
    more = len(names) - _SHOWN_COLUMNS
    return ", ".join(names[:_SHOWN_COLUMNS]) + (f" and {more:,} more" if more > 0 else "")


def tell(layouts: Mapping[File, FileLayout]) -> None:
    """Log each layout, once, and the files that have it."""
    files: dict[str, list[str]] = {}
    for file, layout in layouts.items():
        if layout.head.rows:
            files.setdefault(str(layout), []).append(file.uri)
    for told, uris in files.items():
        more = f" and {len(uris) - 1:,} more" if len(uris) > 1 else ""
        _say(f"{uris[0]}{more}: {told}")


@functools.cache
def _say(line: str) -> None:
    """Log a line that is not logged yet: a command reads its texts twice, first only to check them."""
    log.info("%s", line)


# --- the first rows of a file -----------------------------------------------------------------------------


def _head(file: File, chosen: Sequence[str]) -> FileHead:
    if file.is_parquet:
        return _parquet_head(file)
    if file.uri.endswith(".jsonl"):
        return _head_of(file, json_lines)
    fields, header = _fields(file, chosen)
    read = functools.partial(delimited_lines, columns=fields, header=header)
    return replace(_head_of(file, read), fields=fields, header=header)


def _head_of(file: File, read: Callable[[FileSlice], RawRows]) -> FileHead:
    """The readable rows in the first HEAD_BYTES; where there are none, the first one after them."""
    size = min(file.size, HEAD_BYTES)
    rows = list(readable_rows(read(FileSlice(file, 0, size, size))))
    rows = rows or list(islice(readable_rows(read(whole(file))), 1))
    kinds: dict[str, Counter[str]] = {}
    shapes = frozenset(frozenset(row) for row in rows)
    for row in rows:
        for column, value in row.items():
            kinds.setdefault(column, Counter())[_kind(value)] += 1
    return FileHead(file.uri, len(rows), kinds, shapes)


def _kind(value: Any) -> str:
    match value:
        case None:
            return ""
        case str() | bytes():
            return _TEXT if value.strip() else ""
        case int() | float():
            return "numbers"
    return "lists" if isinstance(value, list) else "objects"


def _parquet_head(file: File) -> FileHead:
    """Kinds by the schema, and of texts by their values."""
    schema = parquet_footer(file.uri).schema.to_arrow_schema()
    kinds = {each.name: _arrow_kind(each.type) for each in schema}
    texts = [name for name, kind in kinds.items() if kind == _TEXT]
    with fs.open_input(file.uri) as source:
        batches = pq.ParquetFile(source).iter_batches(_HEAD_ROWS, columns=texts or schema.names[:1])
        first = next(batches, None)
    rows = 0 if first is None else len(first)
    found = {name: Counter({kind: rows}) for name, kind in kinds.items()}
    if first is not None:
        found |= {name: _text_kinds(first[name]) for name in texts}
    return FileHead(file.uri, rows, found)


def _text_kinds(column: pa.Array) -> Counter[str]:
    """How many values are texts, how many null or blank; invalid UTF-8 is a text here."""
    return Counter(map(_kind, _as_bytes(column).to_pylist()))


def _as_bytes(column: pa.Array) -> pa.Array:
    """Strings as bytes, so that invalid UTF-8 costs one row and not the batch; other columns as they are."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return column.cast(kind).cast(pa.large_binary()) if text else column


def _arrow_kind(kind: pa.DataType) -> str:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if any(is_text(kind) for is_text in _ARROW_TEXTS):
        return _TEXT
    if pa.types.is_null(kind):
        return ""
    if pa.types.is_nested(kind):
        return "objects" if pa.types.is_struct(kind) or pa.types.is_map(kind) else "lists"
    return "numbers"


def _fields(file: File, chosen: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The columns of a file of fields between tabs, and whether its first line names them."""
    first = next(lines(file.uri, 0, file.size), b"").decode("utf-8-sig", "replace").rstrip("\r\n")
    fields = tuple(first.split("\t"))
    if len(fields) > 1 and {*fields} & {*TEXT_NAMES, *SUMMARY_NAMES, *chosen}:
        return fields, True
    if first and len(fields) not in _WITHOUT_HEADER:
        raise DataError(
            f"{file.uri} begins with {len(fields)} fields between tabs, none of them a known name of texts, "
            f"and without a header there are 2 (id, text), 3 (id, title, text) or 4 (id, url, title, text): "
            "write the names of the columns into the first line"
        )
    return _WITHOUT_HEADER.get(len(fields), _WITHOUT_HEADER[2]), False
