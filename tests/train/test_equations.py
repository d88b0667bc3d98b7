"""Every loss against a transcription of its equation in float64, term by term."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy import ndarray

import tiny
from scalingnote.models import backbone as backbones
from scalingnote.models import batch, dual_encoder
from scalingnote.models.batch import Batch
from scalingnote.train import losses as equations
from scalingnote.train.config import Losses
from scalingnote.train.losses import (
    align,
    align_scores,
    cross_entropy,
    info_nce,
    qkd,
    ramp,
    teacher_kl,
)
from scalingnote.train.objective import Triplets, dense_losses, gather_candidates

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
def test_equations_1_to_4_13_and_14_project_states(role, backbone, views, held_in):
    tokenizer_json = backbones.train_tokenizer(["some words to learn from"], vocabulary=400)
    config = tiny.query_tower(backbone) if role == "query" else tiny.document_tower(backbone)
    tower = dual_encoder.build_tower(config, role=role, dim=5, tokenizer_json=tokenizer_json, seed=0).eval()
    rows = tower.prompt.rows(*([["words", "some words to learn"]] * (1 if role == "query" else 3)))
    tower.projection.to(held_in)  # rounds the weight, not the embeddings
    embeddings = tower(batch.collate(rows, pad=tower.pad)).detach().numpy()
    matrix = tower.projection.weight.detach().double().numpy()
    for i, row in enumerate(rows):
        hidden = (
            tower.backbone(input_ids=torch.tensor([row.ids])).last_hidden_state[0].detach().double().numpy()
        )
        assert len(row.positions) == views
        if role == "query":  # [EOS] of a causal model, [CLS] of a student
            assert row.positions == [len(row.ids) - 1 if backbone is tiny.CAUSAL else 0]
        for view, position in enumerate(row.positions):
            np.testing.assert_allclose(embeddings[i, view], matrix @ hidden[position], rtol=1e-4, atol=1e-5)


def test_equation_15_qkd():
    teacher, student = draw(6, 5), draw(6, 5, seed=1)
    weights = np.array([1.0, 0.0, 2.0, 1.0, 0.5, 1.0])
    rows = [np.sum((t - s) ** 2) - cos(t, s) for t, s in zip(teacher, student, strict=True)]
    sides = torch.tensor(teacher), torch.tensor(student)
    assert qkd(*sides).item() == pytest.approx(np.mean(rows), rel=1e-12)
    assert qkd(*sides, weights=torch.tensor(weights)).item() == pytest.approx(np.dot(rows, weights) / 6)


@dataclass
class Rows:
    """A global batch in numpy: group 0 of `documents` holds the positives."""

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


def rows_of(size: int, group: int, *, views: int, dim: int, seed: int, short: bool = False) -> Rows:
    """Draw rows with few distinct ids, so that duplicates and known positives are common; some are unscored.

    With `short`, a third of the negatives is absent, and other values are in their place.
    """
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(size, group))
    scores[rng.random(size) < 0.3, 0] = np.nan
    ids = rng.integers(0, 12, (group, size))
    documents = rng.normal(size=(group, size, views, dim))
    if short:
        absent = rng.random((group, size)) < 0.3
        absent[0] = False
        ids[absent], documents[absent], scores[absent.T] = -1, 1e3, np.nan
    return Rows(
        queries=rng.normal(size=(size, dim)),
        documents=documents,
        query_ids=rng.integers(0, 6, size),
        document_ids=ids,
        known=rng.integers(-1, 12, (size, 3)),
        weights=rng.random(size) + 0.5,
        scores=scores,
    )


def equations_5_to_12(rows: Rows, losses: Losses) -> dict[str, float]:
    """Compute L_con, L_hard and the teacher's loss, each term separately."""
    size, group = len(rows.queries), len(rows.documents)
    columns = group if losses.denominator == "positives_and_negatives" else 1
    total = {"contrastive": 0.0, "margin": 0.0, "teacher": 0.0}

    def answers(i: int, document_id: int) -> bool:
        return document_id == rows.document_ids[0, i] or document_id in rows.known[i].tolist()

    def same_query(i: int, j: int) -> bool:
        return rows.query_ids[i] == rows.query_ids[j]

    for m in losses.matryoshka:
        for view in range(rows.documents.shape[2]):
            q, d = rows.queries[:, :m], rows.documents[:, :, view, :m]
            for i in range(size):
                weight = rows.weights[i] / size
                positive = np.exp(cos(q[i], d[0, i]) / losses.temperature)
                forward = positive
                for column in range(columns):
                    for j in range(size):
                        is_positive = column == 0 and (j == i or same_query(i, j))
                        name = rows.document_ids[column, j]
                        if name >= 0 and not is_positive and not answers(i, name):
                            forward += np.exp(cos(q[i], d[column, j]) / losses.temperature)
                backward = positive
                for j in range(size):
                    if j != i and not same_query(i, j) and not answers(j, rows.document_ids[0, i]):
                        backward += np.exp(cos(q[j], d[0, i]) / losses.temperature)
                if losses.bidirectional:
                    total["contrastive"] -= (
                        weight * (np.log(positive / forward) + np.log(positive / backward)) / 2
                    )
                else:
                    total["contrastive"] -= weight * np.log(positive / forward)
                present = np.flatnonzero(rows.document_ids[:, i] >= 0)
                cosines = [cos(q[i], d[column, i]) for column in present]
                for cosine in cosines[1:]:
                    total["margin"] += (
                        weight * max(0.0, losses.margin - cosines[0] + cosine) / (len(present) - 1)
                    )
                teacher_scores = rows.scores[i][present]
                if losses.teacher and not np.isnan(teacher_scores).any():
                    student = np.exp(np.array(cosines) / losses.temperature)
                    share, target = student / student.sum(), np.exp(teacher_scores)
                    target /= target.sum()
                    total["teacher"] += weight * float((target * np.log(target / share)).sum())
    return total


