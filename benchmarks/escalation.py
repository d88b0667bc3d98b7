"""Quality against the share of queries that the teacher encodes in place of the student."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.search.query_path import threshold

DEPTH = 100  # candidates of a query that the teacher scores
SHARES = tuple(step / 10 for step in range(11))


@dataclass(frozen=True)
class EscalationPoint:
    """One share of queries that escalate, and its quality."""

    share: float  # asked for
    escalated: float  # reached: less than `share` where doubts are equal
    value: float  # mean of the metric


def curve(
    doubts: Float[ndarray, " queries"],
    student: Int[ndarray, "queries k"],
    teacher: Int[ndarray, "queries k"],
    metric: Callable[[Int[ndarray, "queries k"]], Float[ndarray, " queries"]],
    *,
    shares: Sequence[float] = SHARES,
) -> list[EscalationPoint]:
    """Quality from no query escalated to all of them.

    Args:
        doubts: of the queries, from :func:`scalingnote.search.query_path.doubt`.
        student: the student's ranking of each query.
        teacher: the ranking once the teacher has re-ordered it.
        metric: maps the rankings of all queries to a value per query, e.g. nDCG@10.
        shares: points of the curve.
    """
    before, after = metric(student), metric(teacher)
    points = []
    for share in shares:
        chosen = doubts > threshold(doubts, share)
        value = float(np.where(chosen, after, before).mean())
        points.append(EscalationPoint(share, float(chosen.mean()), value))
    return points
