"""Codes become semantic IDs: a suffix parts documents with equal codes.

Even 256^6 codes collide (similar texts share them), so an ID is the codes and a suffix: 0 for the first
document with these codes in corpus order, then 1, 2, ... An ID thus depends on the documents before it, never
on those after it: with the same codebooks, documents appended to a corpus leave every ID as it was. Where IDs
were given out before, they stay, in whatever order documents come now (:func:`suffixes_after`).
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int, Integer
from numpy import ndarray


class Given(NamedTuple):
    """IDs that were given out before."""

    doc_ids: pa.Array
    codes: Integer[ndarray, "given levels"]
    suffix: Int[ndarray, " given"]


def suffixes(codes: Integer[ndarray, "docs levels"]) -> Int[ndarray, " docs"]:
    """How many earlier documents have the same codes. All documents with these codes must be among them."""
    order, fresh = runs(codes)
    positions = np.arange(len(codes))
    starts = np.maximum.accumulate(np.where(fresh[:, -1], positions, 0))
    suffix = np.empty(len(codes), np.int32)
    suffix[order] = positions - starts
    return suffix


def suffixes_after(
    given: Given, doc_ids: pa.Array, codes: Integer[ndarray, "docs levels"]
) -> tuple[Int[ndarray, " docs"], Bool[ndarray, " docs"]]:
    """Suffixes that leave the given ones as they are, and which documents are new (or have new codes).

    A document that was given an ID with these codes keeps it. Others are counted on from the highest suffix
    given with their codes, in corpus order: no document gets the ID of one that is gone.
    """
    if not len(given.doc_ids):
        return suffixes(codes), np.ones(len(codes), bool)
    place = pc.index_in(doc_ids, given.doc_ids).fill_null(-1).to_numpy()
    new = (place < 0) | (given.codes[place] != codes).any(axis=1)
    suffix = given.suffix[place].astype(np.int32)
    # Given and new together, the given first in every run of equal codes.
    order, fresh = runs(np.concatenate([given.codes.astype(codes.dtype), codes[new]]))
    starts = np.flatnonzero(fresh[:, -1])
    run = np.cumsum(fresh[:, -1]) - 1
    free = np.concatenate([given.suffix + 1, np.zeros(new.sum(), np.int32)])[order]
    come = order >= len(given.codes)
    before: ndarray = np.cumsum(come) - come  # newcomers further up
    counted = np.maximum.reduceat(free, starts)[run] + before - before[starts][run]
    newcomers = np.empty(new.sum(), np.int32)
    newcomers[order[come] - len(given.codes)] = counted[come]
    suffix[new] = newcomers
    return suffix, new


def to_strings(codes: Integer[ndarray, "docs levels"], suffix: Int[ndarray, " docs"]) -> pa.Array:
    """IDs as text, "c0-c1-...-suffix"."""
    columns = [pa.array(column).cast(pa.string()) for column in (*codes.T, suffix)]
    return pc.binary_join_element_wise(*columns, "-")


def to_table(
    doc_ids: pa.ChunkedArray, codes: Integer[ndarray, "docs levels"], suffix: Int[ndarray, " docs"]
) -> pa.Table:
    """Rows of a semantic_ids part, columns as in storage.schema.semantic_ids."""
    flat = pa.array(codes.astype(np.int32).reshape(-1))
    return pa.table(
        {
            "doc_id": doc_ids,
            "codes": pa.FixedSizeListArray.from_arrays(flat, codes.shape[1]),
            "suffix": pa.array(suffix.astype(np.int32)),
            "semantic_id": to_strings(codes, suffix),
        }
    )


def runs(
    codes: Integer[ndarray, "docs levels"],
) -> tuple[Int[ndarray, " docs"], Bool[ndarray, "docs levels"]]:
    """Documents sorted by codes, and where, in that order, a prefix of each length begins."""
    order = np.lexsort(codes.T[::-1])  # stable: documents with equal codes stay in corpus order
    ordered = codes[order]
    fresh = np.ones(codes.shape, bool)
    fresh[1:] = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
    return order, fresh
