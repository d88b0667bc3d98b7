"""Exact top-k: search, selection and merging, and the heap of candidates of compiled loops.

Ties are deterministic: higher scores first, then lower ids.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import numba
import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

# One block of scores is 512 x 16,384 floats = 32 MB, for any corpus and number of queries.
QUERY_BLOCK = 512
DOCUMENT_BLOCK = 16_384
_MAX_HITS_PER_PLACE = 4  # of a block: with more hits, the block's k best are selected first


def search(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "docs dim"],
    *,
    k: int,
    allowed: Bool[ndarray, " docs"] | None = None,
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """Find each query's k best documents; return their inner products and row numbers.

    There are fewer columns if there are fewer documents. Only rows that are `allowed` (None: all) count.
    """
    available = len(documents) if allowed is None else int(np.count_nonzero(allowed))
    best = Best(len(queries), min(k, available), dtype=np.result_type(queries, documents))
    best.add_documents(queries, documents, np.arange(len(documents)), allowed=allowed)
    return best.scores, best.ids


def query_blocks(queries: int) -> list[slice]:
    """Divide this number of queries into slices of QUERY_BLOCK."""
    return [slice(start, start + QUERY_BLOCK) for start in range(0, queries, QUERY_BLOCK)]


class Best:
    """The k best candidates of each query so far, best first, independent of the order of additions.

    A row with fewer candidates ends with scores of -inf and ids of -1.
    """

    def __init__(self, queries: int, k: int, *, dtype: Any = np.float32) -> None:
        self.scores = np.full((queries, k), -np.inf, dtype)
        self.ids = np.full((queries, k), -1, np.int64)

    def add(
        self,
        queries: slice,
        scores: Float[ndarray, "queries candidates"],
        ids: Int[ndarray, "queries candidates"],
    ) -> None:
        """Add candidates of some queries, a row for each; an id of -1 means "none" and scores -inf."""
        both = np.hstack([self.scores[queries], scores]), np.hstack([self.ids[queries], ids])
        self.scores[queries], self.ids[queries] = merge(*both, k=self.ids.shape[1])

    def add_documents(
        self,
        queries: Float[ndarray, "queries dim"],
        documents: Float[ndarray, "docs dim"],
        ids: Int[ndarray, " docs"],
        *,
        allowed: Bool[ndarray, " docs"] | None = None,
    ) -> None:
        """Add the inner products of all queries and some documents; `ids` ascend.

        Documents that are not `allowed` score -inf: there must be k others.
        """
        for start in range(0, len(documents), DOCUMENT_BLOCK):
            block = slice(start, start + DOCUMENT_BLOCK)
            for some_queries in query_blocks(len(queries)):
                scores = queries[some_queries] @ documents[block].T
                if allowed is not None:
                    scores[:, ~allowed[block]] = -np.inf
                self.add_block(some_queries, scores, ids[block])

    def add_block(
        self, queries: slice, scores: Float[ndarray, "queries docs"], ids: Int[ndarray, " docs"]
    ) -> None:
        """Add the scores of the same documents for some queries; `ids` ascend."""
        k = self.ids.shape[1]
        if not k:
            return
        # Few documents of a later block reach the k-th score so far: comparison is cheaper than selection.
        hits = scores >= self.scores[queries, -1:]
        counts = np.count_nonzero(hits, axis=1)
        if counts.max(initial=0) > _MAX_HITS_PER_PLACE * k:
            columns = select(scores, k=k)
            self.add(queries, np.take_along_axis(scores, columns, axis=1), ids[columns])
            return
        lines, columns = np.divmod(np.flatnonzero(hits), scores.shape[1])
        places = np.arange(len(lines)) - np.repeat(counts.cumsum() - counts, counts)
        values = np.full((len(scores), counts.max(initial=0)), -np.inf, scores.dtype)
        value_ids = np.full(values.shape, -1, np.int64)
        values[lines, places], value_ids[lines, places] = scores[lines, columns], ids[columns]
        self.add(queries, values, value_ids)


def select(scores: Float[ndarray, "queries columns"], *, k: int) -> Int[ndarray, "queries k"]:
    """Return the columns of each row's k highest scores, best first; ties go to the lower column."""
    columns = scores.shape[1]
    k = min(k, columns)
    if k in (0, columns):
        return np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.argpartition(scores, columns - k, axis=1)[:, columns - k :]
    # argpartition breaks ties at the k-th place arbitrarily: rows with such a tie are sorted in full.
    lowest = np.take_along_axis(scores, best[:, :1], axis=1)
    tied = np.flatnonzero((scores >= lowest).sum(axis=1) > k)
    best[tied] = np.argsort(-scores[tied], axis=1, kind="stable")[:, :k]
    order = np.lexsort((best, -np.take_along_axis(scores, best, axis=1)))
    return np.take_along_axis(best, order, axis=1)


