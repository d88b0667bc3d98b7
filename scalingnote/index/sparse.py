"""Exact sparse search: queries as terms go in, each one's best documents come out, from their postings.

    query ─► block after block: its terms' lists are added up, what beats the k-th best so far is kept

The loops are compiled by numba; `benchmarks/sparse_index.py` measures what that gives over numpy and SciPy.
"""

from typing import no_type_check

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int, Int64
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.index.compiled import climb, compiled, sink, sort
from scalingnote.index.postings import BLOCK, Postings, Segments, build, frozen
from scalingnote.models.sparse_query import SparseRows
from scalingnote.storage.schema import SPARSE

_STRIDE = 64  # scores looked at together: most of the time none of them is good enough
# Compiled code has no 16-bit floats: a bit pattern is looked up instead.
_FLOATS = frozen(np.arange(1 << 16, dtype=np.uint16).view(np.float16), np.float32)
_ALL = frozen(np.ones(0), np.bool_)


def search(
    segments: Segments,
    queries: SparseRows,
    *,
    k: int,
    allowed: Bool[ndarray, " documents"] | None = None,
) -> tuple[Float32[ndarray, "queries k"], Int64[ndarray, "queries k"]]:
    """Scores and rows of each query's k best, -inf and -1 where fewer documents share a term with it.

    A score is the sum of a query's values times a document's impacts: in float32, in the order of the query's
    terms, so it does not depend on which other documents there are. Of equal scores the lower row comes
    first. `allowed` says which documents may be found: filters and deletes.

    The first call compiles, or loads what was compiled before (:func:`warm`). Threads may share segments.
    """
    total = _checked(segments, queries)
    if k < 1:
        raise SearchError(f"k is {k}: ask for at least 1 result")
    if allowed is not None and len(allowed) != total:
        raise SearchError(f"allowed has {len(allowed)} rows, the segments have {total} documents")
    count = len(queries.offsets) - 1
    scores, rows = np.full((count, k), -np.inf, np.float32), np.full((count, k), -1, np.int64)
    kept = np.zeros(count, np.int64)
    mask = _ALL if allowed is None else frozen(allowed, np.bool_)
    first = 0
    for segment in segments:
        _scan(*_lists(segment), *_terms(queries), mask, first, scores, rows, kept)
        first += len(segment)
    _sort(scores, rows, kept)
    return scores, rows


def scores_of(
    segments: Segments, queries: SparseRows, rows: Int[ndarray, "queries candidates"]
) -> Float32[ndarray, "queries candidates"]:
    """The scores of given rows, to the bit those of :func:`search`; 0 where the row is -1."""
    total = _checked(segments, queries)
    if rows.size and rows.max() >= total:
        raise SearchError(f"there is no row {rows.max()}: the segments have {total} documents")
    scores, wanted = np.zeros(rows.shape, np.float32), frozen(rows, np.int64)
    first = 0
    for segment in segments:
        _look_up(*_lists(segment), *_terms(queries), first, wanted, scores)
        first += len(segment)
    return scores


def warm() -> None:
    """Compile, or load from disk, all that searching runs, so that no user's query waits for it."""
    terms = pa.array([[0]], SPARSE.field("terms").type)
    impacts = pa.array([[np.float16(1)]], SPARSE.field("impacts").type)
    queries = SparseRows(np.array([0, 1]), np.zeros(1, np.int32), np.ones(1, np.float32))
    search([build(terms, impacts)], queries, k=1)
    scores_of([build(terms, impacts)], queries, np.zeros((1, 1), np.int64))


def _checked(segments: Segments, queries: SparseRows) -> int:
    """How many documents there are; compiled code trusts what is checked here."""
    offsets, entries = queries.offsets, len(queries.terms)
    if offsets[0] or (np.diff(offsets) < 0).any() or not offsets[-1] == entries == len(queries.values):
        raise SearchError(
            f"sparse queries have offsets {offsets[0]} to {offsets[-1]} for {entries} terms and "
            f"{len(queries.values)} weights: offsets rise from 0 to as many as there are of each"
        )
    if not np.isfinite(queries.values).all():
        raise SearchError("a sparse query has a weight that is not a finite number")
    return sum(len(segment) for segment in segments)


def _lists(postings: Postings) -> tuple[ndarray, ...]:
    bits = postings.impacts.view(np.uint16)
    return postings.blocks, postings.terms, postings.offsets, postings.rows, bits, _FLOATS


def _terms(queries: SparseRows) -> tuple[ndarray, ...]:
    return (
        frozen(queries.offsets, np.int64),
        frozen(queries.terms, np.int32),
        frozen(queries.values, np.float32),
    )


@compiled
@no_type_check
def _scan(
    blocks, terms, offsets, rows, impacts, floats, bounds, sought, values, allowed, first, scores, found, kept
):
    totals = np.zeros(BLOCK, np.float32)
    for b in range(len(blocks) - 1):
        base = first + blocks[b, 0]
        block = totals[: blocks[b + 1, 0] - blocks[b, 0]]
        for q in range(len(bounds) - 1):
            touched = False
            for j in range(bounds[q], bounds[q + 1]):
                at = _find(terms, sought[j], blocks[b, 1], blocks[b + 1, 1])
                if at >= 0:
                    touched = True
                    value = values[j]
                    for entry in range(offsets[at], offsets[at + 1]):
                        block[rows[entry]] += value * floats[impacts[entry]]
            if touched:
                kept[q] = _keep(block, base, allowed, scores[q], found[q], kept[q])
                block[:] = 0


@compiled
@no_type_check
def _find(sorted_values, value, start, stop):
    end = stop
    while start < stop:
        middle = (start + stop) >> 1
        if sorted_values[middle] < value:
            start = middle + 1
        else:
            stop = middle
    return start if start < end and sorted_values[start] == value else -1


@compiled
@no_type_check
def _keep(block, base, allowed, scores, rows, kept):
    k = len(scores)
    bar = scores[0] if kept == k else np.float32(0)
    for start in range(0, len(block), _STRIDE):
        stop = min(start + _STRIDE, len(block))
        beaten = False
        for i in range(start, stop):
            beaten |= block[i] > bar
        if beaten:
            for i in range(start, stop):
                # Rows rise, so a score that only equals the worst one kept stands behind it.
                if block[i] > bar and (len(allowed) == 0 or allowed[base + i]):
                    if kept < k:
                        climb(scores, rows, kept, block[i], base + i)
                        kept += 1
                    else:
                        sink(scores, rows, k, block[i], base + i)
                    if kept == k:
                        bar = scores[0]
    return kept


@compiled
@no_type_check
def _sort(scores, rows, kept):
    for q in range(len(kept)):
        sort(scores[q], rows[q], kept[q])


@compiled
@no_type_check
def _look_up(blocks, terms, offsets, rows, impacts, floats, bounds, sought, values, first, wanted, scores):
    for b in range(len(blocks) - 1):
        base, end = first + blocks[b, 0], first + blocks[b + 1, 0]
        for q in range(len(bounds) - 1):
            for j in range(bounds[q], bounds[q + 1]):
                at = _find(terms, sought[j], blocks[b, 1], blocks[b + 1, 1])
                if at >= 0:
                    for c in range(wanted.shape[1]):
                        if base <= wanted[q, c] < end:
                            entry = _find(rows, wanted[q, c] - base, offsets[at], offsets[at + 1])
                            if entry >= 0:
                                scores[q, c] += values[j] * floats[impacts[entry]]
