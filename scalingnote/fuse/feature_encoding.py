"""Declared features: columns of a table become indices and numbers, by what was fitted on the dataset.

    column ─► observed (one slice) ─► facts (all slices) ─► indices [rows, n], numbers [rows, m]

An index of 0 and a number that is NaN say that a value is missing: null, an empty text, not finite, of the
wrong length, a date that no calendar has, or in no column at all. A value that is there and was not met often
enough when the vocabulary was fitted has index 1.
"""

from calendar import timegm
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Float32, Int32
from numpy import ndarray

from scalingnote.errors import ConfigError
from scalingnote.fuse.config import Bucketed, Categorical, Feature, Numeric, Vector

Facts = dict[str, Any]  # JSON values
MISSING, OTHER = 0, 1
_SKETCH = 2048  # values that a slice sends of its numbers
_KNOTS = 101
_DAY = 86_400.0  # seconds
_SPARE = 10  # times as many values as are kept are counted, so that those rare in one slice can be frequent


@dataclass(frozen=True)
class Encoded:
    """The values of some rows; see the top of the file for what is missing."""

    indices: Int32[ndarray, "rows indices"]
    numbers: Float32[ndarray, "rows numbers"]


@dataclass(frozen=True)
class Encoding:
    """A feature and what was fitted of it."""

    feature: Feature
    facts: Facts

    @property
    def size(self) -> int:
        """Rows of the embedding table of a categorical or bucketed feature, 0 for any other."""
        match self.feature:
            case Categorical():
                return 2 + len(self.facts["values"])
            case Bucketed():
                return 3 + len(self.facts["edges"])
            case _:
                return 0

    @property
    def numbers(self) -> int:
        """How many numbers a feature is that has no table."""
        return (
            self.feature.dim if isinstance(self.feature, Vector) else int(isinstance(self.feature, Numeric))
        )


def observe(features: Sequence[Feature], table: pa.Table) -> list[Facts]:
    """What one slice tells of each feature. ConfigError names a column that the table lacks."""
    missing = [f.column for f in features if f.column not in table.column_names]
    if missing:
        raise ConfigError(f"no column {missing[0]!r} for a feature: the table has {table.column_names}")
    return [_observed(feature, table[feature.column]) for feature in features]


def fit(features: Sequence[Feature], observed: Sequence[Sequence[Facts]]) -> list[Encoding]:
    """Vocabularies and normalisers from what :func:`observe` told of every slice, in any order.

    ConfigError when a feature has no value at all.
    """
    return [
        Encoding(feature, _fitted(feature, [slice_[number] for slice_ in observed]))
        for number, feature in enumerate(features)
    ]


def encode(encodings: Sequence[Encoding], table: pa.Table) -> Encoded:
    """Indices and numbers of the rows of a table, whose further columns do not matter."""
    nothing = pa.chunked_array([pa.nulls(len(table))])
    names = [encoding.feature.column for encoding in encodings]
    columns = [table[name] if name in table.column_names else nothing for name in names]
    return _encoded(encodings, columns, rows=len(table))


def encode_mappings(encodings: Sequence[Encoding], rows: Sequence[Mapping[str, Any]]) -> Encoded:
    """The same of rows that come as mappings, as an online request brings them: written by many hands.

    A value of a kind that a feature cannot have is missing; no other row is the worse for it.
    """
    columns = [
        pa.chunked_array([_loose(encoding.feature, [row.get(encoding.feature.column) for row in rows])])
        for encoding in encodings
    ]
    return _encoded(encodings, columns, rows=len(rows))


def no_values(encodings: Sequence[Encoding], rows: int) -> Encoded:
    """Rows of which nothing is known."""
    indices = np.full((rows, sum(bool(e.size) for e in encodings)), MISSING, np.int32)
    return Encoded(indices, np.full((rows, sum(e.numbers for e in encodings)), np.nan, np.float32))


