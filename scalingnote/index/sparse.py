"""Exact sparse search over postings, and candidates of hybrid search.

    query ─► for each block: add up the lists of its terms, keep documents above the k-th best score so far

numba compiles the loops; `benchmarks/sparse_index.py` compares them with numpy and SciPy.
"""

from collections.abc import Callable
from typing import no_type_check

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Float32, Int, Int64
from numpy import ndarray

from scalingnote.core.errors import SearchError
from scalingnote.core.topk import heap_push, heap_replace, heap_sort, jit
from scalingnote.index import hybrid
from scalingnote.index.hybrid import HybridCandidates
from scalingnote.index.postings import DOCUMENTS_PER_BLOCK, Postings, Segments, build, frozen
from scalingnote.models.sparse_query import SparseRows
from scalingnote.storage.schema import SPARSE

_STRIDE = 64  # number of scores tested together: in most strides none is above the k-th best
# numba has no 16-bit floats: compiled code looks up their bit patterns in this table.
_FLOATS = frozen(np.arange(1 << 16, dtype=np.uint16).view(np.float16), np.float32)
_ALL = frozen(np.ones(0), np.bool_)
# Computes the dense scores of rows for each query; -inf if the row is -1.
DenseScore = Callable[[Int[ndarray, "queries candidates"]], Float[ndarray, "queries candidates"]]


def search(
    segments: Segments, queries: SparseRows, *, k: int, allowed: Bool[ndarray, " documents"] | None = None
) -> tuple[Float32[ndarray, "queries k"], Int64[ndarray, "queries k"]]:
    """Find each query's k best documents by inner product of terms.

    A score is the sum over common terms of query value times document impact, in float32 and in the order of
    the query's terms, so it does not depend on other documents. Ties go to the lower row. The first call
    compiles the code or loads compiled code (see :func:`warm`). Threads may share segments.

    Args:
        segments: postings; rows are numbered consecutively from the first segment to the last.
        queries: terms and values.
        k: documents per query.
        allowed: rows that may be found (filters, deletes); None: all.

    Returns:
        Scores and rows, padded with -inf and -1 if fewer documents share a term with the query.

    Raises:
        SearchError: queries are invalid, or `allowed` has another number of rows than the segments.
    """
    _check(queries)
    total = sum(map(len, segments))
    if allowed is not None and len(allowed) != total:  # compiled code would read beyond its end
        raise SearchError(f"allowed has {len(allowed)} rows, the segments have {total} documents")
    count = len(queries.offsets) - 1
    scores, rows = np.full((count, k), -np.inf, np.float32), np.full((count, k), -1, np.int64)
    counts = np.zeros(count, np.int64)
    mask = _ALL if allowed is None else frozen(allowed, np.bool_)
    first = 0
    for segment in segments:
        _scan(*_lists(segment), *_terms(queries), mask, first, scores, rows, counts)
        first += len(segment)
    _sort(scores, rows, counts)
    return scores, rows


def scores_of(
    segments: Segments, queries: SparseRows, rows: Int[ndarray, "queries candidates"]
) -> Float32[ndarray, "queries candidates"]:
    """Compute the scores of rows, which equal those of :func:`search` bit for bit; 0 if the row is -1."""
    _check(queries)
    scores, candidates = np.zeros(rows.shape, np.float32), frozen(rows, np.int64)
    first = 0
    for segment in segments:
        _look_up(*_lists(segment), *_terms(queries), first, candidates, scores)
        first += len(segment)
    return scores


def hybrid_candidates(
    by_vectors: Int[ndarray, "queries _"],
    score: DenseScore,
    segments: Segments,
    terms: SparseRows,
    *,
    k: int,
    allowed: Bool[ndarray, " documents"] | None = None,
) -> HybridCandidates:
    """Add the k best documents by terms to those of dense search, and compute both scores of all of them.

    Args:
        by_vectors: rows that dense search found, padded with -1.
        score: computes the dense scores of rows.
        segments: postings.
        terms: of the queries.
        k: documents per query by terms.
        allowed: rows that may be found; None: all.
    """
    _, by_terms = search(segments, terms, k=k, allowed=allowed)
    rows = hybrid.union(by_vectors, by_terms)
    return HybridCandidates(rows, score(rows), scores_of(segments, terms, rows))


