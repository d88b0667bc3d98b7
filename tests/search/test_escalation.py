"""Escalation on arrays small enough to compute by hand, and put together over an exact search."""

import numpy as np
import pytest

from scalingnote import topk
from scalingnote.errors import ConfigError, SearchError
from scalingnote.search.escalation import Escalation, EscalationPoint, curve, doubt, rerank, threshold

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


def test_rerank_orders_by_the_teacher():
    documents = np.array([[[1.0, 0], [0, 1], [1, 0], [9, 9]], [[0, 1], [1, 0], [0.5, 0.5], [0, 2]]])
    ids = np.array([[7, 3, 5, -1], [4, 3, 2, 1]])
    scores, order = rerank(np.array([[1.0, 0], [0, 1]]), documents, ids)
    assert scores.tolist() == [[1, 1, 0, -INF], [2, 1, 0.5, 0]]
    assert np.take_along_axis(ids, order, axis=1).tolist() == [[5, 7, 3, -1], [1, 4, 2, 3]]


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


class Numbers:
    """An encoder of numbers: their embeddings are rows of a matrix. It keeps what it was asked."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def __call__(self, texts):
        self.asked.append(list(texts))
        return self.rows[[int(text) for text in texts]]


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    documents = rng.normal(size=(40, 6))
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    teacher = rng.normal(size=(20, 6))
    student = teacher + 0.5 * rng.normal(size=(20, 6))
    return documents, Numbers(student), Numbers(teacher)


def escalation(parts, **knobs):
    documents, student, teacher = parts
    return Escalation(
        student=student,
        teacher=teacher,
        search=lambda queries, k: topk.search(queries, documents, k=k),
        embeddings=lambda ids: documents[ids],
        **knobs,
    )


QUERIES = [str(number) for number in range(20)]


def test_no_query_escalates_by_default(parts):
    documents, student, teacher = parts
    answer = escalation(parts).answer(QUERIES, k=5)
    assert not answer.escalated.any()
    assert teacher.asked == []
    assert (answer.ids == topk.search(student.rows, documents, k=5)[1]).all()


def test_every_query_escalated_over_all_documents_is_the_teachers_search(parts):
    documents, _, teacher = parts
    answer = escalation(parts).tuned([], 1.0).answer(QUERIES, k=5)
    unit = teacher.rows / np.linalg.norm(teacher.rows, axis=1, keepdims=True)
    scores, ids = topk.search(unit, documents, k=5)
    assert answer.escalated.all()
    assert (answer.ids == ids).all()
    np.testing.assert_allclose(answer.scores, scores, atol=1e-12)


def test_a_share_escalates_and_the_others_keep_their_order(parts):
    made = escalation(parts, depth=10).tuned(QUERIES, 0.3)
    teacher = parts[2]
    plain, answer = escalation(parts).answer(QUERIES, k=5), made.answer(QUERIES, k=5)
    assert answer.escalated.sum() == 6
    assert teacher.asked == [[query for query, asked in zip(QUERIES, answer.escalated, strict=True) if asked]]
    assert (answer.ids[~answer.escalated] == plain.ids[~answer.escalated]).all()
    ten = escalation(parts).answer(QUERIES, k=10).ids
    assert all(set(found) <= set(best) for found, best in zip(answer.ids, ten, strict=True))


def test_candidates_that_are_missing_stay_last(parts):
    documents, student, teacher = parts

    def search(queries, k):
        scores, ids = topk.search(queries, documents[:4], k=k)
        scores[:, 3:], ids[:, 3:] = -np.inf, -1
        scores[0, 1:], ids[0, 1:] = -np.inf, -1
        return scores, ids

    made = Escalation(student, teacher, search, lambda ids: documents[ids], threshold=-INF)
    answer = made.answer(QUERIES, k=10)
    assert answer.ids.shape == (20, 4)
    assert (answer.ids[:, 3] == -1).all()
    assert answer.escalated.tolist() == [False] + [True] * 19
    assert (np.diff(answer.scores[1:, :3]) <= 0).all()


def test_errors(parts):
    with pytest.raises(SearchError, match="at least 1"):
        escalation(parts).answer(QUERIES, k=0)
    documents, student, _ = parts
    narrow = Numbers(np.ones((20, 3)))
    with pytest.raises(SearchError, match="3 dimensions, the documents' 6"):
        escalation((documents, student, narrow), threshold=-INF).answer(QUERIES, k=3)
    assert escalation(parts, threshold=-INF).answer([], k=3).ids.shape == (0, 3)
