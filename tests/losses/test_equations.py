"""Every numbered equation of both stages against a float64 transcription in numpy, written term by term."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

import tiny
from scalingnote.losses import info_nce, margin_loss, prefixes, qkd
from scalingnote.models import backbone as backbones
from scalingnote.models import batch, dual_encoder
from scalingnote.models.batch import Batch
from scalingnote.train.candidates import Triplets, gather_candidates
from scalingnote.train.config import Losses, TeacherScores
from scalingnote.train.objective import dense_loss

TAU = 0.07
EMPTY = Batch(*(torch.zeros(1, 1, dtype=torch.long) for _ in range(3)))


def cos(a: ndarray, b: ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def draw(*shape: int, seed: int = 0) -> ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def unit(*arrays: ndarray) -> list[torch.Tensor]:
    return [F.normalize(torch.tensor(array), dim=-1) for array in arrays]


@pytest.mark.parametrize(
    ("role", "backbone", "views"),
    [("query", tiny.CAUSAL, 1), ("document", tiny.CAUSAL, 3), ("query", tiny.BIDIRECTIONAL, 1)],
)
@pytest.mark.parametrize("held_in", [torch.float32, torch.bfloat16])
def test_equations_1_to_4_13_and_14_project_the_states_at_a_rows_positions(role, backbone, views, held_in):
    learnt = backbones.train_tokenizer(["some words to learn from"], vocabulary=400)
    config = tiny.query_tower(backbone) if role == "query" else tiny.document_tower(backbone)
    made = dual_encoder.build_tower(config, role=role, dim=5, tokenizer_json=learnt, seed=0).eval()
    rows = made.prompt.rows(*([["words", "some words to learn"]] * (1 if role == "query" else 3)))
    made.projection.to(held_in)  # what is rounded is the weight, not the embeddings
    found = made(batch.collate(rows, pad=made.pad)).detach().numpy()
    matrix = made.projection.weight.detach().double().numpy()
    for i, row in enumerate(rows):
        hidden = (
            made.backbone(input_ids=torch.tensor([row.ids])).last_hidden_state[0].detach().double().numpy()
        )
        assert len(row.positions) == views
        if role == "query":  # [EOS] of a causal model, [CLS] of a student
            assert row.positions == [len(row.ids) - 1 if backbone is tiny.CAUSAL else 0]
        for view, position in enumerate(row.positions):
            np.testing.assert_allclose(found[i, view], matrix @ hidden[position], rtol=1e-4, atol=1e-5)


def test_equation_5_query_to_document():
    queries, documents = draw(5, 8), draw(7, 8, seed=1)
    expected = 0.0
    for i in range(5):
        right = np.exp(cos(queries[i], documents[i]) / TAU)
        total = sum(np.exp(cos(queries[i], documents[j]) / TAU) for j in range(7))
        expected -= np.log(right / total) / 5
    found = info_nce(*unit(queries, documents), positives=torch.arange(5), temperature=TAU)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_equation_6_document_to_query():
    queries, documents = draw(5, 8), draw(5, 8, seed=1)
    expected = 0.0
    for i in range(5):
        right = np.exp(cos(queries[i], documents[i]) / TAU)
        total = sum(np.exp(cos(queries[j], documents[i]) / TAU) for j in range(5))
        expected -= np.log(right / total) / 5
    found = info_nce(*unit(documents, queries), positives=torch.arange(5), temperature=TAU)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_equations_7_and_10_prefixes_are_normalised_again_and_weighted():
    left, right = draw(3, 8), draw(3, 8, seed=1)
    found = sum(
        weight * (a * b).sum(-1).mean()
        for weight, (a, b) in prefixes(
            torch.tensor(left), torch.tensor(right), dims=(2, 8), weights=(0.5, 2.0)
        )
    )
    expected = sum(
        weight * np.mean([cos(left[i, :m], right[i, :m]) for i in range(3)])
        for m, weight in ((2, 0.5), (8, 2.0))
    )
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_equation_9_margin():
    queries, positives, negatives = draw(4, 6), draw(4, 6, seed=1), draw(4, 2, 6, seed=2)
    cosines = np.array(
        [[cos(queries[i], d) for d in (positives[i], *negatives[i])] for i in range(4)], dtype=np.float64
    )
    expected = np.mean(
        [max(0.0, 0.2 - cosines[i, 0] + cosines[i, 1 + n]) for i in range(4) for n in range(2)]
    )
    assert margin_loss(torch.tensor(cosines), margin=0.2).item() == pytest.approx(expected, rel=1e-12)


def test_equation_15_qkd():
    teacher, student = draw(6, 5), draw(6, 5, seed=1)
    expected = np.mean(
        [np.sum((t - s) ** 2) - 1.5 * cos(t, s) for t, s in zip(teacher, student, strict=True)]
    )
    found = qkd(torch.tensor(teacher), torch.tensor(student), cosine_weight=1.5)
    assert found.item() == pytest.approx(expected, rel=1e-12)


def stage_one_loss(
    queries, documents, triplets: Triplets, losses: Losses, **knobs
) -> dict[str, torch.Tensor]:
    return dense_loss(queries, gather_candidates(triplets, documents, losses), losses, **knobs)


@dataclass
class Rows:
    """A global batch in numpy: group 0 of `documents` are the positives."""

    queries: ndarray  # [queries, dim]
    documents: ndarray  # [group, queries, views, dim]
    query_ids: ndarray
    document_ids: ndarray  # [group, queries]
    known: ndarray  # [queries, known]
    weights: ndarray
    scores: ndarray  # [queries, group]

    def triplets(self) -> Triplets:
        ids = self.document_ids.reshape(-1)
        columns = (self.query_ids, ids, self.known, self.weights, self.scores)
        return Triplets(EMPTY, EMPTY, *(torch.tensor(column) for column in columns))


def rows_of(size: int, group: int, *, views: int, dim: int, seed: int) -> Rows:
    """Few distinct ids, so that duplicates and known positives are common; one row in three unscored."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(size, group))
    scores[rng.random(size) < 0.3, 0] = np.nan
    return Rows(
        queries=rng.normal(size=(size, dim)),
        documents=rng.normal(size=(group, size, views, dim)),
        query_ids=rng.integers(0, 6, size),
        document_ids=rng.integers(0, 12, (group, size)),
        known=rng.integers(-1, 12, (size, 3)),
        weights=rng.random(size) + 0.5,
        scores=scores,
    )


