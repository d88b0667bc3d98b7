"""Filters, which restrict a search to documents by the fields declared for the index.

A filter maps fields to conditions. A document matches if all conditions hold:

    {"topic": "cardiology"}                       equal
    {"brand": ["acme", "globex"]}                 equal to one of these
    {"price": {"min": 10, "max": 20}}             in this range, both ends included; either may be missing

A document without a value in a field never matches a filter on it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.core.words import is_valid_unicode

Filter = Mapping[str, Any]
Condition = list[Any] | tuple[Any, Any]  # values, or both ends of a range, in the type of the field
RANGE = {"min", "max"}
LARGEST = 1e300  # larger than every number of a document; JSON has no infinity


def require_fields(documents: pa.Schema, names: Sequence[str]) -> None:
    """Raise a ConfigError unless the documents have these columns, with text, numbers or booleans."""
    for name in names:
        if name not in documents.names:
            raise ConfigError(f"index.filters names {name!r}, documents have {', '.join(documents.names)}")
        kind = documents.field(name).type
        if not (_is_text(kind) or _is_number(kind) or pa.types.is_boolean(kind)):
            raise ConfigError(
                f"index.filters names {name!r}, which is of type {kind}: name columns of text, numbers or "
                "booleans"
            )


def check(wanted: Filter, fields: pa.Schema) -> None:
    """Raise a SearchError unless each condition has the type of its field."""
    for name, condition in wanted.items():
        if name not in fields.names:
            names = ", ".join(fields.names) or "none"
            raise SearchError(f"no filter by {name!r}: this index has {names}")
        kind = fields.field(name).type
        if isinstance(condition, Mapping):
            if not condition or not condition.keys() <= RANGE:
                raise SearchError(f"filter {name}: {dict(condition)} is not a range: pass min, max or both")
            if not _is_number(kind):
                raise SearchError(f"filter {name}: only numbers have ranges, this field is of type {kind}")
        values = list(condition.values()) if isinstance(condition, Mapping) else _as_list(condition)
        wrong = [value for value in values if not _fits(value, kind)]
        if wrong:
            raise SearchError(f"filter {name}: {wrong[0]!r} is not a value of a field of type {kind}")


def mask(documents: pa.Table, wanted: Filter) -> Bool[ndarray, " rows"]:
    """Compute which rows of a table of documents match a checked filter."""
    matches = np.ones(len(documents), bool)
    for name, condition in wanted.items():
        column = documents[name]
        matches &= np.asarray(_matches(column, _cast(condition, column.type)).fill_null(False))
    return matches


def conditions(wanted: Filter, fields: pa.Schema) -> dict[str, Condition]:
    """Convert the conditions of a checked filter to the types of their fields, for other engines.

    Returns:
        For each field either a list of values or both ends of a range. A document must have one of the values
        (an empty list matches no document). Both ends are included; an open end is -LARGEST or LARGEST.
    """
    typed_conditions: dict[str, Condition] = {}
    for name, condition in wanted.items():
        kind = fields.field(name).type
        typed = _cast(condition, kind)
        if isinstance(typed, tuple):
            (low, high), (least, most) = typed, _limits(kind)
            typed = (-LARGEST if low == least else low, LARGEST if high == most else high)
        typed_conditions[name] = typed
    return typed_conditions


def facets(documents: Sequence[pa.Table], fields: pa.Schema, *, most: int) -> dict[str, dict[str, int]]:
    """Count the documents per value, for each text field with at most `most` values."""
    counts_by_field = {}
    for field in fields:
        if _is_text(field.type):
            chunks = [chunk for table in documents for chunk in table[field.name].chunks]
            counts = pc.value_counts(pa.chunked_array(chunks, field.type).drop_null())
            if len(counts) <= most:
                counts_by_field[field.name] = {row["values"]: row["counts"] for row in counts.to_pylist()}
    return counts_by_field


def _matches(column: pa.ChunkedArray, typed: Condition) -> pa.ChunkedArray:
    if isinstance(typed, tuple):
        low, high = (pa.scalar(end, column.type) for end in typed)
        return pc.and_kleene(pc.greater_equal(column, low), pc.less_equal(column, high))
    values = pa.array(typed, column.type)
    return pc.equal(column, values[0]) if len(values) == 1 else pc.is_in(column, value_set=values)


def _cast(condition: Any, kind: pa.DataType) -> Condition:
    """Convert the values of a condition, or both ends of its range, to the type of a column.

    The result is [] if no value can match. Values that the column cannot hold, such as 1.5 in integers, are
    left out.
    """
    least, most = _limits(kind)
    is_integer = pa.types.is_integer(kind)
    if isinstance(condition, Mapping):
        up, down = (math.ceil, math.floor) if is_integer else (_float, _float)
        low = max(least, up(condition.get("min", least)))
        high = min(most, down(condition.get("max", most)))
        return (low, high) if low <= high else []
    values = _as_list(condition)
    if is_integer:
        values = [int(v) for v in values if v == int(v) and least <= v <= most]
    elif pa.types.is_floating(kind):
        values = [_float(v) for v in values]
    return list(pa.array(values, kind).to_pylist())


def _limits(kind: pa.DataType) -> tuple[float | int, float | int]:
    if not pa.types.is_integer(kind):
        return -math.inf, math.inf
    limits = np.iinfo(kind.to_pandas_dtype())
    return int(limits.min), int(limits.max)


def _float(value: float | int) -> float:
    try:
        return float(value)
    except OverflowError:  # the integer exceeds the largest float
        return math.copysign(math.inf, value > 0 or -1)


def _as_list(condition: Any) -> list[Any]:
    return list(condition) if isinstance(condition, list | tuple) else [condition]


def _fits(value: Any, kind: pa.DataType) -> bool:
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if _is_text(kind):
        return isinstance(value, str) and is_valid_unicode(value)
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))
