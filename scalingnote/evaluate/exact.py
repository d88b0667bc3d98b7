"""Exact search: every document of a pool scored for every query, part by part, in blocks of fixed size.

parts ─► scores of a block of queries with a block of documents ─► the best so far, and each query's range
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from scalingnote import hybrid, topk
from scalingnote.models.sparse_query import SparseRows


@dataclass(frozen=True)
class Found:
    """Each query's best documents, best first, and its lowest and highest score in the whole pool."""

    scores: Float[ndarray, "queries k"]
    rows: Int[ndarray, "queries k"]
    low: Float[ndarray, " queries"]
    high: Float[ndarray, " queries"]


@dataclass(frozen=True)
class Part:
    """A part of the pool."""

    dense: Float[ndarray, "docs dim"] | None = None
    sparse: Any = None  # csr_array [docs, vocabulary]

    def __len__(self) -> int:
        return self.sparse.shape[0] if self.dense is None else len(self.dense)


Score = Callable[[Part, slice, slice], Float[ndarray, "queries docs"]]


def search(parts: Iterable[Part], score: Score, *, queries: int, k: int) -> Found:
    """The k best of all documents by ``score(part, queries, documents)``, rows counted over all parts."""
    blocks = [slice(start, start + topk.QUERY_BLOCK) for start in range(0, queries, topk.QUERY_BLOCK)]
    best = [_Best(k) for _ in blocks]
    first = 0
    for part in parts:
        for start in range(0, len(part), topk.DOCUMENT_BLOCK):
            documents = slice(start, start + topk.DOCUMENT_BLOCK)
            for block, so_far in zip(blocks, best, strict=True):
                so_far.add(score(part, block, documents), first + start)
        first += len(part)
    return Found(*(np.concatenate(column) for column in zip(*(b.found() for b in best), strict=True)))


def dense(queries: Float[ndarray, "queries dim"]) -> Score:
    """Inner products of embeddings."""
    return lambda part, q, d: queries[q] @ part.dense[d].T  # type: ignore[index]


def sparse(queries: Any) -> Score:
    """Inner products of sparse vectors; `queries` are a csr_array."""
    return lambda part, q, d: (queries[q] @ part.sparse[d].T).toarray()


def joined(
    queries: Float[ndarray, "queries dim"],
    terms: Any,
    *,
    ranges: tuple[Found, Found],
    dense_weight: float,
) -> Score:
    """Interpolation of both, each on [0, 1] by the ranges that searches of its own have found."""
    by_embeddings, by_terms = dense(queries), sparse(terms)

    def score(part: Part, q: slice, d: slice) -> Float[ndarray, "queries docs"]:
        first, second = (
            hybrid.normalised(one(part, q, d), found.low[q], found.high[q])
            for one, found in zip((by_embeddings, by_terms), ranges, strict=True)
        )
        return hybrid.interpolated(first, second, dense_weight=dense_weight)

    return score


def query_matrix(rows: SparseRows, *, vocabulary: int) -> Any:
    """Sparse queries as a csr_array [queries, vocabulary]."""
    return csr_array((rows.values, rows.terms, rows.offsets), shape=(len(rows.offsets) - 1, vocabulary))


def document_matrix(terms: pa.ChunkedArray, impacts: pa.ChunkedArray, *, vocabulary: int) -> Any:
    """Sparse documents as a csr_array [docs, vocabulary]; terms that no query can have are left out."""
    lists, weights = terms.combine_chunks(), impacts.combine_chunks()
    offsets = np.asarray(lists.offsets).astype(np.int64)
    columns, values = (np.asarray(x.values)[offsets[0] : offsets[-1]] for x in (lists, weights))
    kept = columns < vocabulary
    before = np.concatenate([[0], kept.cumsum()])
    found = (values[kept].astype(np.float32), columns[kept], before[offsets - offsets[0]])
    return csr_array(found, shape=(len(lists), vocabulary))


class _Best:
    """The k best of the documents that one block of queries has met."""

    def __init__(self, k: int) -> None:
        self._k = k
        self._scores: ndarray | None = None
        self._rows = self._low = self._high = np.empty(0)

    def add(self, scores: Float[ndarray, "queries docs"], first: int) -> None:
        columns = topk.select(scores, k=self._k)
        values, rows = np.take_along_axis(scores, columns, axis=1), columns + first
        low, high = scores.min(1), scores.max(1)
        if self._scores is not None:
            values, rows = np.hstack([self._scores, values]), np.hstack([self._rows, rows])
            values, rows = topk.merge(values, rows, k=self._k)
            low, high = np.minimum(self._low, low), np.maximum(self._high, high)
        self._scores, self._rows, self._low, self._high = values, rows, low, high

    def found(self) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        assert self._scores is not None, "a pool without documents cannot be searched"
        return self._scores, self._rows, self._low, self._high