def equations_5_to_12(rows: Rows, losses: Losses, *, view_weights: tuple[float, ...]) -> dict[str, float]:
    """L_con, L_hard and the teacher's loss, every term by itself."""
    size, group = len(rows.queries), len(rows.documents)
    columns = group if losses.denominator == "positives_and_negatives" else 1
    total = {"contrastive": 0.0, "margin": 0.0, "teacher": 0.0}

    def answers(i: int, document_id: int) -> bool:
        return losses.mask_known and (
            document_id == rows.document_ids[0, i] or document_id in rows.known[i].tolist()
        )

    def same_query(i: int, j: int) -> bool:
        return losses.mask_known and rows.query_ids[i] == rows.query_ids[j]

    for m, prefix_weight in zip(
        losses.matryoshka, losses.matryoshka_weights or [1.0] * len(losses.matryoshka), strict=True
    ):
        for view, view_weight in enumerate(view_weights):
            q, d = rows.queries[:, :m], rows.documents[:, :, view, :m]
            for i in range(size):
                weight = prefix_weight * view_weight * rows.weights[i] / size
                right = np.exp(cos(q[i], d[0, i]) / losses.temperature)
                there = right
                for column in range(columns):
                    for j in range(size):
                        mine = column == 0 and (j == i or same_query(i, j))
                        if not mine and not answers(i, rows.document_ids[column, j]):
                            there += np.exp(cos(q[i], d[column, j]) / losses.temperature)
                back = right
                for j in range(size):
                    if j != i and not same_query(i, j) and not answers(j, rows.document_ids[0, i]):
                        back += np.exp(cos(q[j], d[0, i]) / losses.temperature)
                if losses.bidirectional:
                    total["contrastive"] -= weight * (np.log(right / there) + np.log(right / back)) / 2
                else:
                    total["contrastive"] -= weight * np.log(right / there)
                cosines = [cos(q[i], d[column, i]) for column in range(group)]
                for wrong in cosines[1:]:
                    total["margin"] += weight * max(0.0, losses.margin - cosines[0] + wrong) / (group - 1)
                if losses.teacher and not np.isnan(rows.scores[i]).any():
                    student = np.array(cosines) / losses.temperature
                    total["teacher"] += weight * teacher_loss(student, rows.scores[i], losses.teacher)
    return total


def teacher_loss(student: ndarray, given: ndarray, config: TeacherScores) -> float:
    if config.kind == "margin_mse":
        pairs = [(student[0] - student[n], given[0] - given[n]) for n in range(1, len(given))]
        return float(np.mean([(s - t) ** 2 for s, t in pairs]))
    target = np.exp(given / config.temperature) / np.exp(given / config.temperature).sum()
    share = np.exp(student) / np.exp(student).sum()
    return float((target * np.log(target / share)).sum())


@settings(max_examples=12)
@given(
    size=st.integers(1, 5),
    group=st.integers(2, 3),
    view_weights=st.sampled_from([(1.0, 1.0, 1.0), (0.5, 0.0, 2.0), (1.0,)]),
    matryoshka=st.sampled_from([((6,), None), ((2, 3, 6), (0.5, 1.0, 3.0))]),
    teacher=st.sampled_from([None, TeacherScores(temperature=0.5), TeacherScores(kind="margin_mse")]),
    denominator=st.sampled_from(["positives_only", "positives_and_negatives"]),
    mask_known=st.booleans(),
    bidirectional=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equations_5_to_12_together(
    size, group, view_weights, matryoshka, teacher, denominator, mask_known, bidirectional, seed
):
    rows = rows_of(size, group, views=len(view_weights), dim=6, seed=seed)
    losses = Losses(
        temperature=TAU,
        denominator=denominator,
        bidirectional=bidirectional,
        mask_known=mask_known,
        matryoshka=matryoshka[0],
        matryoshka_weights=matryoshka[1],
        teacher=teacher,
    )
    found = stage_one_loss(
        torch.tensor(rows.queries),
        torch.tensor(rows.documents).flatten(0, 1),
        rows.triplets(),
        losses,
        temperature=TAU,
        view_weights=view_weights,
    )
    expected = equations_5_to_12(rows, losses, view_weights=view_weights)
    for name, value in found.items():
        assert value.item() == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("teacher", [TeacherScores(), TeacherScores(kind="margin_mse")])
def test_gradients_of_the_whole_are_those_of_its_values(teacher: TeacherScores):
    rows = rows_of(4, 3, views=2, dim=5, seed=3)
    rows.scores[1] = np.nan
    losses = Losses(matryoshka=(2, 5), teacher=teacher)

    def value(queries, documents, temperature):
        parts = stage_one_loss(
            queries, documents, rows.triplets(), losses, temperature=temperature, view_weights=(1.0, 0.5)
        )
        return parts["contrastive"] + 0.5 * parts["margin"] + parts["teacher"]

    inputs = (rows.queries, rows.documents.reshape(-1, 2, 5), 0.3)
    leaves = [torch.tensor(x).double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(value, leaves, fast_mode=True)