def _encoded(encodings: Sequence[Encoding], columns: Sequence[pa.ChunkedArray], *, rows: int) -> Encoded:
    both = list(zip(encodings, columns, strict=True))
    indices = [_index(encoding, column) for encoding, column in both if encoding.size]
    numbers = [_scaled(encoding, column) for encoding, column in both if encoding.numbers]
    return Encoded(
        np.stack(indices, axis=1) if indices else np.zeros((rows, 0), np.int32),
        np.concatenate(numbers, axis=1) if numbers else np.zeros((rows, 0), np.float32),
    )


def _loose(feature: Feature, values: Sequence[Any]) -> pa.Array:
    match feature:
        case Categorical():
            return pa.array([_text(value) for value in values], pa.string())
        case Vector():
            return pa.array([_floats(value) for value in values], pa.list_(pa.float64()))
        case _:
            texts = pa.array([_text(v) if isinstance(v, str) else None for v in values], pa.string())
            dates = _days(texts).to_pylist() if texts.null_count < len(values) else [None] * len(values)
            pairs = zip(values, dates, strict=True)
            return pa.array([_number(value) if day is None else day for value, day in pairs], pa.float64())


def _text(value: Any) -> str | None:
    """What a column's cast to texts gives; None for what no column could hold: 10**30, half a surrogate."""
    if not isinstance(value, str | bool | int | float):
        return None
    try:
        found: str = pa.scalar(value).cast(pa.string()).as_py()
    except (OverflowError, ValueError):
        return None
    return found


def _number(value: Any) -> float | None:
    """A number, or a date or time in days since 1970; of a text nothing."""
    try:
        if isinstance(value, datetime):
            return timegm(value.utctimetuple()) / _DAY
        if isinstance(value, date):
            return float((value - date(1970, 1, 1)).days)
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _floats(value: Any) -> list[float] | None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    found = [_number(v) if isinstance(v, int | float) else None for v in value]
    return None if None in found else found  # type: ignore[return-value]  # none is None


def _observed(feature: Feature, column: pa.ChunkedArray) -> Facts:
    match feature:
        case Categorical():
            counts = pc.value_counts(_texts(column)).to_pylist()
            found = Counter({row["values"]: row["counts"] for row in counts if row["values"]})
            most = sorted(found.items(), key=lambda item: (-item[1], item[0]))
            return {"counts": dict(most[: _SPARE * feature.max_values])}
        case Numeric() | Bucketed():
            values = _numbers(column)
            values = np.sort(values[np.isfinite(values)])
            spread = np.linspace(0, len(values) - 1, min(len(values), _SKETCH)).round().astype(int)
            return {"count": len(values), "values": values[spread].tolist()}
        case Vector():
            return {"count": int(np.isfinite(_vectors(column, feature.dim)).all(axis=1).sum())}


