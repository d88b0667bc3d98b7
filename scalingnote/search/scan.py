"""One search over segments: lists are chosen once, every segment is scanned, the best of all are the answer.

    queries ─► lists to scan ─► each segment's k best ─► the k best of all

A *segment* is vectors that are scanned together: those of the shards a searcher holds, or those a live shard
has taken since. Of k results asked for, all k come back wherever k documents may be found: the rarer these
are, the more lists are scanned; where they are few, each is scored; and a scan that falls short is repeated
over all lists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.index import ivf
from scalingnote.index.tuning import RESCORED

_ROW_BITS = 40

Masks = Sequence[Bool[ndarray, " _"] | None]
Rows = tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]


@dataclass(frozen=True)
class Found:
    """The best of each query, best first; -inf and -1 behind the last."""

    scores: Float[ndarray, "queries k"]
    segments: Int[ndarray, "queries k"]
    rows: Int[ndarray, "queries k"]


@dataclass(frozen=True)
class Plan:
    """How a search goes about its work."""

    nprobe: int
    refine_factor: int
    exact: bool = False  # score every document by the vectors kept; without such, scan all lists


def search(
    segments: Sequence[ivf.Lists],
    queries: Float[ndarray, "queries dim"],
    *,
    k: int,
    plan: Plan,
    masks: Masks | None = None,
) -> Found:
    """The k best documents of each query; `masks` say which rows of each segment may be found, None all."""
    masks = [None] * len(segments) if masks is None else masks
    allowed = [
        len(lists) if mask is None else int(np.count_nonzero(mask))
        for lists, mask in zip(segments, masks, strict=True)
    ]
    there = [number for number, count in enumerate(allowed) if count]
    if not there or not len(queries):
        none = np.empty((len(queries), 0), np.int64)
        return Found(none.astype(np.float32), none, none)
    # Of almost always one quantizer: only while a live index goes over to one trained anew are there two.
    nlist, documents = max(segments[number].coarse.ntotal for number in there), sum(map(len, segments))
    nprobe = nlist if plan.exact else min(nlist, ceil(plan.nprobe * documents / sum(allowed)))
    codes = documents * nprobe / nlist
    kept = all(segments[number].kept is not None for number in there)
    few = sum(allowed) < documents and sum(allowed) * RESCORED <= codes
    if kept and (few or plan.exact):
        return _gather(_score_all(segments, queries, k=k, masks=masks, there=there), k=k)

    probed = partial(_probe, segments, masks=masks, there=there, k=k, plan=plan)
    found = probed(queries, nprobe=nprobe)
    if nprobe == nlist:
        return found
    short = np.flatnonzero((found.rows >= 0).sum(axis=1) < min(k, sum(allowed)))
    if not len(short):
        return found
    return _replaced(found, short, probed(queries[short], nprobe=nlist))


def packed(
    place: Int[ndarray, "queries k"] | int, rows: Int[ndarray, "queries k"]
) -> Int[ndarray, "queries k"]:
    """A place (segment or shard) and a row in it as one number that sorts by place, then row; -1 for none."""
    return np.where(rows < 0, -1, (place << _ROW_BITS) + rows)


def unpacked(
    ids: Int[ndarray, "queries k"],
) -> tuple[Int[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """Places and rows of :func:`packed` numbers."""
    none = ids < 0
    return np.where(none, -1, ids >> _ROW_BITS), np.where(none, -1, ids % (1 << _ROW_BITS))


def _probe(
    segments: Sequence[ivf.Lists],
    queries: Float[ndarray, "queries dim"],
    *,
    masks: Masks,
    there: Sequence[int],
    k: int,
    nprobe: int,
    plan: Plan,
) -> Found:
    """The best of the lists that each query's nearest centroids name, in every segment."""
    chosen: dict[int, ivf.Chosen] = {}
    found = {}
    for number in there:
        lists, mask = segments[number], masks[number]
        coarse = lists.coarse
        if id(coarse) not in chosen:
            chosen[id(coarse)] = ivf.choose_lists(queries, coarse, nprobe=min(nprobe, coarse.ntotal))
        found[number] = ivf.search(
            lists,
            queries,
            chosen=chosen[id(coarse)],
            k=k,
            refine_factor=plan.refine_factor,
            allowed=None if mask is None else ivf.bitmap(mask),
        )
    return _gather(found, k=k)


def _score_all(
    segments: Sequence[ivf.Lists],
    queries: Float[ndarray, "queries dim"],
    *,
    k: int,
    masks: Masks,
    there: Sequence[int],
) -> dict[int, Rows]:
    """Every document that may be found, scored: cheaper than a scan where a filter leaves few."""
    found = {}
    for number in there:
        lists, mask = segments[number], masks[number]
        rows = np.arange(len(lists)) if mask is None else np.flatnonzero(mask)
        found[number] = ivf.score_all(lists, queries, rows, k=k)
    return found


def _gather(found: dict[int, Rows], *, k: int) -> Found:
    """The best of all segments; of equal scores the lower segment, then row, comes first."""
    if len(found) == 1:
        ((number, (scores, rows)),) = found.items()
        return Found(scores, np.where(rows < 0, -1, number), rows)
    ids = [packed(number, rows) for number, (_, rows) in found.items()]
    best, chosen = topk.merge(np.hstack([scores for scores, _ in found.values()]), np.hstack(ids), k=k)
    return Found(best, *unpacked(chosen))


def _replaced(found: Found, queries: Int[ndarray, " some"], by: Found) -> Found:
    """With what another search found for some of the queries."""
    columns = max(found.rows.shape[1], by.rows.shape[1])

    def replaced(old: ndarray, new: ndarray, none: float) -> ndarray:
        wide = np.full((len(old), columns), none, old.dtype)
        wide[:, : old.shape[1]] = old
        wide[queries] = none
        wide[queries, : new.shape[1]] = new
        return wide

    return Found(
        replaced(found.scores, by.scores, -np.inf),
        replaced(found.segments, by.segments, -1.0),
        replaced(found.rows, by.rows, -1.0),
    )
