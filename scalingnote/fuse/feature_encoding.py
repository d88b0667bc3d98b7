"""Declared features: columns of a table become indices and numbers, by what was fitted on the dataset.

    column ─► facts (vocabulary, ranges, ranks) ─► indices [rows, n], numbers [rows, m]

Index 0 and NaN mark missing values: null, an empty text, not finite, of the wrong length, an impossible date,
or of a column that the table lacks. Index 1 is a value that was too rare when the vocabulary was fitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Float32, Int32
from numpy import ndarray

from scalingnote.core.config import Config
from scalingnote.core.errors import ConfigError
from scalingnote.core.units import DAY_S
from scalingnote.fuse.config import Feature

Facts = dict[str, Any]  # JSON values
MISSING_INDEX, OTHER_INDEX = 0, 1
MAX_VALUES = 10_000  # most frequent values of a category, which have an embedding each
MIN_VALUE_ROWS = 2  # rows that a value needs for its own embedding
BUCKETS = 16  # of a bucketed feature
EMBEDDING_WIDTH = 16  # of a value, a range, a word, a hashed id and a cross
QUANTILE_KNOTS = 101


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
        match self.feature.kind:
            case "categorical":
                return 2 + len(self.facts["values"])
            case "bucketed":
                return 3 + len(self.facts["edges"])
            case _:
                return 0

    @property
    def width(self) -> int:
        """Width of an embedding, or numbers of a feature without a table."""
        return EMBEDDING_WIDTH if self.size else self.feature.dim or 1


def fit(features: Sequence[Feature], table: pa.Table) -> list[Encoding]:
    """Fit vocabularies and ranks to the rows of a table.

    ConfigError names a column that the table lacks, and one that has no value at all.
    """
    missing = [f.column for f in features if f.column not in table.column_names]
    if missing:
        raise ConfigError(f"no column {missing[0]!r} for a feature: the table has {table.column_names}")
    return [Encoding(feature=feature, facts=_fit(feature, table[feature.column])) for feature in features]


def columns_of(encodings: Sequence[Encoding]) -> list[str]:
    """Columns that are read, each once."""
    return list(dict.fromkeys(encoding.feature.column for encoding in encodings))


def encode(encodings: Sequence[Encoding], table: pa.Table) -> EncodedFeatures:
    """Encode the rows of a table; other columns are ignored."""
    nulls = pa.chunked_array([pa.nulls(len(table))])
    names = [encoding.feature.column for encoding in encodings]
    columns = [table[name] if name in table.column_names else nulls for name in names]
    return _encode(encodings, columns, rows=len(table))


def encode_mappings(encodings: Sequence[Encoding], rows: Sequence[Mapping[str, Any]]) -> EncodedFeatures:
    """Encode rows given as mappings, which online stores hold and many programs write.

    A value of a wrong type is missing, and does not affect the other rows.
    """
    columns = []
    for feature in (encoding.feature for encoding in encodings):
        values = [_read_value(feature, row.get(feature.column)) for row in rows]
        columns.append(pa.chunked_array(values, _type(feature)))
    return _encode(encodings, columns, rows=len(rows))


def no_values(encodings: Sequence[Encoding], rows: int) -> EncodedFeatures:
    """Rows of missing values."""
    indices = np.full((rows, sum(bool(e.size) for e in encodings)), MISSING_INDEX, np.int32)
    numbers = sum(e.width for e in encodings if not e.size)
    return EncodedFeatures(indices, np.full((rows, numbers), np.nan, np.float32))


def _encode(
    encodings: Sequence[Encoding], columns: Sequence[pa.ChunkedArray], *, rows: int
) -> EncodedFeatures:
    pairs = list(zip(encodings, columns, strict=True))
    indices = [_indices(encoding, column) for encoding, column in pairs if encoding.size]
    numbers = [_scale(encoding, column) for encoding, column in pairs if not encoding.size]
    return EncodedFeatures(
        np.stack(indices, axis=1) if indices else np.zeros((rows, 0), np.int32),
        np.concatenate(numbers, axis=1) if numbers else np.zeros((rows, 0), np.float32),
    )


def _type(feature: Feature) -> pa.DataType:
    types = {"categorical": pa.string(), "vector": pa.list_(pa.float64())}
    return types.get(feature.kind, pa.float64())


def _read_value(feature: Feature, value: Any) -> pa.Array:
    """One value as a column of the feature's type; null if Arrow cannot hold or convert it."""
    try:
        column = pa.array([value])
        if feature.kind in ("numeric", "bucketed"):
            return pa.array(_numbers(column))
        return column.cast(_type(feature))
    except (pa.ArrowException, OverflowError, ValueError):
        return pa.nulls(1, _type(feature))