def _fitted(feature: Feature, observed: Sequence[Facts]) -> Facts:
    if isinstance(feature, Categorical):
        counts: Counter[str] = Counter()
        for slice_ in observed:
            counts.update(slice_["counts"])
        kept = sorted(
            (item for item in counts.items() if item[1] >= feature.min_count),
            key=lambda item: (-item[1], item[0]),
        )
        if not counts:
            raise ConfigError(f"feature {feature.column!r} has no value in any row: leave it out")
        return {"values": [value for value, _ in kept[: feature.max_values]]}
    if not sum(slice_["count"] for slice_ in observed):
        kind = f"vector of {feature.dim}" if isinstance(feature, Vector) else "number or date"
        raise ConfigError(f"feature {feature.column!r} is a {kind} in no row: leave it out")
    if isinstance(feature, Vector):
        return {}
    values = np.concatenate([np.array(slice_["values"], np.float64) for slice_ in observed])
    weights = np.concatenate(
        [np.full(len(s["values"]), s["count"] / max(len(s["values"]), 1)) for s in observed]
    )
    if isinstance(feature, Bucketed):
        shares = np.arange(1, feature.buckets) / feature.buckets
        return {"edges": np.unique(_quantiles(values, weights, shares)).tolist()}
    if feature.normalise == "quantile":
        return {"knots": _quantiles(values, weights, np.linspace(0, 1, _KNOTS)).tolist()}
    values = _logarithm(values) if feature.normalise == "log" else values
    mean = np.average(values, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    return {"mean": float(mean), "deviation": float(deviation) or 1.0}


def _index(encoding: Encoding, column: pa.ChunkedArray) -> Int32[ndarray, " rows"]:
    if isinstance(encoding.feature, Categorical):
        texts = _texts(column)
        found = pc.index_in(texts, value_set=pa.array(encoding.facts["values"], pa.string()))
        number = np.asarray(pc.fill_null(found, -1)) + 2
        there = np.asarray(pc.fill_null(pc.not_equal(texts, ""), False))
        return np.where(there, number, MISSING).astype(np.int32)
    values = _numbers(column)
    index = 2 + np.searchsorted(np.array(encoding.facts["edges"]), values, side="right")
    return np.where(np.isfinite(values), index, MISSING).astype(np.int32)


def _scaled(encoding: Encoding, column: pa.ChunkedArray) -> Float32[ndarray, "rows numbers"]:
    feature, facts = encoding.feature, encoding.facts
    if isinstance(feature, Vector):
        matrix = _vectors(column, feature.dim)
        if feature.normalise == "unit":
            matrix = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
        return matrix.astype(np.float32)
    assert isinstance(feature, Numeric)
    values = _numbers(column)
    if feature.normalise == "quantile":
        knots = np.array(facts["knots"])
        scaled = 2 * np.interp(values, knots, np.linspace(0, 1, len(knots))) - 1
    else:
        values = _logarithm(values) if feature.normalise == "log" else values
        scaled = (values - facts["mean"]) / facts["deviation"]
    return np.where(np.isfinite(values), scaled, np.nan)[:, None].astype(np.float32)


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _numbers(column: pa.ChunkedArray) -> Float[ndarray, " rows"]:
    """Numbers as they are, dates and times (or their ISO texts) in days since 1970; NaN for none."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = _days(_texts(column))
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        column = pc.divide(
            column.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).cast(pa.float64()), _DAY
        )
    values = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
    return np.where(np.isfinite(values), values, np.nan)


def _days(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Days since 1970 of texts that begin with a date such as 2024-01-05; null of all others."""
    named = pc.utf8_slice_codeunits(texts, 0, 10)
    found = pc.strptime(named, "%Y-%m-%d", unit="s", error_is_null=True).cast(pa.date32())
    # strptime reads 2024-1-5, too, and takes the 31st of February for the 2nd of March.
    exact = pc.equal(found.cast(pa.string()), named)
    return pc.if_else(exact, found, None).cast(pa.int32()).cast(pa.float64())


def _vectors(column: pa.ChunkedArray, dim: int) -> Float[ndarray, "rows dim"]:
    """Rows that are not `dim` finite numbers are NaN throughout."""
    out = np.full((len(column), dim), np.nan)
    if pa.types.is_null(column.type):
        return out
    right = np.asarray(pc.fill_null(pc.equal(pc.list_value_length(column), dim), False))
    values = pc.list_flatten(column.filter(pa.array(right))).cast(pa.float64())
    out[right] = pc.fill_null(values, np.nan).to_numpy().reshape(-1, dim)
    out[~np.isfinite(out).all(axis=1)] = np.nan
    return out


def _logarithm(values: Float[ndarray, " rows"]) -> Float[ndarray, " rows"]:
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)))


def _quantiles(
    values: Float[ndarray, " values"], weights: Float[ndarray, " values"], shares: Float[ndarray, " shares"]
) -> Float[ndarray, " shares"]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    places = (reached - reached[0]) / max(reached[-1] - reached[0], 1e-12)
    return np.asarray(np.interp(shares, places, values[order]))
