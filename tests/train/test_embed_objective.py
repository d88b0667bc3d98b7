"""StageTwo with every loss of EmbedDistill: against a slow twin, on two ranks, and through GradCache."""

import itertools
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from stages import DIM, Found, PlainEngine, step, towers
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
# 0 answers two queries, 2 is its own negative, and the fourth row has no negative.
POSITIVE, NEGATIVE = [0, 1, 2, 0, -1, 5], [6, 7, 2, -1, -1, 1]
QUERY_IDS = [10, 11, 12, 13, 14, 10]
KNOWN = [[0, 1], [1, -1], [2, -1], [0, -1], [-1, -1], [5, -1]]
WEIGHTS = [1.0, 2.0, 1.0, 0.5, 1.0, 1.0]


def stage(losses: DistillLosses, *, symmetric: bool, similarity: Similarity = "cosine") -> StageTwo:
    made = towers(tiny.BIDIRECTIONAL)
    return StageTwo(made.query, losses, made.document if symmetric else None, similarity=similarity)


def lesson(made: StageTwo, rows: Sequence[int], *, scores: bool = False) -> Lesson:
    """Some rows of one global batch; the fifth is a generated query."""
    draw = torch.Generator().manual_seed(0)
    teacher, documents = (torch.randn(count, DIM, generator=draw) for count in (ROWS, 9))
    ids = torch.tensor([[POSITIVE[i], NEGATIVE[i]] for i in rows])
    distinct, index = ids.clamp(min=0).unique(return_inverse=True)
    texts = tiny.document_rows(9)
    read = None
    if made.document is not None:
        chosen = [texts[i] for i in distinct.tolist()]
        columns = ([row[name] for row in chosen] for name in ("title", "topic", "content"))
        read = batch.collate(made.document.prompt.rows(*columns), pad=0)
    weights = torch.tensor([WEIGHTS[i] for i in rows])
    given = torch.randn(ROWS, 2, generator=draw)
    given[4], given[1], given[3, 1] = torch.nan, torch.nan, torch.nan
    return Lesson(
        queries=batch.collate(made.student.prompt.rows([texts[i]["content"][:20] for i in rows]), pad=0),
        teacher=teacher[list(rows)],
        weights=weights,
        candidates=LessonCandidates(
            embeddings=documents[distinct],
            index=index,
            weights=weights * (ids[:, 0] >= 0) * ROWS / 5,
            query_ids=torch.tensor([QUERY_IDS[i] for i in rows]),
            document_ids=ids,
            known=torch.tensor([KNOWN[i] for i in rows]),
            scores=given[list(rows)] if scores else None,
            texts=read,
        ),
    )


