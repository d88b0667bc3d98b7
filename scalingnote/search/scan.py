"""One search over segments: which lists to scan, candidates by codes, their scores by the vectors kept.

    queries ─► lists, chosen once ─► a scan per segment ─► the best k * refine_factor of all ─► rescored ─► k

A *segment* is vectors that are scanned together: a shard's own, or those a live shard has taken since. The
vectors kept are read for the best candidates of all segments, not of each, so that four shards in a process
cost little more than one. Of k results asked for, all k come back wherever k documents may be found: a scan
that falls short is repeated over more lists.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.index import ivf
from scalingnote.index.tuning import RESCORED

# A segment and a row as one number that sorts by segment, then row.
ROW_BITS = 40


@dataclass(frozen=True)
class Segment:
    """Vectors of a shard; their rows are numbered from `first_row` in it."""

    shard: int
    first_row: int
    lists: ivf.Lists


@dataclass(frozen=True)
class Found:
    """The best of each query, best first; -inf and -1 behind the last. `late` are segments left out."""

    scores: Float[ndarray, "queries k"]
    segments: Int[ndarray, "queries k"]
    rows: Int[ndarray, "queries k"]  # in the shard
    late: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How a search goes about its work."""

    centroids: Float[ndarray, "nlist dim"]
    nprobe: int
    refine_factor: int
    deadline_s: float | None = None
    pool: Executor | None = None  # scans several segments at once


def search(
    segments: Sequence[Segment],
    queries: Float[ndarray, "queries dim"],
    *,
    k: int,
    plan: Plan,
    masks: Sequence[Bool[ndarray, " _"] | None],
) -> Found:
    """The k best documents of each query in all segments; `masks` say which rows may be found, None all."""
    start = time.monotonic()
    rows = [len(segment.lists) for segment in segments]
    allowed = [count if mask is None else int(mask.sum()) for count, mask in zip(rows, masks, strict=True)]
    there = [number for number, count in enumerate(allowed) if count]
    if not there or not len(queries):
        return _nothing(len(queries))
    share, nlist = sum(allowed) / sum(rows), len(plan.centroids)
    nprobe = min(nlist, int(np.ceil(plan.nprobe / share)))
    codes = sum(rows) * nprobe / nlist
    if share < 1 and _kept(segments, there) and sum(allowed) * RESCORED <= codes:
        return _score_all(segments, queries, k=k, masks=masks, there=there)

    end = None if plan.deadline_s is None else start + plan.deadline_s
    found = _probe(segments, queries, k=k, nprobe=nprobe, plan=plan, masks=masks, there=there, end=end)
    short = np.flatnonzero((found.rows >= 0).sum(axis=1) < min(k, sum(allowed)))
    if not len(short) or nprobe == nlist or found.late:
        return found
    rest = queries[short]
    whole = _probe(segments, rest, k=k, nprobe=nlist, plan=plan, masks=masks, there=there, end=end)
    return found if whole.late else _replaced(found, short, whole)


def _probe(
    segments: Sequence[Segment],
    queries: Float[ndarray, "queries dim"],
    *,
    k: int,
    nprobe: int,
    plan: Plan,
    masks: Sequence[Bool[ndarray, " _"] | None],
    there: Sequence[int],
    end: float | None,
) -> Found:
    """The k best documents in so many lists of the segments `there`."""
    chosen = ivf.choose_lists(queries, plan.centroids, nprobe=nprobe)
    wide = k * plan.refine_factor

    def scan(number: int) -> tuple[ndarray, ndarray]:
        mask = masks[number]
        allowed = None if mask is None else ivf.bitmap(mask)
        return ivf.scan(segments[number].lists, queries, chosen=chosen, k=wide, allowed=allowed)

    found = _in_time(scan, there, end, plan.pool)
    scores = [scores for scores, _ in found.values()]
    ids = [_pack(number, rows) for number, (_, rows) in found.items()]
    if len(found) > 1:
        scores, ids = ([x] for x in topk.merge(np.hstack(scores), np.hstack(ids), k=wide))
    late = tuple(number for number in there if number not in found)
    return _finish(segments, queries, scores[0], ids[0], k=k, late=late)


def _finish(
    segments: Sequence[Segment],
    queries: Float[ndarray, "queries dim"],
    scores: Float[ndarray, "queries candidates"],
    ids: Int[ndarray, "queries candidates"],
    *,
    k: int,
    late: tuple[int, ...],
) -> Found:
    """Candidates scored by the vectors their segments keep, and the k best of them."""
    where, rows = _unpack(ids)
    exact = np.array(scores)
    for number in np.unique(where[where >= 0]).tolist():
        here = where == number
        found = ivf.rescore(segments[number].lists, queries, scores, np.where(here, rows, -1))
        np.copyto(exact, found, where=here)
    best, chosen = topk.merge(exact, ids, k=k)
    return _numbered(segments, best, chosen, late)


def _score_all(
    segments: Sequence[Segment],
    queries: Float[ndarray, "queries dim"],
    *,
    k: int,
    masks: Sequence[Bool[ndarray, " _"] | None],
    there: Sequence[int],
) -> Found:
    """Every document that may be found, scored: cheaper than a scan where a filter leaves few."""
    found = []
    for number in there:
        mask = masks[number]
        lists = segments[number].lists
        rows = np.arange(len(lists)) if mask is None else np.flatnonzero(mask)
        scores, best = ivf.score_all(lists, queries, rows, k=k)
        found.append((scores, _pack(number, best)))
    scores, ids = (np.hstack(column) for column in zip(*found, strict=True))
    return _numbered(segments, *topk.merge(scores, ids, k=k), ())


def _in_time(
    work: Callable[[int], tuple[ndarray, ndarray]],
    numbers: Sequence[int],
    end: float | None,
    pool: Executor | None,
) -> dict[int, tuple[ndarray, ndarray]]:
    """What each segment found before the time was up; one at least."""
    if pool is None or len(numbers) == 1:
        found: dict[int, tuple[ndarray, ndarray]] = {}
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


def _kept(segments: Sequence[Segment], numbers: Sequence[int]) -> bool:
    return all(segments[number].lists.kept is not None for number in numbers)


def _numbered(segments: Sequence[Segment], scores: ndarray, ids: ndarray, late: tuple[int, ...]) -> Found:
    where, rows = _unpack(ids)
    first = np.array([segment.first_row for segment in segments])
    return Found(scores, where, np.where(where < 0, -1, rows + first[where]), late)


def _nothing(queries: int) -> Found:
    none = np.empty((queries, 0), np.int64)
    return Found(none.astype(np.float32), none, none)


def _pack(segment: int, rows: Int[ndarray, "queries k"]) -> Int[ndarray, "queries k"]:
    return np.where(rows < 0, -1, (segment << ROW_BITS) + rows)


def _unpack(ids: Int[ndarray, "queries k"]) -> tuple[ndarray, ndarray]:
    return np.where(ids < 0, -1, ids >> ROW_BITS), np.where(ids < 0, -1, ids % (1 << ROW_BITS))


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
