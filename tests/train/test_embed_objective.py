"""StageTwo with every loss of EmbedDistill: against slow code, on two ranks, and through GradCache."""

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from stages import DIM, PlainEngine, Tensors, step, towers
from torch import Tensor

import ranks
import tiny
from scalingnote.models import batch
from scalingnote.models.published_model import Similarity
from scalingnote.train.config import GradCache
from scalingnote.train.distillation.config import DistillConfig, DistillLosses
from scalingnote.train.distillation.objective import Lesson, LessonCandidates, StageTwo
from scalingnote.train.grad_cache import cached_backward

ROWS, TAU = 6, 0.2
ALL = DistillLosses(
    qkd=0.5, query_matching=0.7, document_matching=0.3, one_hot=1.1, scores=0.9, temperature=TAU
)
# Document 0 answers two queries, 2 is its own negative, and the fourth row has no negative.
POSITIVE, NEGATIVE = [0, 1, 2, 0, -1, 5], [6, 7, 2, -1, -1, 1]
QUERY_IDS = [10, 11, 12, 13, 14, 10]
KNOWN = [[0, 1], [1, -1], [2, -1], [0, -1], [-1, -1], [5, -1]]
WEIGHTS = [1.0, 2.0, 1.0, 0.5, 1.0, 1.0]


def stage(losses: DistillLosses, *, symmetric: bool, similarity: Similarity = "cosine") -> StageTwo:
    both = towers(tiny.BIDIRECTIONAL)
    return StageTwo(both.query, losses, both.document if symmetric else None, similarity=similarity)


def lesson(module: StageTwo, rows: Sequence[int], *, scores: bool = False) -> Lesson:
    """Build rows of one global batch; the fifth is a generated query."""
    draw = torch.Generator().manual_seed(0)
    teacher, documents = (torch.randn(count, DIM, generator=draw) for count in (ROWS, 9))
    ids = torch.tensor([[POSITIVE[i], NEGATIVE[i]] for i in rows])
    distinct, index = ids.clamp(min=0).unique(return_inverse=True)
    texts = tiny.document_rows(9)
    document_texts = None
    if module.document is not None:
        chosen = [texts[i] for i in distinct.tolist()]
        columns = ([row[name] for row in chosen] for name in ("title", "topic", "content"))
        document_texts = batch.collate(module.document.prompt.rows(*columns), pad=0)
    weights = torch.tensor([WEIGHTS[i] for i in rows])
    scores_of_rows = torch.randn(ROWS, 2, generator=draw)
    scores_of_rows[4], scores_of_rows[1], scores_of_rows[3, 1] = torch.nan, torch.nan, torch.nan
    return Lesson(
        queries=batch.collate(module.student.prompt.rows([texts[i]["content"][:20] for i in rows]), pad=0),
        teacher=teacher[list(rows)],
        weights=weights,
        candidates=LessonCandidates(
            embeddings=documents[distinct],
            index=index,
            weights=weights * (ids[:, 0] >= 0) * ROWS / 5,
            query_ids=torch.tensor([QUERY_IDS[i] for i in rows]),
            document_ids=ids,
            known=torch.tensor([KNOWN[i] for i in rows]),
            scores=scores_of_rows[list(rows)] if scores else None,
            texts=document_texts,
        ),
    )