def slow(queries: Tensor, documents: Tensor, given: Lesson, similarity: Similarity = "cosine") -> Found:
    """Row by row, in float64; `documents` are the student's, as often as rows name them: [rows, 2, dim]."""
    # By dot, embeddings have their own lengths, and their products no temperature.
    unit, tau = (lambda vectors: vectors, 1.0) if similarity == "dot" else (partial(F.normalize, dim=-1), TAU)
    found, own = given.candidates, unit(documents)
    inherited = unit(found.embeddings.double()[found.index])
    pool = [
        (j, k) for k, j in itertools.product(range(2), range(len(queries))) if found.document_ids[j, k] >= 0
    ]
    names = ("query_matching", "document_matching", "one_hot", "scores")
    parts = {name: torch.zeros((), dtype=torch.float64) for name in names}
    for i in range(len(queries)):
        query, teacher = (unit(side[i].double()) for side in (queries, given.teacher))
        parts["query_matching"] += given.weights[i] * (teacher - query).norm()
        own_places = [k for k in range(2) if found.document_ids[i, k] >= 0]
        if not own_places:
            continue
        weight = found.weights[i].double()
        gaps = (inherited[i] - own[i]).norm(dim=-1)
        parts["document_matching"] += weight * gaps[own_places].mean()
        answers = {int(found.document_ids[i, 0]), *found.known[i].tolist()}
        scores, allowed = {}, []
        for j, k in pool:
            scores[j, k] = query @ own[j, k] / tau
            same = k == 0 and found.query_ids[j] == found.query_ids[i]
            if (j, k) == (i, 0) or not (int(found.document_ids[j, k]) in answers or same):
                allowed.append(scores[j, k])
        parts["one_hot"] -= weight * (scores[i, 0] - torch.stack(allowed).logsumexp(0))
        if found.scores is None:
            target = torch.stack([teacher @ inherited[j, k] / tau for j, k in pool])
            student = torch.stack([scores[place] for place in pool])
        elif found.scores[i, own_places].isfinite().all():
            target = found.scores[i, own_places].double()
            student = torch.stack([query @ own[i, k] / tau for k in own_places])
        else:
            continue
        parts["scores"] -= weight * (target.softmax(0) * student.log_softmax(0)).sum()
    return {name: part / len(queries) for name, part in parts.items()}


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("scores", [False, True], ids=["dual encoder", "cross-encoder"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asymmetric", "symmetric"])
def test_losses_are_those_of_each_row_alone(symmetric: bool, scores: bool, similarity: Similarity):
    losses = ALL if symmetric else ALL.model_copy(update={"document_matching": 0.0})
    made = stage(losses, symmetric=symmetric, similarity=similarity)
    given = lesson(made, range(ROWS), scores=scores)
    loss, parts = made(given)
    queries = made.embeddings("query", given.queries)[:, 0].detach().double()
    documents = given.candidates.embeddings
    if symmetric:
        documents = made.embeddings("document", given.candidates.texts)[:, 0].detach()
    expected = slow(queries, documents.double()[given.candidates.index], given, similarity)
    for name, part in expected.items():
        if getattr(losses, name):
            assert parts[name].item() == pytest.approx(part.item(), rel=1e-4), name
    total = sum(getattr(losses, name) * parts[name] for name in ("qkd", *expected) if getattr(losses, name))
    torch.testing.assert_close(loss.detach(), total)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("kind", ["softmax", "bce", "mse"])
def test_scores_are_compared_as_their_kind_says(kind: str):
    losses = ALL.model_copy(update={"document_matching": 0.0, "scores_kind": kind})
    made = stage(losses, symmetric=False)
    given = lesson(made, range(ROWS), scores=True)
    _, parts = made(given)
    found = given.candidates
    queries = F.normalize(made.embeddings("query", given.queries)[:, 0].detach().double(), dim=-1)
    documents = F.normalize(found.embeddings.double(), dim=-1)[found.index]
    student, teacher = torch.einsum("qd,qgd->qg", queries, documents) / TAU, found.scores.double()
    of_each = {
        "softmax": -teacher.softmax(1) * student.log_softmax(1),
        "bce": F.softplus(student) - teacher.sigmoid() * student,
        "mse": (teacher - student) ** 2,
    }[kind]
    expected = (of_each.nan_to_num(0.0).sum(1) * found.weights).sum() / ROWS  # rows without scores are NaN
    assert parts["scores"].item() == pytest.approx(expected.item(), rel=1e-4)


def step_of(rows: Sequence[int], *, scores: bool) -> Found:
    made = stage(ALL, symmetric=True)
    return step(made, lesson(made, rows, scores=scores))


def halves() -> list[Found]:
    own = ([0, 1, 2], [3, 4, 5])[dist.get_rank()]
    return [step_of(own, scores=scores) for scores in (False, True)]


def test_two_ranks_learn_what_one_process_with_all_rows_would():
    whole = [step_of(range(ROWS), scores=scores) for scores in (False, True)]
    for of_rank in ranks.run(halves, world=2):
        for found, expected in zip(of_rank, whole, strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=name)


def test_grad_cache_gives_the_same_gradients():
    plain, cached = stage(ALL, symmetric=True), stage(ALL, symmetric=True)
    loss, _ = plain(lesson(plain, range(ROWS)))
    loss.backward()
    found, _ = cached_backward(
        PlainEngine(cached), lesson(cached, range(ROWS)), config=GradCache(query_rows=4, document_rows=3)
    )
    torch.testing.assert_close(found, loss.detach())
    for mine, other in zip(cached.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"document": {}}, "would learn nothing"),
        ({"losses": {"document_matching": 1}}, "needs a document student"),
        ({"losses": {"qkd": 0}}, "every weight is 0"),
    ],
)
def test_knobs_at_odds_are_refused(knobs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**knobs)
