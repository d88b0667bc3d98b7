"""Declared features: columns of a table become indices and numbers, by what was fitted on the dataset.

    column ─► observations (of a slice) ─► facts (of all slices) ─► indices [rows, n], numbers [rows, m]

Index 0 and NaN mark missing values: null, an empty text, not finite, of the wrong length, an impossible date,
or of a column that the table lacks. Index 1 is a value that was too rare when the vocabulary was fitted.
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

from scalingnote.config import Config
from scalingnote.errors import ConfigError
from scalingnote.fuse.config import Bucketed, Categorical, Feature, Numeric, Vector

Facts = dict[str, Any]  # JSON values
MISSING, OTHER = 0, 1
SKETCH_VALUES = 2048  # of a slice's numbers: its sorted values at equal distances
QUANTILE_KNOTS = 101
DAY_S = 86_400.0
COUNTED_PER_KEPT = 10  # a slice counts more values than are kept: some rare in it are frequent overall


@dataclass(frozen=True)
class EncodedFeatures:
    """Values of some rows; the module's docstring says how missing ones are marked."""

    indices: Int32[ndarray, "rows indices"]
    numbers: Float32[ndarray, "rows numbers"]


class Encoding(Config):
    """A feature, and the facts that were fitted for it."""

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
    def width(self) -> int:
        """Width of an embedding, or numbers of a feature without a table."""
        match self.feature:
            case Categorical(width=width) | Bucketed(width=width) | Vector(dim=width):
                return width
            case _:
                return 1


def observe(features: Sequence[Feature], table: pa.Table) -> list[Facts]:
    """Observations of one slice for :func:`fit`. ConfigError names a column that the table lacks."""
    missing = [f.column for f in features if f.column not in table.column_names]
    if missing:
        raise ConfigError(f"no column {missing[0]!r} for a feature: the table has {table.column_names}")
    return [_observed(feature, table[feature.column]) for feature in features]


def fit(features: Sequence[Feature], observed: Sequence[Sequence[Facts]]) -> list[Encoding]:
    """Fit vocabularies and normalisers to the observations of all slices, in any order.

    ConfigError when a feature has no value at all.
    """
    return [
        Encoding(feature=feature, facts=_fitted(feature, [slice_[number] for slice_ in observed]))
        for number, feature in enumerate(features)
    ]


def encode(encodings: Sequence[Encoding], table: pa.Table) -> EncodedFeatures:
    """Encode the rows of a table; other columns are ignored."""
    nulls = pa.chunked_array([pa.nulls(len(table))])
    names = [encoding.feature.column for encoding in encodings]
    columns = [table[name] if name in table.column_names else nulls for name in names]
    return _encoded(encodings, columns, rows=len(table))


def encode_mappings(encodings: Sequence[Encoding], rows: Sequence[Mapping[str, Any]]) -> EncodedFeatures:
    """Encode rows given as mappings, which online stores hold and many programs write.

    A value of a wrong type is missing, and does not affect the other rows.
    """
    columns = [
        pa.chunked_array([_array_of(encoding.feature, [row.get(encoding.feature.column) for row in rows])])
        for encoding in encodings
    ]
    return _encoded(encodings, columns, rows=len(rows))


def no_values(encodings: Sequence[Encoding], rows: int) -> EncodedFeatures:
    """Rows of missing values."""
    indices = np.full((rows, sum(bool(e.size) for e in encodings)), MISSING, np.int32)
    numbers = sum(e.width for e in encodings if not e.size)
    return EncodedFeatures(indices, np.full((rows, numbers), np.nan, np.float32))


def _encoded(
    encodings: Sequence[Encoding], columns: Sequence[pa.ChunkedArray], *, rows: int
) -> EncodedFeatures:
    pairs = list(zip(encodings, columns, strict=True))
    indices = [_indices(encoding, column) for encoding, column in pairs if encoding.size]
    numbers = [_scaled(encoding, column) for encoding, column in pairs if not encoding.size]
    return EncodedFeatures(
        np.stack(indices, axis=1) if indices else np.zeros((rows, 0), np.int32),
        np.concatenate(numbers, axis=1) if numbers else np.zeros((rows, 0), np.float32),
    )


def _array_of(feature: Feature, values: Sequence[Any]) -> pa.Array:
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
    """The cast of a value to a string; None for values that Arrow cannot hold: 10**30, a lone surrogate."""
    if not isinstance(value, str | bool | int | float):
        return None
    try:
        return str(pa.scalar(value).cast(pa.string()).as_py())
    except (OverflowError, ValueError):
        return None


def _number(value: Any) -> float | None:
    """A number, or a date or time in days since 1970; None for texts."""
    try:
        if isinstance(value, datetime):
            return timegm(value.utctimetuple()) / DAY_S
        if isinstance(value, date):
            return float((value - date(1970, 1, 1)).days)
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


