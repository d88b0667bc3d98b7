"""Dense search over segments: choose inverted lists once, scan every segment, keep the best k.

    queries ─► checked, unit length ─► lists to scan ─► each segment's k best ─► the k best of all

A *segment* is vectors that are scanned together: those of the shards a searcher holds, or those written to a
live shard since. Rows are numbered through from the first segment to the last. A search for k returns k
documents wherever k are allowed: the fewer are allowed, the more lists are scanned; if they are few, each is
scored; and a scan that returns too few is repeated over all lists.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import ceil
from typing import no_type_check

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy import ndarray

from scalingnote import topk
from scalingnote.errors import SearchError
from scalingnote.index import ivf
from scalingnote.index.ivf import RESCORE_COST, compiled
from scalingnote.index.shard import Layout

MAX_K = 1000

Masks = Sequence[Bool[ndarray, " _"] | None]
Ranking = tuple[Float[ndarray, "_ _"], Int[ndarray, "_ _"]]  # scores and rows, [queries, k], best first


def search(
    segments: Sequence[ivf.Lists],
    queries: Float[ndarray, "queries dim"],
    *,
    k: int,
    nprobe: int,
    refine_factor: int,
    exact: bool = False,
    masks: Masks | None = None,
) -> Ranking:
    """Find the k best documents of each query.

    Args:
        segments: all trained alike; two quantizers occur only while a live index adopts a retrained one.
        queries: unit vectors.
        k: documents per query.
        nprobe: inverted lists to scan where all documents are allowed.
        refine_factor: candidates rescored by kept vectors, per document asked for.
        exact: score every document by the vectors kept; without these, scan all lists.
        masks: rows allowed in each segment; None: all.

    Returns:
        Scores and rows, best first; at most k columns, padded with -inf and -1. Ties go to the lower row.
    """
    masks = [None] * len(segments) if masks is None else masks
    counts = [
        len(lists) if mask is None else int(np.count_nonzero(mask))
        for lists, mask in zip(segments, masks, strict=True)
    ]
    starts = accumulate(map(len, segments), initial=0)
    pieces = [
        (start, lists, mask)
        for start, lists, mask, count in zip(starts, segments, masks, counts, strict=False)
        if count
    ]
    if not pieces or not len(queries):
        return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    allowed, documents = sum(counts), sum(map(len, segments))
    nlist = max(lists.coarse.ntotal for _, lists, _ in pieces)
    widened = nlist if exact else min(nlist, ceil(nprobe * documents / allowed))
    scanned = documents * widened / nlist
    has_vectors = all(lists.kept is not None for _, lists, _ in pieces)
    if has_vectors and (exact or (allowed < documents and allowed * RESCORE_COST <= scanned)):
        return _score_all(pieces, queries, k=k)

    probe = partial(_probe, pieces, k=k, refine_factor=refine_factor)
    scores, rows = probe(queries, nprobe=widened)
    if widened == nlist:
        return scores, rows
    short = np.flatnonzero((rows >= 0).sum(axis=1) < min(k, allowed))
    if not len(short):
        return scores, rows
    return _replaced((scores, rows), short, probe(queries[short], nprobe=nlist))


def unit_queries(queries: Shaped[ndarray, "..."], *, dim: int, k: int) -> Float[ndarray, "queries dim"]:
    """Scale queries to unit length; SearchError for queries, or a `k`, that cannot be searched."""
    if not isinstance(k, int | np.integer) or not 1 <= k <= MAX_K:
        raise SearchError(f"k is {k!r}: ask for 1 to {MAX_K} results")
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
    """At most the number of lists; SearchError below 1."""
    if nprobe < 1:
        raise SearchError(f"nprobe is {nprobe}: scan 1 to {nlist} lists")
    return min(nprobe, nlist)


def require_vectors(layout: Layout) -> None:
    """SearchError unless the index keeps vectors of its documents."""
    if layout.refine == "none":
        raise SearchError(
            f"{layout.family} keeps no vectors of documents: index with index.family.refine=sq8"
        )


def require_hybrid(layout: Layout) -> None:
    """SearchError unless the index can be searched by embeddings and terms together."""
    if not layout.sparse:
        raise SearchError(
            "this index has no terms: set bm25, or train with train.sparse and encode, then index anew"
        )
    if layout.refine == "none":
        raise SearchError(
            f"{layout.family} keeps no vectors to score documents that terms find: index with "
            "index.family.refine=sq8"
        )


_Pieces = Sequence[tuple[int, ivf.Lists, Bool[ndarray, " _"] | None]]  # first row, vectors, allowed rows


def _probe(
    pieces: _Pieces, queries: Float[ndarray, "queries dim"], *, k: int, nprobe: int, refine_factor: int
) -> Ranking:
    """Scan the lists of each query's nearest centroids in every segment."""
    chosen: dict[int, ivf.Chosen] = {}
    rankings = []
    for start, lists, mask in pieces:
        coarse = lists.coarse
        if id(coarse) not in chosen:
            chosen[id(coarse)] = ivf.choose_lists(queries, coarse, nprobe=min(nprobe, coarse.ntotal))
        found = ivf.search(
            lists,
            queries,
            chosen=chosen[id(coarse)],
            k=k,
            refine_factor=refine_factor,
            allowed=None if mask is None else ivf.bitmap(mask),
        )
        rankings.append(_shifted(found, start))
    return _merged(rankings, k=k)


def _score_all(pieces: _Pieces, queries: Float[ndarray, "queries dim"], *, k: int) -> Ranking:
    """Score every allowed document: cheaper than a scan where a filter leaves few."""
    rankings = []
    for start, lists, mask in pieces:
        rows = np.arange(len(lists)) if mask is None else np.flatnonzero(mask)
        rankings.append(_shifted(ivf.score_all(lists, queries, rows, k=k), start))
    return _merged(rankings, k=k)


def _shifted(found: Ranking, start: int) -> Ranking:
    """Count rows from the first segment on."""
    scores, rows = found
    return (scores, np.where(rows < 0, -1, rows + start)) if start else found


def _merged(rankings: Sequence[Ranking], *, k: int) -> Ranking:
    if len(rankings) == 1:
        return rankings[0]
    scores, rows = (np.hstack(columns) for columns in zip(*rankings, strict=True))
    return topk.merge(scores, rows, k=k)


def _replaced(found: Ranking, queries: Int[ndarray, " some"], new: Ranking) -> Ranking:
    """Put another ranking in place of those of some queries."""
    width = max(found[1].shape[1], new[1].shape[1])
    scores = np.full((len(found[0]), width), -np.inf, np.float32)
    rows = np.full(scores.shape, -1, np.int64)
    for wide, none, old, own in zip((scores, rows), (-np.inf, -1), found, new, strict=True):
        wide[:, : old.shape[1]] = old
        wide[queries] = none
        wide[queries, : own.shape[1]] = own
    return scores, rows


@compiled
@no_type_check
def _unit(queries):
    """Queries of unit length, and the first that has no direction or -1; numpy would take longer per call."""
    unit = np.empty(queries.shape, np.float32)
    for q in range(len(queries)):
        total = 0.0
        for j in range(queries.shape[1]):
            total += np.float64(queries[q, j]) * np.float64(queries[q, j])
        if not 0.0 < total < np.inf:  # nor is NaN
            return unit, q
        length = np.sqrt(total)
        for j in range(queries.shape[1]):
            unit[q, j] = queries[q, j] / length
    return unit, -1
