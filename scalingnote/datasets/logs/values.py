"""Columns of whatever type a file has, as the type we want; null, and no error, where a value is none."""

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FEATURES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
_MS = pa.timestamp("ms")
_MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 0.001}
# Everything below a space but tab and line ends, DEL and the C1 block, as in `intake`.
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x{9f}]"
_NUMBER = r"(?i)^[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|nan|inf|infinity)$"
# Casts that fail are slow: only what looks like a date is tried.
_DATE = r"^\d{4}-\d\d-\d\d([T ].*)?$"
_ZONE = r"[T ].*(Z|[+-]\d\d:?\d\d)$"


def text(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """A column as strings, whole numbers written out; and which rows are not UTF-8."""
    found = _column(rows, name)
    if pa.types.is_integer(found.type) or pa.types.is_null(found.type):
        found = found.cast(pa.string())
    # A Parquet file may promise UTF-8 and hold something else; only this way round does Arrow look.
    plain = gently(found.cast(pa.binary()), pa.string())
    return plain, pc.and_(pc.is_null(plain), pc.is_valid(found))


def numbers(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """A column as float64, numerals in text included; and which rows hold anything at all."""
    found = _column(rows, name)
    if pa.types.is_floating(found.type) or pa.types.is_null(found.type):
        return found.cast(pa.float64()), pc.is_valid(found)
    if pa.types.is_integer(found.type) or pa.types.is_decimal(found.type):
        return found.cast(pa.float64(), safe=False), pc.is_valid(found)
    plain = pc.utf8_trim_whitespace(text(rows, name)[0])
    numeral = pc.if_else(pc.match_substring_regex(plain, _NUMBER), plain, None)
    return gently(numeral, pa.float64()), pc.is_valid(found)


def flags(rows: pa.Table, name: str) -> pa.Array:
    """A column as booleans: true and false, 1 and 0; null for anything else."""
    found = _column(rows, name)
    if pa.types.is_integer(found.type):
        known = pc.is_in(found, value_set=pa.array([0, 1], found.type))
        return pc.if_else(known, pc.not_equal(found, 0), None)
    return found.cast(pa.bool_())


def times(rows: pa.Table, name: str, *, unit: Literal["s", "ms", "us"]) -> tuple[pa.Array, pa.Array]:
    """A column as UTC milliseconds, and why a row has none. `unit` is that of plain numbers."""
    found = _column(rows, name)
    if pa.types.is_timestamp(found.type):
        return _utc(found), _because(pc.is_null(found), f"{name} is not a number")
    numeric, given = numbers(rows, name)
    ms = np.rint(np.asarray(pc.fill_null(numeric, float("nan"))) * _MS_PER_UNIT[unit])
    usable = np.abs(ms) < 2.0**62
    clock = pa.array(np.where(usable, ms, 0).astype(np.int64)).cast(_MS)
    clock = pc.if_else(pa.array(usable), clock, None)
    problem = _because(pa.array(~usable), f"{name} is not finite")
    if not pa.types.is_string(found.type) and not pa.types.is_large_string(found.type):
        return clock, pc.if_else(given, problem, f"{name} is not a number")
    plain = pc.utf8_trim_whitespace(text(rows, name)[0])
    plain = pc.if_else(pc.match_substring_regex(plain, _DATE), plain, None)
    zoned = pc.match_substring_regex(plain, _ZONE)
    here = gently(pc.if_else(zoned, plain, None), pa.timestamp("ns", "UTC"))
    bare = gently(pc.if_else(zoned, None, plain), pa.timestamp("ns"))
    clock = pc.coalesce(clock, _utc(here), _utc(bare))
    neither = _because(pc.is_null(numeric), f"{name} is neither a number nor ISO 8601 text")
    problem = pc.if_else(pc.is_valid(clock), None, pc.coalesce(neither, problem))
    return clock, pc.if_else(given, problem, f"{name} is not a number")


def feature(rows: pa.Table, field: pa.Field) -> tuple[pa.Array, pa.Array]:
    """A column of numbers or flags as `field` wants it, and which rows lost a value that was none."""
    found = _column(rows, field.name)
    if pa.types.is_boolean(field.type):
        plain = flags(rows, field.name)
    else:
        plain, _ = numbers(rows, field.name)
        if pa.types.is_integer(field.type) and not pa.types.is_integer(found.type):
            plain = gently(plain, pa.int64())
        elif pa.types.is_integer(field.type):
            plain = gently(found, pa.int64())
    return plain, pc.and_(pc.is_null(plain), pc.is_valid(found))


def gently(found: pa.Array, kind: pa.DataType) -> pa.Array:
    """`found` cast to `kind`; a value that cannot be is null, found by halving: quick where few are bad."""
    try:
        return found.cast(kind)
    except pa.ArrowInvalid:
        if len(found) == 1:
            return pa.nulls(1, kind)
    middle = len(found) // 2
    return pa.concat_arrays([gently(found[:middle], kind), gently(found[middle:], kind)])


def has_controls(found: pa.Array) -> pa.Array:
    """Which texts hold characters that no text should."""
    return pc.match_substring_regex(found, _CONTROL)


def without_controls(found: pa.Array) -> pa.Array:
    """Texts with blanks instead of them."""
    return pc.replace_substring_regex(found, _CONTROL, " ")


def rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows to be shown to a person, whatever bytes and times they hold."""
    columns = {}
    for name in table.column_names:
        found = _column(table, name)
        if pa.types.is_timestamp(found.type):
            columns[name] = found.cast(pa.string()).to_pylist()
        elif pa.types.is_string(found.type) or pa.types.is_binary(found.type):
            raw = found.cast(pa.binary()).to_pylist()
            columns[name] = [None if v is None else v.decode("utf-8", "backslashreplace") for v in raw]
        else:
            columns[name] = found.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _column(rows: pa.Table, name: str) -> pa.Array:
    """One array of a plain type; nulls where the file has no such column."""
    if name not in rows.column_names:
        return pa.nulls(len(rows))
    found = rows[name].combine_chunks()
    if isinstance(found, pa.ChunkedArray):  # zero chunks stay a ChunkedArray
        found = pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], found.type)
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    if pa.types.is_large_string(found.type) or pa.types.is_string_view(found.type):
        found = found.cast(pa.string())
    return found.cast(pa.binary()) if pa.types.is_large_binary(found.type) else found


def _utc(found: pa.Array) -> pa.Array:
    """Timestamps of any unit and zone; one without a zone is taken for UTC."""
    if found.type.tz:
        found = found.cast(pa.timestamp(found.type.unit, "UTC")).cast(pa.timestamp(found.type.unit))
    return found.cast(_MS, safe=False)


def _because(which: pa.Array, reason: str) -> pa.Array:
    return pc.if_else(which, reason, None)
