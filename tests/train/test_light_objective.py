"""LightRetriever's losses: their sum, against plain transcriptions, and through GradCache."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from stages import PlainEngine, Tensors, step

import light
import ranks
import tiny
from scalingnote.models import dual_encoder
from scalingnote.models.config import LookupConfig, Lora, TokenWiseConfig, TowerConfig
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.lookup import LookupTower
from scalingnote.train.config import GradCache, Losses, Sparse, TrainConfig
from scalingnote.train.grad_cache import cached_backward
from scalingnote.train.losses import false_negative_documents
from scalingnote.train.objective import StageOne

ROWS = 6


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def transcribed(module: StageOne, batch, losses: Losses) -> dict[str, float]:
    """Compute the parts in float64 numpy, from the outputs of the towers."""
    with torch.no_grad():
        embeddings = module.encode("query", batch.queries)
        cheap, whole = (embeddings[name][:, 0].double().numpy() for name in ("query", "whole_query"))
        dense, terms = (x.double().numpy() for x in module.towers.document.read(batch.documents))
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
    for row, row_terms in enumerate(batch.terms.tolist()):
        for term in row_terms:
            counts[row, term] += term >= 0
    sparse = counts @ terms.T
    widest = max(losses.matryoshka)
    return {
        "contrastive": sum(contrastive(scores(cheap, m)) for m in losses.matryoshka),
        "whole": sum(contrastive(scores(whole, m)) for m in losses.matryoshka),
        "align": sum(divergence(scores(cheap, m), scores(whole, widest)) for m in losses.matryoshka),
        "sparse": contrastive(sparse),
        "sparse_align": divergence(sparse, scores(whole, widest)),
        "flops": float((terms[~absent].mean(0) ** 2).sum()),
        "terms": float((terms[~absent] > 0).sum(1).mean()),
    }


# The step is 2.5 of 10: a ramp is a share of them, or a number of steps.
@pytest.mark.parametrize(("ramp", "flops_ramp"), [(0.0, 0.5), (5.0, 5.0)], ids=["shares", "steps"])
@pytest.mark.parametrize("short", [(), (1, 4)], ids=["whole", "short"])
def test_every_part_follows_the_equation_of_the_paper(short: tuple[int, ...], ramp: float, flops_ramp: float):
    module = light.stage(sparse=Sparse(ramp=ramp, flops=1e-2, flops_ramp=flops_ramp))
    batch = light.triplets(module, range(ROWS), of=ROWS, packed=True, step=2.5)
    batch.document_ids[[ROWS + row for row in short]] = -1  # rows without a hard negative
    loss, parts = module(batch)
    expected = transcribed(module, batch, light.LOSSES)
    for name, value in expected.items():
        assert parts[name].item() == pytest.approx(value, rel=1e-4), name
    factor = 0.5 if ramp else 1.0
    expected_loss = expected["contrastive"] + expected["whole"] + expected["align"]
    expected_loss += (
        factor * (expected["sparse_align"] + expected["sparse"]) + 1e-2 * 0.5**2 * expected["flops"]
    )
    assert loss.item() == pytest.approx(expected_loss, rel=1e-4)


def test_alignment_gives_the_teacher_no_gradient():
    module = light.stage()
    batch = light.triplets(module, range(ROWS), of=ROWS)
    encoded = module.encode("query", batch.queries) | module.encode("document", batch.documents)
    embeddings = {name: tensor.detach().requires_grad_() for name, tensor in encoded.items()}
    weighted, _ = module.losses(batch, lambda name, rows: embeddings)
    for name in ("align", "sparse_align"):
        sides = [embeddings["query"], embeddings["whole_query"]]
        cheap, whole = torch.autograd.grad(weighted[name], sides, retain_graph=True, allow_unused=True)
        assert whole is None
        assert (cheap is None) == (name == "sparse_align")


def test_binary_queries_count_a_term_once():
    counted, binary = (light.stage(align=False, sparse=Sparse(query=kind)) for kind in ("counts", "binary"))
    batch = light.triplets(counted, range(ROWS), of=ROWS)
    twice = torch.cat([batch.terms, batch.terms], dim=1)
    doubled = light.Triplets(**{**vars(batch), "terms": twice})
    parts = [module.eval()(b)[1]["sparse"] for module in (counted, binary) for b in (batch, doubled)]
    assert parts[0] != parts[1]
    torch.testing.assert_close(parts[2], parts[3])


def test_a_transformer_query_tower_is_aligned_with_its_terms():
    module = light.stage()
    query = dual_encoder.build_tower(
        TowerConfig(backbone=tiny.CAUSAL, max_length=16),
        role="query",
        dim=light.DIM,
        tokenizer_json=light.learnt(),
        seed=0,
    )
    both = StageOne(DualEncoder(query, module.towers.document), light.LOSSES, sparse=light.SPARSE, align=True)
    _, parts = both(light.triplets(both, range(ROWS), of=ROWS))
    assert "sparse_align" in parts
    assert not {"align", "whole"} & set(parts)


@pytest.mark.parametrize(("packed", "lora"), [(False, None), (True, Lora(rank=2))])
def test_grad_cache_has_the_gradients_of_a_plain_step(packed: bool, lora: Lora | None):
    results = []
    for cached in (True, False):
        module = light.stage(lora=lora).eval()
        batch = light.triplets(module, range(ROWS), of=ROWS, packed=packed)
        if cached:
            cached_backward(PlainEngine(module), batch, config=GradCache(query_rows=2, document_rows=5))
        else:
            module(batch)[0].backward()
        results.append({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


def step_of(rows: Sequence[int]) -> Tensors:
    module = light.stage()
    results = step(module, light.triplets(module, rows, of=ROWS, step=2))
    del results["terms"]  # only of this rank's documents, for the log
    return results


def halves() -> Tensors:
    return step_of(torch.arange(ROWS).split(ROWS // 2)[dist.get_rank()].tolist())


def test_two_ranks_have_the_gradients_of_one():
    torch.testing.assert_close(ranks.run(halves, world=2)[0], step_of(range(ROWS)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_every_trained_weight_has_a_gradient(shared: bool):
    module = light.stage(shared=shared)
    module(light.triplets(module, range(ROWS), of=ROWS))[0].backward()
    without_gradient = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    assert not without_gradient
    backbones = {id(module.towers.query.backbone), id(module.towers.document.backbone)}
    assert len(backbones) == (1 if shared else 2)


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_saved_towers_encode_the_same_as_trained_ones(lora: Lora | None, tmp_path):
    module = light.stage(lora=lora).eval()
    batch = light.triplets(module, range(ROWS), of=ROWS)
    module.towers.save(tmp_path)
    loaded = DualEncoder.load(tmp_path)
    assert isinstance(loaded.query, LookupTower)
    with torch.no_grad():
        results = loaded.query(batch.queries), *loaded.document.read(batch.documents)
        expected = module.towers.query(batch.queries), *module.towers.document.read(batch.documents)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other[..., : result.shape[-1]], atol=1e-3, rtol=1e-3)
    assert loaded.sparse_query.tokens(["torch a"]) == module.towers.sparse_query.tokens(["torch a"])


def test_settings_without_effect_are_refused():
    with pytest.raises(ValidationError, match="align has no effect"):
        TrainConfig(align=True)
    with pytest.raises(ValidationError, match="a lookup has none"):
        TrainConfig(query=LookupConfig(), sparse=Sparse(), align=True)
    shared = TrainConfig(query=TokenWiseConfig(), align=True)
    assert shared.shares_backbone
    assert shared.query_tower.backbone == shared.document.backbone
