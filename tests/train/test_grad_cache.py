"""GradCache equals one backward pass over the same chunks; shares describe the gradient of each loss."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import DIM, PlainEngine, Tensors, gradients, learnt, towers, triplets
from torch import Tensor, nn

import ranks
import tiny
from scalingnote.models import dual_encoder
from scalingnote.models.batch import Batch, collate
from scalingnote.models.config import Lora
from scalingnote.train import grad_cache
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import GradCache, Losses, Optimizer, Schedule
from scalingnote.train.distillation.config import DistillLosses
from scalingnote.train.distillation.objective import Lesson, StageTwo
from scalingnote.train.engine import Encode, Objective, WeightedLosses
from scalingnote.train.grad_cache import (
    SHARE_INTERVAL_STEPS,
    GradientShares,
    cached_backward,
    measured_parameters,
    standing_still,
)
from scalingnote.train.loop import TrainingLoop
from scalingnote.train.objective import StageOne
from scalingnote.train.strategies import build

ROWS, CPU = 7, torch.device("cpu")
CHUNKS, ALL = GradCache(query_rows=3, document_rows=4), GradCache(query_rows=1000, document_rows=1000)


def stage() -> StageOne:
    """Build encoders with dropout."""
    return StageOne(towers(tiny.BIDIRECTIONAL), Losses(matryoshka=(4, DIM))).train()


def batch_of(module: StageOne, *, packed: bool = False) -> Any:
    return triplets(module.towers, range(ROWS), of=2 * ROWS, packed=packed)


def plain_backward(engine: PlainEngine, batch: Any, *, config: GradCache) -> Tensor:
    """Run a slow equivalent: chunks in the same order, but all graphs are kept until one backward pass."""

    def encode(name: str, rows: Batch) -> Tensors:
        size = config.query_rows if name == "query" else config.document_rows
        chunks = []
        for start in range(0, len(rows), size):
            with engine.precision():
                chunks.append(engine.module.encode(name, rows.rows(start, min(start + size, len(rows)))))
        return {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}

    weighted, _ = engine.module.losses(batch, encode)
    loss = sum(weighted.values())
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stage_name", ["stage I", "stage II"])
def test_gradients_equal_a_plain_backward_pass(dtype: torch.dtype, packed: bool, stage_name: str):
    results = []
    for backward in (lambda *a, **k: cached_backward(*a, **k)[0], plain_backward):
        module = stage()
        batch = batch_of(module, packed=packed)
        if stage_name == "stage II":
            draw = torch.Generator().manual_seed(0)
            batch = Lesson(batch.queries, torch.randn(ROWS, DIM, generator=draw))
            module = StageTwo(module.towers.query, DistillLosses())
        torch.manual_seed(5)
        engine = PlainEngine(module, dtype)
        loss = backward(engine, batch, config=CHUNKS)
        assert engine.lasts == [False] * (len(engine.lasts) - 1) + [True] * bool(engine.lasts)
        results.append((loss, gradients(module), torch.rand(3)))
    (cached, cached_gradients, after), (loss, expected, after_plain) = results
    torch.testing.assert_close(cached, loss)
    torch.testing.assert_close(after, after_plain)  # the second pass left no trace
    assert cached_gradients.keys() == expected.keys()
    tolerance = {"atol": 1e-6, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 2e-2}
    for name, value in expected.items():
        torch.testing.assert_close(cached_gradients[name], value, msg=name, **tolerance)


class OwnDocuments(Objective):
    """A loss of a rank's own rows: ranks may have different numbers of documents."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = stage().eval().towers

    def encode(self, name: str, rows: Batch) -> Tensors:
        return {name: self.towers.encode(name, rows).float()}

    def losses(self, batch: Any, encode: Encode) -> WeightedLosses:
        queries = encode("query", batch.queries)["query"][:, 0]
        documents = encode("document", batch.documents)["document"][:, -1].unflatten(0, (2, -1))
        return {"products": torch.einsum("qd,gqd->q", queries, documents).square().sum()}, {}


def on_a_rank(counts: tuple[int, ...]) -> tuple[Tensors, Tensors, int]:
    """Return averaged gradients of a cached and a plain step without dropout, and the number of chunks."""
    rows, results = counts[dist.get_rank()], []
    for cached in (True, False):
        module = OwnDocuments()
        engine, batch = PlainEngine(module), triplets(module.towers, range(rows), of=rows)
        if cached:
            cached_backward(engine, batch, config=CHUNKS)
            chunks = len(engine.lasts)
        else:
            module(batch)[0].backward()
        results.append(gradients(module))
        for value in results[-1].values():
            dist.all_reduce(value)
    return results[0], results[1], chunks


