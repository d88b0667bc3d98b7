"""Exact search of a pool: every document is scored for every query, in tasks that read each part once.

    part ─► scores of blocks of queries and documents ─► best documents and score ranges of a task
         ─► of all tasks, merged as they arrive

Scores are by embeddings, by terms (of a tower with a sparse head, or words weighed by BM25), or by both
joined. Only the results (queries times k) pass through the caller, for any size of the pool. Their merge does
not depend on the order of tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from scalingnote import hybrid, topk
from scalingnote.errors import ArtifactError
from scalingnote.evaluate.pool import INDEXED_VIEW, Pool, PoolPart, places
from scalingnote.lexical import weights
from scalingnote.log import Progress
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, read_table
from scalingnote.storage.shuffle import TaskRunner

_PAIRS_PER_BLOCK = 65_536


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
    documents: Callable[[PoolPart], Any]  # those of a part, as a csr_array [docs, vocabulary]
    columns: Sequence[str]  # of the embeddings artifact

    def __len__(self) -> int:
        return int(self.queries.shape[0])

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
    """Two scores of the same documents, each mapped to [0, 1] by its range, or as they are, interpolated."""

    names: tuple[str, str]  # dense and sparse
    ranges: tuple[ScoreRanges, ScoreRanges] | None  # None: scores are joined as they are
    dense_weight: float  # terms have the rest

    def block(
        self, scores: Mapping[str, Float[ndarray, "queries docs"]], queries: slice
    ) -> Float[ndarray, "queries docs"]:
        """Joined scores of a block, given both by name."""
        dense, sparse = (scores[name] for name in self.names)
        if self.ranges is not None:
            dense, sparse = (
                hybrid.normalised(side, scale.low[queries], scale.high[queries])
                for side, scale in zip((dense, sparse), self.ranges, strict=True)
            )
        return hybrid.interpolated(dense, sparse, dense_weight=self.dense_weight)


@dataclass(frozen=True)
class PairTable:
    """Pairs of a `query` (its text) and a `doc_id`, with further columns: a table, or the URI of one."""

    source: pa.Table | str
    rows: int

    def read(self, columns: list[str]) -> pa.Table:
        """Some of the columns."""
        source = self.source
        return read_table(source, columns) if isinstance(source, str) else source.select(columns)


# --- terms -------------------------------------------------------------------------------------------------


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


# --- search ------------------------------------------------------------------------------------------------


class TopDocuments(topk.Best):
    """Each query's best documents by row, and its range of scores over the documents that were scored."""

    def __init__(self, queries: int, k: int) -> None:
        super().__init__(queries, k)
        self.ranges = ScoreRanges(np.full(queries, np.inf, np.float32), np.full(queries, -np.inf, np.float32))
        self.documents = 0

    def score(
        self, queries: slice, scores: Float[ndarray, "queries docs"], rows: Int[ndarray, " docs"]
    ) -> None:
        """Add the scores of some documents, at least one, for some queries."""
        self.add_block(queries, scores, rows)
        self._extend(queries, scores.min(1), scores.max(1))

    def table(self) -> pa.Table:
        """The result as a row per query."""
        columns = {"score": arrow.to_arrow(self.scores), "row": arrow.to_arrow(self.ids)}
        columns |= {"low": self.ranges.low, "high": self.ranges.high}
        return pa.table(columns | {"documents": np.full(len(self.ids), self.documents)})

    def merge(self, other: pa.Table) -> None:
        """Add the result of a search of other documents, as :meth:`table` gives it."""
        scores, rows = arrow.to_numpy(other["score"]), arrow.to_matrix(other["row"])
        for block in topk.query_blocks(len(self.ids)):
            self.add(block, scores[block], rows[block])
        self._extend(slice(None), other["low"].to_numpy(), other["high"].to_numpy())
        self.documents += other["documents"][0].as_py()

    def _extend(
        self, queries: slice, lowest: Float[ndarray, " queries"], highest: Float[ndarray, " queries"]
    ) -> None:
        low, high = self.ranges.low, self.ranges.high
        low[queries] = np.minimum(low[queries], lowest)
        high[queries] = np.maximum(high[queries], highest)


