"""LightRetriever on several ranks, and under every strategy: the gradients of one process with all rows."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import steady
from torch import Tensor
from torch.distributed.tensor import DTensor

import light
import ranks
from scalingnote.models.config import Lora
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, GradCache, Memory, Optimizer, Ranks, Schedule
from scalingnote.train.engine import rank, world_size
from scalingnote.train.grad_cache import cached_backward
from scalingnote.train.strategies import build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = 6
Found = dict[str, Tensor]
CACHED = Memory(grad_cache=GradCache(query_rows=2, document_rows=4))
STRATEGIES: dict[str, tuple[Ddp | Fsdp2 | DeepSpeed, Memory, bool]] = {
    "ddp": (Ddp(), Memory(), False),
    "ddp, cached, lora": (Ddp(), CACHED, True),
    "fsdp2": (Fsdp2(), Memory(), False),
    "fsdp2, cached, checkpointed": (
        Fsdp2(),
        CACHED.model_copy(update={"gradient_checkpointing": True}),
        False,
    ),
    "fsdp2, lora": (Fsdp2(), Memory(), True),
    "zero-2": (DeepSpeed(stage=2), Memory(), False),
    "zero-3": (DeepSpeed(stage=3), Memory(), False),
    "zero-3, cached": (DeepSpeed(stage=3), CACHED, False),
    "zero-3, lora": (DeepSpeed(stage=3), Memory(), True),
}


def step(rows: Sequence[int]) -> Found:
    """Loss, parts and gradients of this rank's rows, all averaged over ranks."""
    made = light.stage()
    loss, parts = made(light.triplets(made, rows, of=ROWS, step=2))
    loss.backward()
    found = {"loss": loss.detach(), **parts}
    found |= {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    del found["terms"]  # of this rank's documents, for the log
    if dist.is_initialized():
        for value in found.values():
            dist.all_reduce(value)
            value /= world_size()
    return found


@steady()
def train(name: str) -> dict[str, Any]:
    """Two optimizer steps of one strategy."""
    strategy, memory, lora = STRATEGIES[name]
    made = light.stage(lora=Lora(rank=2) if lora else None)
    schedule = Schedule(
        strategy=strategy,
        optimizer=Optimizer(peak_lr=1e-2),
        global_batch=ROWS,
        memory=memory,
        precision="float32",
        resources=Ranks(workers=world_size()),
    )
    engine = build(made, schedule=schedule, device=torch.device("cpu"))
    engine.module.train()
    size = ROWS // world_size()
    norms = []
    for _ in range(2):
        own = range(rank() * size, (rank() + 1) * size)
        batch = light.triplets(made, own, of=ROWS, packed=True)
        if memory.grad_cache:
            cached_backward(engine, batch, config=memory.grad_cache)
        else:
            engine.backward(engine(batch)[0])
        norms.append(float(engine.step(1e-2)))
    assert not any(isinstance(n, DTensor) for n in norms)
    return {"norms": norms, "weights": engine.weights()}


def everything() -> tuple[Found, dict[str, Any]]:
    own = torch.arange(ROWS).split(ROWS // 2)[rank()].tolist()
    return step(own), {name: train(name) for name in STRATEGIES}


@pytest.fixture(scope="module")
def on_two() -> tuple[Found, dict[str, Any]]:
    """All in one pair of processes: they take longer to start than to train."""
    return ranks.run(everything, world=2)[0]


@cache
def alone(*, lora: bool) -> dict[str, Any]:
    return train("ddp, cached, lora" if lora else "ddp")


def test_two_ranks_have_the_gradients_of_one(on_two: tuple[Found, Any]):
    torch.testing.assert_close(on_two[0], step(range(ROWS)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_the_same_weights(on_two: tuple[Any, dict[str, Any]], name: str):
    found, expected = on_two[1][name], alone(lora=STRATEGIES[name][2])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
