"""Conversion of a log's columns to our types (an invalid value becomes null), and normalised query texts."""

import hashlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FEATURES = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
_MS = pa.timestamp("ms")
_MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 0.001}
# Control characters except tab and line ends, DEL and the C1 block, as in `row_checks`.
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x{9f}]"
_NUMBER = r"(?i)^[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|nan|inf|infinity)$"
# Failing casts are slow, so only texts that look like a date are cast.
_DATE = r"^\d{4}-\d\d-\d\d([T ].*)?$"
_ZONE = r"[T ].*(Z|[+-]\d\d:?\d\d)$"


def text_column(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """A column as strings, integers as decimal digits; and which rows are not UTF-8."""
    column = _column(rows, name)
    if pa.types.is_integer(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.string())
    # A Parquet string column may hold invalid UTF-8; Arrow validates it only when binary is cast to string.
    plain = cast_or_null(column.cast(pa.binary()), pa.string())
    return plain, pc.and_(pc.is_null(plain), pc.is_valid(column))


def number_column(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """A column as float64, including numbers in text; and which rows have any value."""
    column = _column(rows, name)
    if pa.types.is_floating(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.float64()), pc.is_valid(column)
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        return column.cast(pa.float64(), safe=False), pc.is_valid(column)
    plain = pc.utf8_trim_whitespace(text_column(rows, name)[0])
    numeral = pc.if_else(pc.match_substring_regex(plain, _NUMBER), plain, None)
    return cast_or_null(numeral, pa.float64()), pc.is_valid(column)


def boolean_column(rows: pa.Table, name: str) -> pa.Array:
    """A column as booleans: true and false, 1 and 0; null for anything else."""
    column = _column(rows, name)
    if pa.types.is_integer(column.type):
        known = pc.is_in(column, value_set=pa.array([0, 1], column.type))
        return pc.if_else(known, pc.not_equal(column, 0), None)
    return column.cast(pa.bool_())


def time_column(rows: pa.Table, name: str, *, unit: Literal["s", "ms", "us"]) -> tuple[pa.Array, pa.Array]:
    """A column as UTC milliseconds, and the reason for each row without; `unit` is that of plain numbers."""
    column = _column(rows, name)
    if pa.types.is_timestamp(column.type):
        return _utc(column), _reason_where(pc.is_null(column), f"{name} is not a number")
    numeric, present = number_column(rows, name)
    ms = np.rint(np.asarray(pc.fill_null(numeric, float("nan"))) * _MS_PER_UNIT[unit])
    usable = np.abs(ms) < 2.0**62
    clock = pa.array(np.where(usable, ms, 0).astype(np.int64)).cast(_MS)
    clock = pc.if_else(pa.array(usable), clock, None)
    problem = _reason_where(pa.array(~usable), f"{name} is not finite")
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return clock, pc.if_else(present, problem, f"{name} is not a number")
    plain = pc.utf8_trim_whitespace(text_column(rows, name)[0])
    plain = pc.if_else(pc.match_substring_regex(plain, _DATE), plain, None)
    zoned = pc.match_substring_regex(plain, _ZONE)
    with_zone = cast_or_null(pc.if_else(zoned, plain, None), pa.timestamp("ns", "UTC"))
    without_zone = cast_or_null(pc.if_else(zoned, None, plain), pa.timestamp("ns"))
    clock = pc.coalesce(clock, _utc(with_zone), _utc(without_zone))
    neither = _reason_where(pc.is_null(numeric), f"{name} is neither a number nor ISO 8601 text")
    problem = pc.if_else(pc.is_valid(clock), None, pc.coalesce(neither, problem))
    return clock, pc.if_else(present, problem, f"{name} is not a number")


def feature_column(rows: pa.Table, field: pa.Field) -> tuple[pa.Array, pa.Array]:
    """A column of numbers or booleans with the type of `field`, and which rows lost an invalid value."""
    column = _column(rows, field.name)
    if pa.types.is_boolean(field.type):
        plain = boolean_column(rows, field.name)
    else:
        plain, _ = number_column(rows, field.name)
        if pa.types.is_integer(field.type) and not pa.types.is_integer(column.type):
            plain = cast_or_null(plain, pa.int64())
        elif pa.types.is_integer(field.type):
            plain = cast_or_null(column, pa.int64())
    return plain, pc.and_(pc.is_null(plain), pc.is_valid(column))


def cast_or_null(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column; invalid values become null. Bisection finds them, which is fast if they are few."""
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind)
    middle = len(column) // 2
    return pa.concat_arrays([cast_or_null(column[:middle], kind), cast_or_null(column[middle:], kind)])


def has_controls(column: pa.Array) -> pa.Array:
    """Which texts have control characters."""
    return pc.match_substring_regex(column, _CONTROL)


def without_controls(column: pa.Array) -> pa.Array:
    """Texts with a blank in place of each control character."""
    return pc.replace_substring_regex(column, _CONTROL, " ")


def printable_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as Python values that can be printed, also for invalid UTF-8 and out-of-range timestamps."""
    columns = {}
    for name in table.column_names:
        column = _column(table, name)
        if pa.types.is_timestamp(column.type):
            columns[name] = column.cast(pa.string()).to_pylist()
        elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            raw = column.cast(pa.binary()).to_pylist()
            columns[name] = [None if v is None else v.decode("utf-8", "backslashreplace") for v in raw]
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _column(rows: pa.Table, name: str) -> pa.Array:
    """One array of a plain type; nulls where the file has no such column."""
    if name not in rows.column_names:
        return pa.nulls(len(rows))
    column = rows[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # zero chunks stay a ChunkedArray
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.binary()) if pa.types.is_large_binary(column.type) else column


def _utc(column: pa.Array) -> pa.Array:
    """Timestamps of any unit and zone as UTC milliseconds; without a zone they are UTC."""
    if column.type.tz:
        column = column.cast(pa.timestamp(column.type.unit, "UTC")).cast(pa.timestamp(column.type.unit))
    return column.cast(_MS, safe=False)


def _reason_where(which: pa.Array, reason: str) -> pa.Array:
    return pc.if_else(which, reason, None)


# --- query texts and their ids ----------------------------------------------------------------------------

_BLANKS = r"[\s\pZ\x{85}]+"


def collapse_spaces(texts: pa.Array) -> pa.Array:
    """Texts with runs of white space as one blank."""
    return _map_distinct(texts, _collapse)


def query_ids(texts: pa.Array, *, fold_case: bool) -> pa.Array:
    """An id of 16 hexadecimal digits for every text that is not null.

    Equal ids mean the same query, whatever the width, blanks and case of its letters. They are reproducible:
    the text without format characters (Unicode's Cf), in NFKC, with runs of white space as one blank and none
    at the ends, in lower case with `ß` as `ss` and `ς` as `σ` (if `fold_case`); in UTF-8; BLAKE2b of 8 bytes;
    in hex. Among 100 million queries, two share an id with probability 0.0003.
    """

    def identify(distinct: pa.Array) -> pa.Array:
        plain = _collapse(normalize_text(distinct))
        plain = fold_letters(plain) if fold_case else plain
        return pa.array([None if text is None else _hash(text) for text in plain.to_pylist()], pa.string())

    return _map_distinct(texts, identify)


def _collapse(texts: pa.Array) -> pa.Array:
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, _BLANKS, " "))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _map_distinct(texts: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply `function` once per distinct text, since a log repeats its queries."""
    coded = pc.dictionary_encode(texts)
    return function(coded.dictionary).take(coded.indices)


def normalize_text(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """NFKC without format characters.

    Copied text has zero-width spaces, joiners, soft hyphens and byte-order marks; a blank for them would
    split a word. They are removed first, so that NFKC can compose an accent after one with its letter.
    """
    return pc.utf8_normalize(pc.replace_substring_regex(texts, r"\p{Cf}+", ""), form="NFKC")


def fold_letters(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Lower case, `ß` as `ss` and a final sigma as any other, since their upper case forms are equal."""
    return pc.replace_substring(pc.replace_substring(pc.utf8_lower(texts), "ß", "ss"), "ς", "σ")
