"""Codes become semantic IDs: a suffix parts documents with equal codes; statistics say how codes spread.

Even 256^6 codes collide (similar texts share them), so an ID is the codes and a suffix: 0 for the first
document with these codes in corpus order, then 1, 2, ... An ID thus depends on the documents before it, never
on those after it: with the same codebooks, documents appended to a corpus leave every ID as it was.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int, Integer
from numpy import ndarray


def suffixes(codes: Integer[ndarray, "docs levels"]) -> Int[ndarray, " docs"]:
    """How many earlier documents have the same codes. One stable sort: all codes must fit in memory."""
    order, fresh = _runs(codes)
    positions = np.arange(len(codes))
    starts = np.maximum.accumulate(np.where(fresh[:, -1], positions, 0))
    suffix = np.empty(len(codes), np.int32)
    suffix[order] = positions - starts
    return suffix


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


def statistics(
    codes: Integer[ndarray, "docs levels"], *, size: int, residual_energy: Float[ndarray, " levels"]
) -> dict[str, Any]:
    """How `size` codes per level are used.

    Per level: `usage`, the share of codes that occur; `entropy_bits`, at most log2(size) when all are equally
    frequent; `residual_energy`, mean squared norm left over (1 is nothing explained, for unit vectors);
    `distinct_prefixes`, how many different tuples the levels up to this one form. Overall: `collisions`,
    documents that needed a suffix above 0.
    """
    documents, levels = codes.shape
    _, fresh = _runs(codes)
    distinct = fresh.sum(axis=0)
    per_level = []
    for level in range(levels):
        counts = np.bincount(codes[:, level], minlength=size)
        share = counts[counts > 0] / max(documents, 1)
        per_level.append(
            {
                "level": level,
                "usage": float((counts > 0).mean()),
                "entropy_bits": float(-(share * np.log2(share)).sum()),
                "residual_energy": float(residual_energy[level] / max(documents, 1)),
                "distinct_prefixes": int(distinct[level]),
            }
        )
    return {
        "documents": documents,
        "distinct_codes": int(distinct[-1]),
        "collisions": int(documents - distinct[-1]),
        "levels": per_level,
    }


def _runs(codes: Integer[ndarray, "docs levels"]) -> tuple[Int[ndarray, " docs"], ndarray]:
    """Documents sorted by codes, and where, in that order, a new prefix begins ([docs, levels] booleans)."""
    order = np.lexsort(codes.T[::-1])  # stable: documents with equal codes stay in corpus order
    ordered = codes[order]
    fresh = np.ones(codes.shape, bool)
    fresh[1:] = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
    return order, fresh
