"""One search over segments: lists are chosen once, every segment is scanned, the best of all are the answer.

    queries ─► lists to scan ─► each segment's k best ─► the k best of all

A *segment* is vectors that are scanned together: those of the shards a searcher holds, or those a live shard
has taken since. Of k results asked for, all k come back wherever k documents may be found: the rarer these
are, the more lists are scanned; where they are few, each is scored; and a scan that falls short is repeated
over all lists.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
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
    """The best of each query, best first; -inf and -1 behind the last. `late` are segments left out."""

    scores: Float[ndarray, "queries k"]
    segments: Int[ndarray, "queries k"]
    rows: Int[ndarray, "queries k"]
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How a search goes about its work."""

    nprobe: int
    refine_factor: int
    deadline_s: float | None = None
    pool: Executor | None = None  # scans several segments at once
    exact: bool = False  # score every document by the vectors kept; without such, scan all lists


def search(
    segments: Sequence[ivf.Lists],
    queries: Float[ndarray, "queries dim"],
    *,
    k: int,
    plan: Plan,
    masks: Masks | None = None,
) -> Found:
    """The k best documents of each query; `masks` say which rows of each segment may be found, None all.

    After the deadline no further segment is begun; one at least is searched.
    """
    end = None if plan.deadline_s is None else time.monotonic() + plan.deadline_s
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
        return _gather(_score_all(segments, queries, k=k, masks=masks, there=there), there, k=k)

    probed = partial(_probe, segments, masks=masks, there=there, k=k, plan=plan, end=end)
    found = probed(queries, nprobe=nprobe)
    if nprobe == nlist or found.late:
        return found
    short = np.flatnonzero((found.rows >= 0).sum(axis=1) < min(k, sum(allowed)))
    if not len(short):
        return found
    whole = probed(queries[short], nprobe=nlist)
    return found if whole.late else _replaced(found, short, whole)


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
    end: float | None,
) -> Found:
    """The best of the lists that each query's nearest centroids name, in every segment."""
    coarse = {id(segments[number].coarse): segments[number].coarse for number in there}
    chosen = {
        key: ivf.choose_lists(queries, index, nprobe=min(nprobe, index.ntotal))
        for key, index in coarse.items()
    }
    scan = partial(_scan, segments, queries, chosen, masks=masks, k=k, refine_factor=plan.refine_factor)
    return _gather(_in_time(scan, there, end, plan.pool), there, k=k)


def _scan(
    segments: Sequence[ivf.Lists],
    queries: Float[ndarray, "queries dim"],
    chosen: Mapping[int, ivf.Chosen],
    number: int,
    *,
    masks: Masks,
    k: int,
    refine_factor: int,
) -> Rows:
    lists, mask = segments[number], masks[number]
    bitmap = None if mask is None else ivf.bitmap(mask)
    of_lists = chosen[id(lists.coarse)]
    return ivf.search(lists, queries, chosen=of_lists, k=k, refine_factor=refine_factor, allowed=bitmap)


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


def _in_time(
    work: Callable[[int], Rows], numbers: Sequence[int], end: float | None, pool: Executor | None
) -> dict[int, Rows]:
    """What each segment found before the time was up; one at least."""
    if pool is None or len(numbers) == 1:
        found: dict[int, Rows] = {}
        for number in numbers:
            if found and end is not None and time.monotonic() >= end:
                break
            found[number] = work(number)
        return found
    running = {pool.submit(work, number): number for number in numbers}
    done, late = wait(running, None if end is None else max(end - time.monotonic(), 0.0))
    for future in late:
        future.cancel()
    if not done:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
    return {number: future.result() for future, number in running.items() if future in done}


def _gather(found: dict[int, Rows], there: Sequence[int], *, k: int) -> Found:
    """The best of all segments; of equal scores the lower segment, then row, comes first."""
    late = tuple(number for number in there if number not in found)
    if len(found) == 1:
        ((number, (scores, rows)),) = found.items()
        return Found(scores, np.where(rows < 0, -1, number), rows, late)
    ids = [packed(number, rows) for number, (_, rows) in found.items()]
    best, chosen = topk.merge(np.hstack([scores for scores, _ in found.values()]), np.hstack(ids), k=k)
    return Found(best, *unpacked(chosen), late)


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
