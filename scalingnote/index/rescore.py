"""Candidates scored by the vectors kept, and the best of them: compiled, for numpy would outlast the scan.

A document's score is summed in the same order whichever candidates it stands among and whichever shard it is
in, so equal documents have equal scores everywhere. Of equal scores the lower row comes first.
"""

from collections.abc import Iterable
from typing import Any, no_type_check
from weakref import WeakKeyDictionary

import faiss
import numpy as np
from jaxtyping import Float, Int, UInt8
from numpy import ndarray

from scalingnote.index.compiled import climb, compiled, reordered, sink, sort

# To ask faiss anew would take a single query longer than to score its candidates.
_STORED: WeakKeyDictionary[Any, UInt8[ndarray, "rows bytes"]] = WeakKeyDictionary()
_RANGES: WeakKeyDictionary[Any, tuple[ndarray, ndarray]] = WeakKeyDictionary()


def best(
    kept: Any, queries: Float[ndarray, "queries dim"], rows: Int[ndarray, "queries candidates"], *, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best of each query's candidates by the vectors kept; -inf and -1 where there are fewer."""
    best, chosen = _select(scores(kept, queries, rows), rows, min(k, rows.shape[1]))
    return best, chosen


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
    """The same for rows over several pieces: (the row that one begins at, the vectors it keeps), in order."""
    found = np.full(rows.shape, -np.inf, np.float32)
    for first, kept in pieces:
        here = (rows >= first) & (rows < first + kept.ntotal)
        found = np.where(here, scores(kept, queries, np.where(here, rows - first, -1)), found)
    return found


def vectors(kept: Any, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows dim"]:
    """Vectors kept, as floats."""
    decoded: ndarray = kept.sa_decode(stored(kept)[rows])
    return decoded


def floats(kept: Any) -> Float[ndarray, "rows dim"]:
    """All vectors of a flat index, where they lie."""
    return stored(kept).view(np.float32).reshape(kept.ntotal, kept.d)


def stored(kept: Any) -> UInt8[ndarray, "rows bytes"]:
    """What an index of flat codes stores, where it lies."""
    codes = _STORED.get(kept)
    if codes is None or len(codes) != kept.ntotal:  # none yet, or of before vectors were added
        size = kept.sa_code_size()
        flat = (
            faiss.rev_swig_ptr(kept.codes.data(), kept.codes.size()) if kept.ntotal else np.empty(0, np.uint8)
        )
        codes = _STORED[kept] = flat.reshape(-1, size)
    return codes


def _range(kept: Any) -> tuple[Float[ndarray, " dim"], Float[ndarray, " dim"]]:
    """What a trained scalar quantizer has for the least value of each dimension, and for its width."""
    found = _RANGES.get(kept)
    if found is None:
        low, spread = faiss.vector_to_array(kept.sq.trained).reshape(2, kept.d)
        found = _RANGES[kept] = low, spread
    return found


@reordered
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


@reordered
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
                climb(best[q], chosen[q], kept, score, row)
                kept += 1
            elif score > best[q, 0] or (score == best[q, 0] and row < chosen[q, 0]):
                sink(best[q], chosen[q], k, score, row)
        sort(best[q], chosen[q], kept)
    return best, chosen