def test_ranks_with_unequal_rows_run_the_same_number_of_chunks():
    (cached, plain, chunks), (_, _, others) = ranks.run(on_a_rank, (7, 2), world=2)
    assert chunks == others == 3 + 4  # queries and documents of the larger rank
    torch.testing.assert_close(cached, plain, atol=1e-4, rtol=1e-4)  # sums in another order


# --- shares of losses in the gradient ----------------------------------------------------------------------


@pytest.mark.parametrize("cache", [ALL, CHUNKS], ids=["plain", "chunks"])
def test_shares_equal_those_of_separate_gradients(cache: GradCache, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grad_cache, "GRADIENT_ROWS", 1000)
    module = stage().eval()
    batch = batch_of(module)
    shares = grad_cache.gradient_shares(PlainEngine(module), batch, cache=cache)
    weighted, _ = module.losses(batch, module.encode)
    assert shares.keys() == weighted.keys() == {"contrastive", "margin"}
    separate = {name: flat(loss, measured_parameters(module)) for name, loss in weighted.items()}
    total = sum(separate.values(), start=torch.zeros(()))
    for name, gradient in separate.items():
        cosine = torch.cosine_similarity(gradient, total, dim=0)
        assert shares[name] == pytest.approx((float(gradient.norm()), float(cosine)), rel=1e-4, abs=1e-4)


def flat(loss: Tensor, parameters: Any) -> Tensor:
    """Compute the gradient of `loss` as one vector."""
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    dense = (torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True))
    return torch.cat([value.flatten() for value in dense])


def test_the_step_after_a_measurement_draws_the_same_numbers():
    module = stage()  # with dropout
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert grad_cache.gradient_shares(PlainEngine(module), batch_of(module), cache=ALL)
    torch.testing.assert_close(torch.rand(3), expected)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_only_adapters_or_a_part_of_a_large_model_are_measured(monkeypatch: pytest.MonkeyPatch):
    adapted = {"lora": Lora(rank=2)}
    both = dual_encoder.build(
        tiny.query_tower(tiny.CAUSAL).model_copy(update=adapted),
        tiny.document_tower(tiny.CAUSAL).model_copy(update=adapted),
        dim=DIM,
        tokenizers={"query": learnt(), "document": learnt()},
        seed=0,
    )
    names = {id(value): name for name, value in both.named_parameters()}
    assert measured_parameters(both)
    assert all("lora_" in names[id(value)] for value in measured_parameters(both))
    monkeypatch.setattr(grad_cache, "MAX_GRADIENT_NUMBERS", 100)
    assert 0 < sum(value.numel() for value in measured_parameters(stage())) <= 100


class Drowned(Objective):
    """One loss with a small weight has its minimum at 0; the other falls forever as its parameter grows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def encode(self, name: str, rows: Batch) -> Tensors:
        return {name: self.weight.expand(len(rows), 2)}

    def losses(self, batch: Batch, encode: Encode) -> WeightedLosses:
        small, large = encode("query", batch)["query"][0]
        parts = {"small": small**2, "large": 1000 / (1 + large**2)}
        return {"small": 1e-3 * parts["small"], "large": parts["large"]}, parts


def test_one_warning_names_a_loss_that_stands_still(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    schedule = Schedule(optimizer=Optimizer(peak_lr=1e-5), precision="float32", global_batch=2)
    batch = collate(stage().towers.query.prompt.rows(["a"]), pad=0)
    with caplog.at_level(logging.INFO, logger="scalingnote"):
        engine, steps = build(Drowned(), schedule=schedule, device=CPU), 2 * SHARE_INTERVAL_STEPS + 1
        loop = TrainingLoop(engine, schedule, Checkpoints(str(tmp_path)), section="test", steps=steps)
        history = loop.fit(lambda step: batch)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, warnings
    assert "the loss small stands still at 0.99" in warnings[0]
    measured = [line for line in history.curve if "gradient_cosine/small" in line]
    assert [line["step"] for line in measured] == [0, SHARE_INTERVAL_STEPS, 2 * SHARE_INTERVAL_STEPS]
    assert all(line["gradient_cosine/small"] < 0.1 < line["gradient_cosine/large"] for line in measured)


def test_an_engine_that_is_not_whole_measures_nothing():
    module = stage()
    shares = GradientShares(PlainEngine(module), section="test", cache=None)  # the engine is not `whole`
    assert shares.measure(0, batch_of(module)) == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], []),
        ([2.77], []),
        ([2.77, 2.76, 2.77, 2.76], ["loss"]),
        ([2.77, 2.5, 2.1, 1.9], []),
        ([0.0, 0.0], []),  # a margin that no row violates
    ],
)
def test_standing_still_names_losses_that_do_not_fall(values: list[float], expected: list[str]):
    assert standing_still([{"loss": value} for value in values]) == expected
