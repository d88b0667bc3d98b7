"""The first rows of a file, before any work: its columns, and the kinds of their values."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.core.errors import DataError
from scalingnote.datasets.input_files import (
    File,
    FileSlice,
    RawRows,
    delimited_lines,
    json_lines,
    lines,
    parquet_footer,
    parquet_rows,
    readable_rows,
    whole,
)
from scalingnote.storage import filesystem as fs

# Names of each column in public and in users' files, our name first.
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
# Columns of tab-separated files without a header, by their number.
_WITHOUT_HEADER = {
    2: ("pid", "passage"),
    3: ("pid", "title", "passage"),
    4: ("docid", "url", "title", "body"),
}
TEXT_LINES = ("line",)  # the fields of a .txt file
# Kinds of values; "" of one that is null or blank.
TEXTS, WHOLE_NUMBERS, NUMBERS, FLAGS = "texts", "whole numbers", "numbers", "true or false"
TIMES, LISTS, OBJECTS, OTHERS = "timestamps", "lists", "objects", "other values"
_ARROW_KINDS: dict[str, tuple[Callable[[pa.DataType], bool], ...]] = {
    "": (pa.types.is_null,),
    TEXTS: (  # some writers do not mark text as UTF-8
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    ),
    WHOLE_NUMBERS: (pa.types.is_integer,),
    NUMBERS: (pa.types.is_floating, pa.types.is_decimal),
    FLAGS: (pa.types.is_boolean,),
    TIMES: (pa.types.is_timestamp,),
    OBJECTS: (pa.types.is_struct, pa.types.is_map),
    LISTS: (pa.types.is_nested,),
}
_HEAD_BYTES = 1 << 18  # of a file of lines
_HEAD_ROWS = 1000  # of a Parquet file
_STRAY_SHARE = 0.1  # of the rows of the fullest column: a column with fewer values does not count
_SHOWN_COLUMNS = 20


@dataclass(frozen=True)
class FileHead:
    """The columns of a file's first rows."""

    uri: str
    rows: int
    kinds: Mapping[str, Counter[str]]  # column -> kind of value -> how often
    shapes: frozenset[frozenset[str]] = frozenset()  # the columns of each kind of row, if rows may differ
    fields: tuple[str, ...] = ()  # of a file without names: of its columns in their order
    header: bool = False  # the first line has the names

    def kind(self, column: str) -> str:
        """Return the most frequent kind of a column's values; "" for a blank column."""
        kinds = [kind for kind, _ in self.kinds[column].most_common() if kind]
        return kinds[0] if kinds else ""

    def with_values(self, columns: Iterable[str], *kinds: str) -> list[str]:
        """Return the columns with values of these kinds; values in only a few rows do not count."""
        counts = {
            column: sum(self.kinds[column][kind] for kind in kinds)
            for column in columns
            if column in self.kinds
        }
        most = max(counts.values(), default=0)
        return [column for column, count in counts.items() if count > _STRAY_SHARE * most]

    def lack(self, columns: Iterable[str]) -> str:
        """Describe the missing columns, as the middle of an error message."""
        where = "" if self.uri.endswith(".parquet") else f" in its first {_HEAD_BYTES >> 10} kB"
        return f"has no column {[*columns]}{where}, only {list_columns(self.kinds)}"


def list_columns(columns: Iterable[str]) -> str:
    """Join the names of columns for a message; only the first ones if there are many."""
    names = [repr(column) for column in columns]
    more = len(names) - _SHOWN_COLUMNS
    return ", ".join(names[:_SHOWN_COLUMNS]) + (f" and {more:,} more" if more > 0 else "")


def columns_of(file: File) -> list[str]:
    """Return the columns of a file in the order of their first occurrence; of lines, in the first ones."""
    return list(file_head(file).kinds)


def file_head(
    file: File, *, chosen: Sequence[str] = (), tabs: bool = False, values: bool = False
) -> FileHead:
    """Read the first rows of Parquet, JSON lines, text lines (.txt) or fields between tabs (other names).

    Args:
        file: the file.
        chosen: columns that identify a header of fields between tabs.
        tabs: whether a .txt file has fields too.
        values: whether texts of Parquet are read, to detect blank ones; else only its types are read.

    Raises:
        DataError: a file is not Parquet, or its fields between tabs have no names.
    """
    if file.is_parquet:
        return _parquet_head(file, values=values)
    if file.uri.endswith(".jsonl"):
        return _line_head(file, json_lines)
    if file.uri.endswith(".txt") and not tabs:
        return FileHead(file.uri, file.size, {}, fields=TEXT_LINES)
    fields, header = _fields(file, chosen)
    read_lines = partial(delimited_lines, columns=fields, header=header)
    return replace(_line_head(file, read_lines), fields=fields, header=header)


def head_rows(piece: FileSlice, head: FileHead, columns: Sequence[str]) -> RawRows:
    """Read the rows of a slice of a file under the file's own names; of Parquet, only `columns`."""
    if piece.file.is_parquet:
        return parquet_rows(piece, columns=columns)
    if not head.fields:
        return json_lines(piece)
    separator = "\n" if head.fields == TEXT_LINES else "\t"
    return delimited_lines(piece, columns=head.fields, separator=separator, header=head.header)


def _line_head(file: File, read: Callable[[FileSlice], RawRows]) -> FileHead:
    """Read the readable rows in the first bytes; if there are none, the first one after them."""
    size = min(file.size, _HEAD_BYTES)
    rows = list(readable_rows(read(FileSlice(file, 0, size, size))))
    rows = rows or list(islice(readable_rows(read(whole(file))), 1))
    kinds: dict[str, Counter[str]] = {}
    for row in rows:
        for column, value in row.items():
            kinds.setdefault(column, Counter())[_kind(value)] += 1
    return FileHead(file.uri, len(rows), kinds, frozenset(frozenset(row) for row in rows))


def _kind(value: Any) -> str:
    match value:
        case None:
            return ""
        case str() | bytes():
            return TEXTS if value.strip() else ""
        case bool():
            return FLAGS
        case int():
            return WHOLE_NUMBERS
        case float():
            return NUMBERS
    return LISTS if isinstance(value, list) else OBJECTS


def _parquet_head(file: File, *, values: bool) -> FileHead:
    footer = parquet_footer(file.uri)
    schema, rows = footer.schema.to_arrow_schema(), min(footer.num_rows, _HEAD_ROWS)
    kinds = {field.name: Counter({_arrow_kind(field.type): rows}) for field in schema}
    texts = [name for name, kind in kinds.items() if values and kind[TEXTS]]
    if texts:  # only if the file has rows
        with fs.open_input(file.uri) as source:
            first = next(pq.ParquetFile(source).iter_batches(_HEAD_ROWS, columns=texts))
        rows = len(first)
        kinds |= {name: Counter(map(_kind, _as_bytes(first[name]).to_pylist())) for name in texts}
    return FileHead(file.uri, rows, kinds)


def _as_bytes(column: pa.Array) -> pa.Array:
    """Convert strings to bytes, so that invalid UTF-8 is a text and not an error."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return column.cast(kind).cast(pa.large_binary())


def _arrow_kind(type_: pa.DataType) -> str:
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    return next((kind for kind, tests in _ARROW_KINDS.items() if any(test(plain) for test in tests)), OTHERS)


def _fields(file: File, chosen: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the columns of a file of fields between tabs, and whether its first line is a header."""
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
