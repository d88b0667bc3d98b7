"""Exact search over the documents of an embeddings artifact, part by part in blocks of fixed size.

    parts ─► scores of a block of queries and a block of documents ─► best documents so far, and score ranges

Documents have an embedding. They have terms too if their tower has a sparse head, or if BM25 weights their
words.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from scalingnote import hybrid, topk
from scalingnote.errors import ArtifactError
from scalingnote.lexical import weights
from scalingnote.log import Progress
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact

INDEXED_VIEW = "summary"
_PAIRS_PER_BLOCK = 65_536


@dataclass(frozen=True)
class QueryEmbeddings:
    """Distinct queries and their embeddings, unnormalized."""

    queries: Sequence[str]
    embeddings: Float[ndarray, "queries dim"]

    @cached_property
    def _row(self) -> dict[str, int]:
        return {query: row for row, query in enumerate(self.queries)}

    def of(self, queries: Sequence[str]) -> Float[ndarray, "asked dim"]:
        """Unnormalized embeddings of some of the queries."""
        return np.asarray(self.embeddings[[self._row[query] for query in queries]])

    def unit(self, queries: Sequence[str]) -> Float[ndarray, "asked dim"]:
        """Embeddings of some of the queries at length 1, as search uses them."""
        return arrow.l2_normalize(self.of(queries))

    def subset(self, queries: Sequence[str]) -> "QueryEmbeddings":
        """Some of the queries, without repetitions."""
        distinct = list(dict.fromkeys(queries))
        return QueryEmbeddings(distinct, self.of(distinct))


@dataclass(frozen=True)
class TopDocuments:
    """Each query's best documents, best first, with its lowest and highest score in the whole pool."""

    scores: Float[ndarray, "queries k"]
    rows: Int[ndarray, "queries k"]
    low: Float[ndarray, " queries"]
    high: Float[ndarray, " queries"]


@dataclass(frozen=True)
class PoolPart:
    """Some documents of a pool: their embeddings, their terms, or both."""

    dense: Float[ndarray, "docs dim"] | None = None
    sparse: Any = None  # csr_array [docs, vocabulary]

    def __len__(self) -> int:
        return self.sparse.shape[0] if self.dense is None else len(self.dense)


BlockScore = Callable[[PoolPart, slice, slice], Float[ndarray, "queries docs"]]


def search_parts(parts: Iterable[PoolPart], score: BlockScore, *, queries: int, k: int) -> TopDocuments:
    """The `k` best documents by ``score(part, queries, documents)``; rows count over all parts."""
    blocks = [slice(start, start + topk.QUERY_BLOCK) for start in range(0, queries, topk.QUERY_BLOCK)]
    best = [_BestOfBlock(k) for _ in blocks]
    first = 0
    for part in parts:
        for start in range(0, len(part), topk.DOCUMENT_BLOCK):
            documents = slice(start, start + topk.DOCUMENT_BLOCK)
            for block, block_best in zip(blocks, best, strict=True):
                block_best.add(score(part, block, documents), first + start)
        first += len(part)
    return TopDocuments(*(np.concatenate(column) for column in zip(*(b.top() for b in best), strict=True)))


def dense_score(queries: Float[ndarray, "queries dim"]) -> BlockScore:
    """Score by inner products of embeddings."""
    return lambda part, q, d: queries[q] @ part.dense[d].T  # type: ignore[index]


def sparse_score(queries: Any) -> BlockScore:
    """Score by inner products of sparse vectors; `queries` is a csr_array [queries, vocabulary]."""
    return lambda part, q, d: (queries[q] @ part.sparse[d].T).toarray()


def hybrid_score(
    queries: Float[ndarray, "queries dim"],
    terms: Any,
    *,
    ranges: tuple[TopDocuments, TopDocuments],
    dense_weight: float,
) -> BlockScore:
    """Score by interpolating embeddings and terms.

    Args:
        queries: embeddings of length 1.
        terms: csr_array [queries, vocabulary].
        ranges: results of a search by embeddings and one by terms, whose score ranges are mapped to [0, 1].
        dense_weight: of embeddings; terms have the rest.
    """
    by_embeddings, by_terms = dense_score(queries), sparse_score(terms)

    def score(part: PoolPart, q: slice, d: slice) -> Float[ndarray, "queries docs"]:
        first, second = (
            hybrid.normalised(one(part, q, d), result.low[q], result.high[q])
            for one, result in zip((by_embeddings, by_terms), ranges, strict=True)
        )
        return hybrid.interpolated(first, second, dense_weight=dense_weight)

    return score


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


class _BestOfBlock:
    """The k best documents of one block of queries so far."""

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

    def top(self) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        assert self._scores is not None, "a pool without documents cannot be searched"
        return self._scores, self._rows, self._low, self._high


def search(
    embeddings: Artifact,
    score: BlockScore,
    *,
    queries: int,
    k: int,
    dim: int | None = None,
    terms: int | None = None,
    words: Artifact | None = None,
) -> TopDocuments:
    """Score every document of an embeddings artifact.

    Args:
        embeddings: artifact of the pool.
        score: of a block of queries and documents.
        queries: number of queries.
        k: results per query.
        dim: dimensions of embeddings; None: do not read them.
        terms: size of the queries' vocabulary; None: do not read terms.
        words: a `bm25_terms` artifact that replaces the terms stored with the embeddings.

    Raises:
        ArtifactError: documents have embeddings of another dimension.
    """
    total = embeddings.counts["documents"]
    with Progress("evaluate", total=total, unit="documents searched") as progress:
        parts = _parts(embeddings, progress, dim=dim, terms=terms, words=words)
        return search_parts(parts, score, queries=queries, k=k)


