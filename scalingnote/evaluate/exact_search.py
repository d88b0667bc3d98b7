"""Exact search of a pool: every document is scored for every query, in tasks that read a part once.

    part ─► scores of blocks of queries and documents ─► best documents and score ranges of a task
         ─► of all tasks, merged as they arrive

Only the results pass through the caller: queries times k, whatever the size of the pool. Their merge does
not depend on the order of tasks.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.evaluate import pool as pools
from scalingnote.evaluate.pool import Pool
from scalingnote.evaluate.scores import JoinedScores, ScoreRanges, Scores
from scalingnote.log import Progress
from scalingnote.storage.shuffle import TaskRunner

_PAIRS_PER_BLOCK = 65_536


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
        self._extend(queries, ScoreRanges(scores.min(1), scores.max(1)))

    def merge(self, other: "TopDocuments") -> None:
        """Add the result of a search of other documents."""
        for block in topk.query_blocks(len(self.ids)):
            self.add(block, other.scores[block], other.ids[block])
        self._extend(slice(None), other.ranges)
        self.documents += other.documents

    def _extend(self, queries: slice, ranges: ScoreRanges) -> None:
        low, high = self.ranges.low, self.ranges.high
        low[queries] = np.minimum(low[queries], ranges.low)
        high[queries] = np.maximum(high[queries], ranges.high)


def search(
    pool: Pool,
    scores: Mapping[str, Scores],
    *,
    k: int,
    joined: Mapping[str, JoinedScores] | None = None,
    each: TaskRunner = map,
) -> dict[str, TopDocuments]:
    """The `k` best documents of every query, by each of the scores.

    Args:
        pool: documents to search.
        scores: by name; all of the same number of queries.
        k: results per query.
        joined: by name, what ranks in place of `scores`, from which it is made.
        each: runs the tasks.
    """
    queries = len(next(iter(scores.values())))
    total = {name: TopDocuments(queries, k) for name in (scores if joined is None else joined)}
    task = partial(_search_group, pool=pool, scores=scores, k=k, joined=joined)
    documents = pool.embeddings.counts["documents"]
    with Progress("evaluate", total=documents, unit="documents searched") as progress:
        for read, found in each(task, pool.groups()):
            for name, one in found.items():
                total[name].merge(one)
            progress.advance(read)
    return total


def _search_group(
    group: list[str],
    *,
    pool: Pool,
    scores: Mapping[str, Scores],
    k: int,
    joined: Mapping[str, JoinedScores] | None,
) -> tuple[int, dict[str, TopDocuments]]:
    """The best of a group of parts, and the number of its documents, searched or not."""
    queries = len(next(iter(scores.values())))
    best = {name: TopDocuments(queries, k) for name in (scores if joined is None else joined)}
    for part in pool.read(group, {column for one in scores.values() for column in one.columns}):
        matrices = {name: one.documents(part) for name, one in scores.items()}
        for start in range(0, len(part), topk.DOCUMENT_BLOCK):
            chosen = slice(start, start + topk.DOCUMENT_BLOCK)
            block = {name: matrix[chosen] for name, matrix in matrices.items()}
            for asked in topk.query_blocks(queries):
                found = {name: one.block(block[name], asked) for name, one in scores.items()}
                if joined is not None:
                    found = {name: one.block(found, asked) for name, one in joined.items()}
                for name, values in found.items():
                    best[name].score(asked, values, part.rows[chosen])
        for result in best.values():
            result.documents += len(part)
    return sum(pool.embeddings.rows_of(group).values()), best


def score_pairs(
    pool: Pool,
    scores: Mapping[str, Scores],
    queries: Int[ndarray, " pairs"],
    doc_ids: Sequence[str],
    *,
    each: TaskRunner = map,
) -> dict[str, Float[ndarray, " pairs"]]:
    """Scores of pairs of a query, by its number, and a document; NaN if it is not in the pool."""
    total = {name: np.full(len(doc_ids), np.nan) for name in scores}
    ids = pa.array(doc_ids, pa.string())
    for found in each(
        partial(_score_group, pool=pool, scores=scores, queries=queries, doc_ids=ids), pool.groups()
    ):
        for name, (present, values) in found.items():
            total[name][present] = values
    return total


def _score_group(
    group: list[str],
    *,
    pool: Pool,
    scores: Mapping[str, Scores],
    queries: Int[ndarray, " pairs"],
    doc_ids: pa.Array,
) -> dict[str, tuple[Int[ndarray, " present"], Float[ndarray, " present"]]]:
    """Numbers and scores of the pairs whose document is in a group of parts."""
    found: dict[str, list[tuple[ndarray, ndarray]]] = {name: [] for name in scores}
    for part in pool.read(group, {"doc_id", *(column for one in scores.values() for column in one.columns)}):
        place, present = pools.places(doc_ids, part)
        for name, one in scores.items() if len(present) else ():
            documents = one.documents(part)
            for start in range(0, len(present), _PAIRS_PER_BLOCK):
                block = present[start : start + _PAIRS_PER_BLOCK]
                found[name].append((block, one.pairs(documents, queries[block], place[block])))
    none = (np.empty(0, np.int64), np.empty(0, np.float32))
    joined = {name: zip(none, *blocks, strict=True) for name, blocks in found.items()}
    return {name: tuple(map(np.concatenate, columns)) for name, columns in joined.items()}  # type: ignore[misc]
