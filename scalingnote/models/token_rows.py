"""Token rows as Arrow columns. A file of its own: readers need no torch, the query path no pyarrow."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped
from numpy import ndarray

from scalingnote.models.prompt import Row

# 64-bit offsets: a large part of long documents can have more than 2^31 tokens.
IDS = pa.large_list(pa.int32())


def token_columns(rows: Iterable[Sequence[Row]], *, views: int) -> dict[str, pa.Array]:
    """Return columns ``ids`` and ``positions`` of blocks of token rows with `views` positions each."""
    ids: list[ndarray] = [np.empty(0, np.int32)]
    positions: list[ndarray] = [np.empty(0, np.int32)]
    lengths = [0]
    for block in rows:
        lengths += [len(row.ids) for row in block]
        ids.append(np.array([token for row in block for token in row.ids], dtype=np.int32))
        positions.append(np.array([at for row in block for at in row.positions], dtype=np.int32))
    return {
        "ids": list_column(np.concatenate(ids), list(accumulate(lengths)), IDS),
        "positions": pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(positions)), views),
    }


def list_column(values: Shaped[ndarray, " values"], offsets: Sequence[int], kind: pa.DataType) -> pa.Array:
    """Return a column of lists with 64-bit offsets; list i has values offsets[i] to offsets[i + 1]."""
    starts = pa.array(np.asarray(offsets, dtype=np.int64))
    return pa.LargeListArray.from_arrays(starts, pa.array(values, kind.value_type))


def from_columns(table: pa.Table) -> list[Row]:
    """Return the rows of columns ``ids`` and ``positions`` from :func:`token_columns`."""
    if not len(table):
        return []
    ids = table["ids"].combine_chunks()
    positions = table["positions"].combine_chunks()
    tokens, width = ids.values.to_numpy(), positions.type.list_size
    places = positions.flatten().to_numpy().reshape(-1, width).tolist()
    spans = pairwise(ids.offsets.to_numpy().tolist())
    return [Row(tokens[start:stop].tolist(), at) for (start, stop), at in zip(spans, places, strict=True)]