def slow(queries: Tensor, documents: Tensor, batch: Lesson, similarity: Similarity = "cosine") -> Tensors:
    """Compute the parts row by row, in float64.

    `documents` are the student's, as often as rows name them: [rows, 2, dim].
    """
    # By dot, embeddings keep their lengths, and their products have no temperature.
    unit, tau = (lambda vectors: vectors, 1.0) if similarity == "dot" else (partial(F.normalize, dim=-1), TAU)
    candidates, student_documents = batch.candidates, unit(documents)
    teacher_documents = unit(candidates.embeddings.double()[candidates.index])
    pool = [
        (j, k)
        for k, j in itertools.product(range(2), range(len(queries)))
        if candidates.document_ids[j, k] >= 0
    ]
    names = ("query_matching", "document_matching", "one_hot", "scores")
    parts = {name: torch.zeros((), dtype=torch.float64) for name in names}
    for i in range(len(queries)):
        query, teacher = (unit(side[i].double()) for side in (queries, batch.teacher))
        parts["query_matching"] += batch.weights[i] * (teacher - query).norm()
        own_places = [k for k in range(2) if candidates.document_ids[i, k] >= 0]
        if not own_places:
            continue
        weight = candidates.weights[i].double()
        gaps = (teacher_documents[i] - student_documents[i]).norm(dim=-1)
        parts["document_matching"] += weight * gaps[own_places].mean()
        answers = {int(candidates.document_ids[i, 0]), *candidates.known[i].tolist()}
        scores, allowed = {}, []
        for j, k in pool:
            scores[j, k] = query @ student_documents[j, k] / tau
            same = k == 0 and candidates.query_ids[j] == candidates.query_ids[i]
            if (j, k) == (i, 0) or not (int(candidates.document_ids[j, k]) in answers or same):
                allowed.append(scores[j, k])
        parts["one_hot"] -= weight * (scores[i, 0] - torch.stack(allowed).logsumexp(0))
        if candidates.scores is None:
            target = torch.stack([teacher @ teacher_documents[j, k] / tau for j, k in pool])
            student = torch.stack([scores[place] for place in pool])
        elif candidates.scores[i, own_places].isfinite().all():
            target = candidates.scores[i, own_places].double()
            student = torch.stack([query @ student_documents[i, k] / tau for k in own_places])
        else:
            continue
        parts["scores"] -= weight * (target.softmax(0) * student.log_softmax(0)).sum()
    return {name: part / len(queries) for name, part in parts.items()}


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("scores", [False, True], ids=["dual encoder", "cross-encoder"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_losses_equal_a_computation_row_by_row(symmetric: bool, scores: bool, similarity: Similarity):
    losses = ALL if symmetric else ALL.model_copy(update={"document_matching": 0.0})
    module = stage(losses, symmetric=symmetric, similarity=similarity)
    batch = lesson(module, range(ROWS), scores=scores)
    loss, parts = module(batch)
    queries = module.embeddings("query", batch.queries)[:, 0].detach().double()
    documents = batch.candidates.embeddings
    if symmetric:
        documents = module.embeddings("document", batch.candidates.texts)[:, 0].detach()
    expected = slow(queries, documents.double()[batch.candidates.index], batch, similarity)
    for name, part in expected.items():
        if getattr(losses, name):
            assert parts[name].item() == pytest.approx(part.item(), rel=1e-4), name
    total = sum(getattr(losses, name) * parts[name] for name in ("qkd", *expected) if getattr(losses, name))
    torch.testing.assert_close(loss.detach(), total)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", ["softmax", "bce", "mse"])
def test_each_kind_of_score_loss_follows_its_equation(kind: str):
    losses = ALL.model_copy(update={"document_matching": 0.0, "scores_kind": kind})
    module = stage(losses, symmetric=False)
    batch = lesson(module, range(ROWS), scores=True)
    _, parts = module(batch)
    candidates = batch.candidates
    queries = F.normalize(module.embeddings("query", batch.queries)[:, 0].detach().double(), dim=-1)
    documents = F.normalize(candidates.embeddings.double(), dim=-1)[candidates.index]
    student, teacher = torch.einsum("qd,qgd->qg", queries, documents) / TAU, candidates.scores.double()
    losses_of_pairs = {
        "softmax": -teacher.softmax(1) * student.log_softmax(1),
        "bce": F.softplus(student) - teacher.sigmoid() * student,
        "mse": (teacher - student) ** 2,
    }[kind]
    expected = (
        losses_of_pairs.nan_to_num(0.0).sum(1) * candidates.weights
    ).sum() / ROWS  # rows without scores are NaN
    assert parts["scores"].item() == pytest.approx(expected.item(), rel=1e-4)


def step_of(rows: Sequence[int], *, scores: bool) -> Tensors:
    module = stage(ALL, symmetric=True)
    return step(module, lesson(module, rows, scores=scores))


def halves() -> list[Tensors]:
    rows = ([0, 1, 2], [3, 4, 5])[dist.get_rank()]
    return [step_of(rows, scores=scores) for scores in (False, True)]


def test_two_ranks_have_the_gradients_of_one_process():
    one_process = [step_of(range(ROWS), scores=scores) for scores in (False, True)]
    for rank_results in ranks.run(halves, world=2):
        for result, expected in zip(rank_results, one_process, strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(result[name], value, rtol=2e-4, atol=2e-5, msg=name)


def test_grad_cache_computes_the_same_gradients():
    plain, cached = stage(ALL, symmetric=True), stage(ALL, symmetric=True)
    loss, _ = plain(lesson(plain, range(ROWS)))
    loss.backward()
    cached_loss, _ = cached_backward(
        PlainEngine(cached), lesson(cached, range(ROWS)), config=GradCache(query_rows=4, document_rows=3)
    )
    torch.testing.assert_close(cached_loss, loss.detach())
    for ours, theirs in zip(cached.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"document": {}}, "would learn nothing"),
        ({"losses": {"document_matching": 1}}, "needs a document student"),
        ({"losses": {"qkd": 0}}, "every weight is 0"),
    ],
)
def test_contradictory_settings_are_refused(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**settings)
