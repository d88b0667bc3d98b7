"""Escalation on arrays small enough to compute by hand."""

import numpy as np
import pytest

from scalingnote.errors import ConfigError
from scalingnote.search.query_path import EscalationPoint, curve, doubt, threshold

INF = float("inf")


def test_doubt_is_minus_the_deviation_of_the_ten_best():
    scores = np.array([np.linspace(1, 0, 12), np.ones(12)])
    assert doubt(scores).tolist() == pytest.approx([-np.std(np.linspace(1, 0, 12)[:10]), 0.0])


def test_doubt_with_few_candidates():
    scores = np.array(
        [[0.9, 0.5, -INF, -INF], [0.9, -INF, -INF, -INF], [-INF] * 4, [0.4, 0.4, 0.4, 0.4]], np.float32
    )
    assert doubt(scores).tolist() == pytest.approx([-0.2, -INF, -INF, 0.0])
    assert doubt(scores[:, :1]).tolist() == [-INF] * 4
    assert doubt(np.empty((0, 3))).tolist() == []


@pytest.mark.parametrize(("share", "most"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.99, 3), (1.0, 4)])
def test_threshold_lets_the_share_escalate(share, most):
    doubts = np.array([-0.4, -0.1, -0.3, -0.2])
    assert (doubts > threshold(doubts, share)).sum() == most


def test_threshold_among_ties_lets_fewer_escalate():
    doubts = np.array([-0.1, -0.2, -0.2, -0.2])
    assert (doubts > threshold(doubts, 0.5)).tolist() == [True, False, False, False]
    assert (doubts > threshold(doubts, 1.0)).all()
    assert not (np.zeros(3) > threshold(np.full(3, -0.5), 0.0)).any()  # of other queries, neither


def test_threshold_is_not_short_of_one_query_by_rounding():
    doubts = -np.arange(100.0)
    assert all((doubts > threshold(doubts, n / 100)).sum() == n for n in range(101))


def test_threshold_errors():
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="from 0 to 1"):
            threshold(np.zeros(3), share)
    with pytest.raises(ConfigError, match="no held-out queries"):
        threshold(np.empty(0), 0.3)
    assert threshold(np.empty(0), 0.0) == INF


def test_curve():
    doubts = np.array([-0.3, -0.1, -0.2, -0.4])
    student, teacher = np.array([[0], [0], [1], [1]]), np.array([[1], [1], [0], [1]])
    points = curve(
        doubts,
        student,
        teacher,
        lambda ids: ids[:, 0].astype(float),  # document 1 is relevant to every query
        student_cost=1.0,
        teacher_cost=10.0,
        shares=(0.0, 0.25, 0.5, 1.0),
    )
    assert points == [
        EscalationPoint(0.0, 0.0, 0.5, 1.0),
        EscalationPoint(0.25, 0.25, 0.75, 3.5),
        EscalationPoint(0.5, 0.5, 0.5, 6.0),
        EscalationPoint(1.0, 1.0, 0.75, 11.0),
    ]


def test_curve_tuned_on_other_queries():
    ids = np.zeros((4, 1), int)
    (point,) = curve(
        np.array([-0.3, -0.1, -0.2, -0.4]),
        ids,
        ids,
        lambda ids: np.ones(len(ids)),
        student_cost=0.0,
        teacher_cost=2.0,
        shares=(0.5,),
        held_out=np.array([-0.05, -0.35]),
    )
    assert point == EscalationPoint(0.5, 0.75, 1.0, 1.5)
