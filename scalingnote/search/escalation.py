"""Escalation: a cheap student encodes every query, its teacher again those that it is uncertain about.

    query -> student -> search -> ten best scores close together? -> teacher encodes the query -> search again
                                                                  -> otherwise: unchanged

A student of the teacher's space finds nearly the same documents, but orders them worse. The standard
deviation of its ten best scores shows where, without training: the order of candidates with similar scores is
uncertain. :class:`scalingnote.Index` searches this way; here is when to, and what it gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.errors import ConfigError

COMPARED = 10  # best scores whose standard deviation is taken
DEPTH = 100  # candidates of a query that the teacher scores
SHARES = tuple(step / 10 for step in range(11))


def doubt(scores: Float[ndarray, "queries k"]) -> Float[ndarray, " queries"]:
    """How uncertain the student's order is: minus the standard deviation of a query's ten best scores.

    Args:
        scores: best first; -inf where a query has no further candidate.

    Returns:
        At most 0, which is most doubt; -inf where there are fewer than two candidates to order.
    """
    best = scores[:, :COMPARED].astype(np.float64)
    found = np.isfinite(best)
    count = np.maximum(found.sum(axis=1), 1)
    mean = np.where(found, best, 0.0).sum(axis=1) / count
    squares = np.where(found, np.where(found, best, 0.0) - mean[:, None], 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=1) / count)
    return np.where(found.sum(axis=1) > 1, -deviation, -np.inf)


def threshold(doubts: Float[ndarray, " queries"], share: float) -> float:
    """The doubt above which a query escalates, such that at most `share` of these queries do.

    Args:
        doubts: of held-out queries, from :func:`doubt`.
        share: in [0, 1]. 0 gives inf (no query escalates), 1 gives -inf (every query with two candidates).

    Raises:
        ConfigError: `share` is outside [0, 1], or there are no queries to tune on.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of queries that escalate is {share:g}: give a number from 0 to 1")
    if share in (0, 1):
        return float("-inf" if share else "inf")
    if not len(doubts):
        raise ConfigError("no held-out queries to tune the threshold of escalation on: give some")
    most = int(share * len(doubts) + 1e-9)  # 0.29 * 100 is 28.999999999999996
    return float(np.sort(doubts)[::-1][most])


@dataclass(frozen=True)
class EscalationPoint:
    """One share of queries that escalate, and what it gives."""

    share: float
    """Asked for."""
    escalated: float
    """Reached: less than `share` where doubts are equal, more or less where tuned on other queries."""
    value: float
    """Mean of the metric."""
    cost: float
    """Mean per query, in the unit of the costs given."""


def curve(
    doubts: Float[ndarray, " queries"],
    student: Int[ndarray, "queries k"],
    teacher: Int[ndarray, "queries k"],
    metric: Callable[[Int[ndarray, "queries k"]], Float[ndarray, " queries"]],
    *,
    student_cost: float,
    teacher_cost: float,
    shares: Sequence[float] = SHARES,
    held_out: Float[ndarray, " queries2"] | None = None,
) -> list[EscalationPoint]:
    """Quality against cost, from no query escalated to all of them.

    Args:
        doubts: of the queries that are measured.
        student: each query's ranking as the student has it.
        teacher: the ranking once the teacher has re-ordered it.
        metric: a ranking of every query in, each query's value out, e.g. nDCG@10.
        student_cost: of encoding and searching one query; every query costs it.
        teacher_cost: of encoding one query, in the same unit; escalated queries cost it on top.
        shares: points of the curve.
        held_out: doubts of other queries to tune each threshold on; None tunes on `doubts`.

    Raises:
        ConfigError: as :func:`threshold`.
    """
    before, after = metric(student), metric(teacher)
    points = []
    for share in shares:
        chosen = doubts > threshold(doubts if held_out is None else held_out, share)
        escalated = float(chosen.mean())
        value = float(np.where(chosen, after, before).mean())
        points.append(EscalationPoint(share, escalated, value, student_cost + escalated * teacher_cost))
    return points
