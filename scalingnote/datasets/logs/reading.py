"""The rows of one slice as Arrow tables under our column names, a few megabytes at a time.

Parquet comes typed. JSON lines are parsed by Arrow as long as a block is what its first line promises. One
that is not (a broken line, a number among texts) is cut smaller, and in the end read line by line, so that a
bad row costs some milliseconds, and no other row anything.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.json as pj
import pyarrow.parquet as pq

from scalingnote.datasets.logs.inputs import Slice
from scalingnote.datasets.logs.tables import Kind
from scalingnote.datasets.logs.tally import Tally
from scalingnote.storage import filesystem as fs
from scalingnote.storage.text import mended, storable

# A column beside the file's own: why the row cannot be used, where reading it already told.
PROBLEM = "_problem"
_BLOCK = 1 << 20
_FEW_LINES = 1 << 14  # bytes
_PEEK = 1 << 16


def read(piece: Slice, *, kinds: dict[str, Kind], tally: Tally) -> Iterator[pa.Table]:
    """Tables with those of our columns that the file has, and PROBLEM. Unreadable lines are set aside."""
    if piece.uri.endswith(".parquet"):
        with fs.open_input(piece.uri) as source:
            reader = pq.ParquetFile(source)
            for group in range(piece.start, piece.stop):
                rows = reader.read_row_group(group, columns=sorted(set(piece.columns.values())))
                columns = {name: rows[column] for name, column in piece.columns.items()}
                yield pa.table(columns | {PROBLEM: pa.nulls(len(rows), pa.string())})
        return
    for block in _blocks(_lines(piece), _BLOCK):
        # Rows read this way and that have one schema, as a rule: few tables are quicker than many.
        for _, alike in groupby(_parsed(block, piece, kinds, tally), key=lambda table: table.schema):
            yield pa.concat_tables(alike)


def _parsed(block: bytes, piece: Slice, kinds: dict[str, Kind], tally: Tally) -> Iterator[pa.Table]:
    table = _by_arrow(block, piece.columns, kinds)
    if table is not None:
        yield table
        return
    smaller = list(_blocks(block, max(len(block) // 4, _FEW_LINES)))
    if len(smaller) == 1:  # as small as it gets: few lines, or one long line
        yield _line_by_line(block, piece, kinds, tally)
        return
    for part in smaller:
        yield from _parsed(part, piece, kinds, tally)


def _lines(piece: Slice) -> bytes:
    """The lines whose first byte lies in [start, stop)."""
    first = max(piece.start - 1, 0)
    with fs.open_input(piece.uri) as source:
        source.seek(first)
        data: bytes = source.read(piece.stop - first)
        while not data.endswith(b"\n") and (more := source.read(_PEEK)):
            head, found, _ = more.partition(b"\n")
            data += head + found
    if not piece.start:
        return data
    # The byte before `start` shows whether a line begins there or has begun before.
    begin = data.find(b"\n") + 1
    return data[begin:] if 0 < begin < piece.stop - first else b""


def _blocks(data: bytes, size: int) -> Iterator[bytes]:
    """Whole lines, about `size` bytes of them at a time."""
    start = 0
    while start < len(data):
        stop = data.find(b"\n", start + size) + 1 or len(data)
        yield data[start:stop]
        start = stop


def _by_arrow(block: bytes, columns: dict[str, str], kinds: dict[str, Kind]) -> pa.Table | None:
    """The block parsed at once; None where any line does not keep what the first one promises."""
    try:
        block.decode()  # Arrow would put U+FFFD for what is not UTF-8
        first = json.loads(block[: block.find(b"\n") + 1 or None])
        schema = {column: _promised(first.get(column), kinds[name]) for name, column in columns.items()}
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


def _promised(value: Any, kind: Kind) -> pa.DataType:
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


def _line_by_line(block: bytes, piece: Slice, kinds: dict[str, Kind], tally: Tally) -> pa.Table:
    named = "documents" if piece.table == "unpaired" else piece.table
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
            shown = line[:400].decode("utf-8", "backslashreplace").rstrip()
            tally.reject_lines(named, reason, [shown])
            continue
        problem = None
        for name, column in piece.columns.items():
            value, why = _plain(row.get(column), name, kinds[name], tally)
            columns[name].append(value)
            problem = problem or why
        columns[PROBLEM].append(problem)
    return pa.table({name: _array(values, kinds.get(name, "text")) for name, values in columns.items()})


def _array(found: list[Any], kind: Kind) -> pa.Array:
    match kind:
        case "flag":
            return pa.array(found, pa.bool_())
        case "number":
            return pa.array(found, pa.float64())
        case "time" if not any(isinstance(value, str) for value in found):
            return pa.array(found, pa.float64())
    return pa.array([value if value is None else str(value) for value in found], pa.string())


def _plain(value: Any, name: str, kind: Kind, tally: Tally) -> tuple[Any, str | None]:
    """A JSON value as its kind is kept, and why it cannot be used."""
    if value is None:
        return None, None
    match kind:
        case "flag":
            # 0 and 1 pass; what is neither is null, and refused as that.
            return (bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None), None
        case "number":
            return _number(value, name)
        case "time" if isinstance(value, str):
            return mended(value), None
        case "time":
            return _number(value, name)
        case "id" if isinstance(value, int) and not isinstance(value, bool):
            return str(value), None
        case "id" if not isinstance(value, str):
            return None, f"{name} is of type {type(value).__name__}"
        case "text" if not isinstance(value, str):
            return None, f"{name} is of type {type(value).__name__}, not text"
    if storable(value):
        return value, None
    if kind == "id":
        return None, f"{name} with control characters"
    tally.mended["lone_surrogates_replaced"] += 1
    return mended(value), None


def _number(value: Any, name: str) -> tuple[float | None, str | None]:
    try:
        return float(value), None
    except (TypeError, ValueError, OverflowError):
        return None, f"{name} is not a number"