def merge(
    scores: Float[ndarray, "queries candidates"], ids: Int[ndarray, "queries candidates"], *, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """Select the k best of the candidates of several searches, which are concatenated along the columns.

    An id of -1 means "none", with any score. Ties go to the lower id, so the result does not depend on the
    order of the searches.
    """
    k = min(k, scores.shape[1])
    best: tuple[ndarray, ndarray] = _merge(np.ascontiguousarray(scores), np.ascontiguousarray(ids), k)
    return best


# --- compiled loops ---------------------------------------------------------------------------------------


def jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function at its first call, to run without the GIL; cache on disk if a folder is writable."""
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder for its cache
        compiled = numba.njit(nogil=True, **options)(function)
    return compiled


@jit
@no_type_check
def count_from(first, rows):
    """Convert row numbers of a part, which begins at row `first` of all rows, to global ones; -1 stays."""
    counted = rows.astype(np.int64)
    flat = counted.reshape(-1)
    for place in range(flat.size):
        if flat[place] >= 0:
            flat[place] += first
    return counted


@jit
@no_type_check
def heap_push(scores, rows, place, score, row):
    """Put a candidate into a heap at its first free place."""
    while place > 0:
        parent = (place - 1) >> 1
        if scores[parent] < score or (scores[parent] == score and rows[parent] > row):
            break
        scores[place], rows[place] = scores[parent], rows[parent]
        place = parent
    scores[place], rows[place] = score, row


@jit
@no_type_check
def heap_replace(scores, rows, size, score, row):
    """Put a candidate into a heap in place of the worst."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (
            scores[right] < scores[child] or (scores[right] == scores[child] and rows[right] > rows[child])
        ):
            child = right
        if scores[child] > score or (scores[child] == score and rows[child] < row):
            break
        scores[place], rows[place] = scores[child], rows[child]
        place = child
    scores[place], rows[place] = score, row


@jit
@no_type_check
def heap_sort(scores, rows, size):
    """Turn a heap into a ranking, best first."""
    for last in range(size - 1, 0, -1):
        score, row = scores[last], rows[last]
        scores[last], rows[last] = scores[0], rows[0]
        heap_replace(scores, rows, last, score, row)


@jit
@no_type_check
def _merge(scores, ids, k):
    best = np.full((len(scores), k), -np.inf, scores.dtype)
    best_ids = np.full((len(scores), k), -1, np.int64)
    for q in range(len(scores)):
        heap_size = 0
        for c in range(scores.shape[1]):
            score, row = scores[q, c], ids[q, c]
            if row < 0:
                continue
            if heap_size < k:
                heap_push(best[q], best_ids[q], heap_size, score, row)
                heap_size += 1
            elif heap_size and (score > best[q, 0] or (score == best[q, 0] and row < best_ids[q, 0])):
                heap_replace(best[q], best_ids[q], k, score, row)
        heap_sort(best[q], best_ids[q], heap_size)
    return best, best_ids
