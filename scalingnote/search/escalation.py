"""Which queries the teacher encodes in place of the student.

    search ─► five best scores close together? ─► the teacher encodes the query ─► search again
                                               └► otherwise: unchanged

A student finds nearly the same documents as its teacher, but orders them worse. The order is uncertain if the
five best scores have a small standard deviation for their height. :class:`scalingnote.Index` tunes the
threshold on held-out queries, :mod:`scalingnote.serve.escalation` on its latest ones.
"""

from collections import deque

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import ConfigError

COMPARED = 5  # best scores whose variation is taken
WINDOW = 1000  # latest queries that a share is a share of
MIN_QUERIES = 100  # before the first one escalates, unless all do
TUNING_INTERVAL = 20  # queries


def doubt(scores: Float[ndarray, "queries k"]) -> Float[ndarray, " queries"]:
    """How uncertain the student's order is: minus the coefficient of variation of a query's five best scores.

    That is their standard deviation over their mean. `scores` are best first, -inf where a query has no
    further candidate. The result is at most 0, which is most doubt, also where the mean is not above 0:
    nothing is like the query. It is -inf where there are fewer than two candidates to order.
    """
    best = scores[:, :COMPARED].astype(np.float64)
    found = np.isfinite(best)
    count = np.maximum(found.sum(axis=1), 1)
    best = np.where(found, best, 0.0)
    mean = best.sum(axis=1) / count
    squares = np.where(found, best - mean[:, None], 0.0) ** 2
    deviation = np.sqrt(squares.sum(axis=1) / count)
    variation = np.divide(deviation, mean, out=np.zeros_like(mean), where=mean > 0)
    return np.where(found.sum(axis=1) > 1, -variation, -np.inf)


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
    ranked = np.sort(doubts)[::-1]
    # Between two of them: the last digits of a query's scores differ, alone and among others.
    return float((ranked[max(most - 1, 0)] + ranked[most]) / 2)


class DoubtWindow:
    """Which queries escalate in a stream of queries.

    Args:
        share: of the latest WINDOW queries.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._doubts: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._limit = float("-inf") if share == 1 else float("inf")

    def is_uncertain(self, scores: Float[ndarray, " candidates"]) -> bool:
        """Whether a query with these scores, in any order, escalates."""
        value = float(doubt(-np.sort(-scores)[np.newaxis, :COMPARED])[0])
        uncertain = value > self._limit  # before it counts itself
        if self._share < 1:
            self._doubts.append(value)
            self._seen += 1
            if self._seen >= MIN_QUERIES and self._seen % TUNING_INTERVAL == 0:
                self._limit = threshold(np.array(self._doubts), self._share)
        return uncertain
