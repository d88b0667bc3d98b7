"""The gradient of each weighted loss beside that of all, at the adapters; a loss that is drowned is named."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from test_grad_cache import PlainEngine, stage, triplets
from torch import Tensor, nn

import tiny
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.batch import Batch
from scalingnote.models.config import Lora
from scalingnote.train import gradient_shares
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import GradCache, Losses, Optimizer, Schedule
from scalingnote.train.engine import Cacheable
from scalingnote.train.gradient_shares import INTERVAL_STEPS, GradientShares, measured, standing_still
from scalingnote.train.loop import fit
from scalingnote.train.objective import StageOne
from scalingnote.train.strategies import build

ALL = GradCache(query_rows=1000, document_rows=1000)


@pytest.mark.parametrize("cache", [ALL, GradCache(query_rows=3, document_rows=4)], ids=["plain", "chunks"])
@pytest.mark.usefixtures("_every_row")
def test_shares_are_those_of_the_gradients_of_each_loss(cache: GradCache):
    made = stage().eval()
    batch = triplets(made, 7)
    found = gradient_shares.gradient_shares(PlainEngine(made), batch, cache=cache)

    embeddings: dict[str, Tensor] = {}
    for name, rows in made.inputs(batch).items():
        embeddings |= made.encode(name, rows)
    weighted, _ = made.weighted_losses(embeddings, batch)
    assert found.keys() == weighted.keys() == {"contrastive", "margin"}
    own = {name: flat(loss, measured(made)) for name, loss in weighted.items()}
    total = sum(own.values(), start=torch.zeros(()))
    for name, gradient in own.items():
        assert found[name].norm == pytest.approx(float(gradient.norm()), rel=1e-4)
        expected = torch.cosine_similarity(gradient, total, dim=0)
        assert found[name].cosine == pytest.approx(float(expected), abs=1e-4)


def test_the_step_after_a_measurement_draws_the_same_numbers():
    made = stage()  # with dropout
    batch = triplets(made, 7)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert gradient_shares.gradient_shares(PlainEngine(made), batch, cache=ALL)
    torch.testing.assert_close(torch.rand(3), expected)
    assert all(parameter.grad is None for parameter in made.parameters())


def test_adapters_are_measured_and_nothing_beside_them():
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    adapted = {"lora": Lora(rank=2)}
    towers = dual_encoder.build(
        tiny.query_tower(tiny.CAUSAL).model_copy(update=adapted),
        tiny.document_tower(tiny.CAUSAL).model_copy(update=adapted),
        dim=8,
        tokenizers={"query": learnt, "document": learnt},
        seed=0,
        share_base=True,
    )
    made = StageOne(towers, Losses(matryoshka=(8,)))
    names = {id(value): name for name, value in made.named_parameters()}
    assert measured(made)
    assert all("lora_" in names[id(value)] for value in measured(made))


def test_large_models_are_measured_in_part(monkeypatch: pytest.MonkeyPatch):
    made = stage()
    monkeypatch.setattr(gradient_shares, "MOST_NUMBERS", 100)
    assert 0 < sum(value.numel() for value in measured(made)) <= 100


class Drowned(Cacheable):
    """One loss asks for 0 at a small weight, the other for growth that never ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def inputs(self, batch: Tensor) -> dict[str, Batch | None]:
        del batch
        return {"weight": None}

    def encode(self, name: str, rows: Batch | None) -> dict[str, Tensor]:
        del rows
        return {name: self.weight[None]}

    def weighted_losses(
        self, embeddings: dict[str, Tensor], batch: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        del batch
        small, large = embeddings["weight"][0]
        parts = {"small": small**2, "large": 1000 / (1 + large**2)}
        return {"small": 1e-3 * parts["small"], "large": parts["large"]}, parts


def test_a_loss_without_a_share_that_stands_still_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    schedule = Schedule(optimizer=Optimizer(peak_lr=1e-5), precision="float32", global_batch=2)
    with caplog.at_level(logging.INFO, logger="scalingnote"):
        history = fit(
            build(Drowned(), schedule=schedule, device=torch.device("cpu")),
            lambda step: torch.zeros(1),
            steps=2 * INTERVAL_STEPS + 1,
            schedule=schedule,
            checkpoints=Checkpoints(str(tmp_path), keep=schedule.keep_checkpoints),
            section="test",
        )
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1, warned
    assert "the loss small stands still at 0.99" in warned[0]
    noted = [line for line in history.curve if "gradient_cosine/small" in line]
    assert [line["step"] for line in noted] == [0, INTERVAL_STEPS, 2 * INTERVAL_STEPS]
    assert all(line["gradient_cosine/small"] < 0.1 < line["gradient_cosine/large"] for line in noted)


def test_nothing_is_kept_of_steps_where_nothing_is_measured():
    made = stage()
    shares = GradientShares(PlainEngine(made), section="test", cache=None)  # not said to be whole
    shares.note({"loss": 1.0})
    assert shares.measure(0, triplets(made, 7)) == {}
    assert shares._values == []


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
def test_standing_still(values: list[float], expected: list[str]):
    assert standing_still([{"loss": value} for value in values]) == expected


def flat(loss: Tensor, parameters: Any) -> Tensor:
    """The gradient of `loss` as one vector."""
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    filled = (torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True))
    return torch.cat([value.flatten() for value in filled])


@pytest.fixture
def _every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_shares, "ROWS", 1000)
