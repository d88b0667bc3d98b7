"""Reads a slice as Arrow tables under our column names, a few megabytes at a time.

Parquet is typed. JSON lines are parsed by Arrow with the types of the first line of a block. If a line of the
block does not fit (broken JSON, a number among texts), the block is divided, and finally read line by line:
a bad line costs a few milliseconds and affects no other line.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from scalingnote.datasets.file_slices import lines
from scalingnote.datasets.logs.column_checks import PROBLEM, LogTally
from scalingnote.datasets.logs.inputs import Kind, LogSlice
from scalingnote.storage import filesystem as fs
from scalingnote.storage.schema import is_valid_unicode, replace_surrogates

_BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 1 << 14


def read_slice(piece: LogSlice, *, kinds: dict[str, Kind], tally: LogTally) -> Iterator[pa.Table]:
    """Tables with those of our columns that the file has, and PROBLEM. Unreadable lines are rejected."""
    if piece.uri.endswith(".parquet"):
        with fs.open_input(piece.uri) as source:
            reader = pq.ParquetFile(source)
            for group in range(piece.start, piece.stop):
                rows = reader.read_row_group(group, columns=sorted(set(piece.columns.values())))
                columns = {name: rows[column] for name, column in piece.columns.items()}
                yield pa.table(columns | {PROBLEM: pa.nulls(len(rows), pa.string())})
        return
    data = b"".join(lines(piece.uri, piece.start, piece.stop))
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
    for line in block.split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            reason = None if isinstance(row, dict) else "not a JSON object"
        except UnicodeDecodeError:
            reason = "invalid UTF-8"
        except ValueError:
            reason = "invalid JSON"
        if reason:
            tally.reject_rows(table, reason, [line[:400].decode("utf-8", "backslashreplace").rstrip()])
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
            # 0 and 1 are valid; another number becomes null, which `column_checks` rejects.
            return (bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None), None
        case "number":
            return _number(value, name)
        case "time" if isinstance(value, str):
            return replace_surrogates(value), None
        case "time":
            return _number(value, name)
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
    tally.mended["lone_surrogates_replaced"] += 1
    return replace_surrogates(value), None


def _number(value: Any, name: str) -> tuple[float | None, str | None]:
    try:
        return float(value), None
    except (TypeError, ValueError, OverflowError):
        return None, f"{name} is not a number"
