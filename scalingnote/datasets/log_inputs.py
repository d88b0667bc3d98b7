"""The files of a log: checked against the config, cut into slices, and read as Arrow tables.

A file with missing or wrongly typed columns is refused before any work; `log_columns` checks the values.

A slice is read a few megabytes at a time. Parquet is typed. JSON lines are parsed by Arrow with the types of
the first line of a block. If a line of the block does not fit (broken JSON, a number among texts), the block
is divided, and finally read line by line: a bad line costs a few milliseconds and affects no other line.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from scalingnote.datasets.config import FeatureType, Logs
from scalingnote.datasets.layouts import Layout, find_layouts, tell
from scalingnote.datasets.log_columns import PROBLEM, LogTally
from scalingnote.datasets.raw_rows import (
    File,
    FileSlice,
    UnreadableRow,
    cut,
    find_files,
    json_head,
    lines,
    parquet_footer,
    parsed_lines,
    readable_rows,
)
from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs
from scalingnote.texts import is_valid_unicode, replace_surrogates

Kind = Literal["id", "text", "number", "flag", "time"]


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
_RULES: dict[Kind, _Rule] = {
    "id": _Rule("text or whole numbers", {str, int}, (*_TEXT, pa.types.is_integer)),
    "text": _Rule("text", {str}, _TEXT),
    "number": _Rule("a number", {int, float, str}, (*_TEXT, *_NUMBER)),
    "flag": _Rule("true or false, or 1 and 0", {bool, int}, (pa.types.is_boolean, pa.types.is_integer)),
    "time": _Rule(
        "a timestamp, a number or ISO 8601 text",
        {int, float, str},
        (*_TEXT, *_NUMBER, pa.types.is_timestamp),
    ),
}
_FEATURES: dict[FeatureType, Kind] = {
    "string": "text",
    "int64": "number",
    "float64": "number",
    "bool": "flag",
}
_DOCUMENTS: dict[str, Kind] = {
    "doc_id": "id",
    **dict.fromkeys(("title", "topic", "content", "group"), "text"),
}
_PAIR: dict[str, Kind] = {"query": "text", "query_id": "id", "doc_id": "id"}
# The columns of each table by our names, and the kind of their values.
_KINDS: dict[str, dict[str, Kind]] = {
    "documents": _DOCUMENTS,
    "unpaired": _DOCUMENTS,
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
}
_REQUIRED = {
    "documents": ["doc_id"],
    "unpaired": ["doc_id"],
    "impressions": ["session_id", "query", "doc_id", "position", "clicked", "timestamp"],
    "scores": ["doc_id", "score"],
    "qrels": ["doc_id"],
}
# The key of queries and the presence of grades must not change within a file.
_FIXED_COLUMNS = ("query", "query_id", "relevance")
_BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 1 << 14


@dataclass(frozen=True)
class LogSlice:
    """What one task reads. Slices are numbered in the order of the input: tables, files by name, rows."""

    number: int
    table: str
    part: FileSlice
    columns: dict[str, str]  # our name -> the file's


def plan_slices(config: Logs) -> list[LogSlice]:
    """All slices of all tables; DataError names the file and the column that do not fit."""
    found = {name: find_files(table.path) for name in _KINDS if (table := getattr(config, name)) is not None}
    pieces = [
        (name, piece) for name, each in found.items() for piece in cut(each, limit=config.slice_mb << 20)
    ]
    layouts: dict[tuple[str, File], Layout] = {}
    for name in found:
        if _KINDS[name] is _DOCUMENTS:
            names = list(_column_kinds(config, name))
            told = find_layouts(found[name], getattr(config, name).columns, names=names)
            tell(told)
            layouts |= {(name, file): layout for file, layout in told.items()}
    files = list(dict.fromkeys((table, piece.file) for table, piece in pieces))
    look = partial(_columns, config=config, layouts=layouts)
    columns = dict(zip(files, fs.map_files(look, files), strict=True))
    if not _have_query_ids(columns):
        for have in columns.values():
            if "query" in have:
                have.pop("query_id", None)
    return [
        LogSlice(number, table, piece, columns[table, piece.file])
        for number, (table, piece) in enumerate(pieces)
    ]


def _columns(
    item: tuple[str, File], *, config: Logs, layouts: Mapping[tuple[str, File], Layout]
) -> dict[str, str]:
    """The columns of a file that are read: our name -> the file's."""
    table, file = item
    mapping: dict[str, str] = getattr(config, table).columns
    kinds = _column_kinds(config, table)
    unknown = sorted(set(mapping) - set(kinds))
    if unknown:
        raise DataError(f"{file.uri}: columns maps {unknown}, which are none of {list(kinds)}")
    theirs = {name: mapping.get(name, name) for name in kinds}
    theirs |= layouts[item].columns if item in layouts else {}
    inspect = _inspect_parquet if file.is_parquet else _inspect_json
    seen, wrong = inspect(file, theirs, kinds)
    missing = _missing_columns(config, table, seen)
    missing += [name for name in mapping if name not in seen and name not in missing]
    if missing:
        shown = [theirs.get(name, name) for name in missing]
        raise DataError(f"{file.uri} ({table}) has no column {shown}: map it under {table}.columns")
    for name, kind in wrong.items():
        raise DataError(
            f"{file.uri} ({table}): column {theirs[name]!r} is of type {kind}, but {name} is "
            f"{_RULES[kinds[name]].shown}: convert it, or map another column"
        )
    # Optional columns may first occur later in a JSON-lines file.
    maybe = () if file.is_parquet else set(theirs) - set(_FIXED_COLUMNS)
    return {name: column for name, column in theirs.items() if name in seen or name in maybe}


