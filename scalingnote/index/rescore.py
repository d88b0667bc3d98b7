"""Exact scores of candidates by the vectors kept, and the compiled heap that keeps the k best.

Compiled by numba: numpy would take longer than the scan that finds the candidates. A document's score is
summed in the same order among any candidates and in any shard, so equal documents have equal scores
everywhere. Ties go to the lower row.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, no_type_check
from weakref import WeakKeyDictionary

import faiss
import numba
import numpy as np
from jaxtyping import Float, Int, UInt8
from numpy import ndarray

# Sums may be reordered, so that loops over dimensions are vectorised; infinities must stay infinities.
_REORDERED = {"reassoc", "contract", "nsz"}
RESCORE_COST = 16  # codes scanned in the time of scoring one kept vector (fast scan, 128 dimensions)
# Reading these from faiss takes longer than scoring the candidates of one query.
_STORED: WeakKeyDictionary[Any, UInt8[ndarray, "rows bytes"]] = WeakKeyDictionary()
_RANGES: WeakKeyDictionary[Any, tuple[ndarray, ndarray]] = WeakKeyDictionary()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile at the first call, run without the GIL; cache on disk where a folder is writable."""
    try:
        made: Callable[..., Any] = numba.njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # numba found no folder for its cache
        made = numba.njit(nogil=True, **options)(function)
    return made


compiled_fastmath = partial(compiled, fastmath=_REORDERED)


@compiled
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


@compiled
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


@compiled
@no_type_check
def heap_sort(scores, rows, size):
    """Turn a heap into a ranking, best first."""
    for last in range(size - 1, 0, -1):
        score, row = scores[last], rows[last]
        scores[last], rows[last] = scores[0], rows[0]
        heap_replace(scores, rows, last, score, row)


def best(
    kept: Any, queries: Float[ndarray, "queries dim"], rows: Int[ndarray, "queries candidates"], *, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best of each query's candidates by the vectors kept, padded with -inf and -1.

    Args:
        kept: faiss.IndexFlatIP or IndexScalarQuantizer (8 bits).
        queries: unit vectors.
        rows: candidates, -1 for none.
        k: candidates to return per query.
    """
    best_scores, best_rows = _select(scores(kept, queries, rows), rows, min(k, rows.shape[1]))
    return best_scores, best_rows


def scores(
    kept: Any, queries: Float[ndarray, "queries dim"], rows: Int[ndarray, "queries candidates"]
) -> Float[ndarray, "queries candidates"]:
    """Inner products with the vectors kept; -inf where the row is -1."""
    queries = np.ascontiguousarray(queries, np.float32)
    if isinstance(kept, faiss.IndexFlat):
        found: ndarray = _of_floats(floats(kept), queries, rows)
    else:
        found = _of_bytes(stored(kept), *_range(kept), queries, rows)
    return found


def scores_over(
    pieces: Iterable[tuple[int, Any]],
    queries: Float[ndarray, "queries dim"],
    rows: Int[ndarray, "queries candidates"],
) -> Float[ndarray, "queries candidates"]:
    """As :func:`scores`, for rows over several pieces, given by first row and kept vectors, in order."""
    found = np.full(rows.shape, -np.inf, np.float32)
    for first, kept in pieces:
        own = (rows >= first) & (rows < first + kept.ntotal)
        found = np.where(own, scores(kept, queries, np.where(own, rows - first, -1)), found)
    return found


def vectors(kept: Any, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows dim"]:
    """Kept vectors of rows, decoded to floats."""
    decoded: ndarray = kept.sa_decode(stored(kept)[rows])
    return decoded


def floats(kept: Any) -> Float[ndarray, "rows dim"]:
    """All vectors of a flat index, as a view of faiss's memory."""
    return stored(kept).view(np.float32).reshape(kept.ntotal, kept.d)


def stored(kept: Any) -> UInt8[ndarray, "rows bytes"]:
    """Codes of an index of flat codes, as a view of faiss's memory."""
    codes = _STORED.get(kept)
    if codes is None or len(codes) != kept.ntotal:  # not read yet, or vectors were added since
        size = kept.sa_code_size()
        flat = (
            faiss.rev_swig_ptr(kept.codes.data(), kept.codes.size()) if kept.ntotal else np.empty(0, np.uint8)
        )
        codes = _STORED[kept] = flat.reshape(-1, size)
    return codes


def _range(kept: Any) -> tuple[Float[ndarray, " dim"], Float[ndarray, " dim"]]:
    """Least value and width of each dimension of a trained scalar quantizer."""
    found = _RANGES.get(kept)
    if found is None:
        low, spread = faiss.vector_to_array(kept.sq.trained).reshape(2, kept.d)
        found = _RANGES[kept] = low, spread
    return found


@compiled_fastmath
@no_type_check
def _of_floats(stored, queries, rows):
    found = np.full(rows.shape, -np.inf, np.float32)
    dim = queries.shape[1]
    for q in range(rows.shape[0]):
        query = queries[q]
        for c in range(rows.shape[1]):
            row = rows[q, c]
            if row < 0:
                continue
            document = stored[row]
            total = np.float32(0)
            for j in range(dim):
                total += document[j] * query[j]
            found[q, c] = total
    return found


@compiled_fastmath
@no_type_check
def _of_bytes(codes, low, spread, queries, rows):
    """A byte c of a dimension stands for low + (c + 1/2) / 255 * spread, as in faiss's QT_8bit."""
    found = np.full(rows.shape, -np.inf, np.float32)
    dim = queries.shape[1]
    weights = np.empty(dim, np.float32)
    for q in range(rows.shape[0]):
        first = np.float32(0)
        for j in range(dim):
            weights[j] = queries[q, j] * spread[j] / np.float32(255)
            first += queries[q, j] * low[j] + weights[j] / np.float32(2)
        for c in range(rows.shape[1]):
            row = rows[q, c]
            if row < 0:
                continue
            document = codes[row]
            total = np.float32(0)
            for j in range(dim):
                total += np.float32(document[j]) * weights[j]
            found[q, c] = first + total
    return found


@compiled
@no_type_check
def _select(scores, rows, k):
    best = np.full((len(scores), k), -np.inf, np.float32)
    chosen = np.full((len(scores), k), -1, np.int64)
    for q in range(len(scores)):
        kept = 0
        for c in range(scores.shape[1]):
            score, row = scores[q, c], rows[q, c]
            if row < 0:
                continue
            if kept < k:
                heap_push(best[q], chosen[q], kept, score, row)
                kept += 1
            elif score > best[q, 0] or (score == best[q, 0] and row < chosen[q, 0]):
                heap_replace(best[q], chosen[q], k, score, row)
        heap_sort(best[q], chosen[q], kept)
    return best, chosen