def search(
    pool: Pool,
    scores: Mapping[str, Scores],
    *,
    k: int,
    joined: Mapping[str, JoinedScores] | None = None,
    each: TaskRunner = map,
) -> dict[str, TopDocuments]:
    """The `k` best documents of every query, by each of the scores, which are of the same queries.

    With `joined`, its scores rank the documents in place of `scores`, which they are made from.
    """
    queries = len(next(iter(scores.values())))
    total = {name: TopDocuments(queries, k) for name in joined or scores}
    task = partial(_search_group, pool=pool, scores=scores, k=k, joined=joined)
    documents = pool.embeddings.counts["documents"]
    with Progress("evaluate", total=documents, unit="documents searched") as progress:
        for found in each(task, pool.groups()):
            for number, one in enumerate(total.values()):
                one.merge(found.slice(number * queries, queries))
            progress.advance(found["read"][0].as_py())
    return total


def _search_group(
    group: list[str],
    *,
    pool: Pool,
    scores: Mapping[str, Scores],
    k: int,
    joined: Mapping[str, JoinedScores] | None,
) -> pa.Table:
    """The best of a group of parts, one score after the other, and the number of documents read."""
    queries = len(next(iter(scores.values())))
    best = {name: TopDocuments(queries, k) for name in joined or scores}
    for part in pool.read(group, {column for one in scores.values() for column in one.columns}):
        matrices = {name: one.documents(part) for name, one in scores.items()}
        for start in range(0, len(part), topk.DOCUMENT_BLOCK):
            chosen = slice(start, start + topk.DOCUMENT_BLOCK)
            block = {name: matrix[chosen] for name, matrix in matrices.items()}
            for rows in topk.query_blocks(queries):
                found = {name: one.block(block[name], rows) for name, one in scores.items()}
                if joined:
                    found = {name: one.block(found, rows) for name, one in joined.items()}
                for name, values in found.items():
                    best[name].score(rows, values, part.rows[chosen])
        for result in best.values():
            result.documents += len(part)
    table = pa.concat_tables(result.table() for result in best.values())
    read = sum(pool.embeddings.rows_of(group).values())
    return table.append_column("read", pa.array(np.full(len(table), read)))


def score_pairs(
    pool: Pool,
    scores: Mapping[str, Scores],
    queries: Sequence[str],
    pairs: Sequence[PairTable],
    *,
    each: TaskRunner = map,
) -> dict[str, Float[ndarray, " pairs"]]:
    """Scores of pairs of a query and a document, in the order of `pairs`; NaN where the pool lacks it.

    `scores` are of `queries`, distinct texts. Pairs in files are read in the tasks alone: only a number for
    each reaches the caller.
    """
    starts = np.cumsum([0, *(table.rows for table in pairs)])
    total = {name: np.full(starts[-1], np.nan) for name in scores}
    task = partial(_score_group, pool=pool, scores=scores, queries=pa.array(queries), pairs=pairs)
    for found in each(task, pool.groups()):
        rows = starts[found["table"].to_numpy()] + found["pair"].to_numpy()
        for name, values in total.items():
            values[rows] = found[_score_column(name)].to_numpy()
    return total


def _score_column(name: str) -> str:
    """Of a query side's scores beside the numbers of pairs: a side may be called `table`."""
    return f"score of {name}"


def _score_group(
    group: list[str],
    *,
    pool: Pool,
    scores: Mapping[str, Scores],
    queries: pa.Array,
    pairs: Sequence[PairTable],
) -> pa.Table:
    """Numbers and scores of the pairs whose document is in a group of parts."""
    numbers = {"table": pa.int64(), "pair": pa.int64()}
    layout = pa.schema(numbers | {_score_column(name): pa.float64() for name in scores})
    found = [layout.empty_table()]
    columns = {"doc_id", *(column for one in scores.values() for column in one.columns)}
    for part in pool.read(group, columns):
        documents = {name: one.documents(part) for name, one in scores.items()}
        for number, table in enumerate(pairs):
            own = table.read(["query", "doc_id"])
            place, present = places(own["doc_id"], part)
            for start in range(0, len(present), _PAIRS_PER_BLOCK):
                rows = present[start : start + _PAIRS_PER_BLOCK]
                query_rows = pc.index_in(own["query"].take(pa.array(rows)), value_set=queries).to_numpy()
                values = {
                    _score_column(name): one.pairs(documents[name], query_rows, place[rows])
                    for name, one in scores.items()
                }
                block = pa.table({"table": np.full(len(rows), number), "pair": rows, **values})
                found.append(block.cast(layout))
    return pa.concat_tables(found)
