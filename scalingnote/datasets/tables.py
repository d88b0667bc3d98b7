"""Tables of a user's files: columns are checked before any work, slices are read as Arrow tables.

A file with missing columns or columns of a wrong type is an error; `column_checks` checks the values. Parquet
is read by columns, other files row by row: only a line that cannot be read, or has an id or text of another
type, is set aside.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import ne
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scalingnote.core.errors import DataError
from scalingnote.core.words import is_valid_unicode, replace_surrogates
from scalingnote.datasets.column_checks import CHECKED
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.file_heads import (
    FLAGS,
    LISTS,
    NUMBERS,
    TEXTS,
    TIMES,
    WHOLE_NUMBERS,
    file_head,
)
from scalingnote.datasets.input_files import (
    File,
    FileColumns,
    FileRows,
    FileSlice,
    InputSlice,
    Quarantine,
    RawRow,
    RawRows,
    UnreadableRow,
    cut,
    find_files,
    json_lines,
    parquet_rows,
    plain_column,
    rename,
)
from scalingnote.datasets.layouts import without_title
from scalingnote.storage import filesystem as fs

ColumnKind = Literal["id", "text", "number", "flag", "time", "vector", "any"]
# Allowed values of each kind of column, in words and as kinds of values.
_ALLOWED: dict[ColumnKind, tuple[str, set[str]]] = {
    "id": ("text or whole numbers", {TEXTS, WHOLE_NUMBERS}),
    "text": ("text", {TEXTS}),
    "number": ("a number", {TEXTS, WHOLE_NUMBERS, NUMBERS}),
    "flag": ("true or false, or 1 and 0", {FLAGS, WHOLE_NUMBERS}),
    "time": ("a timestamp, a number or ISO 8601 text", {TEXTS, WHOLE_NUMBERS, NUMBERS, TIMES}),
    "vector": ("a list of numbers", {LISTS}),
}
# Types of features and profiles, by their name in a config.
COLUMN_TYPES = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "vector": pa.list_(pa.float32()),
}
# The key of queries and the presence of grades must not change within a file.
_FIXED_COLUMNS = ("query", "query_id", "relevance")
_ROWS_PER_TABLE = 1 << 16


@dataclass(frozen=True)
class TableFormat:
    """Columns of a table by our names, their kinds, and the `features`, which only lose invalid values."""

    table: str
    kinds: Mapping[str, ColumnKind]
    features: frozenset[str] = frozenset()

    def of_columns(self, names: Collection[str]) -> "TableFormat":
        """Return the format of some of the columns."""
        kinds = {name: kind for name, kind in self.kinds.items() if name in names}
        return TableFormat(self.table, kinds, self.features)


def table_format(table: str, features: pa.Schema) -> TableFormat:
    """Return the format of a table of CHECKED with these features, which documents and users may have."""
    kinds = {field.name: _kind(field) for field in [*CHECKED[table], *features]}
    return TableFormat(table, kinds, frozenset(features.names))


def _kind(field: pa.Field) -> ColumnKind:
    if pa.types.is_string(field.type):
        return "id" if field.name.endswith("_id") else "text"
    if pa.types.is_boolean(field.type):
        return "flag"
    if pa.types.is_timestamp(field.type):
        return "time"
    return "vector" if pa.types.is_list(field.type) else "number"


def column_schema(types: Mapping[str, str]) -> pa.Schema:
    """Build the schema of the features or profile of a config."""
    return pa.schema({name: COLUMN_TYPES[kind] for name, kind in types.items()})


# --- columns of files -------------------------------------------------------------------------------------


def find_columns(file: TableFile, form: TableFormat, required: Sequence[str]) -> dict[File, dict[str, str]]:
    """Find the columns of each file that are read: our name -> the file's.

    Args:
        file: the path, and the mapping from our column names to those of the files.
        form: of the table; a column that the mapping leaves out has the same name in the files.
        required: columns that every file must have; "a or b" for one of two.

    Raises:
        DataError: no file, a missing column or one of a wrong type.
    """
    if unknown := sorted(set(file.columns) - set(form.kinds)):
        raise DataError(f"{file.path}: columns maps {unknown}, which are not in {list(form.kinds)}")
    files = find_files(file.path)
    find_in_file = partial(_columns_of, mapping=file.columns, form=form, required=required)
    return dict(zip(files, fs.map_files(find_in_file, files), strict=True))


def column_slices(columns: Mapping[File, Mapping[str, str]]) -> list[FileColumns | FileRows]:
    """Return slices of files under our names (`columns`: ours -> the file's), of Parquet by columns."""
    return [
        FileColumns(piece, columns[piece.file])
        if piece.file.is_parquet
        else named_rows(piece, columns[piece.file])
        for piece in cut([*columns])
    ]


def named_rows(piece: FileSlice, columns: Mapping[str, str]) -> FileRows:
    """Return the rows of a slice of Parquet or JSON lines under our names (`columns`: ours -> the file's)."""
    return FileRows(piece, partial(_rename_rows, columns=columns), frozenset(columns))


def _rename_rows(piece: FileSlice, *, columns: Mapping[str, str]) -> RawRows:
    theirs = [*columns.values()]
    rows = parquet_rows(piece, columns=theirs) if piece.file.is_parquet else json_lines(piece)
    return (rename(row, columns) for row in rows)


def _columns_of(
    file: File, *, mapping: Mapping[str, str], form: TableFormat, required: Sequence[str]
) -> dict[str, str]:
    head, mapped = file_head(file), f"{form.table}.columns".removeprefix(".")
    label = f"{file.uri} ({form.table})" if form.table else file.uri
    if file.size and not head.kinds:
        raise DataError(f"{label} does not begin with a JSON object: write one on each line")
    theirs = {name: mapping.get(name, name) for name in form.kinds}
    present = {name for name, column in theirs.items() if column in head.kinds or not head.kinds}
    missing = [name for name in required if not present & {*name.split(" or ")}]
    missing += [name for name in mapping if name not in present and name not in missing]
    if missing:
        lack = head.lack(theirs.get(name, name) for name in missing)
        raise DataError(f"{label} {lack}: map it under {mapped}")
    for name, kind in form.kinds.items():
        kinds = {value for value in head.kinds.get(theirs[name], ()) if value}
        if kind != "any" and kinds and not kinds & _ALLOWED[kind][1]:
            raise DataError(
                f"{label}: column {theirs[name]!r} holds {' and '.join(sorted(kinds))}, but {name} is "
                f"{_ALLOWED[kind][0]}: convert it, or map another column"
            )
    # Optional columns may first occur later in a JSON-lines file.
    maybe = () if file.is_parquet else set(theirs) - set(_FIXED_COLUMNS)
    return {name: column for name, column in theirs.items() if name in present or name in maybe}


# --- rows of a slice ---------------------------------------------------------------------------------------


def read_tables(rows: InputSlice, form: TableFormat, *, quarantine: Quarantine) -> Iterator[pa.Table]:
    """Yield tables with the columns of ours that the slice has. Unreadable rows are put in quarantine."""
    if isinstance(rows, FileColumns):
        yield from _parquet_tables(rows)
        return
    fixed_columns, remaining = rows.columns if isinstance(rows, FileRows) else None, iter(rows)
    while chunk := list(islice(remaining, _ROWS_PER_TABLE)):
        present = fixed_columns or set[str]().union(*(row for row in chunk if isinstance(row, dict)))
        yield _typed_table(chunk, form.of_columns(present), quarantine)


def _parquet_tables(rows: FileColumns) -> Iterator[pa.Table]:
    number = rows.first
    with fs.open_input(rows.part.file.uri) as source:
        reader = pq.ParquetFile(source)
        for group in range(rows.part.start, rows.part.stop):
            group_rows = reader.read_row_group(group, columns=sorted(set(rows.columns.values())))
            columns = {name: plain_column(group_rows, column) for name, column in rows.columns.items()}
            if number is not None:
                ids = columns.get("doc_id", pa.nulls(len(group_rows), pa.string()))
                columns["doc_id"] = _number_rows(ids, number)
                number += len(group_rows)
            if rows.columns.get("content") == "contents" and "title" in columns:
                texts = (columns[name].cast(pa.binary()).to_pylist() for name in ("content", "title"))
                columns["content"] = pa.array(map(without_title, *texts), pa.binary())
            yield pa.table(columns)


def _number_rows(ids: pa.Array, first: int) -> pa.Array:
    """Replace missing ids by the number of the row."""
    if not pa.types.is_binary(ids.type):
        ids = ids.cast(pa.string())
    numbers = pa.array(np.arange(first, first + len(ids))).cast(pa.string()).cast(ids.type)
    missing = pc.or_kleene(pc.is_null(ids), pc.equal(pc.binary_length(ids), 0))
    return pc.if_else(missing, numbers, ids)


def _typed_table(
    rows: Iterable[RawRow | UnreadableRow], form: TableFormat, quarantine: Quarantine
) -> pa.Table:
    """Convert rows to a table; set aside unreadable rows and those with an id or text of another type."""
    columns: dict[str, list[Any]] = {name: [] for name in form.kinds}
    typed = {name: kind for name, kind in form.kinds.items() if kind in ("id", "text", "vector")}
    for row in rows:
        if isinstance(row, UnreadableRow):
            quarantine.reject(form.table, row.row, row.reason)
            continue
        faults = {name: _fault(row.get(name), name, kind) for name, kind in typed.items()}
        dropped = {name for name, fault in faults.items() if fault and name in form.features}
        if reason := next((fault for name, fault in faults.items() if fault and name not in dropped), None):
            quarantine.reject(form.table, row, reason)
            continue
        quarantine.repaired.update(f"feature_{name}_dropped" for name in dropped)
        for name, values in columns.items():
            values.append(None if name in dropped else row.get(name))
    return pa.table({name: _array(values, form.kinds[name], quarantine) for name, values in columns.items()})


def _fault(value: Any, name: str, kind: ColumnKind) -> str:
    """Return why a value is not an id, text or vector; "" if it is one."""
    if value is None:
        return ""
    match kind:
        case "id" if isinstance(value, bool) or not isinstance(value, str | int):
            return f"{name} is of type {type(value).__name__}"
        case "id" if isinstance(value, str) and not is_valid_unicode(value):
            return f"{name} with control characters"
        case "text" if not isinstance(value, str):
            return f"{name} is of type {type(value).__name__}, not text"
        case "vector":
            numbers = isinstance(value, list) and all(isinstance(each, int | float | None) for each in value)
            return "" if numbers else f"{name} is not a list of numbers"
    return ""


def _array(values: list[Any], kind: ColumnKind, quarantine: Quarantine) -> pa.Array:
    """Build a column of faultless values: numbers and times as text; flags as 1 and 0, other values as 2."""
    if kind == "vector":
        return pa.array(values, COLUMN_TYPES["vector"])
    if kind == "flag":
        codes = [value if value is None else int(value) if value in (0, 1) else 2 for value in values]
        return pa.array(codes, pa.int8())
    texts = [value if value is None else _as_text(value) for value in values]
    valid_texts = [text if text is None else replace_surrogates(text) for text in texts]
    if repaired := sum(map(ne, valid_texts, texts)):
        quarantine.repaired["lone_surrogates_replaced"] += repaired
    return pa.array(valid_texts, pa.string())


def _as_text(value: Any) -> str:
    return str(int(value) if isinstance(value, bool) else value)