@settings(max_examples=12)
@given(
    size=st.integers(1, 5),
    group=st.integers(2, 3),
    views=st.sampled_from([1, 3]),
    matryoshka=st.sampled_from([(6,), (2, 3, 6)]),
    teacher=st.sampled_from([0.0, 0.5]),
    denominator=st.sampled_from(["positives_only", "positives_and_negatives"]),
    bidirectional=st.booleans(),
    short=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_equations_5_to_12_together(
    size, group, views, matryoshka, teacher, denominator, bidirectional, short, seed
):
    rows = rows_of(size, group, views=views, dim=6, seed=seed, short=short)
    losses = Losses(
        temperature=TAU,
        denominator=denominator,
        bidirectional=bidirectional,
        matryoshka=matryoshka,
        teacher=teacher,
    )
    documents = torch.tensor(rows.documents).flatten(0, 1).requires_grad_()
    candidates = gather_candidates(rows.triplets(), documents, losses)
    parts = dense_losses(torch.tensor(rows.queries), candidates, losses)
    expected = equations_5_to_12(rows, losses)
    for name, value in parts.items():
        assert value.item() == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
    sum(parts.values()).backward()
    assert documents.grad.isfinite().all()
    assert (documents.grad[torch.tensor(rows.document_ids).flatten() < 0] == 0).all()


# --- softmax that keeps no scores --------------------------------------------------------------------------


def of_scores(queries, candidates, *, temperature, **options):
    """Compute the same loss from scores, which are kept."""
    return cross_entropy(queries @ candidates.T / temperature, **options)


def plain_softmax(queries, candidates, *, positives, temperature, ignore, weights):
    """Compute the same loss with PyTorch's own operations."""
    scores = queries @ candidates.T / temperature
    ignore = ignore & ~F.one_hot(positives, len(candidates)).bool()
    rows = F.cross_entropy(scores.masked_fill(ignore, -torch.inf), positives, reduction="none")
    return (rows * weights).mean()


def test_value_and_gradients_equal_plain_cross_entropy():
    ignore, results = torch.zeros(3, 5, dtype=torch.bool), []
    ignore[0, [0, 2]] = ignore[2, [1, 3, 4]] = True  # the first is row 0's own positive
    for loss in (info_nce, of_scores, plain_softmax):
        leaves = [*unit(draw(3, 6), draw(5, 6, seed=1)), torch.tensor(0.05, dtype=torch.float64)]
        queries, candidates, temperature = (leaf.requires_grad_() for leaf in leaves)
        value = loss(
            queries,
            candidates,
            positives=torch.tensor([0, 3, 0]),
            temperature=temperature,
            ignore=ignore,
            weights=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64),
        )
        (3.0 * value).backward()
        results.append([value, queries.grad, candidates.grad, temperature.grad])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-12, atol=1e-12)