# Our columns that the file has, and those of a wrong type, with this type.
_Inspection = tuple[set[str], dict[str, str]]


def _inspect_parquet(file: File, theirs: dict[str, str], kinds: dict[str, Kind]) -> _Inspection:
    schema = parquet_footer(file.uri).schema.to_arrow_schema()
    types = {name: schema.field(column).type for name, column in theirs.items() if column in schema.names}
    wrong = {name: str(kind) for name, kind in types.items() if not _fits_arrow(kind, _RULES[kinds[name]])}
    return set(types), wrong


def _inspect_json(file: File, theirs: dict[str, str], kinds: dict[str, Kind]) -> _Inspection:
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


def _have_query_ids(columns: dict[tuple[str, File], dict[str, str]]) -> bool:
    """Whether the files of all tables identify queries by query_id; else, all do by their text."""
    named = {
        file.uri: "query_id" in have for (table, file), have in columns.items() if table == "impressions"
    }
    if len(set(named.values())) > 1:
        without_id = next(uri for uri, has_id in named.items() if not has_id)
        raise DataError(
            f"{without_id} has no column query_id, other impressions have: one query would become two"
        )
    has_ids = any(named.values())
    for (table, file), have in columns.items():
        if has_ids and table in ("scores", "qrels") and "query_id" not in have:
            raise DataError(
                f"{file.uri} ({table}) has no column query_id, but the impressions call queries by it: "
                "add it here, or leave it out there"
            )
    return has_ids


# --- what a column may hold ----------------------------------------------------------------------------


def _column_kinds(config: Logs, table: str) -> dict[str, Kind]:
    if _KINDS[table] is not _DOCUMENTS:
        return _KINDS[table]
    return _DOCUMENTS | {name: _FEATURES[kind] for name, kind in config.features.items()}


def _missing_columns(config: Logs, table: str, have: Collection[str]) -> list[str]:
    """The required columns of a table that a file with the columns `have` lacks."""
    either = ("title", "content") if _KINDS[table] is _DOCUMENTS else ("query", "query_id")
    needed = [*_REQUIRED[table], *(["dwell_s"] if table == "impressions" and config.min_dwell_s else [])]
    lacking = [name for name in needed if name not in have]
    if not set(either) & {*have, *lacking}:
        lacking.append(" or ".join(either))
    return lacking


def _fits_arrow(kind: pa.DataType, rule: _Rule) -> bool:
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_null(plain) or any(fits(plain) for fits in rule.arrow)


# --- rows of a slice ---------------------------------------------------------------------------------------


