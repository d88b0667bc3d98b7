"""The rows that a search sees, and the dense search over them, which scans the same lists in each segment.

    queries ─► checked, unit length ─► lists to scan ─► each segment's k best ─► the k best of all

A *segment* is vectors that are scanned together: those of the shards of a searcher, or later writes to a live
shard. Rows are numbered from the first segment to the last. A search for k returns k documents if k are
allowed: the fewer documents a filter allows, the more lists are scanned. If only few are allowed, each is
scored. A scan that returns too few is repeated over all lists.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from math import ceil
from typing import Any, no_type_check

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int, Shaped
from numpy import ndarray

from scalingnote.core import topk
from scalingnote.core.errors import SearchError
from scalingnote.core.topk import jit
from scalingnote.index import filters, ivf
from scalingnote.index.ivf import RESCORE_COST, RowMask, UnitQueries
from scalingnote.index.postings import Postings
from scalingnote.index.shard import IndexLayout

MAX_K = 1000
MAX_DEPTH = 16_000  # passages of one query; the limit of Milvus is 16,384
CACHED_FILTERS = 64  # number of filters with row masks in memory: one byte per document each

Masks = Sequence[RowMask | None]  # of each segment; None: all rows
Ranking = tuple[Float[ndarray, "_ _"], Int[ndarray, "_ _"]]  # scores and rows, [queries, k], best first


@dataclass(frozen=True, eq=False)
class IndexView:
    """The rows that one search sees: those of all its shards, numbered from the first shard to the last.

    Each kind of data divides the same rows differently: *segments* are vectors that are scanned together,
    `documents` are tables, `postings` are term lists; each sequence covers all rows in order.
    """

    layout: IndexLayout
    segments: Sequence[ivf.Lists]
    alive: Masks  # the rows that were not deleted or replaced
    documents: Sequence[pa.Table]  # with the columns that a search may filter by
    postings: Sequence[Postings]  # empty if the index has no terms
    shard_rows: Mapping[int, int]  # shard -> number of its rows, in order
    # Number of a live shard -> the function from a row of the shard to its document.
    lookup: Mapping[int, Callable[[int], Mapping[str, Any]]] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """First row of each segment, and the number of rows."""
        return [*accumulate(map(len, self.segments), initial=0)]

    @cached_property
    def shards(self) -> Int[ndarray, " shards"]:
        """Numbers of the shards."""
        return np.array([*self.shard_rows], np.int64)

    @cached_property
    def shard_starts(self) -> Int[ndarray, " bounds"]:
        """First row of each shard, and the number of rows."""
        return np.array([*accumulate(self.shard_rows.values(), initial=0)], np.int64)

    @cached_property
    def _matching(self) -> Callable[[str], Bool[ndarray, " rows"]]:
        return lru_cache(CACHED_FILTERS)(partial(_matching_rows, self.documents))

    @property
    def fields(self) -> pa.Schema:
        """Columns that a search may filter by."""
        return self.layout.fields(self.documents[0].schema)

    @property
    def kept(self) -> list[tuple[int, Any]]:
        """First row of each segment, and its vectors for exact scores."""
        return [(start, lists.kept) for start, lists in zip(self.starts, self.segments, strict=False)]

    def hiding(self, alive: Bool[ndarray, " rows"]) -> "IndexView":
        """Return a view of the same rows in which a search finds only those that are `alive`."""
        hidden = replace(self, alive=[RowMask(rows) for rows in np.split(alive, self.starts[1:-1])])
        vars(hidden)["_matching"] = self._matching  # filters are computed once: they match the same rows
        return hidden

    def beside(self, other: "IndexView") -> "IndexView":
        """Return a view of these rows and then those of other shards with the same layout and quantizer."""
        both = IndexView(
            self.layout,
            segments=[*self.segments, *other.segments],
            alive=[*self.alive, *other.alive],
            documents=[*self.documents, *other.documents],
            postings=[*self.postings, *other.postings],
            shard_rows={**self.shard_rows, **other.shard_rows},
            lookup={**self.lookup, **other.lookup},
        )
        parts = (self, other)  # each has cached filters
        vars(both)["_matching"] = lambda where: np.concatenate([each._matching(where) for each in parts])
        return both

    def masks(self, where: filters.Filter | None) -> Masks:
        """Return the rows of each segment that are alive and match a filter; None for all.

        Raises:
            SearchError: the filter is invalid.
        """
        if not where:
            return self.alive
        filters.check(where, self.fields)
        matching = np.split(self._matching(json.dumps(where, sort_keys=True)), self.starts[1:-1])
        pairs = zip(matching, self.alive, strict=True)
        return [RowMask(rows if alive is None else rows & alive.rows) for rows, alive in pairs]

    def whole_mask(self, masks: Masks) -> Bool[ndarray, " rows"] | None:
        """Join the masks of all segments; None for all rows."""
        if all(mask is None for mask in masks):
            return None
        pairs = zip(self.segments, masks, strict=True)
        return np.concatenate([np.ones(len(lists), bool) if m is None else m.rows for lists, m in pairs])

    def alive_documents(self) -> list[pa.Table]:
        """Return the documents without rows that were deleted or replaced."""
        alive = self.whole_mask(self.alive)
        if alive is None:
            return list(self.documents)
        ends = [*accumulate(map(len, self.documents))]
        pairs = zip(self.documents, np.split(alive, ends[:-1]), strict=True)
        return [documents.filter(pa.array(mask)) for documents, mask in pairs]

    def place(
        self, rows: Int[ndarray, "queries k"]
    ) -> tuple[Int[ndarray, "queries k"], Int[ndarray, "queries k"]]:
        """Return the shard of each row, and its number in the shard; both are -1 for a row of -1."""
        places: tuple[ndarray, ndarray] = _locate(rows, self.shard_starts, self.shards)
        return places


def search(
    segments: Sequence[ivf.Lists],
    queries: UnitQueries,
    *,
    k: int,
    nprobe: int,
    refine_factor: int,
    exact: bool = False,
    masks: Masks | None = None,
    alive: Masks | None = None,
) -> Ranking:
    """Find the k best documents of each query.

    Args:
        segments: all share a quantizer; there are two only while a live index adopts a retrained one.
        queries: unit vectors.
        k: documents per query.
        nprobe: number of inverted lists to scan if all documents are allowed.
        refine_factor: number of candidates rescored by stored vectors, per requested document.
        exact: score every document by its stored vector; without stored vectors, scan all lists.
        masks: rows allowed in each segment; None for all.
        alive: rows of each segment that were not deleted or replaced, which include `masks`. A new index of
            these rows would scan the same number of lists.

    Returns:
        Scores and rows, best first; at most k columns, padded with -inf and -1. For equal scores, the lower
        row is first.
    """
    every = [None] * len(segments)
    sizes = [*map(len, segments)]  # computed once: each `len` takes faiss a microsecond
    counts = _counts(sizes, masks or every)
    starts = accumulate(sizes, initial=0)
    columns = zip(starts, segments, masks or every, counts, strict=False)
    pieces = [(start, lists, mask) for start, lists, mask, count in columns if count]
    if not pieces or not len(queries):
        return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    documents, allowed, alive_count = sum(sizes), sum(counts), sum(_counts(sizes, alive or every))
    nlist = max(lists.coarse.ntotal for _, lists, _ in pieces)
    widened = nlist if exact else min(nlist, ceil(nprobe * alive_count / allowed))
    scanned = documents * widened / nlist
    has_vectors = all(lists.kept is not None for _, lists, _ in pieces)
    if has_vectors and (exact or (allowed < documents and allowed * RESCORE_COST <= scanned)):
        return _score_all(pieces, queries, k=k)

    probe = partial(_probe, pieces, k=k, refine_factor=refine_factor)
    scores, rows = probe(queries, nprobe=widened)
    if widened < nlist:
        short = np.flatnonzero((rows >= 0).sum(axis=1) < min(k, allowed))
        if len(short):
            scores[short], rows[short] = probe(queries[short], nprobe=nlist)
    return scores, rows


def unit_queries(
    queries: Shaped[ndarray, "..."], *, dim: int, k: int, passages: bool = False
) -> Float[ndarray, "queries dim"]:
    """Scale queries to unit length.

    `passages`: k is a number of passages, which has a higher limit.

    Raises:
        SearchError: queries or `k` are invalid for this index.
    """
    most = MAX_DEPTH if passages else MAX_K
    if not isinstance(k, int | np.integer) or not 1 <= k <= most:
        raise SearchError(f"k is {k!r}: ask for 1 to {most} results")
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise SearchError(
            f"queries have shape {queries.shape}, the index has embeddings of dim {dim}: "
            f"pass [queries, {dim}] from the query tower this index was built for"
        )
    if not np.issubdtype(queries.dtype, np.floating):
        raise SearchError(f"queries are {queries.dtype}: pass floats")
    unit, invalid = _unit(queries if queries.dtype == np.float64 else np.asarray(queries, np.float32))
    if invalid >= 0:
        raise SearchError(f"query {invalid} is not finite or all zero: it has no direction")
    return unit  # type: ignore[no-any-return]


def checked_nprobe(nprobe: int, nlist: int) -> int:
    """Limit nprobe to the number of lists; raise SearchError below 1."""
    if nprobe < 1:
        raise SearchError(f"nprobe is {nprobe}: scan 1 to {nlist} lists")
    return min(nprobe, nlist)


def require_vectors(layout: IndexLayout) -> None:
    """Raise SearchError unless the index keeps vectors of its documents."""
    if layout.refine == "none":
        raise SearchError(
            f"{layout.family} keeps no vectors of documents: index with index.family.refine=sq8"
        )


def require_hybrid(layout: IndexLayout) -> None:
    """Raise SearchError unless the index can be searched by embeddings and terms together."""
    if not layout.sparse:
        raise SearchError(
            "this index has no terms: set bm25, or train with train.sparse and encode, then index again"
        )
    if layout.refine == "none":
        raise SearchError(
            f"{layout.family} keeps no vectors to score documents that terms find: index with "
            "index.family.refine=sq8"
        )


_Pieces = Sequence[tuple[int, ivf.Lists, RowMask | None]]  # first row, vectors, allowed rows


def _counts(sizes: Sequence[int], masks: Masks) -> list[int]:
    """Count the allowed rows of each segment."""
    return [size if mask is None else mask.count for size, mask in zip(sizes, masks, strict=True)]


def _probe(pieces: _Pieces, queries: UnitQueries, *, k: int, nprobe: int, refine_factor: int) -> Ranking:
    """Scan the lists of each query's nearest centroids in every segment."""
    chosen_lists: dict[int, ivf.Chosen] = {}
    rankings = []
    for _, lists, mask in pieces:
        coarse = lists.coarse
        if id(coarse) not in chosen_lists:
            chosen_lists[id(coarse)] = ivf.choose_lists(queries, coarse, nprobe=min(nprobe, coarse.ntotal))
        its_lists = chosen_lists[id(coarse)]
        rankings.append(
            ivf.candidates(lists, queries, chosen=its_lists, k=k, refine_factor=refine_factor, allowed=mask)
        )
    return _best(pieces, rankings, k=k)


