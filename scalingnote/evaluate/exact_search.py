"""Exact search of a pool: tasks read each part once and score every document for every query.

    part ─► scores of blocks of queries and documents ─► best documents and score ranges of a task
         ─► best documents and score ranges of all tasks, merged as they arrive

Scores are of embeddings, of terms (from a tower with a sparse head, or words with BM25 weights), or joined
from both. Only the results (queries times k) pass through the caller, for any size of the pool. The result of
their merge does not depend on the order of tasks.
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
from scalingnote.core.parts import Executor
from scalingnote.encode.lexical.weights import read_columns
from scalingnote.evaluate.pool import Pool, PoolPart, places
from scalingnote.index import hybrid
from scalingnote.models.sparse_query import SparseQuery, SparseRows
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import INDEXED_VIEW

_PAIRS_PER_BLOCK = 65_536


@dataclass(frozen=True)
class DenseScores:
    """Inner products of embeddings; queries have length 1."""

    queries: Float[ndarray, "queries dim"]
    columns: Sequence[str] = (INDEXED_VIEW,)  # columns of the embeddings artifact to read

    def __len__(self) -> int:
        return len(self.queries)

    def documents(self, part: PoolPart) -> Float[ndarray, "docs dim"]:
        """Return embeddings of the documents; raise an ArtifactError if they do not fit the queries."""
        vectors = part.vectors()
        if vectors.shape[1] != self.queries.shape[1]:
            raise ArtifactError(
                f"the query tower gives {self.queries.shape[1]} dimensions, {part.pool.embeddings.uri} has "
                f"{vectors.shape[1]}: evaluate with towers that were trained together"
            )
        return vectors

    def block(self, documents: Float[ndarray, "docs dim"], queries: slice) -> Float[ndarray, "queries docs"]:
        """Compute scores of some queries and some documents."""
        scores: ndarray = self.queries[queries] @ documents.T
        return scores

    def pairs(
        self,
        documents: Float[ndarray, "docs dim"],
        queries: Int[ndarray, " pairs"],
        rows: Int[ndarray, " pairs"],
    ) -> Float[ndarray, " pairs"]:
        """Compute scores of pairs of a query and a row of `documents`."""
        scores: ndarray = np.einsum("pd,pd->p", self.queries[queries], documents[rows])
        return scores


@dataclass(frozen=True)
class SparseScores:
    """Inner products of sparse vectors."""

    queries: Any  # csr_array [queries, vocabulary]
    documents: Callable[[PoolPart], Any]  # returns those of a part, as a csr_array [docs, vocabulary]
    columns: Sequence[str]  # columns of the embeddings artifact to read

    def __len__(self) -> int:
        return int(self.queries.shape[0])

    def block(self, documents: Any, queries: slice) -> Float[ndarray, "queries docs"]:
        """Compute scores of some queries and some documents."""
        scores: ndarray = (self.queries[queries] @ documents.T).toarray()
        return scores

    def pairs(
        self, documents: Any, queries: Int[ndarray, " pairs"], rows: Int[ndarray, " pairs"]
    ) -> Float[ndarray, " pairs"]:
        """Compute scores of pairs of a query and a row of `documents`."""
        return np.asarray(self.queries[queries].multiply(documents[rows]).sum(axis=1))


PoolScores = DenseScores | SparseScores


# Lowest and highest score of each query in the entire pool.
ScoreRanges = tuple[Float[ndarray, " queries"], Float[ndarray, " queries"]]


@dataclass(frozen=True)
class JoinedScores:
    """Interpolation of two scores of the same documents, each mapped to [0, 1] by its range, or unchanged."""

    names: tuple[str, str]  # dense and sparse
    ranges: tuple[ScoreRanges, ScoreRanges] | None  # None: scores are not mapped
    dense_weight: float  # sparse scores have the rest

    def block(
        self, scores: Mapping[str, Float[ndarray, "queries docs"]], queries: slice
    ) -> Float[ndarray, "queries docs"]:
        """Join the scores of a block, which are passed by name."""
        dense, sparse = (scores[name] for name in self.names)
        if self.ranges is not None:
            dense, sparse = (
                hybrid.normalise(side, low[queries], high[queries])
                for side, (low, high) in zip((dense, sparse), self.ranges, strict=True)
            )
        return hybrid.interpolate(dense, sparse, dense_weight=self.dense_weight)


# --- terms -------------------------------------------------------------------------------------------------


def term_scores(source: Artifact, queries: Sequence[str]) -> SparseScores:
    """Build scores by terms, which are stored with the embeddings or in a `bm25_terms` artifact.

    `source` is the dual encoder that encoded the documents, or the `bm25_terms` artifact.
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
    """Convert sparse queries to a csr_array [queries, vocabulary]."""
    return csr_array((rows.values, rows.terms, rows.offsets), shape=(len(rows.offsets) - 1, vocabulary))


def document_matrix(terms: pa.ChunkedArray, impacts: pa.ChunkedArray, *, vocabulary: int) -> Any:
    """Convert sparse documents to a csr_array [docs, vocabulary], without terms outside this vocabulary."""
    term_lists, impact_lists = terms.combine_chunks(), impacts.combine_chunks()
    offsets = np.asarray(term_lists.offsets).astype(np.int64)
    columns, values = (np.asarray(x.values)[offsets[0] : offsets[-1]] for x in (term_lists, impact_lists))
    in_vocabulary = columns < vocabulary
    starts = np.concatenate([[0], in_vocabulary.cumsum()])
    matrix = (values[in_vocabulary].astype(np.float32), columns[in_vocabulary], starts[offsets - offsets[0]])
    return csr_array(matrix, shape=(len(term_lists), vocabulary))