def read_slice(piece: LogSlice, *, config: Logs, tally: LogTally) -> Iterator[pa.Table]:
    """Tables with those of our columns that the file has, and PROBLEM. Unreadable lines are rejected."""
    kinds = _column_kinds(config, piece.table)
    file, start, stop = piece.part.file, piece.part.start, piece.part.stop
    if file.is_parquet:
        with fs.open_input(file.uri) as source:
            reader = pq.ParquetFile(source)
            for group in range(start, stop):
                rows = reader.read_row_group(group, columns=sorted(set(piece.columns.values())))
                columns = {name: rows[column] for name, column in piece.columns.items()}
                yield pa.table(columns | {PROBLEM: pa.nulls(len(rows), pa.string())})
        return
    data = b"".join(lines(file.uri, start, stop))
    for block in _blocks(data, _BLOCK_BYTES):
        # Both ways of reading usually give the same schema; few tables are faster to process than many.
        for _, alike in groupby(_parse(block, piece, kinds, tally), key=lambda table: table.schema):
            yield pa.concat_tables(alike)


def _parse(block: bytes, piece: LogSlice, kinds: dict[str, Kind], tally: LogTally) -> Iterator[pa.Table]:
    table = _parse_block(block, piece.columns, kinds)
    if table is not None:
        yield table
        return
    smaller = list(_blocks(block, max(len(block) // 4, _MIN_BLOCK_BYTES)))
    if len(smaller) == 1:  # cannot be divided further: few lines, or one long line
        yield _parse_lines(block, piece, kinds, tally)
        return
    for part in smaller:
        yield from _parse(part, piece, kinds, tally)


def _blocks(data: bytes, size: int) -> Iterator[bytes]:
    """Blocks of whole lines, of about `size` bytes."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start + size) + 1 or len(data)
        yield data[start:stop]
        start = stop


def _parse_block(block: bytes, columns: dict[str, str], kinds: dict[str, Kind]) -> pa.Table | None:
    """The block parsed at once; None if any line does not fit the types of the first one."""
    try:
        block.decode()  # Arrow would replace invalid UTF-8 by U+FFFD
        first = json.loads(block[: block.find(b"\n") + 1 or None])
        schema = {column: _arrow_type(first.get(column), kinds[name]) for name, column in columns.items()}
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
    taken = {name: parsed[column] for name, column in columns.items()}
    return pa.table(taken | {PROBLEM: pa.nulls(lines, pa.string())})


def _arrow_type(value: Any, kind: Kind) -> pa.DataType:
    match kind, value:
        case "flag", bool() | None:
            return pa.bool_()
        case "flag", _:
            return pa.int64()
        case "id", int():
            return pa.int64()
        case "number", str():
            return pa.string()
        case "number", _:
            return pa.float64()
        case "time", int() | float():
            return pa.float64()
    return pa.string()


def _parse_lines(block: bytes, piece: LogSlice, kinds: dict[str, Kind], tally: LogTally) -> pa.Table:
    table = "documents" if piece.table == "unpaired" else piece.table
    columns: dict[str, list[Any]] = {name: [] for name in [*piece.columns, PROBLEM]}
    for row in parsed_lines(block.split(b"\n")):
        if isinstance(row, UnreadableRow):
            tally.reject(table, row.row, row.reason)
            continue
        problem = None
        for name, column in piece.columns.items():
            value, why = _typed_value(row.get(column), name, kinds[name], tally)
            columns[name].append(value)
            problem = problem or why
        columns[PROBLEM].append(problem)
    return pa.table({name: _array(values, kinds.get(name, "text")) for name, values in columns.items()})


def _array(items: list[Any], kind: Kind) -> pa.Array:
    match kind:
        case "flag":
            return pa.array(items, pa.bool_())
        case "number":
            return pa.array(items, pa.float64())
        case "time" if not any(isinstance(value, str) for value in items):
            return pa.array(items, pa.float64())
    return pa.array([value if value is None else str(value) for value in items], pa.string())


def _typed_value(value: Any, name: str, kind: Kind, tally: LogTally) -> tuple[Any, str | None]:
    """A JSON value with the Python type of its kind, and the reason if it is invalid."""
    if value is None:
        return None, None
    match kind:
        case "flag":
            # 0 and 1 are valid; another number becomes null, which `log_columns` rejects.
            return (bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None), None
        case "time" if isinstance(value, str):
            return replace_surrogates(value), None
        case "number" | "time":
            try:
                return float(value), None
            except (TypeError, ValueError, OverflowError):
                return None, f"{name} is not a number"
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
    tally.repaired["lone_surrogates_replaced"] += 1
    return replace_surrogates(value), None