def test_no_scores_are_kept_for_the_backward_pass():
    shapes = []
    queries, candidates = unit(draw(30, 6), draw(50, 6, seed=1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        info_nce(queries.requires_grad_(), candidates, positives=torch.arange(30), temperature=0.05)
    assert shapes
    assert all(math.prod(shape) < 30 * 50 for shape in shapes)


def test_a_row_with_only_its_positive_has_no_loss_or_gradient():
    queries, candidates = unit(draw(2, 6), draw(4, 6, seed=1))
    ignore = torch.ones(2, 4, dtype=torch.bool)
    loss = info_nce(
        queries.requires_grad_(), candidates, positives=torch.tensor([1, 2]), temperature=0.05, ignore=ignore
    )
    loss.backward()
    assert loss.item() == 0
    assert queries.grad.abs().max() == 0


# --- scores of a teacher (EmbedDistill) --------------------------------------------------------------------


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(scores: list[float]) -> list[float]:
    return [math.exp(s) / sum(math.exp(other) for other in scores) for s in scores]


def equation_11(student: list[float], teacher: list[float]) -> float:
    return -sum(t * math.log(s) for t, s in zip(softmax(teacher), softmax(student), strict=True))


def equation_12(student: list[float], teacher: list[float]) -> float:
    return -sum(
        sigmoid(t) * math.log(sigmoid(s)) + sigmoid(-t) * math.log(sigmoid(-s))
        for s, t in zip(student, teacher, strict=True)
    )


def equation_13(student: list[float], teacher: list[float]) -> float:
    return sum((t - s) ** 2 for s, t in zip(student, teacher, strict=True))


EQUATIONS = {"softmax": equation_11, "bce": equation_12, "mse": equation_13}


def scores(seed: int, *shape: int) -> torch.Tensor:
    return torch.tensor(draw(*shape, seed=seed) * 3)


@pytest.mark.parametrize("kind", EQUATIONS)
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10_000), queries=st.integers(1, 5), documents=st.integers(1, 6), masked=st.booleans()
)
def test_equations_11_to_13(kind: str, seed: int, queries: int, documents: int, masked: bool):
    student, teacher = scores(seed, queries, documents), scores(seed + 1, queries, documents)
    weights = scores(seed + 2, queries).abs()
    share = 0.7 if masked else 1.0
    scored = torch.tensor(np.random.default_rng(seed + 3).random((queries, documents)) < share)
    teacher[~scored] = torch.nan
    student.requires_grad_()
    mask = {"scored": scored} if masked else {}
    loss = equations.SCORE_LOSSES[kind](student, teacher, **mask, weights=weights)
    rows = [
        w * EQUATIONS[kind](s[m].tolist(), t[m].tolist())
        for w, s, t, m in zip(weights.tolist(), student, teacher, scored, strict=True)
        if m.any()
    ]
    assert loss.item() == pytest.approx(sum(rows) / queries, rel=1e-9, abs=1e-12)
    loss.backward()
    assert torch.isfinite(student.grad).all()
    assert (student.grad[~scored] == 0).all()


@pytest.mark.parametrize("loss", [*equations.SCORE_LOSSES.values(), teacher_kl])
def test_a_student_with_its_teachers_scores_has_no_gradient(loss):
    teacher = scores(0, 3, 4)
    shift = 7.0 if loss is teacher_kl else 0.0  # only differences change a softmax
    student = (teacher + shift).requires_grad_()
    loss(student, teacher).backward()
    assert student.grad.abs().max() < 1e-12


def test_equations_7_and_8_are_norms_not_squares():
    teacher, student, weights = scores(0, 5, 3), scores(1, 5, 3), scores(2, 5).abs()
    expected = np.mean([w * math.dist(t, s) for w, t, s in zip(weights, teacher, student, strict=True)])
    loss = equations.embedding_matching(teacher, student, weights=weights)
    assert loss.item() == pytest.approx(float(expected))
    student[2] = teacher[2]  # equal vectors have no direction
    student.requires_grad_()
    equations.embedding_matching(teacher, student).backward()
    assert (student.grad.norm(dim=1) * 5).tolist() == pytest.approx([1, 1, 0, 1, 1])


# --- term weights and alignment (LightRetriever) -----------------------------------------------------------


@pytest.mark.parametrize("over", [0.5, 20.0], ids=["share", "steps"])
def test_a_weight_grows_over_a_share_of_a_run_or_over_steps(over: float):
    steps = torch.tensor(40.0)
    factors = [ramp(torch.tensor(step), steps, over=over) for step in (0.0, 5.0, 20.0, 36.0)]
    assert factors == [0, 0.25, 1, 1]
    assert ramp(torch.tensor(4.0), steps, over=0.0) == 1.0


def test_alignment_is_the_mean_divergence_from_the_teacher():
    queries, documents = torch.tensor(draw(4, 3)), torch.tensor(draw(6, 3, seed=1))
    teacher = torch.tensor(draw(4, 6, seed=2)).log_softmax(1)
    weights = torch.tensor([1.0, 2, 0.5, 1], dtype=torch.float64)
    options = {"teacher": teacher, "weights": weights}
    student = (queries / 0.1 @ documents.T).log_softmax(1)
    expected = ((teacher.exp() * (teacher - student)).sum(1) * weights).mean()
    torch.testing.assert_close(align(queries, documents, temperature=0.1, **options), expected)
    torch.testing.assert_close(align_scores(queries / 0.1 @ documents.T, **options), expected)
    assert align_scores(teacher, **options).abs() < 1e-12
    leaves = [queries.requires_grad_(), documents.requires_grad_()]
    assert torch.autograd.gradcheck(lambda q, d: align(q, d, temperature=0.5, **options), leaves)