# --- search ------------------------------------------------------------------------------------------------


class TopDocuments(topk.Best):
    """Best documents of each query by row, and the range of its scores over the scored documents."""

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
        """Add scores of some documents, at least one, for some queries.

        `firsts` are the positions of each document's first row; of its rows the best one counts.
        """
        self._extend(queries, scores.min(1), scores.max(1))
        if len(firsts) < len(rows):
            scores, rows = np.maximum.reduceat(scores, firsts, axis=1), rows[firsts]
        self.add_block(queries, scores, rows)

    def table(self) -> pa.Table:
        """Return the result as a table with a row per query."""
        columns = {"score": arrow.to_arrow(self.scores), "row": arrow.to_arrow(self.ids)}
        columns |= dict(zip(("low", "high"), self.ranges, strict=True))
        return pa.table(columns | {"documents": np.full(len(self.ids), self.documents)})

    def merge(self, other: pa.Table) -> None:
        """Add the result of a search of other documents, in the form of :meth:`table`."""
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
    each: Executor = map,
) -> dict[str, TopDocuments]:
    """Find the `k` best documents of every query by each of the scores.

    Args:
        pool: the documents.
        scores: by name, all of the same queries.
        k: documents per query.
        joined: joined scores by name, which rank the documents instead; `scores` are their inputs. None: the
            documents are ranked by `scores`.
        each: runs the tasks.
    """
    queries = len(next(iter(scores.values())))
    total = {name: TopDocuments(queries, k) for name in joined or scores}
    task = partial(_search_group, pool=pool, scores=scores, k=k, joined=joined)
    documents = pool.embeddings.counts["documents"]
    with Progress("evaluate", total=documents, unit="documents searched") as progress:
        for table in each(task, pool.groups()):
            for number, one in enumerate(total.values()):
                one.merge(table.slice(number * queries, queries))
            progress.advance(table["read"][0].as_py())
    return total


def _search_group(
    group: list[str],
    *,
    pool: Pool,
    scores: Mapping[str, PoolScores],
    k: int,
    joined: Mapping[str, JoinedScores] | None,
) -> pa.Table:
    """Search a group of parts; the table has the results of each score and the number of documents read."""
    queries = len(next(iter(scores.values())))
    best = {name: TopDocuments(queries, k) for name in joined or scores}
    for part in pool.read(group, {column for one in scores.values() for column in one.columns}):
        matrices = {name: one.documents(part) for name, one in scores.items()}
        for block_rows, firsts in _blocks(part):
            block = {name: matrix[block_rows] for name, matrix in matrices.items()}
            for rows in topk.query_blocks(queries):
                block_scores = {name: one.block(block[name], rows) for name, one in scores.items()}
                if joined:
                    block_scores = {name: one.block(block_scores, rows) for name, one in joined.items()}
                for name, values in block_scores.items():
                    best[name].score(rows, values, part.rows[block_rows], firsts)
        for result in best.values():
            result.documents += len(part)
    table = pa.concat_tables(result.table() for result in best.values())
    documents_read = sum(pool.embeddings.rows_of(group).values())
    return table.append_column("read", pa.array(np.full(len(table), documents_read)))


def _blocks(part: PoolPart) -> Iterator[tuple[slice, Int[ndarray, " docs"]]]:
    """Yield blocks of complete documents of about DOCUMENT_BLOCK rows, with the positions of first rows."""
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
    each: Executor = map,
) -> dict[str, Float[ndarray, " pairs"]]:
    """Compute scores of pairs of a query (its text) and a document, in the order of `pairs`.

    The score is NaN if the document is not in the pool.

    Args:
        pool: the documents.
        scores: by name, all of `queries`.
        queries: distinct texts.
        pairs: a table of `query` and `doc_id`.
        each: runs the tasks.
    """
    total = {name: np.full(len(pairs), np.nan) for name in scores}
    needed = pairs.select(["query", "doc_id"]).combine_chunks()
    task = partial(_score_group, pool=pool, scores=scores, queries=pa.array(queries), pairs=needed)
    for table in each(task, pool.groups()):
        for name, values in total.items():
            values[table["pair"].to_numpy()] = table[_score_column(name)].to_numpy()
    return total


def _score_column(name: str) -> str:
    """Return the column of a side's scores; the prefix is needed because a side may have the name `pair`."""
    return f"score of {name}"


def _score_group(
    group: list[str], *, pool: Pool, scores: Mapping[str, PoolScores], queries: pa.Array, pairs: pa.Table
) -> pa.Table:
    """Return the numbers and scores of the pairs that have their document in a group of parts."""
    layout = pa.schema({"pair": pa.int64()} | {_score_column(name): pa.float64() for name in scores})
    tables = [layout.empty_table()]
    columns = {"doc_id", *(column for one in scores.values() for column in one.columns)}
    query_of = pc.index_in(pairs["query"], value_set=queries).to_numpy()
    for part in pool.read(group, columns):
        documents = {name: one.documents(part) for name, one in scores.items()}
        position, present = places(pairs["doc_id"], part)
        for start in range(0, len(present), _PAIRS_PER_BLOCK):
            rows = present[start : start + _PAIRS_PER_BLOCK]
            values = {
                _score_column(name): one.pairs(documents[name], query_of[rows], position[rows])
                for name, one in scores.items()
            }
            tables.append(pa.table({"pair": rows, **values}).cast(layout))
    return pa.concat_tables(tables)
