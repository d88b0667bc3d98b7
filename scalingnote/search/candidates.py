"""Candidates of a search: the rows that one search sees, their documents, and the merged ranking.

IndexView: rows of the shards held ─► ShardCandidates of each query ─merge_candidates─► the k best SearchHits
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, no_type_check

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote import hybrid
from scalingnote.hybrid import HybridCandidates, Joining
from scalingnote.index import filters, ivf
from scalingnote.index.ivf import compiled
from scalingnote.index.postings import Postings
from scalingnote.index.shard import Layout
from scalingnote.search.scan import Masks

CACHED_FILTERS = 64  # filters whose row masks a built index keeps: one byte per document each
_ROW_BITS = 40  # of a candidate's id; the bits above are the number of its shard


@dataclass(frozen=True)
class ShardCandidates:
    """Candidates of one query in some shards, in no particular order, with their documents.

    Documents travel with their candidates, because a live index may have changed by the time they are read.
    `ids` order documents of equal scores in the same way wherever candidates are merged. `sparse` is None
    where the query has no terms.
    """

    ids: Int[ndarray, " candidates"]
    shards: Int[ndarray, " candidates"]
    dense: Float[ndarray, " candidates"]
    sparse: Float[ndarray, " candidates"] | None
    documents: Sequence[Mapping[str, Any]]

    def rows(self) -> Iterable[tuple[int, int, float, Mapping[str, Any]]]:
        """Id, shard, dense score and document of each candidate."""
        return zip(self.ids.tolist(), self.shards.tolist(), self.dense.tolist(), self.documents, strict=True)


class SearchHit(NamedTuple):
    """A document of the answer. `score` is its cosine, or the joined dense and sparse score."""

    score: float
    document: Mapping[str, Any]
    shard: int
    dense: float
    sparse: float | None

    @property
    def doc_id(self) -> str:
        """Id of the document."""
        return str(self.document["doc_id"])


def merge_candidates(
    answers: Sequence[ShardCandidates], *, k: int, joining: Joining, layout: Layout
) -> list[SearchHit]:
    """Rank the candidates of disjoint shards for one query.

    The result does not depend on how shards are distributed over searchers: of hybrid candidates, only as
    many per score are considered as a single searcher would have returned.

    Args:
        answers: of :meth:`IndexSearch.find`, one from each searcher.
        k: number of hits.
        joining: how dense and sparse scores are joined.
        layout: of the index, whose tuned weight and background apply where `joining` has none.

    Returns:
        At most k hits, best first; of equal scores the lower id first.
    """
    sparse = [answer.sparse for answer in answers if answer.sparse is not None]
    if len(sparse) < len(answers):
        # On the path of every search: for a few dozen candidates Python is ten times as fast as numpy.
        hits = {
            number: SearchHit(dense, document, shard, dense, None)
            for answer in answers
            for number, shard, dense, document in answer.rows()
        }
        best = sorted(hits.items(), key=lambda item: (-item[1].dense, item[0]))
        return [hit for _, hit in best[:k]]
    depth = max(k, joining.candidates)
    each = [
        HybridCandidates(a.ids[None], a.dense[None], s[None]) for a, s in zip(answers, sparse, strict=True)
    ]
    both = each[0] if len(each) == 1 else hybrid.merge(each, candidates=depth)
    (scores,), (ids,) = hybrid.join(
        both,
        joining,
        tuned_weight=layout.dense_weight,
        background=layout.background,
        candidates=depth,
        k=k,
    )
    places = {
        number: (answer, place) for answer in answers for place, number in enumerate(answer.ids.tolist())
    }
    ranking = zip(scores.tolist(), ids.tolist(), strict=True)
    return [_hit(*places[number], score=score) for score, number in ranking if number >= 0]


def _hit(answer: ShardCandidates, place: int, *, score: float) -> SearchHit:
    assert answer.sparse is not None
    shard, dense, sparse = (column[place].item() for column in (answer.shards, answer.dense, answer.sparse))
    return SearchHit(score, answer.documents[place], shard, dense, sparse)


class IndexView:
    """What one search sees: the rows of all shards held, numbered through from the first shard to the last.

    The same rows are cut differently by kind of data: *segments* are vectors that are scanned together,
    `documents` are tables, `postings` are term lists; each sequence covers all rows in order.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        segments: Sequence[ivf.Lists],
        alive: Masks,
        documents: Sequence[pa.Table],
        postings: Sequence[Postings],
        shard_rows: Mapping[int, int],
        lookup: Mapping[int, Callable[[int], Mapping[str, Any]]],
        cache_filters: bool = False,
    ) -> None:
        """Cut the rows by segments and shards.

        Args:
            layout: of the index.
            segments: inverted lists.
            alive: of each segment, the rows that still stand for a document; None: all.
            documents: tables of the rows.
            postings: term lists of the rows; empty where the index has no terms.
            shard_rows: number of rows of each shard, in order.
            lookup: of each shard, the function from a row of the shard to its document.
            cache_filters: keep the masks of recent filters.
        """
        self.layout, self.segments, self.alive = layout, segments, alive
        self.documents, self.postings, self._lookup = documents, postings, lookup
        self.starts = [*accumulate(map(len, segments), initial=0)]  # of the segments, and the number of rows
        self.shards = np.array([*shard_rows], np.int64)
        self.shard_starts = np.array([*accumulate(shard_rows.values(), initial=0)], np.int64)
        matching = partial(_matching_rows, documents)
        self._matching = lru_cache(CACHED_FILTERS)(matching) if cache_filters else matching

    @property
    def fields(self) -> pa.Schema:
        """Columns that a search may filter by."""
        return self.layout.fields(self.documents[0].schema)

    @property
    def kept(self) -> list[tuple[int, Any]]:
        """First row of each segment, and the vectors it keeps for exact scores."""
        return [(start, lists.kept) for start, lists in zip(self.starts, self.segments, strict=False)]

    def masks(self, where: filters.Filter | None) -> Masks:
        """Rows of each segment that are alive and match a filter; None: all. SearchError for a bad filter."""
        if not where:
            return self.alive
        filters.check(where, self.fields)
        matching = np.split(self._matching(json.dumps(where, sort_keys=True)), self.starts[1:-1])
        pairs = zip(matching, self.alive, strict=True)
        return [mask if alive is None else mask & alive for mask, alive in pairs]

    def whole_mask(self, masks: Masks) -> Bool[ndarray, " rows"] | None:
        """The masks of all segments as one; None: all rows."""
        if all(mask is None for mask in masks):
            return None
        pairs = zip(self.segments, masks, strict=True)
        return np.concatenate([np.ones(len(lists), bool) if m is None else m for lists, m in pairs])

    def alive_documents(self) -> list[pa.Table]:
        """The documents without rows that were deleted or replaced."""
        alive = self.whole_mask(self.alive)
        if alive is None:
            return list(self.documents)
        ends = [*accumulate(map(len, self.documents))]
        pairs = zip(self.documents, np.split(alive, ends[:-1]), strict=True)
        return [documents.filter(pa.array(mask)) for documents, mask in pairs]

    def candidates(
        self,
        rows: Int[ndarray, "queries k"],
        dense: Float[ndarray, "queries k"],
        sparse: Float[ndarray, "queries k"] | None,
    ) -> list[ShardCandidates]:
        """Candidates of each query with their documents, without the trailing rows of -1."""
        shards, inside = _locate(rows, self.shard_starts, self.shards)
        ids, dense = (shards << _ROW_BITS) + inside, dense.astype(np.float32, copy=False)
        answers = []
        for query, count in enumerate((rows >= 0).sum(axis=1).tolist()):
            own = query, slice(count)
            places = zip(shards[own].tolist(), inside[own].tolist(), strict=True)
            documents = [self._lookup[shard](row) for shard, row in places]
            terms = None if sparse is None else sparse[own]
            answers.append(ShardCandidates(ids[own], shards[own], dense[own], terms, documents))
        return answers


def _matching_rows(documents: Sequence[pa.Table], where: str) -> Bool[ndarray, " rows"]:
    """Rows of the tables that match a filter, given as JSON so that it can be a key of a cache."""
    wanted = json.loads(where)
    return np.concatenate([filters.mask(table, wanted) for table in documents])


@compiled
@no_type_check
def _locate(rows, starts, numbers):
    """Shard and row in the shard of each row over all shards; -1 where the row is -1."""
    shard, inside = np.full_like(rows, -1), np.full_like(rows, -1)
    for q in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            row = rows[q, c]
            if row >= 0:
                place = np.searchsorted(starts, row, side="right") - 1
                shard[q, c], inside[q, c] = numbers[place], row - starts[place]
    return shard, inside
