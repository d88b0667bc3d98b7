"""Tables of a user's files: columns are checked before any work, slices are read as Arrow tables.

A file with missing or wrongly typed columns is refused; `column_checks` checks the values.

Parquet is typed. JSON lines are parsed by Arrow, a block at a time, with the types of its first line. If a
line of the block does not fit (broken JSON, a number among texts), the block is divided, and finally read row
by row: a bad line costs a few milliseconds and affects no other line. Rows of other formats, and of
documents whose columns vary from row to row, are read row by row, too.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from scalingnote.core.errors import DataError
from scalingnote.core.words import is_valid_unicode, replace_surrogates
from scalingnote.datasets.config import TableFile
from scalingnote.datasets.input_files import (
    File,
    FileColumns,
    InputSlice,
    Quarantine,
    RawRow,
    UnreadableRow,
    cut,
    find_files,
    json_head,
    lines,
    parquet_footer,
    parsed_lines,
    plain_column,
    readable_rows,
)
from scalingnote.datasets.layouts import without_title
from scalingnote.storage import filesystem as fs

ColumnKind = Literal["id", "text", "number", "integer", "flag", "time", "vector"]


class _Rule(NamedTuple):
    """What a column of a kind may hold."""

    shown: str  # in errors
    json: set[type]
    arrow: tuple[Callable[[pa.DataType], bool], ...]  # one of these is true of its type


# Some writers do not mark text columns as UTF-8, so that they are read as binary.
_TEXT = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
_NUMBER = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
_LIST = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
_NUMBER_RULE = _Rule("a number", {int, float, str}, (*_TEXT, *_NUMBER))
_RULES: dict[ColumnKind, _Rule] = {
    "id": _Rule("text or whole numbers", {str, int}, (*_TEXT, pa.types.is_integer)),
    "text": _Rule("text", {str}, _TEXT),
    "number": _NUMBER_RULE,
    "integer": _NUMBER_RULE,
    "flag": _Rule("true or false, or 1 and 0", {bool, int}, (pa.types.is_boolean, pa.types.is_integer)),
    "time": _Rule(
        "a timestamp, a number or ISO 8601 text",
        {int, float, str},
        (*_TEXT, *_NUMBER, pa.types.is_timestamp),
    ),
    "vector": _Rule("a list of numbers", {list}, _LIST),
}
_VECTOR = pa.list_(pa.float32())
# Types of features and profiles, by their name in a config.
COLUMN_TYPES = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "vector": _VECTOR,
}
_FEATURES: dict[pa.DataType, ColumnKind] = {
    pa.string(): "text",
    pa.int64(): "integer",
    pa.float64(): "number",
    pa.bool_(): "flag",
    _VECTOR: "vector",
}
_PAIR: dict[str, ColumnKind] = {"query": "text", "query_id": "id", "doc_id": "id"}
# The columns of each table by our names, and the kind of their values.
_KINDS: dict[str, dict[str, ColumnKind]] = {
    "documents": {"doc_id": "id", **dict.fromkeys(("title", "topic", "content", "group"), "text")},
    "queries": {"query_id": "id", "query": "text", "split": "text"},
    "impressions": _PAIR
    | {
        "session_id": "id",
        "user_id": "id",
        "position": "number",
        "clicked": "flag",
        "timestamp": "time",
        "dwell_s": "number",
    },
    "scores": _PAIR | {"score": "number"},
    "qrels": _PAIR | {"relevance": "number"},
    "users": {"user_id": "id"},
}
# The key of queries and the presence of grades must not change within a file.
_FIXED_COLUMNS = ("query", "query_id", "relevance")
_BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 1 << 14
_ROWS_PER_TABLE = 1 << 16


@dataclass(frozen=True)
class TableFormat:
    """The columns of a table by our names, the kind of each, and which ones lose invalid values only."""

    table: str
    kinds: Mapping[str, ColumnKind]
    features: frozenset[str] = frozenset()

    def of_columns(self, names: Collection[str]) -> "TableFormat":
        """The format of some of the columns."""
        kinds = {name: kind for name, kind in self.kinds.items() if name in names}
        return TableFormat(self.table, kinds, self.features)


def table_format(table: str, features: pa.Schema) -> TableFormat:
    """The format of a table with these features, which documents and users may have."""
    kinds = _KINDS[table] | {field.name: _FEATURES[field.type] for field in features}
    return TableFormat(table, kinds, frozenset(features.names))


def column_schema(types: Mapping[str, str]) -> pa.Schema:
    """The schema of the features or profile of a config."""
    return pa.schema({name: COLUMN_TYPES[kind] for name, kind in types.items()})


# --- columns of files -------------------------------------------------------------------------------------


def refuse_unknown(file: TableFile, names: Iterable[str]) -> None:
    """DataError if the config maps a column that is none of ours."""
    if unknown := sorted(set(file.columns) - set(names)):
        raise DataError(f"{file.path}: columns maps {unknown}, which are none of {list(names)}")


def find_columns(
    file: TableFile,
    form: TableFormat,
    required: Sequence[str],
    *,
    layouts: Mapping[File, Mapping[str, str]] | None = None,
) -> dict[File, dict[str, str]]:
    """The columns of each file that are read: our name -> the file's.

    Args:
        file: the path, and the mapping from our column names to those of the files.
        form: of the table; a column that the mapping leaves out has the same name in the files.
        required: columns that every file must have; "a or b" for one of two.
        layouts: columns of documents, as their files call them.

    Raises:
        DataError: no file, a missing column or one of a wrong type.
    """
    refuse_unknown(file, form.kinds)
    files = find_files(file.path) if layouts is None else [*layouts]
    look = partial(_columns_of, mapping=file.columns, form=form, required=required, layouts=layouts or {})
    return dict(zip(files, fs.map_files(look, files), strict=True))


def column_slices(columns: Mapping[File, Mapping[str, str]]) -> list[FileColumns]:
    """Slices of files that are read by columns."""
    return [FileColumns(piece, columns[piece.file]) for piece in cut([*columns])]


def _columns_of(
    file: File,
    *,
    mapping: Mapping[str, str],
    form: TableFormat,
    required: Sequence[str],
    layouts: Mapping[File, Mapping[str, str]],
) -> dict[str, str]:
    theirs = {name: mapping.get(name, name) for name in form.kinds} | dict(layouts.get(file, {}))
    seen, wrong = (_inspect_parquet if file.is_parquet else _inspect_json)(file, theirs, form.kinds)
    missing = [name for name in required if not seen & {*name.split(" or ")}]
    missing += [name for name in mapping if name not in seen and name not in missing]
    if missing:
        shown = [theirs.get(name, name) for name in missing]
        raise DataError(f"{file.uri} ({form.table}) has no column {shown}: map it under {form.table}.columns")
    for name, kind in wrong.items():
        raise DataError(
            f"{file.uri} ({form.table}): column {theirs[name]!r} is of type {kind}, but {name} is "
            f"{_RULES[form.kinds[name]].shown}: convert it, or map another column"
        )
    # Optional columns may first occur later in a JSON-lines file.
    maybe = () if file.is_parquet else set(theirs) - set(_FIXED_COLUMNS)
    return {name: column for name, column in theirs.items() if name in seen or name in maybe}


# Our columns that the file has, and those of a wrong type, with this type.
_Inspection = tuple[set[str], dict[str, str]]


def _inspect_parquet(file: File, theirs: Mapping[str, str], kinds: Mapping[str, ColumnKind]) -> _Inspection:
    schema = parquet_footer(file.uri).schema.to_arrow_schema()
    types = {name: schema.field(column).type for name, column in theirs.items() if column in schema.names}
    wrong = {name: str(kind) for name, kind in types.items() if not _fits_arrow(kind, _RULES[kinds[name]])}
    return set(types), wrong


def _fits_arrow(kind: pa.DataType, rule: _Rule) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_null(plain) or any(fits(plain) for fits in rule.arrow)


def _inspect_json(file: File, theirs: Mapping[str, str], kinds: Mapping[str, ColumnKind]) -> _Inspection:
    """Columns are inferred from the first lines."""
    head = json_head(file)
    rows = list(readable_rows(head))
    if head and not rows:
        raise DataError(f"{file.uri} opens with no JSON object: one on each line is expected")
    types = {
        name: {type(row[column]) for row in rows if row.get(column) is not None}
        for name, column in theirs.items()
    }
    wrong = {
        name: " and ".join(sorted(kind.__name__ for kind in kinds_seen))
        for name, kinds_seen in types.items()
        if kinds_seen and not kinds_seen & _RULES[kinds[name]].json
    }
    seen = {name for name, column in theirs.items() if not rows or any(column in row for row in rows)}
    return seen, wrong


# --- rows of a slice ---------------------------------------------------------------------------------------


def read_tables(rows: InputSlice, form: TableFormat, *, quarantine: Quarantine) -> Iterator[pa.Table]:
    """Tables with those of our columns that the slice has. Unreadable rows go to the quarantine."""
    if not isinstance(rows, FileColumns):
        remaining = iter(rows)
        while some := list(islice(remaining, _ROWS_PER_TABLE)):
            present = set[str]().union(*(row for row in some if isinstance(row, dict)))
            yield _typed_table(some, form.of_columns(present), quarantine)
    elif rows.part.file.is_parquet:
        yield from _parquet_tables(rows)
    else:
        data = b"".join(lines(rows.part.file.uri, rows.part.start, rows.part.stop))
        form = form.of_columns(rows.columns)
        for block in _blocks(data, _BLOCK_BYTES):
            # Both ways of reading usually give the same schema; few tables are faster to process than many.
            parsed = _parse(block, rows.columns, form, quarantine)
            for _, alike in groupby(parsed, key=lambda table: table.schema):
                yield pa.concat_tables(alike)


def _parquet_tables(rows: FileColumns) -> Iterator[pa.Table]:
    number = rows.first
    with fs.open_input(rows.part.file.uri) as source:
        reader = pq.ParquetFile(source)
        for group in range(rows.part.start, rows.part.stop):
            read = reader.read_row_group(group, columns=sorted(set(rows.columns.values())))
            columns = {name: plain_column(read, column) for name, column in rows.columns.items()}
            if number is not None:
                ids = columns.get("doc_id", pa.nulls(len(read), pa.string()))
                columns["doc_id"] = _number_rows(ids, number)
                number += len(read)
            if rows.columns.get("content") == "contents" and "title" in columns:
                texts = (columns[name].cast(pa.binary()).to_pylist() for name in ("content", "title"))
                columns["content"] = pa.array(map(without_title, *texts), pa.binary())
            yield pa.table(columns)


def _number_rows(ids: pa.Array, first: int) -> pa.Array:
    """Ids, where there is none the number of the row."""
    if not pa.types.is_binary(ids.type):
        ids = ids.cast(pa.string())
    numbers = pa.array(np.arange(first, first + len(ids))).cast(pa.string()).cast(ids.type)
    missing = pc.or_kleene(pc.is_null(ids), pc.equal(pc.binary_length(ids), 0))
    return pc.if_else(missing, numbers, ids)


def _parse(
    block: bytes, columns: Mapping[str, str], form: TableFormat, quarantine: Quarantine
) -> Iterator[pa.Table]:
    table = _parse_block(block, columns, form.kinds)
    if table is not None:
        yield table
        return
    smaller = list(_blocks(block, max(len(block) // 4, _MIN_BLOCK_BYTES)))
    if len(smaller) == 1:  # cannot be divided further: few lines, or one long line
        rows = (_rename_columns(row, columns) for row in parsed_lines(block.split(b"\n")))
        yield _typed_table(rows, form, quarantine)
        return
    for part in smaller:
        yield from _parse(part, columns, form, quarantine)


def _rename_columns(row: RawRow | UnreadableRow, columns: Mapping[str, str]) -> RawRow | UnreadableRow:
    if isinstance(row, UnreadableRow):
        return row
    return {name: row[column] for name, column in columns.items() if column in row}


def _blocks(data: bytes, size: int) -> Iterator[bytes]:
    """Blocks of whole lines, of about `size` bytes."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start + size) + 1 or len(data)
        yield data[start:stop]
        start = stop


