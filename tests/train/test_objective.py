"""The module that stage I trains: what its loss adds up, and what it refuses."""

from functools import cache

import pytest
import torch

import tiny
from scalingnote.errors import ConfigError, TrainingError
from scalingnote.models import backbone, tower
from scalingnote.models.batch import Batch
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.train.candidates import Triplets
from scalingnote.train.config import Losses, TeacherScores
from scalingnote.train.objective import StageOne

EMPTY = Batch(*(torch.zeros(1, 1, dtype=torch.long) for _ in range(3)))


@cache
def towers() -> DualEncoder:
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    query = tower.build(tiny.query_tower(), role="query", dim=8, tokenizer_json=learnt, seed=0)
    document = tower.build(tiny.document_tower(), role="document", dim=8, tokenizer_json=learnt, seed=1)
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


def test_what_cannot_be_learnt_from_is_refused():
    with pytest.raises(ConfigError, match=r"leaves no view .* give one a weight above 0"):
        StageOne(towers(), Losses(view_weights={"title": 0, "content": 0, "summary": 0}))
    config = tiny.document_tower().model_copy(update={"prompt": "{title} {content} [EMB]"})
    learnt = backbone.train_tokenizer(["a few words"], vocabulary=400)
    one_view = tower.build(config, role="document", dim=8, tokenizer_json=learnt, seed=0)
    with pytest.raises(ConfigError, match="view_weights names title, but the document prompt gives summary"):
        StageOne(DualEncoder(towers().query, one_view), Losses(view_weights={"title": 0.5}))
    embeddings, triplets = drawn()
    with pytest.raises(TrainingError, match="carry no scores"):
        StageOne(towers(), Losses(matryoshka=(8,), teacher=TeacherScores())).loss(embeddings, triplets)
