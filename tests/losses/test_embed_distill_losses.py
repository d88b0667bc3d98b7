"""EmbedDistill's losses against transcriptions of its equations, document by document, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote import losses
from scalingnote.losses import info_nce


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape) * 3)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(scores: list[float]) -> list[float]:
    return [math.exp(s) / sum(math.exp(other) for other in scores) for s in scores]


def equation_11(student: list[float], teacher: list[float]) -> float:
    pairs = zip(softmax(teacher), softmax(student), strict=True)
    return -sum(t * math.log(s) for t, s in pairs)


def equation_12(student: list[float], teacher: list[float]) -> float:
    return -sum(
        sigmoid(t) * math.log(sigmoid(s)) + sigmoid(-t) * math.log(sigmoid(-s))
        for s, t in zip(student, teacher, strict=True)
    )


def equation_13(student: list[float], teacher: list[float]) -> float:
    return sum((t - s) ** 2 for s, t in zip(student, teacher, strict=True))


EQUATIONS = {"softmax": equation_11, "bce": equation_12, "mse": equation_13}


@pytest.mark.parametrize("kind", EQUATIONS)
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), queries=st.integers(1, 5), documents=st.integers(1, 6))
def test_score_distillation_follows_its_equations(kind: str, seed: int, queries: int, documents: int):
    student, teacher = drawn(seed, queries, documents), drawn(seed + 1, queries, documents)
    weights = drawn(seed + 2, queries).abs()
    rng = np.random.default_rng(seed + 3)
    scored = torch.tensor(rng.random((queries, documents)) < 0.7)
    teacher[~scored] = torch.nan
    student.requires_grad_()
    found = losses.SCORE_LOSSES[kind](student, teacher, scored=scored, weights=weights)
    rows = [
        w * EQUATIONS[kind](s[m].tolist(), t[m].tolist())
        for w, s, t, m in zip(weights.tolist(), student, teacher, scored, strict=True)
        if m.any()
    ]
    assert found.item() == pytest.approx(sum(rows) / queries, rel=1e-9, abs=1e-12)
    found.backward()
    assert torch.isfinite(student.grad).all()
    assert (student.grad[~scored] == 0).all()


@pytest.mark.parametrize("kind", EQUATIONS)
def test_without_a_mask_every_document_counts(kind: str):
    student, teacher = drawn(0, 3, 4), drawn(1, 3, 4)
    expected = np.mean(
        [EQUATIONS[kind](s.tolist(), t.tolist()) for s, t in zip(student, teacher, strict=True)]
    )
    assert losses.SCORE_LOSSES[kind](student, teacher).item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", EQUATIONS)
def test_a_student_that_scores_as_its_teacher_has_nothing_to_learn(kind: str):
    teacher = drawn(0, 3, 4)
    student = teacher.clone().requires_grad_()
    losses.SCORE_LOSSES[kind](student, teacher).backward()
    assert student.grad.abs().max() < 1e-12


def test_equations_7_and_8_are_norms_and_not_squares():
    teacher, student, weights = drawn(0, 5, 3), drawn(1, 5, 3), drawn(2, 5).abs()
    rows = [
        w * math.sqrt(sum((a - b) ** 2 for a, b in zip(t, s, strict=True)))
        for w, t, s in zip(weights.tolist(), teacher.tolist(), student.tolist(), strict=True)
    ]
    assert losses.embedding_matching(teacher, student, weights=weights).item() == pytest.approx(sum(rows) / 5)
    student[2] = teacher[2]  # where they meet, there is no direction to go
    student.requires_grad_()
    losses.embedding_matching(teacher, student).backward()
    lengths = student.grad.norm(dim=1) * 5
    assert lengths.tolist() == pytest.approx([1, 1, 0, 1, 1])


def test_equation_9_is_the_contrastive_loss_of_stage_one():
    queries, documents = drawn(0, 3, 4), drawn(1, 7, 4)
    positives = torch.tensor([4, 0, 2])
    scores = (queries @ documents.T).tolist()
    expected = np.mean([-math.log(softmax(row)[p]) for row, p in zip(scores, positives, strict=True)])
    found = info_nce(queries, documents, positives=positives, temperature=1.0)
    assert found.item() == pytest.approx(expected)


def test_rows_of_eq_15_can_be_weighed():
    teacher, student, weights = drawn(0, 4, 3), drawn(1, 4, 3), torch.tensor([1.0, 0.0, 2.0, 1.0]).double()
    alone = [losses.qkd(teacher[i : i + 1], student[i : i + 1], cosine_weight=0.5).item() for i in range(4)]
    found = losses.qkd(teacher, student, cosine_weight=0.5, weights=weights).item()
    assert found == pytest.approx(np.dot(alone, weights.tolist()) / 4)
