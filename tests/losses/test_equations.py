"""Every numbered equation against a float64 transcription in numpy, written term by term."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from scalingnote.losses.contrastive import info_nce
from scalingnote.losses.distillation import qkd
from scalingnote.losses.margin import margin_loss
from scalingnote.losses.matryoshka import over_prefixes
from scalingnote.models.tower import Batch
from scalingnote.train.config import Losses
from scalingnote.train.objective import Triplets, stage_one_loss

TAU = 0.07


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def nothing_ignored(rows: int, columns: int) -> torch.Tensor:
    return torch.zeros(rows, columns, dtype=torch.bool)


def test_equation_5_query_to_document():
    queries, documents = draw(5, 8), draw(7, 8, seed=1)
    expected = 0.0
    for i in range(5):
        right = np.exp(cos(queries[i], documents[i]) / TAU)
        total = sum(np.exp(cos(queries[i], documents[j]) / TAU) for j in range(7))
        expected -= np.log(right / total) / 5
    unit = [F.normalize(torch.tensor(x), dim=-1) for x in (queries, documents)]
    found = info_nce(*unit, positives=torch.arange(5), ignore=nothing_ignored(5, 7), temperature=TAU)
    assert found.item() == pytest.approx(expected, rel=1e-9)


def test_ignored_candidates_leave_the_denominator_but_a_positive_never_does():
    queries, documents = draw(3, 8), draw(4, 8, seed=1)
    unit = [F.normalize(torch.tensor(x), dim=-1) for x in (queries, documents)]
    ignore = nothing_ignored(3, 4)
    ignore[0, 0] = ignore[0, 2] = True
    found = info_nce(*unit, positives=torch.arange(3), ignore=ignore, temperature=TAU)
    expected = 0.0
    for i in range(3):
        columns = [0, 1, 3] if i == 0 else range(4)
        total = sum(np.exp(cos(queries[i], documents[j]) / TAU) for j in columns)
        expected -= np.log(np.exp(cos(queries[i], documents[i]) / TAU) / total) / 3
    assert found.item() == pytest.approx(expected, rel=1e-9)


def test_equation_9_margin():
    queries, positives, negatives = draw(4, 6), draw(4, 6, seed=1), draw(4, 2, 6, seed=2)
    expected = np.mean(
        [
            max(0.0, 0.2 - cos(queries[i], positives[i]) + cos(queries[i], negatives[i, n]))
            for i in range(4)
            for n in range(2)
        ]
    )
    unit = [F.normalize(torch.tensor(x), dim=-1) for x in (queries, positives, negatives)]
    assert margin_loss(*unit, margin=0.2).item() == pytest.approx(expected, rel=1e-9)


def test_equation_15_qkd():
    teacher, student = draw(6, 5), draw(6, 5, seed=1)
    expected = np.mean(
        [np.sum((t - s) ** 2) - 1.5 * cos(t, s) for t, s in zip(teacher, student, strict=True)]
    )
    found = qkd(torch.tensor(teacher), torch.tensor(student), cosine_weight=1.5)
    assert found.item() == pytest.approx(expected, rel=1e-9)


def test_prefixes_are_normalised_again_and_weighted():
    left, right = draw(3, 8), draw(3, 8, seed=1)

    def mean_cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum(-1).mean()

    found = over_prefixes(
        mean_cosine, torch.tensor(left), torch.tensor(right), dims=(2, 8), weights=(0.5, 2.0)
    )
    expected = sum(
        weight * np.mean([cos(left[i, :m], right[i, :m]) for i in range(3)])
        for m, weight in ((2, 0.5), (8, 2.0))
    )
    assert found.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("denominator", ["positives_only", "positives_and_negatives"])
def test_equations_5_to_12_together(denominator: str):
    size, dims = 4, (3, 6)
    queries, documents = draw(size, 6), draw(2 * size, 3, 6, seed=1)
    query_ids = np.array([10, 11, 10, 13])  # the first and third are the same query
    document_ids = np.array([1, 2, 3, 4, 5, 6, 1, 7])  # the third hard negative is the first positive
    known = np.array([[1, 3], [2, -1], [1, 3], [4, 5]])  # the fourth query is also answered by 5
    empty = Batch(*(torch.zeros(1, 1, dtype=torch.long) for _ in range(3)))
    weights = np.array([1.0, 0.5, 2.0, 1.0])
    columns_of = (query_ids, document_ids, known, weights)
    triplets = Triplets(empty, empty, *(torch.tensor(column) for column in columns_of))
    losses = Losses(temperature=TAU, denominator=denominator, matryoshka=dims, alpha=0.5)
    contrastive, margin = stage_one_loss(torch.tensor(queries), torch.tensor(documents), triplets, losses)

    columns = 2 * size if denominator == "positives_and_negatives" else size
    expected_contrastive = expected_margin = 0.0
    for view in range(3):
        for m in dims:
            q, d = queries[:, :m], documents[:, view, :m]
            for i in range(size):
                kept = [
                    j
                    for j in range(columns)
                    if j == i or (document_ids[j] != document_ids[i] and document_ids[j] not in known[i])
                ]
                total = sum(np.exp(cos(q[i], d[j]) / TAU) for j in kept)
                expected_contrastive -= np.log(np.exp(cos(q[i], d[i]) / TAU) / total) * weights[i] / size / 2
                kept = [
                    j
                    for j in range(size)
                    if j == i or (query_ids[j] != query_ids[i] and document_ids[i] not in known[j])
                ]
                total = sum(np.exp(cos(q[j], d[i]) / TAU) for j in kept)
                expected_contrastive -= np.log(np.exp(cos(q[i], d[i]) / TAU) / total) * weights[i] / size / 2
                hinge = 0.2 - cos(q[i], d[i]) + cos(q[i], d[size + i])
                expected_margin += max(0.0, hinge) * weights[i] / size
    assert contrastive.item() == pytest.approx(expected_contrastive, rel=1e-6)
    assert margin.item() == pytest.approx(expected_margin, rel=1e-6)