def warm() -> None:
    """Compile all search kernels, or load them from disk, so that no query of a user waits for them."""
    terms = pa.array([[0]], SPARSE.field("terms").type)
    impacts = pa.array([[np.float16(1)]], SPARSE.field("impacts").type)
    queries = SparseRows(np.array([0, 1]), np.zeros(1, np.int32), np.ones(1, np.float32))
    search([build(terms, impacts)], queries, k=1)
    scores_of([build(terms, impacts)], queries, np.zeros((1, 1), np.int64))


def _check(queries: SparseRows) -> None:
    """Raise a SearchError unless offsets and weights are valid: compiled code does not check them."""
    offsets, entries = queries.offsets, len(queries.terms)
    if offsets[0] or (np.diff(offsets) < 0).any() or not offsets[-1] == entries == len(queries.values):
        raise SearchError(
            f"sparse queries have offsets {offsets[0]} to {offsets[-1]} for {entries} terms and "
            f"{len(queries.values)} weights: pass offsets that rise from 0 to the number of terms and weights"
        )
    if not np.isfinite(queries.values).all():
        raise SearchError("a sparse query has a weight that is not a finite number")


def _lists(postings: Postings) -> tuple[ndarray, ...]:
    bits = postings.impacts.view(np.uint16)
    return postings.blocks, postings.terms, postings.offsets, postings.rows, bits, _FLOATS


def _terms(queries: SparseRows) -> tuple[ndarray, ...]:
    return (
        frozen(queries.offsets, np.int64),
        frozen(queries.terms, np.int32),
        frozen(queries.values, np.float32),
    )


@jit
@no_type_check
def _scan(
    blocks,
    terms,
    offsets,
    rows,
    impacts,
    floats,
    bounds,
    query_terms,
    values,
    allowed,
    first,
    scores,
    best_rows,
    counts,
):
    totals = np.zeros(DOCUMENTS_PER_BLOCK, np.float32)
    for b in range(len(blocks) - 1):
        base = first + blocks[b, 0]
        block = totals[: blocks[b + 1, 0] - blocks[b, 0]]
        for q in range(len(bounds) - 1):
            touched = False
            for j in range(bounds[q], bounds[q + 1]):
                at = _find(terms, query_terms[j], blocks[b, 1], blocks[b + 1, 1])
                if at >= 0:
                    touched = True
                    value = values[j]
                    for entry in range(offsets[at], offsets[at + 1]):
                        block[rows[entry]] += value * floats[impacts[entry]]
            if touched:
                counts[q] = _keep(block, base, allowed, scores[q], best_rows[q], counts[q])
                block[:] = 0


@jit
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


@jit
@no_type_check
def _keep(block, base, allowed, scores, rows, count):
    k = len(scores)
    bar = scores[0] if count == k else np.float32(0)
    for start in range(0, len(block), _STRIDE):
        stop = min(start + _STRIDE, len(block))
        beaten = False
        for i in range(start, stop):
            beaten |= block[i] > bar
        if beaten:
            for i in range(start, stop):
                # Rows ascend, so a document with the same score as the worst one kept ranks behind it.
                if block[i] > bar and (len(allowed) == 0 or allowed[base + i]):
                    if count < k:
                        heap_push(scores, rows, count, block[i], base + i)
                        count += 1
                    else:
                        heap_replace(scores, rows, k, block[i], base + i)
                    if count == k:
                        bar = scores[0]
    return count


@jit
@no_type_check
def _sort(scores, rows, counts):
    for q in range(len(counts)):
        heap_sort(scores[q], rows[q], counts[q])


@jit
@no_type_check
def _look_up(
    blocks, terms, offsets, rows, impacts, floats, bounds, query_terms, values, first, candidates, scores
):
    for b in range(len(blocks) - 1):
        base, end = first + blocks[b, 0], first + blocks[b + 1, 0]
        for q in range(len(bounds) - 1):
            for j in range(bounds[q], bounds[q + 1]):
                at = _find(terms, query_terms[j], blocks[b, 1], blocks[b + 1, 1])
                if at >= 0:
                    for c in range(candidates.shape[1]):
                        if base <= candidates[q, c] < end:
                            entry = _find(rows, candidates[q, c] - base, offsets[at], offsets[at + 1])
                            if entry >= 0:
                                scores[q, c] += values[j] * floats[impacts[entry]]
