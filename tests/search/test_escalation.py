"""Escalation on arrays small enough to compute by hand."""

import numpy as np
import pytest

from scalingnote.core.errors import ConfigError
from scalingnote.search.query_path import MIN_QUERIES, DoubtWindow, doubt, escalation_threshold

INF = float("inf")


def test_doubt_is_minus_the_variation_of_the_five_best():
    scores = np.array([np.linspace(1, 0, 12), np.ones(12)])
    best = np.linspace(1, 0, 12)[:5]
    assert doubt(scores).tolist() == pytest.approx([-np.std(best) / np.mean(best), 0.0])
    assert doubt(0.5 * scores) == pytest.approx(doubt(scores))
    assert doubt(np.array([[0.1, -0.1], [-0.2, -0.9]])).tolist() == [
        0.0,
        0.0,
    ]  # no document resembles the query


def test_doubt_with_few_candidates():
    scores = np.array(
        [[0.9, 0.5, -INF, -INF], [0.9, -INF, -INF, -INF], [-INF] * 4, [0.4, 0.4, 0.4, 0.4]], np.float32
    )
    assert doubt(scores).tolist() == pytest.approx([-0.2 / 0.7, -INF, -INF, 0.0])
    assert doubt(scores[:, :1]).tolist() == [-INF] * 4
    assert doubt(np.empty((0, 3))).tolist() == []


@pytest.mark.parametrize(("share", "most"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_threshold_lets_the_share_escalate(share, most):
    doubts = np.array([-0.4, -0.1, -0.3, -0.2])
    assert (doubts > escalation_threshold(doubts, share)).sum() == most
    assert escalation_threshold(doubts, 0.5) == pytest.approx(-0.25)  # between two doubts
    tied = np.array([-0.1, -0.2, -0.2, -0.2])
    assert (tied > escalation_threshold(tied, 0.5)).tolist() == [True, False, False, False]


def test_rounding_does_not_reduce_the_share():
    doubts = -np.arange(100.0)
    assert all((doubts > escalation_threshold(doubts, n / 100)).sum() == n for n in range(101))


def test_a_threshold_needs_a_share_and_queries():
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            escalation_threshold(np.zeros(3), share)
    with pytest.raises(ConfigError, match="no held-out queries"):
        escalation_threshold(np.empty(0), 0.3)
    assert escalation_threshold(np.empty(0), 0.0) == INF


def test_the_share_refers_to_the_latest_queries():
    def spread(value: float) -> np.ndarray:
        return 0.9 - 0.1 * value * np.arange(10, dtype=np.float32)

    rng = np.random.default_rng(0)
    window = DoubtWindow(share=0.3)
    first = [window.is_uncertain(spread(value)) for value in rng.random(MIN_QUERIES)]
    assert not any(first)  # there are too few scores for a threshold
    for scale in (1.0, 0.01):  # then an index with scores closer together
        for value in rng.random(1000):
            window.is_uncertain(spread(scale * value))
        escalated = [window.is_uncertain(spread(scale * value)) for value in rng.random(2000)]
        assert np.mean(escalated) == pytest.approx(0.3, abs=0.04)
    assert [window.is_uncertain(spread(0.01 * value)) for value in (0.0, 1.0)] == [True, False]
    single = np.ones(1, np.float32)  # one document has no order
    assert not window.is_uncertain(single)
    assert not DoubtWindow(share=1.0).is_uncertain(single)