def _floats(value: Any) -> list[float] | None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    numbers = [_number(v) if isinstance(v, int | float) else None for v in value]
    return None if None in numbers else numbers  # type: ignore[return-value]  # none is None


def _observed(feature: Feature, column: pa.ChunkedArray) -> Facts:
    match feature:
        case Categorical():
            counts = pc.value_counts(column.cast(pa.string())).to_pylist()
            by_value = {row["values"]: row["counts"] for row in counts if row["values"]}
            most = sorted(by_value.items(), key=lambda item: (-item[1], item[0]))
            return {"counts": dict(most[: COUNTED_PER_KEPT * feature.max_values])}
        case Numeric() | Bucketed():
            values = _numbers(column)
            values = np.sort(values[np.isfinite(values)])
            spread = np.linspace(0, len(values) - 1, min(len(values), SKETCH_VALUES)).round().astype(int)
            return {"count": len(values), "values": values[spread].tolist()}
        case Vector():
            return {"count": int(np.isfinite(_vectors(column, feature.dim)).all(axis=1).sum())}


def _fitted(feature: Feature, observed: Sequence[Facts]) -> Facts:
    if isinstance(feature, Categorical):
        counts = Counter[str]()
        for slice_ in observed:
            counts.update(slice_["counts"])
        if not counts:
            raise ConfigError(f"feature {feature.column!r} has no value in any row: leave it out")
        ordered = sorted(counts, key=lambda value: (-counts[value], value))
        kept = [value for value in ordered if counts[value] >= feature.min_count]
        return {"values": kept[: feature.max_values]}
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
        return {"knots": _quantiles(values, weights, np.linspace(0, 1, QUANTILE_KNOTS)).tolist()}
    values = _signed_log(values) if feature.normalise == "log" else values
    mean = np.average(values, weights=weights)
    deviation = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    return {"mean": float(mean), "deviation": float(deviation) or 1.0}


def _indices(encoding: Encoding, column: pa.ChunkedArray) -> Int32[ndarray, " rows"]:
    if isinstance(encoding.feature, Categorical):
        texts = column.cast(pa.string())
        places = pc.index_in(texts, value_set=pa.array(encoding.facts["values"], pa.string()))
        index = np.asarray(pc.fill_null(places, -1)) + 2
        valid = np.asarray(pc.fill_null(pc.not_equal(texts, ""), False))
        return np.where(valid, index, MISSING).astype(np.int32)
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
        values = _signed_log(values) if feature.normalise == "log" else values
        scaled = (values - facts["mean"]) / facts["deviation"]
    return np.where(np.isfinite(values), scaled, np.nan)[:, None].astype(np.float32)


def _numbers(column: pa.ChunkedArray) -> Float[ndarray, " rows"]:
    """Numbers as they are, dates and times (or their ISO texts) in days since 1970; NaN for none."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = _days(column.cast(pa.string()))
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        column = pc.divide(
            column.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).cast(pa.float64()), DAY_S
        )
    values = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy()
    return np.where(np.isfinite(values), values, np.nan)


def _days(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Days since 1970 of texts that begin with an ISO date such as 2024-01-05; null for other texts."""
    named = pc.utf8_slice_codeunits(texts, 0, 10)
    days = pc.strptime(named, "%Y-%m-%d", unit="s", error_is_null=True).cast(pa.date32())
    # strptime also accepts 2024-1-5, and reads the 31st of February as the 2nd of March.
    exact = pc.equal(days.cast(pa.string()), named)
    return pc.if_else(exact, days, None).cast(pa.int32()).cast(pa.float64())


def _vectors(column: pa.ChunkedArray, dim: int) -> Float[ndarray, "rows dim"]:
    """A matrix; rows that are not `dim` finite numbers are all NaN."""
    out = np.full((len(column), dim), np.nan)
    if pa.types.is_null(column.type):
        return out
    right = np.asarray(pc.fill_null(pc.equal(pc.list_value_length(column), dim), False))
    values = pc.list_flatten(column.filter(pa.array(right))).cast(pa.float64())
    out[right] = pc.fill_null(values, np.nan).to_numpy().reshape(-1, dim)
    out[~np.isfinite(out).all(axis=1)] = np.nan
    return out


def _signed_log(values: Float[ndarray, " rows"]) -> Float[ndarray, " rows"]:
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)))


def _quantiles(
    values: Float[ndarray, " values"], weights: Float[ndarray, " values"], shares: Float[ndarray, " shares"]
) -> Float[ndarray, " shares"]:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    places = (reached - reached[0]) / max(reached[-1] - reached[0], 1e-12)
    return np.asarray(np.interp(shares, places, values[order]))
