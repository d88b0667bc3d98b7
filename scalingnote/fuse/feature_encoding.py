"""Declared features: columns of a table become a matrix, by facts that were fitted on the dataset.

    column ─► facts (vocabulary, ranges, ranks) ─► numbers [rows, width]

A value of a category, or a range, is encoded as the number of its embedding. NaN marks missing values: a
null, an empty text, a number that is not finite, a vector of the wrong length, an impossible date, and all
values of a column that the table lacks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Float32
from numpy import ndarray

from scalingnote.core import DAY_S
from scalingnote.core.config import Config
from scalingnote.core.errors import ConfigError
from scalingnote.fuse.config import Feature

Facts = dict[str, Any]  # JSON values
OTHER_INDEX = 1  # row of values that were too rare when the vocabulary was fitted; row 0: missing values
MAX_VALUES = 10_000  # most frequent values of a category, which have their own embeddings
MIN_VALUE_ROWS = 2  # rows that a value needs for its own embedding
BUCKETS = 16  # of a bucketed feature
QUANTILE_KNOTS = 101


class Encoding(Config):
    """A feature, and the facts that were fitted for it."""

    feature: Feature
    facts: Facts

    @property
    def size(self) -> int:
        """Number of rows of the embedding table of a categorical or bucketed feature, 0 for others."""
        match self.feature.kind:
            case "categorical":
                return 2 + len(self.facts["values"])
            case "bucketed":
                return 3 + len(self.facts["edges"])
            case _:
                return 0

    @property
    def width(self) -> int:
        """Number of columns of the matrix that the feature fills."""
        return self.feature.dim or 1


def fit(features: Sequence[Feature], table: pa.Table) -> list[Encoding]:
    """Fit vocabularies and ranks to the rows of a table; raise ConfigError if a column has no value."""
    return [Encoding(feature=feature, facts=_fit(feature, table[feature.column])) for feature in features]


def columns_of(encodings: Sequence[Encoding]) -> list[str]:
    """List the columns that are read, each once."""
    return list(dict.fromkeys(encoding.feature.column for encoding in encodings))


def encode(encodings: Sequence[Encoding], table: pa.Table) -> Float32[ndarray, "rows width"]:
    """Encode the rows of a table; other columns are ignored."""
    nulls = pa.chunked_array([pa.nulls(len(table))])
    names = [encoding.feature.column for encoding in encodings]
    columns = [table[name] if name in table.column_names else nulls for name in names]
    return _encode(encodings, columns, rows=len(table))


def encode_mappings(
    encodings: Sequence[Encoding], rows: Sequence[Mapping[str, Any]]
) -> Float32[ndarray, "rows width"]:
    """Encode rows that are mappings, for example from an online store, with values of any type.

    A value of a wrong type is missing, and does not affect the other rows.
    """
    columns = []
    for feature in (encoding.feature for encoding in encodings):
        values = [_read_value(feature, row.get(feature.column)) for row in rows]
        columns.append(pa.chunked_array(values, _type(feature)))
    return _encode(encodings, columns, rows=len(rows))


def _encode(
    encodings: Sequence[Encoding], columns: Sequence[pa.ChunkedArray], *, rows: int
) -> Float32[ndarray, "rows width"]:
    pairs = zip(encodings, columns, strict=True)
    blocks = [np.empty((rows, 0)), *(_encode_column(encoding, column) for encoding, column in pairs)]
    return np.concatenate(blocks, axis=1).astype(np.float32)


def _type(feature: Feature) -> pa.DataType:
    types = {"categorical": pa.string(), "vector": pa.list_(pa.float64())}
    return types.get(feature.kind, pa.float64())


def _read_value(feature: Feature, value: Any) -> pa.Array:
    """Convert a value to a column of the feature's type; null if Arrow cannot hold or convert it."""
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


def _encode_column(encoding: Encoding, column: pa.ChunkedArray) -> Float[ndarray, "rows width"]:
    facts = encoding.facts
    if encoding.feature.kind == "vector":
        matrix = _vectors(column, encoding.width)
        scaled: ndarray = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
        return scaled
    if encoding.feature.kind == "categorical":
        texts = column.cast(pa.string())
        index = pc.fill_null(pc.index_in(texts, value_set=pa.array(facts["values"], pa.string())), -1)
        valid = np.asarray(pc.fill_null(pc.not_equal(texts, ""), False))
        return np.where(valid, OTHER_INDEX + 1 + np.asarray(index), np.nan)[:, None]
    values = _numbers(column)
    if encoding.feature.kind == "bucketed":
        index = OTHER_INDEX + 1 + np.searchsorted(np.array(facts["edges"]), values, side="right")
        return np.where(np.isfinite(values), index, np.nan)[:, None]
    knots = np.array(facts["knots"])
    ranks: ndarray = 2 * np.interp(values, knots, np.linspace(0, 1, len(knots))) - 1
    return ranks[:, None]


def _numbers(column: pa.Array | pa.ChunkedArray) -> Float[ndarray, " rows"]:
    """Convert dates and times (or their ISO texts) to days since 1970; keep numbers; NaN if there is none."""
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
    """Convert texts that begin with an ISO date (2024-01-05) to days since 1970; null for other texts."""
    date_texts = pc.utf8_slice_codeunits(texts, 0, 10)
    days = pc.strptime(date_texts, "%Y-%m-%d", unit="s", error_is_null=True).cast(pa.date32())
    # strptime also accepts 2024-1-5, and reads the 31st of February as the 2nd of March.
    exact = pc.equal(days.cast(pa.string()), date_texts)
    return pc.if_else(exact, days, None).cast(pa.int32()).cast(pa.float64())


def _vectors(column: pa.ChunkedArray, dim: int) -> Float[ndarray, "rows dim"]:
    """Convert a column of lists to a matrix; rows that are not `dim` finite numbers are all NaN."""
    out = np.full((len(column), dim), np.nan)
    if pa.types.is_null(column.type):
        return out
    right = np.asarray(pc.fill_null(pc.equal(pc.list_value_length(column), dim), False))
    values = pc.list_flatten(column.filter(pa.array(right))).cast(pa.float64())
    out[right] = pc.fill_null(values, np.nan).to_numpy().reshape(-1, dim)
    out[~np.isfinite(out).all(axis=1)] = np.nan
    return out