def _parse_block(
    block: bytes, columns: Mapping[str, str], kinds: Mapping[str, ColumnKind]
) -> pa.Table | None:
    """The block parsed at once; None if any line does not fit the types of the first one."""
    try:
        block.decode()  # Arrow would replace invalid UTF-8 by U+FFFD
        first = json.loads(block[: block.find(b"\n") + 1 or None])
        schema = {column: _json_type(first.get(column), kinds[name]) for name, column in columns.items()}
        parsed = pj.read_json(
            pa.BufferReader(block),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(schema), unexpected_field_behavior="ignore"
            ),
        )
    except (ValueError, AttributeError):  # ArrowInvalid and UnicodeDecodeError are ValueErrors
        return None
    lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if len(parsed) != lines:  # blank lines, two objects on one line, one object on two
        return None
    return pa.table({name: parsed[column] for name, column in columns.items()})


def _json_type(value: Any, kind: ColumnKind) -> pa.DataType:
    match kind, value:
        case "flag", bool() | None:
            return pa.bool_()
        case ("flag", _) | ("id" | "integer", int()):
            return pa.int64()
        case "number" | "integer", str():
            return pa.string()
        case ("number" | "integer", _) | ("time", int() | float()):
            return pa.float64()
        case "vector", _:
            return _VECTOR
    return pa.string()