def _score_all(pieces: _Pieces, queries: UnitQueries, *, k: int) -> Ranking:
    """Score every allowed document, which is cheaper than a scan if a filter allows few."""
    rankings = []
    for _, lists, mask in pieces:
        rows = np.arange(len(lists)) if mask is None else np.flatnonzero(mask.rows)
        every = np.broadcast_to(rows, (len(queries), len(rows)))
        rankings.append(topk.merge(ivf.scores(lists.kept, queries, every), every, k=k))
    return _best(pieces, rankings, k=k)


def _best(pieces: _Pieces, rankings: Sequence[Ranking], *, k: int) -> Ranking:
    """Merge the candidates of all segments into the k best, with rows counted from the first segment."""
    counted = [
        (scores, topk.count_from(first, rows) if first else rows)
        for (first, _, _), (scores, rows) in zip(pieces, rankings, strict=True)
    ]
    if len(counted) == 1:
        return topk.merge(*counted[0], k=k)
    scores, rows = (np.concatenate(columns, axis=1) for columns in zip(*counted, strict=True))
    return topk.merge(scores, rows, k=k)


def _matching_rows(documents: Sequence[pa.Table], where: str) -> Bool[ndarray, " rows"]:
    """Compute which rows match a filter, which is JSON because it is a key of the cache."""
    conditions = json.loads(where)
    return np.concatenate([filters.mask(table, conditions) for table in documents])


@jit
@no_type_check
def _unit(queries):
    """Return queries of unit length, and the first one without direction or -1; numpy is slower per call."""
    unit = np.empty(queries.shape, np.float32)
    for q in range(len(queries)):
        total = 0.0
        for j in range(queries.shape[1]):
            total += np.float64(queries[q, j]) * np.float64(queries[q, j])
        if not 0.0 < total < np.inf:  # false for NaN too
            return unit, q
        length = np.sqrt(total)
        for j in range(queries.shape[1]):
            unit[q, j] = queries[q, j] / length
    return unit, -1


@jit
@no_type_check
def _locate(rows, starts, numbers):
    shard, inside = np.full_like(rows, -1), np.full_like(rows, -1)
    for q in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            row = rows[q, c]
            if row >= 0:
                place = np.searchsorted(starts, row, side="right") - 1
                shard[q, c], inside[q, c] = numbers[place], row - starts[place]
    return shard, inside
