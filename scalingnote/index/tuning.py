"""Tuning: the cheapest nprobe and refine_factor that reach a recall, on queries of the real query tower.

Queries are not drawn from where documents lie: a query tower is another model. So recall is measured on real
queries against their exact answers, never on perturbed documents.

    each shard, each nprobe ─► candidates by their codes, and their scores by the vectors kept
    all shards ─► the best refine_factor * k by codes ─► the best k of these ─► recall

That is what a searcher of all shards does; searchers of one shard each find no less. What a setting costs is
counted, not timed, so that the same inputs give the same index: codes scanned, and vectors scored anew, which
cost as much as 16 codes each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.index import ivf, rescore
from scalingnote.index.config import Refine
from scalingnote.log import get_logger

FACTORS = (1, 2, 4, 8, 16)
RESCORED = 16  # codes scanned in the time of scoring one kept vector (fast scan, 128 dimensions)
FLAT = 0.002  # recall that a doubling of nprobe must bring to be worth its time


class Candidates(NamedTuple):
    """What a shard's lists hold for queries."""

    rows: Int[ndarray, "queries candidates"]  # -1 where there are fewer
    by_codes: Float[ndarray, "queries candidates"]
    by_vectors: Float[ndarray, "queries candidates"]
    scanned: float  # codes per query


@dataclass(frozen=True)
class Point:
    """A setting, what it finds and what it costs."""

    nprobe: int
    refine_factor: int
    recall: float
    cost: float  # codes per query, of all shards


def probes(nlist: int) -> list[int]:
    """Powers of two up to all lists."""
    return [*(1 << power for power in range(nlist.bit_length()) if 1 << power < nlist), nlist]


def factors(family: str, refine: Refine) -> tuple[int, ...]:
    """Refine factors to try; a flat index compares by the vectors it keeps anyway."""
    return FACTORS if refine != "none" and family != "flat" else (1,)


def candidates(
    lists: ivf.Lists,
    queries: Float[ndarray, "queries dim"],
    *,
    nprobe: int,
    k: int,
) -> Candidates:
    """A shard's share in the measurement of one nprobe: its k best by codes."""
    chosen = ivf.choose_lists(queries, lists.coarse, nprobe=nprobe)
    scores, rows = ivf.scan(lists, queries, chosen=chosen, k=k)
    exact = scores if lists.kept is None else rescore.scores(lists.kept, queries, rows)
    scanned = len(lists) if lists.index is None else _list_sizes(lists)[chosen[1]].sum() / len(queries)
    return Candidates(rows, scores, exact, float(scanned))


def measure(
    shards: Sequence[Candidates],
    exact: Int[ndarray, "queries k"],
    *,
    nprobe: int,
    factors: Sequence[int],
) -> list[Point]:
    """The points of one nprobe, for every refine factor; `exact` holds -1 where there are fewer documents."""
    rows, codes, vectors = (np.concatenate([shard[i] for shard in shards], axis=1) for i in range(3))
    order = np.argsort(-codes, axis=1, kind="stable")
    k = exact.shape[1]
    points = []
    for factor in factors:
        best = order[:, : factor * k]
        found = topk.merge(*(np.take_along_axis(x, best, axis=1) for x in (vectors, rows)), k=k)[1]
        cost = sum(shard.scanned for shard in shards) + factor * k * RESCORED
        points.append(Point(nprobe, factor, round(recall(found, exact), 4), round(cost, 1)))
    return points


def recall(found: Int[ndarray, "queries k"], exact: Int[ndarray, "queries k"]) -> float:
    """Mean share of each query's exact answer that was found."""
    shares = [
        np.isin(theirs[theirs >= 0], mine).mean()
        for mine, theirs in zip(found, exact, strict=True)
        if (theirs >= 0).any()
    ]
    return float(np.mean(shares))


def choose(points: Sequence[Point], *, target: float) -> Point:
    """The cheapest point that reaches the target; where none does, of the best, and a warning."""
    enough = [point for point in points if point.recall >= target]
    if enough:
        return min(enough, key=lambda point: (point.cost, point.nprobe))
    best = max(point.recall for point in points)
    chosen = min((p for p in points if p.recall > best - FLAT), key=lambda point: (point.cost, point.nprobe))
    get_logger("index").warning(
        "recall %.3f is the most this index finds, %.3f was asked for, and more than nprobe=%d does not "
        "move it: its codes are too coarse. Keep finer vectors (index.family.refine=flat) or take a finer "
        "family (ivf_sq8)",
        best,
        target,
        chosen.nprobe,
    )
    return chosen


def _list_sizes(lists: ivf.Lists) -> Int[ndarray, " nlist"]:
    inverted = lists.index.invlists  # type: ignore[union-attr]
    return np.array([inverted.list_size(number) for number in range(inverted.nlist)])