def _fit(feature: Feature, column: pa.ChunkedArray) -> Facts:
    match feature.kind:
        case "categorical":
            counts = pc.value_counts(column.cast(pa.string())).to_pylist()
            known = {row["values"]: row["counts"] for row in counts if row["values"]}
            ordered = sorted(known, key=lambda value: (-known[value], value))
            values = [value for value in ordered if known[value] >= MIN_VALUE_ROWS][:MAX_VALUES]
            kind, exists, facts = "text", bool(known), {"values": values}
        case "vector":
            vectors = _vectors(column, feature.dim or 1)
            kind, exists, facts = f"vector of {feature.dim}", bool(np.isfinite(vectors).any()), {}
        case _:
            numbers = _numbers(column)
            numbers = numbers[np.isfinite(numbers)]
            kind, exists, facts = "number or date", len(numbers) > 0, {}
            if exists and feature.kind == "bucketed":
                shares = np.arange(1, BUCKETS) / BUCKETS
                facts = {"edges": np.unique(np.quantile(numbers, shares)).tolist()}
            elif exists:
                facts = {"knots": np.quantile(numbers, np.linspace(0, 1, QUANTILE_KNOTS)).tolist()}
    if not exists:
        raise ConfigError(f"feature {feature.column!r} is a {kind} in no row: leave it out")
    return facts


def _indices(encoding: Encoding, column: pa.ChunkedArray) -> Int32[ndarray, " rows"]:
    if encoding.feature.kind == "categorical":
        texts = column.cast(pa.string())
        places = pc.index_in(texts, value_set=pa.array(encoding.facts["values"], pa.string()))
        index = np.asarray(pc.fill_null(places, -1)) + 2
        valid = np.asarray(pc.fill_null(pc.not_equal(texts, ""), False))
        return np.where(valid, index, MISSING_INDEX).astype(np.int32)
    values = _numbers(column)
    index = 2 + np.searchsorted(np.array(encoding.facts["edges"]), values, side="right")
    return np.where(np.isfinite(values), index, MISSING_INDEX).astype(np.int32)


def _scale(encoding: Encoding, column: pa.ChunkedArray) -> Float32[ndarray, "rows numbers"]:
    if encoding.feature.dim is not None:
        matrix = _vectors(column, encoding.feature.dim)
        lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
        return np.asarray(matrix / np.maximum(lengths, 1e-12), dtype=np.float32)
    values, knots = _numbers(column), np.array(encoding.facts["knots"])
    ranks = 2 * np.interp(values, knots, np.linspace(0, 1, len(knots))) - 1
    return np.where(np.isfinite(values), ranks, np.nan)[:, None].astype(np.float32)


def _numbers(column: pa.Array | pa.ChunkedArray) -> Float[ndarray, " rows"]:
    """Numbers as they are, dates and times (or their ISO texts) in days since 1970; NaN for none."""
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        column = _days(column.cast(pa.string()))
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        column = pc.divide(
            column.cast(pa.timestamp("s"), safe=False).cast(pa.int64()).cast(pa.float64()), DAY_S
        )
    values: ndarray = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False)
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