def document_ids(
    embeddings: Artifact, rows: Int[ndarray, "queries k"]
) -> tuple[Int[ndarray, " found"], pa.Array]:
    """Distinct rows in ascending order, and the ids of their documents; negative rows are ignored."""
    distinct = np.unique(rows[rows >= 0])
    ids, start = [pa.array([], pa.string())], 0
    for batch in embeddings.batches("embeddings", columns=["doc_id"]):
        inside = slice(*np.searchsorted(distinct, (start, start + len(batch))))
        ids.append(batch["doc_id"].take(pa.array(distinct[inside] - start)))
        start += len(batch)
    return distinct, pa.concat_arrays(ids)


def gather_embeddings(
    embeddings: Artifact, doc_ids: Sequence[str]
) -> tuple[Float[ndarray, "docs dim"], Bool[ndarray, " docs"]]:
    """Embeddings of some documents, and a mask of those that are in the pool; the others are 0."""
    ids = pa.array(doc_ids, pa.string())
    gathered, in_pool = np.zeros((len(doc_ids), 0), np.float32), np.zeros(len(doc_ids), bool)
    for name in embeddings.names("embeddings/", ".parquet"):
        table = embeddings.table(name, columns=["doc_id", INDEXED_VIEW])
        place, present = _rows_of(ids, table)
        documents = arrow.to_numpy(table[INDEXED_VIEW])
        if not gathered.size:
            gathered = np.zeros((len(doc_ids), documents.shape[1]), np.float32)
        gathered[present], in_pool[present] = documents[place[present]], True
    return gathered, in_pool


def score_pairs(
    embeddings: Artifact,
    queries: Float[ndarray, "queries dim"],
    rows: Int[ndarray, " pairs"],
    doc_ids: Sequence[str],
) -> Float[ndarray, " pairs"]:
    """Inner products of ``queries[rows[i]]`` and document ``doc_ids[i]``; NaN if it is not in the pool."""
    ids = pa.array(doc_ids, pa.string())
    scores = np.full(len(doc_ids), np.nan)
    for name in embeddings.names("embeddings/", ".parquet"):
        table = embeddings.table(name, columns=["doc_id", INDEXED_VIEW])
        place, present = _rows_of(ids, table)
        documents = arrow.to_numpy(table[INDEXED_VIEW])
        for start in range(0, len(present), _PAIRS_PER_BLOCK):
            block = present[start : start + _PAIRS_PER_BLOCK]
            scores[block] = np.einsum("pd,pd->p", queries[rows[block]], documents[place[block]])
    return scores


def _rows_of(ids: pa.Array, table: pa.Table) -> tuple[Int[ndarray, " wanted"], Int[ndarray, " here"]]:
    """The row of each document in a part, negative if absent; and the positions of those that are present."""
    place = pc.fill_null(pc.index_in(ids, value_set=table["doc_id"].combine_chunks()), -1).to_numpy()
    return place, np.flatnonzero(place >= 0)


def _parts(
    embeddings: Artifact, progress: Progress, *, dim: int | None, terms: int | None, words: Artifact | None
) -> Iterator[PoolPart]:
    own = ["terms", "impacts"] if words is None else ["doc_id"]
    columns = [INDEXED_VIEW] * (dim is not None) + own * (terms is not None)
    for name in embeddings.names("embeddings/", ".parquet"):
        table = embeddings.table(name, columns=columns)
        dense = arrow.to_numpy(table[INDEXED_VIEW]) if dim is not None else None
        if dense is not None and dense.shape[1] != dim:
            raise ArtifactError(
                f"the query tower gives {dim} dimensions, {embeddings.uri} has "
                f"{dense.shape[1]}: evaluate with towers that were trained together"
            )
        sparse = None
        if terms is not None:
            rows = table
            if words is not None:
                rows = weights.read_columns(words, name.removeprefix("embeddings/"), table["doc_id"])
            sparse = document_matrix(rows["terms"], rows["impacts"], vocabulary=terms)
        yield PoolPart(dense, sparse)
        progress.advance(len(table))


@dataclass(frozen=True)
class SparseQueries:
    """Queries as sparse vectors of terms."""

    matrix: Any  # csr_array [queries, vocabulary]
    vocabulary: int
    words: Artifact | None = None  # artifact with the documents' terms; None: the embeddings artifact


def has_terms(embeddings: Artifact, towers: Artifact | None) -> bool:
    """Whether the documents were encoded by `towers`, and these have a sparse head."""
    if towers is None or "dual_encoder" not in embeddings.manifest.parents:
        return False
    return bool(towers.names("sparse_query/"))


def sparse_queries(
    embeddings: Artifact, towers: Artifact | None, queries: Sequence[str]
) -> SparseQueries | None:
    """Terms of queries for documents encoded by `towers`; None if these have no sparse head."""
    if towers is None or not has_terms(embeddings, towers):
        return None
    return _as_terms(towers, queries)


def bm25_queries(words: Artifact, queries: Sequence[str]) -> SparseQueries:
    """Words of queries for documents whose words have weights in `words`, a `bm25_terms` artifact."""
    return replace(_as_terms(words, queries), words=words)


def _as_terms(source: Artifact, queries: Sequence[str]) -> SparseQueries:
    sparse = SparseQuery.load(source.directory("sparse_query"))
    rows, vocabulary = sparse.encode(queries), sparse.vocabulary
    return SparseQueries(query_matrix(rows, vocabulary=vocabulary), vocabulary)
