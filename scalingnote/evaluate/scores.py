"""Scores of documents for queries: by embeddings, by terms, and by both joined.

A document has an embedding. It has terms too if its tower has a sparse head, or if BM25 weighs its words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from scalingnote import hybrid
from scalingnote.errors import ArtifactError
from scalingnote.evaluate.pool import INDEXED_VIEW, PoolPart
from scalingnote.lexical import weights
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.storage.artifact import Artifact


@dataclass(frozen=True)
class DenseScores:
    """Inner products of embeddings; queries have length 1."""

    queries: Float[ndarray, "queries dim"]
    columns: Sequence[str] = (INDEXED_VIEW,)  # of the embeddings artifact

    def __len__(self) -> int:
        return len(self.queries)

    def documents(self, part: PoolPart) -> Float[ndarray, "docs dim"]:
        """Embeddings of the documents; ArtifactError if they have other dimensions than the queries."""
        vectors = part.vectors()
        if vectors.shape[1] != self.queries.shape[1]:
            raise ArtifactError(
                f"the query tower gives {self.queries.shape[1]} dimensions, {part.pool.embeddings.uri} has "
                f"{vectors.shape[1]}: evaluate with towers that were trained together"
            )
        return vectors

    def block(self, documents: Float[ndarray, "docs dim"], queries: slice) -> Float[ndarray, "queries docs"]:
        """Scores of some queries and some documents."""
        scores: ndarray = self.queries[queries] @ documents.T
        return scores

    def pairs(
        self,
        documents: Float[ndarray, "docs dim"],
        queries: Int[ndarray, " pairs"],
        rows: Int[ndarray, " pairs"],
    ) -> Float[ndarray, " pairs"]:
        """Scores of pairs of a query and a row of `documents`."""
        scores: ndarray = np.einsum("pd,pd->p", self.queries[queries], documents[rows])
        return scores


@dataclass(frozen=True)
class TermScores:
    """Inner products of sparse vectors."""

    queries: Any  # csr_array [queries, vocabulary]
    read: Callable[[PoolPart], Any]  # a part's documents as a csr_array [docs, vocabulary]
    columns: Sequence[str]  # of the embeddings artifact

    def __len__(self) -> int:
        return int(self.queries.shape[0])

    def documents(self, part: PoolPart) -> Any:
        """Terms of the documents, as a csr_array."""
        return self.read(part)

    def block(self, documents: Any, queries: slice) -> Float[ndarray, "queries docs"]:
        """Scores of some queries and some documents."""
        scores: ndarray = (self.queries[queries] @ documents.T).toarray()
        return scores

    def pairs(
        self, documents: Any, queries: Int[ndarray, " pairs"], rows: Int[ndarray, " pairs"]
    ) -> Float[ndarray, " pairs"]:
        """Scores of pairs of a query and a row of `documents`."""
        return np.asarray(self.queries[queries].multiply(documents[rows]).sum(axis=1))


Scores = DenseScores | TermScores


@dataclass(frozen=True)
class ScoreRanges:
    """Each query's lowest and highest score in the whole pool."""

    low: Float[ndarray, " queries"]
    high: Float[ndarray, " queries"]


@dataclass(frozen=True)
class JoinedScores:
    """Two scores of the same documents, each mapped to [0, 1] by its range and interpolated."""

    names: tuple[str, str]  # dense and sparse
    ranges: tuple[ScoreRanges, ScoreRanges]
    dense_weight: float  # terms have the rest

    def block(
        self, scores: Mapping[str, Float[ndarray, "queries docs"]], queries: slice
    ) -> Float[ndarray, "queries docs"]:
        """Joined scores of a block, given both by name."""
        dense, sparse = (
            hybrid.normalised(scores[name], scale.low[queries], scale.high[queries])
            for name, scale in zip(self.names, self.ranges, strict=True)
        )
        return hybrid.interpolated(dense, sparse, dense_weight=self.dense_weight)


# --- terms -------------------------------------------------------------------------------------------------


def has_terms(embeddings: Artifact, towers: Artifact | None) -> bool:
    """Whether the documents were encoded by `towers`, and these have a sparse head."""
    if towers is None or "dual_encoder" not in embeddings.manifest.parents:
        return False
    return bool(towers.names("sparse_query/"))


def own_terms(towers: Artifact, queries: Sequence[str]) -> TermScores:
    """Scores by terms of documents that were encoded by `towers`."""
    matrix = _query_terms(towers, queries)
    return TermScores(matrix, partial(_own_terms, vocabulary=matrix.shape[1]), ("terms", "impacts"))


def bm25_terms(words: Artifact, queries: Sequence[str]) -> TermScores:
    """Scores by the words of documents that have weights in `words`, a `bm25_terms` artifact."""
    matrix = _query_terms(words, queries)
    read = partial(_weighted_words, words=words, vocabulary=matrix.shape[1])
    return TermScores(matrix, read, ("doc_id",))


def _query_terms(source: Artifact, queries: Sequence[str]) -> Any:
    sparse = SparseQuery.load(source.directory("sparse_query"))
    return query_matrix(sparse.encode(queries), vocabulary=sparse.vocabulary)


def _own_terms(part: PoolPart, *, vocabulary: int) -> Any:
    return document_matrix(part.table["terms"], part.table["impacts"], vocabulary=vocabulary)


def _weighted_words(part: PoolPart, *, words: Artifact, vocabulary: int) -> Any:
    rows = weights.read_columns(words, part.name, part.table["doc_id"])
    return document_matrix(rows["terms"], rows["impacts"], vocabulary=vocabulary)


def query_matrix(rows: SparseRows, *, vocabulary: int) -> Any:
    """Sparse queries as a csr_array [queries, vocabulary]."""
    return csr_array((rows.values, rows.terms, rows.offsets), shape=(len(rows.offsets) - 1, vocabulary))


def document_matrix(terms: pa.ChunkedArray, impacts: pa.ChunkedArray, *, vocabulary: int) -> Any:
    """Sparse documents as a csr_array [docs, vocabulary], without terms beyond the queries' vocabulary."""
    term_lists, impact_lists = terms.combine_chunks(), impacts.combine_chunks()
    offsets = np.asarray(term_lists.offsets).astype(np.int64)
    columns, values = (np.asarray(x.values)[offsets[0] : offsets[-1]] for x in (term_lists, impact_lists))
    kept = columns < vocabulary
    starts = np.concatenate([[0], kept.cumsum()])
    matrix = (values[kept].astype(np.float32), columns[kept], starts[offsets - offsets[0]])
    return csr_array(matrix, shape=(len(term_lists), vocabulary))
