"""The module that stage I trains: what its loss adds up, and what it refuses."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

import tiny
from scalingnote.errors import ConfigError, TrainingError
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import Batch
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.train.candidates import Triplets
from scalingnote.train.config import Losses, TeacherScores
from scalingnote.train.objective import StageOne

EMPTY = Batch(*(torch.zeros(1, 1, dtype=torch.long) for _ in range(3)))


@cache
def towers() -> DualEncoder:
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    query = dual_encoder.build_tower(tiny.query_tower(), role="query", dim=8, tokenizer_json=learnt, seed=0)
    document = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=8, tokenizer_json=learnt, seed=1
    )
    return DualEncoder(query, document)


def drawn(scores: torch.Tensor | None = None) -> tuple[dict[str, torch.Tensor], Triplets]:
    generator = torch.Generator().manual_seed(0)
    embeddings = {
        "query": torch.randn(4, 1, 8, generator=generator),
        "document": torch.randn(12, 3, 8, generator=generator),
    }
    triplets = Triplets(
        EMPTY, EMPTY, torch.arange(4), torch.arange(12), torch.arange(4)[:, None], torch.ones(4), scores
    )
    return embeddings, triplets


def test_equation_12_adds_the_parts():
    losses = Losses(matryoshka=(4, 8), alpha=0.25, teacher=TeacherScores(weight=2.0))
    embeddings, triplets = drawn(torch.randn(4, 3))
    loss, parts = StageOne(towers(), losses).loss(embeddings, triplets)
    assert set(parts) == {"contrastive", "margin", "teacher"}
    expected = parts["contrastive"] + 0.25 * parts["margin"] + 2.0 * parts["teacher"]
    torch.testing.assert_close(loss, expected)


def test_a_learnt_temperature_starts_where_the_fixed_one_stands_and_is_in_the_state():
    embeddings, triplets = drawn()
    fixed = StageOne(towers(), Losses(matryoshka=(8,)))
    learnt = StageOne(towers(), Losses(matryoshka=(8,), learn_temperature=True))
    assert set(learnt.state_dict()) - set(fixed.state_dict()) == {"temperature.log"}
    expected, _ = fixed.loss(embeddings, triplets)
    loss, parts = learnt.loss(embeddings | learnt.encode("temperature", None), triplets)
    torch.testing.assert_close(loss, expected)
    assert parts["temperature"].item() == pytest.approx(0.05)
    loss.backward()
    assert learnt.temperature.log.grad.abs().item() > 0


def test_the_loss_is_computed_in_float32_whatever_the_towers_ran_in():
    embeddings, triplets = drawn()
    stage = StageOne(towers(), Losses(matryoshka=(8,)))
    expected, _ = stage.loss(embeddings, triplets)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = stage.loss(embeddings, triplets)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_views_are_weighed_by_name():
    embeddings, triplets = drawn()
    losses = Losses(matryoshka=(8,), view_weights={"title": 0, "content": 0.5})
    _, parts = StageOne(towers(), losses).loss(embeddings, triplets)
    expected = 0.0
    for view, weight in ((1, 0.5), (2, 1.0)):
        only = {"title": 0.0, "content": 0.0, "summary": 0.0}
        only[("title", "content", "summary")[view]] = weight
        alone = StageOne(towers(), Losses(matryoshka=(8,), view_weights=only))
        expected = expected + alone.loss(embeddings, triplets)[1]["contrastive"]
    torch.testing.assert_close(parts["contrastive"], expected)


GROUPS = [[0, 4, 8], [1, -1, -1], [2, 6, -1], [3, 7, 11]]  # documents of each row; -1: it has fewer


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double(), other.double()
    return float(one @ other / one.norm() / other.norm())


def slow_parts(embeddings: dict[str, torch.Tensor], scores: list[list[float]], kind: str) -> dict[str, float]:
    """Eq. 5, 6, 9 and a ranking model's loss, query by query over its own documents alone."""
    parts = dict.fromkeys(("contrastive", "margin", "teacher"), 0.0)
    queries, documents, tau = embeddings["query"][:, 0], embeddings["document"], 0.05
    for m in (4, 8):
        for view in range(3):

            def score(i: int, doc: int, m: int = m, view: int = view) -> float:
                row, column = doc % 4, doc // 4
                return cosine(queries[i, :m], documents[column * 4 + row, view, :m]) / tau

            everything = [doc for own in GROUPS for doc in own if doc >= 0]
            for i, own in enumerate(GROUPS):
                own = [doc for doc in own if doc >= 0]
                forth = sum(math.exp(score(i, doc)) for doc in everything)
                back = sum(math.exp(score(j, own[0])) for j in range(4))
                right = score(i, own[0])
                parts["contrastive"] += (math.log(forth) + math.log(back) - 2 * right) / 2 / 4
                logits = [score(i, doc) for doc in own]
                gaps = [logits[0] - other for other in logits[1:]]
                if gaps:
                    parts["margin"] += sum(max(0, 0.2 - tau * gap) for gap in gaps) / len(gaps) / 4
                given = scores[i][: len(own)]
                if kind == "kl":
                    p, q = (
                        [math.exp(s) / sum(map(math.exp, side)) for s in side] for side in (given, logits)
                    )
                    parts["teacher"] += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 4
                elif gaps:
                    wanted = [given[0] - other for other in given[1:]]
                    squares = [(a - b) ** 2 for a, b in zip(gaps, wanted, strict=True)]
                    parts["teacher"] += sum(squares) / len(squares) / 4
    return parts


