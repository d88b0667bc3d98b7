"""Exact search of a pool: every document is scored for every query, in tasks that read each part once.

    part ─► scores of blocks of queries and documents ─► best documents and score ranges of a task
         ─► of all tasks, merged as they arrive

Scores are by embeddings, by terms (of a tower with a sparse head, or words weighed by BM25), or by both
joined. Only the results (queries times k) pass through the caller, for any size of the pool. Their merge does
not depend on the order of tasks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.sparse import csr_array

from scalingnote.core import topk
from scalingnote.core.errors import ArtifactError
from scalingnote.core.log import Progress
from scalingnote.encode.lexical.weights import read_columns
from scalingnote.evaluate.pool import Pool, PoolPart, places
from scalingnote.index import hybrid
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import INDEXED_VIEW
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
class SparseScores:
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


PoolScores = DenseScores | SparseScores


# Each query's lowest and highest score in the whole pool.
ScoreRanges = tuple[Float[ndarray, " queries"], Float[ndarray, " queries"]]


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
                hybrid.normalise(side, low[queries], high[queries])
                for side, (low, high) in zip((dense, sparse), self.ranges, strict=True)
            )
        return hybrid.interpolate(dense, sparse, dense_weight=self.dense_weight)


# --- terms -------------------------------------------------------------------------------------------------


def term_scores(source: Artifact, queries: Sequence[str]) -> SparseScores:
    """Scores by terms of documents: by those beside their embeddings, or by the words that were weighted.

    `source` is the towers that encoded the documents, or a `bm25_terms` artifact.
    """
    sparse = SparseQuery.load(source.directory("sparse_query"))
    matrix = query_matrix(sparse.encode(queries), vocabulary=sparse.vocabulary)
    words = source if source.manifest.kind == "bm25_terms" else None
    documents = partial(_term_matrix, words=words, vocabulary=sparse.vocabulary)
    return SparseScores(matrix, documents, ("doc_id",) if words else ("terms", "impacts"))


def _term_matrix(part: PoolPart, *, words: Artifact | None, vocabulary: int) -> Any:
    table = part.table if words is None else read_columns(words, part.name, part.table["doc_id"])
    return document_matrix(table["terms"], table["impacts"], vocabulary=vocabulary)


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
        self.ranges: ScoreRanges = (
            np.full(queries, np.inf, np.float32),
            np.full(queries, -np.inf, np.float32),
        )
        self.documents = 0

    def score(
        self,
        queries: slice,
        scores: Float[ndarray, "queries rows"],
        rows: Int[ndarray, " rows"],
        firsts: Int[ndarray, " docs"],
    ) -> None:
        """Add the scores of some documents, at least one, for some queries.

        `firsts` are the first places of each document's rows, of which the best one counts.
        """
        self._extend(queries, scores.min(1), scores.max(1))
        if len(firsts) < len(rows):
            scores, rows = np.maximum.reduceat(scores, firsts, axis=1), rows[firsts]
        self.add_block(queries, scores, rows)

    def table(self) -> pa.Table:
        """The result as a row per query."""
        columns = {"score": arrow.to_arrow(self.scores), "row": arrow.to_arrow(self.ids)}
        columns |= dict(zip(("low", "high"), self.ranges, strict=True))
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
        low, high = self.ranges
        low[queries] = np.minimum(low[queries], lowest)
        high[queries] = np.maximum(high[queries], highest)


def search(
    pool: Pool,
    scores: Mapping[str, PoolScores],
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
    scores: Mapping[str, PoolScores],
    k: int,
    joined: Mapping[str, JoinedScores] | None,
) -> pa.Table:
    """The best of a group of parts, one score after the other, and the number of documents read."""
    queries = len(next(iter(scores.values())))
    best = {name: TopDocuments(queries, k) for name in joined or scores}
    for part in pool.read(group, {column for one in scores.values() for column in one.columns}):
        matrices = {name: one.documents(part) for name, one in scores.items()}
        for chosen, firsts in _blocks(part):
            block = {name: matrix[chosen] for name, matrix in matrices.items()}
            for rows in topk.query_blocks(queries):
                found = {name: one.block(block[name], rows) for name, one in scores.items()}
                if joined:
                    found = {name: one.block(found, rows) for name, one in joined.items()}
                for name, values in found.items():
                    best[name].score(rows, values, part.rows[chosen], firsts)
        for result in best.values():
            result.documents += len(part)
    table = pa.concat_tables(result.table() for result in best.values())
    read = sum(pool.embeddings.rows_of(group).values())
    return table.append_column("read", pa.array(np.full(len(table), read)))


def _blocks(part: PoolPart) -> Iterator[tuple[slice, Int[ndarray, " docs"]]]:
    """Blocks of about DOCUMENT_BLOCK rows, each with the first places of its documents, which are whole."""
    firsts = part.first_rows()
    start = 0
    while start < len(firsts):
        stop = max(int(np.searchsorted(firsts, firsts[start] + topk.DOCUMENT_BLOCK)), start + 1)
        end = int(firsts[stop]) if stop < len(firsts) else len(part)
        yield slice(int(firsts[start]), end), firsts[start:stop] - firsts[start]
        start = stop


def score_pairs(
    pool: Pool,
    scores: Mapping[str, PoolScores],
    queries: Sequence[str],
    pairs: pa.Table,
    *,
    each: TaskRunner = map,
) -> dict[str, Float[ndarray, " pairs"]]:
    """Scores of pairs of a query (its text) and a document in the order of `pairs`; NaN if the pool lacks it.

    Args:
        pool: the documents.
        scores: by name, of `queries`.
        queries: distinct texts.
        pairs: a table of `query` and `doc_id`.
        each: runs the tasks.
    """
    total = {name: np.full(len(pairs), np.nan) for name in scores}
    own = pairs.select(["query", "doc_id"]).combine_chunks()
    task = partial(_score_group, pool=pool, scores=scores, queries=pa.array(queries), pairs=own)
    for found in each(task, pool.groups()):
        for name, values in total.items():
            values[found["pair"].to_numpy()] = found[_score_column(name)].to_numpy()
    return total


def _score_column(name: str) -> str:
    """Of a query side's scores beside the numbers of pairs: a side may be called `pair`."""
    return f"score of {name}"


def _score_group(
    group: list[str], *, pool: Pool, scores: Mapping[str, PoolScores], queries: pa.Array, pairs: pa.Table
) -> pa.Table:
    """Numbers and scores of the pairs whose document is in a group of parts."""
    layout = pa.schema({"pair": pa.int64()} | {_score_column(name): pa.float64() for name in scores})
    found = [layout.empty_table()]
    columns = {"doc_id", *(column for one in scores.values() for column in one.columns)}
    query_of = pc.index_in(pairs["query"], value_set=queries).to_numpy()
    for part in pool.read(group, columns):
        documents = {name: one.documents(part) for name, one in scores.items()}
        place, present = places(pairs["doc_id"], part)
        for start in range(0, len(present), _PAIRS_PER_BLOCK):
            rows = present[start : start + _PAIRS_PER_BLOCK]
            values = {
                _score_column(name): one.pairs(documents[name], query_of[rows], place[rows])
                for name, one in scores.items()
            }
            found.append(pa.table({"pair": rows, **values}).cast(layout))
    return pa.concat_tables(found)
