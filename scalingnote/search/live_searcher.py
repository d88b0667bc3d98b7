"""Search of a live index: a search sees one moment of each shard, with all writes acknowledged before it."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.index import filters, rescore
from scalingnote.index.both import candidates
from scalingnote.index.live.index import LiveIndex
from scalingnote.index.live.snapshot import Segment, Snapshot
from scalingnote.index.postings import Postings
from scalingnote.index.shard import Layout
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search import scan
from scalingnote.search.checks import checked_nprobe, require_both, require_vectors, unit_queries
from scalingnote.search.config import Joining
from scalingnote.search.found import Found, Hit, merge
from scalingnote.search.searcher import DEFAULT_JOINING


class _Moment(NamedTuple):
    """What a search looks at: the segments of all shards, one after the other, and what it may find there."""

    layout: Layout
    segments: list[Segment]
    first: list[int]  # row of all where each segment begins, and the number of rows
    masks: list[Bool[ndarray, " rows"] | None]
    terms: list[Postings]  # of the same rows, in other pieces
    snapshots: list[Snapshot]  # of the shards
    starts: Int[ndarray, " shards+1"]  # row of all where each shard begins, and the number of rows


class LiveSearcher:
    """Searches what a live index holds. Threads may share one."""

    def __init__(self, index: LiveIndex, *, nprobe: int | None = None) -> None:
        self._index, self._nprobe = index, nprobe

    def search(
        self,
        queries: Float[ndarray, "queries dim"],
        *,
        k: int,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
    ) -> list[list[Hit]]:
        """The k best documents of each query, best first; all there are where there are fewer.

        The same queries and filters as :meth:`scalingnote.search.searcher.Searcher.search` takes.
        """
        found = self.find(queries, k=k, nprobe=nprobe, where=where)
        return self._best(found, k=k, joining=DEFAULT_JOINING)

    def search_both(
        self,
        queries: Float[ndarray, "queries dim"],
        terms: SparseRows,
        *,
        k: int,
        joining: Joining = DEFAULT_JOINING,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
    ) -> list[list[Hit]]:
        """The k best documents by embeddings and by terms; `terms` has a row for each query.

        The same as :meth:`scalingnote.search.searcher.Searcher.search_both`.
        """
        found = self.find(queries, k=k, terms=terms, joining=joining, nprobe=nprobe, where=where)
        return self._best(found, k=k, joining=joining)

    def find(
        self,
        queries: Float[ndarray, "queries dim"],
        *,
        k: int,
        terms: SparseRows | None = None,
        joining: Joining = DEFAULT_JOINING,
        nprobe: int | None = None,
        where: filters.Filter | None = None,
        exact: bool = False,
    ) -> list[Found]:
        """What there is for each query; as :meth:`scalingnote.search.searcher.Searcher.find` has it."""
        now = self._moment(where)
        unit = unit_queries(queries, dim=now.layout.dim, k=k)
        if terms is None:
            best = self._scan(now, unit, k=k, nprobe=nprobe, exact=exact)
            rows, dense, sparse = _rows(now, best), best.scores, None
        else:
            require_both(now.layout)
            depth = max(k, joining.candidates)
            rows = _rows(now, self._scan(now, unit, k=depth, nprobe=nprobe, exact=exact))
            kept = [(first, s.lists.kept) for first, s in zip(now.first, now.segments, strict=False)]
            score = partial(rescore.scores_over, kept, unit)
            both = candidates(rows, score, now.terms, terms, k=depth, allowed=_allowed(now))
            rows, dense, sparse = both.ids, both.dense, both.sparse
        return [
            _found(now, rows[query], dense[query], None if sparse is None else sparse[query])
            for query in range(len(rows))
        ]

    def refresh(self) -> None:
        """Show what the writing process has acknowledged by now, of the version that is open."""
        for shard in self._index.shards:
            shard.refresh()

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id, as of now."""
        return self._index.get(doc_id)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """A document's vector, as exact as the index keeps it; None where it is not there.

        SearchError where the index keeps codes alone.
        """
        require_vectors(self._index.layout)
        return self._index.vector(doc_id)

    def facets(self, *, most: int) -> dict[str, dict[str, int]]:
        """How many documents have each value, for text fields with at most so many values."""
        now = self._moment(None)
        pairs = zip(now.segments, now.masks, strict=True)
        alive = [s.documents if mask is None else s.documents.filter(pa.array(mask)) for s, mask in pairs]
        return filters.facets(alive, self.fields, most=most)

    @property
    def layout(self) -> Layout:
        """Of the index version."""
        return self._index.layout

    @property
    def fields(self) -> pa.Schema:
        """What a search may filter by."""
        return self.layout.fields(self._index.snapshots()[0].base.documents.schema)

    @property
    def dim(self) -> int:
        """Dimension of the queries."""
        return self.layout.dim

    @property
    def shards(self) -> list[int]:
        """Numbers of the shards held: all."""
        return list(range(self.layout.shards))

    def _best(self, found: Sequence[Found], *, k: int, joining: Joining) -> list[list[Hit]]:
        return [merge([one], k=k, joining=joining, layout=self.layout) for one in found]

    def _moment(self, where: filters.Filter | None) -> _Moment:
        layout, snapshots = self._index.layout, self._index.snapshots()
        segments = [segment for snapshot in snapshots for segment in snapshot.segments]
        if where:
            filters.check(where, layout.fields(segments[0].documents.schema))
        masks = []
        for segment in segments:
            mask = segment.alive
            if where:
                wanted = filters.mask(segment.documents, where)
                mask = wanted if mask is None else mask & wanted
            masks.append(mask)
        first = [*accumulate((len(segment.lists) for segment in segments), initial=0)]
        terms = [each for snapshot in snapshots for each in snapshot.term_segments]
        starts = np.cumsum([0, *(snapshot.rows for snapshot in snapshots)])
        return _Moment(layout, segments, first, masks, terms, snapshots, starts)

    def _scan(
        self,
        now: _Moment,
        unit: Float[ndarray, "queries dim"],
        *,
        k: int,
        nprobe: int | None,
        exact: bool = False,
    ) -> scan.Found:
        asked = (nprobe, self._nprobe, now.layout.nprobe)
        probes = checked_nprobe(next(n for n in asked if n is not None), now.layout.nlist)
        plan = scan.Plan(probes, now.layout.refine_factor, exact=exact)
        return scan.search([segment.lists for segment in now.segments], unit, k=k, plan=plan, masks=now.masks)


def _rows(now: _Moment, found: scan.Found) -> Int[ndarray, "queries k"]:
    """What was found, as rows of all."""
    return np.where(found.rows < 0, -1, np.array(now.first)[found.segments] + found.rows)


def _allowed(now: _Moment) -> Bool[ndarray, " rows"] | None:
    """Which rows of all may be found; None: every one."""
    if all(mask is None for mask in now.masks):
        return None
    pairs = zip(now.segments, now.masks, strict=True)
    return np.concatenate([np.ones(len(s.lists), bool) if mask is None else mask for s, mask in pairs])


def _found(
    now: _Moment,
    rows: Int[ndarray, " candidates"],
    dense: Float[ndarray, " candidates"],
    sparse: Float[ndarray, " candidates"] | None,
) -> Found:
    """One query's candidates with their documents."""
    there = rows >= 0
    rows = rows[there]
    shards = np.searchsorted(now.starts, rows, side="right") - 1
    places = zip(shards.tolist(), (rows - now.starts[shards]).tolist(), strict=True)
    documents = [now.snapshots[shard].document(row) for shard, row in places]
    return Found(rows, shards, dense[there], None if sparse is None else sparse[there], documents)