@pytest.mark.parametrize("mask_known", [True, False])
@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_rows_of_fewer_negatives_cost_what_their_own_documents_cost(kind: str, mask_known: bool):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(4, 3, generator=generator)
    embeddings, triplets = drawn(scores)
    present = torch.tensor(GROUPS) >= 0
    expected = slow_parts(embeddings, scores.tolist(), kind)
    ids = torch.tensor(GROUPS).T.flatten()
    short = replace(triplets, document_ids=ids, scores=scores.masked_fill(~present, torch.nan))
    losses = Losses(matryoshka=(4, 8), teacher=TeacherScores(kind=kind), mask_known=mask_known)
    stage = StageOne(towers(), losses)
    for stand_in in (0.0, 1e3):  # whatever stands where there is no document
        documents = embeddings["document"].clone()
        documents[ids < 0] = stand_in
        given = {"query": embeddings["query"], "document": documents.requires_grad_()}
        loss, parts = stage.loss(given, short)
        for name, value in expected.items():
            assert parts[name].item() == pytest.approx(value, rel=1e-4), name
        (gradient,) = torch.autograd.grad(loss, documents)
        assert gradient.isfinite().all()
        assert (gradient[ids < 0] == 0).all()
        assert (gradient[ids >= 0].flatten(1).norm(dim=1) > 0).all()


def test_what_cannot_be_learnt_from_is_refused():
    with pytest.raises(ConfigError, match=r"leaves no view .* give one a weight above 0"):
        StageOne(towers(), Losses(view_weights={"title": 0, "content": 0, "summary": 0}))
    config = tiny.document_tower().model_copy(update={"prompt": "{title} {content} [EMB]"})
    learnt = backbone.train_tokenizer(["a few words"], vocabulary=400)
    one_view = dual_encoder.build_tower(config, role="document", dim=8, tokenizer_json=learnt, seed=0)
    with pytest.raises(ConfigError, match="view_weights names title, but the document prompt gives summary"):
        StageOne(DualEncoder(towers().query, one_view), Losses(view_weights={"title": 0.5}))
    embeddings, triplets = drawn()
    with pytest.raises(TrainingError, match="carry no scores"):
        StageOne(towers(), Losses(matryoshka=(8,), teacher=TeacherScores())).loss(embeddings, triplets)