def _typed_table(
    rows: Iterable[RawRow | UnreadableRow], form: TableFormat, quarantine: Quarantine
) -> pa.Table:
    """Rows as a table; those that are unreadable or hold a value of another kind are set aside."""
    columns: dict[str, list[Any]] = {name: [] for name in form.kinds}
    for row in rows:
        if isinstance(row, UnreadableRow):
            quarantine.reject(form.table, row.row, row.reason)
            continue
        values, problems = [], []
        for name, kind in form.kinds.items():
            value, problem = _typed_value(row.get(name), name, kind, quarantine)
            values.append(value)
            if problem and name in form.features:
                quarantine.repaired[f"feature_{name}_dropped"] += 1
            elif problem:
                problems.append(problem)
        if problems:
            quarantine.reject(form.table, row, problems[0])
            continue
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    return pa.table({name: _array(values, form.kinds[name]) for name, values in columns.items()})


def _array(items: list[Any], kind: ColumnKind) -> pa.Array:
    match kind:
        case "flag":
            return pa.array(items, pa.bool_())
        case "integer":
            return pa.array(items, pa.int64())
        case "number":
            return pa.array(items, pa.float64())
        case "vector":
            return pa.array(items, _VECTOR)
        case "time" if not any(isinstance(value, str) for value in items):
            return pa.array(items, pa.float64())
    return pa.array([value if value is None else str(value) for value in items], pa.string())


