"""LightRetriever's losses: what they add up, against plain transcriptions, and through GradCache."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import light
import tiny
from scalingnote.losses import false_negative_documents
from scalingnote.models import dual_encoder
from scalingnote.models.config import LookupConfig, Lora, TokenWiseConfig, TowerConfig
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.lookup import LookupTower
from scalingnote.train.config import Align, GradCache, Losses, Sparse, TrainConfig
from scalingnote.train.engine import Engine, cached_backward, surrogate
from scalingnote.train.objective import StageOne

ROWS = 6


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def transcribed(made: StageOne, batch, losses: Losses, align: Align) -> dict[str, float]:
    """The parts in float64 numpy, from what the towers give."""
    with torch.no_grad():
        read = made.encode("query", batch.queries)
        cheap, whole = (read[name][:, 0].double().numpy() for name in ("query", "whole_query"))
        dense, terms = (x.double().numpy() for x in made.towers.document.read(batch.documents))
    dense, weights = dense[:, 0], batch.weights.double().numpy()
    ids = batch.document_ids
    ignore = false_negative_documents(
        batch.query_ids,
        ids[:ROWS],
        batch.known_positives,
        all_query_ids=batch.query_ids,
        candidate_ids=ids,
    ).numpy()
    absent = (ids == -1).numpy()
    ignore |= absent
    np.fill_diagonal(ignore, False)

    def contrastive(scores: np.ndarray) -> float:
        rows = log_softmax(np.where(ignore, -np.inf, scores))
        return float((-np.diag(rows) * weights).mean())

    def divergence(scores: np.ndarray, teacher: np.ndarray) -> float:
        target, student = log_softmax(teacher[:, ~absent]), log_softmax(scores[:, ~absent])
        return float(((np.exp(target) * (target - student)).sum(1) * weights).mean())

    def scores(queries: np.ndarray, m: int) -> np.ndarray:
        return unit(queries[:, :m]) @ unit(dense[:, :m]).T / losses.temperature

    counts = np.zeros((ROWS, terms.shape[1]))
    for row, found in enumerate(batch.terms.tolist()):
        for term in found:
            counts[row, term] += term >= 0
    sparse = counts @ terms.T
    widest = max(losses.matryoshka)
    teachers = {m: scores(whole, widest if align.prefix == "widest" else m) for m in losses.matryoshka}
    return {
        "contrastive": sum(contrastive(scores(cheap, m)) for m in losses.matryoshka),
        "whole": sum(contrastive(scores(whole, m)) for m in losses.matryoshka),
        "align": sum(divergence(scores(cheap, m), teachers[m]) for m in losses.matryoshka),
        "sparse": contrastive(sparse),
        "sparse_align": divergence(sparse, scores(whole, widest)),
        "flops": float((terms[~absent].mean(0) ** 2).sum()),
        "terms": float((terms[~absent] > 0).sum(1).mean()),
    }


# Of ten steps, 2.5 are done: a ramp is a share of them, or a number of steps.
@pytest.mark.parametrize(("ramp", "flops_ramp"), [(0.0, 0.5), (5.0, 5.0)], ids=["shares", "steps"])
@pytest.mark.parametrize("short", [(), (1, 4)], ids=["whole", "short"])
@pytest.mark.parametrize("prefix", ["widest", "same"])
def test_every_part_is_what_the_paper_says(
    prefix: str, short: tuple[int, ...], ramp: float, flops_ramp: float
):
    align = Align(weight=0.7, prefix=prefix)
    sparse = Sparse(weight=0.5, align_weight=0.3, ramp=ramp, flops=1e-2, flops_ramp=flops_ramp)
    made = light.stage(align=align, sparse=sparse)
    batch = light.triplets(made, range(ROWS), of=ROWS, packed=True, step=2.5)
    batch.document_ids[[ROWS + row for row in short]] = -1  # rows without a hard negative
    loss, parts = made(batch)
    expected = transcribed(made, batch, light.LOSSES, align)
    for name, value in expected.items():
        assert parts[name].item() == pytest.approx(value, rel=1e-4), name
    together = expected["contrastive"] + expected["whole"]
    grown = 0.5 if ramp else 1.0
    together += 0.7 * expected["align"] + grown * 0.3 * expected["sparse_align"]
    together += grown * 0.5 * expected["sparse"] + 1e-2 * 0.5**2 * expected["flops"]
    assert loss.item() == pytest.approx(together, rel=1e-4)


def test_the_teacher_learns_nothing_from_aligning():
    made = light.stage()
    batch = light.triplets(made, range(ROWS), of=ROWS)
    read = made.encode("query", batch.queries) | made.encode("document", batch.documents)
    embeddings = {name: tensor.detach() for name, tensor in read.items()}
    queries = [embeddings[name].requires_grad_() for name in ("query", "whole_query")]
    gradients = {}
    for weight in (1.0, 3.0):
        made._align = Align(weight=weight)
        loss, _ = made.loss(embeddings, batch)
        gradients[weight] = torch.autograd.grad(loss, queries)
    torch.testing.assert_close(gradients[1.0][1], gradients[3.0][1])
    assert (gradients[1.0][0] - gradients[3.0][0]).abs().max() > 1e-4


def test_binary_queries_count_a_term_once():
    counted, binary = (light.stage(align=None, sparse=Sparse(query=kind)) for kind in ("counts", "binary"))
    batch = light.triplets(counted, range(ROWS), of=ROWS)
    embeddings = {}
    for name, rows in counted.inputs(batch).items():
        embeddings |= counted.encode(name, rows)
    twice = torch.cat([batch.terms, batch.terms], dim=1)
    doubled = light.Triplets(**{**vars(batch), "terms": twice})
    parts = [made.loss(embeddings, b)[1]["sparse"] for made in (counted, binary) for b in (batch, doubled)]
    assert parts[0] != parts[1]
    torch.testing.assert_close(parts[2], parts[3])


def test_a_transformer_query_tower_teaches_its_own_sparse_side():
    made = light.stage()
    query = dual_encoder.build_tower(
        TowerConfig(backbone=tiny.CAUSAL, max_length=16),
        role="query",
        dim=light.DIM,
        tokenizer_json=light.learnt(),
        seed=0,
    )
    both = StageOne(
        DualEncoder(query, made.towers.document), light.LOSSES, sparse=light.SPARSE, align=light.ALIGN
    )
    _, parts = both(light.triplets(both, range(ROWS), of=ROWS))
    assert "sparse_align" in parts
    assert not {"align", "whole"} & set(parts)


class Plain(Engine):
    """All that cached_backward needs of an engine."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def precision(self) -> AbstractContextManager[None]:
        return torch.autocast("cpu", enabled=False)

    def backward_from(self, embeddings: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        del last
        surrogate(embeddings, gradients).backward()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_gradcache_gives_the_gradients_of_a_plain_step(packed: bool, lora: Lora | None):
    results = []
    for cached in (True, False):
        made = light.stage(lora=lora).eval()
        batch = light.triplets(made, range(ROWS), of=ROWS, packed=packed)
        if cached:
            cached_backward(Plain(made), batch, config=GradCache(query_rows=2, document_rows=5))
        else:
            made(batch)[0].backward()
        results.append({name: p.grad for name, p in made.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_every_weight_that_learns_gets_a_gradient(shared: bool):
    made = light.stage(shared=shared)
    made(light.triplets(made, range(ROWS), of=ROWS))[0].backward()
    lacking = [name for name, p in made.named_parameters() if p.requires_grad and p.grad is None]
    assert not lacking
    backbones = {id(made.towers.query.backbone), id(made.towers.document.backbone)}
    assert len(backbones) == (1 if shared else 2)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_what_is_saved_gives_what_was_trained(lora: Lora | None, tmp_path):
    made = light.stage(lora=lora).eval()
    batch = light.triplets(made, range(ROWS), of=ROWS)
    made.towers.save(tmp_path)
    again = DualEncoder.load(tmp_path)
    assert isinstance(again.query, LookupTower)
    with torch.no_grad():
        found = again.query(batch.queries), *again.document.read(batch.documents)
        expected = made.towers.query(batch.queries), *made.towers.document.read(batch.documents)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other[..., : one.shape[-1]], atol=1e-3, rtol=1e-3)
    assert again.sparse_query.tokens(["torch a"]) == made.towers.sparse_query.tokens(["torch a"])


def test_combinations_that_mean_nothing_are_refused():
    with pytest.raises(ValidationError, match="align has no effect"):
        TrainConfig(align=Align())
    with pytest.raises(ValidationError, match="a lookup has none"):
        TrainConfig(query=LookupConfig(), sparse=Sparse(), align=Align())
    shared = TrainConfig(query=TokenWiseConfig(), align=Align())
    assert shared.shares_backbone
    assert shared.query_tower.backbone == shared.document.backbone