def _typed_value(value: Any, name: str, kind: ColumnKind, quarantine: Quarantine) -> tuple[Any, str | None]:
    """A value with the Python type of its kind, and the reason if it is invalid."""
    if value is None:
        return None, None
    match kind:
        case "flag":
            # 0 and 1 are valid; another value becomes null, which `column_checks` rejects.
            found = bool(value) if isinstance(value, int | float) and value in (0, 1) else None
            return found, None if found is not None else f"{name} is neither true nor false"
        case "time" if isinstance(value, str):
            return replace_surrogates(value), None
        case "integer" if isinstance(value, int) and -(2**63) <= value < 2**63:
            return int(value), None
        case "number" | "time" | "integer":
            return _number(value, name, whole=kind == "integer")
        case "vector":
            numbers = isinstance(value, list) and all(isinstance(each, int | float | None) for each in value)
            return (value, None) if numbers else (None, f"{name} is no list of numbers")
        case "id" if isinstance(value, int) and not isinstance(value, bool):
            return str(value), None
        case "id" if not isinstance(value, str):
            return None, f"{name} is of type {type(value).__name__}"
        case "text" if not isinstance(value, str):
            return None, f"{name} is of type {type(value).__name__}, not text"
    if is_valid_unicode(value):
        return value, None
    if kind == "id":
        return None, f"{name} with control characters"
    quarantine.repaired["lone_surrogates_replaced"] += 1
    return replace_surrogates(value), None


def _number(value: Any, name: str, *, whole: bool) -> tuple[float | int | None, str | None]:
    try:
        number = float(value)
    except OverflowError:  # an integer may be larger than any float
        return None, f"{name} is not finite"
    except (TypeError, ValueError):
        return None, f"{name} is not a number"
    if not whole:
        return number, None
    fits = number.is_integer() and abs(number) < 2.0**63
    return (int(number), None) if fits else (None, f"{name} is not a whole number")
