import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.plan import training_cost
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Optimizer

SIZES = {"trained": 7_000, "frozen": 0, "largest": 900, "gpus": 4}


def test_one_process_holds_what_torch_holds():
    layers = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    parameters = list(layers.parameters())
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    state = training_cost.training_state(
        Ddp(),
        Optimizer(),
        trained=sum(p.numel() for p in parameters),
        frozen=0,
        largest=0,
        gpus=1,
        numbers="float32",
    )
    assert state.weights == sum(p.nbytes for p in parameters)
    assert state.gradients == sum(p.grad.nbytes for p in parameters)
    assert state.optimizer == sum(t.nbytes for t in moments)
    assert state.gathered == state.host == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_keeps_sixteen_bytes_and_shards_more_by_stage(stage: int):
    one = training_cost.training_state(
        DeepSpeed(stage=stage), Optimizer(), **SIZES | {"gpus": 1}, numbers="bfloat16"
    )
    many = training_cost.training_state(DeepSpeed(stage=stage), Optimizer(), **SIZES, numbers="bfloat16")
    whole = {1: 2 + 2, 2: 2, 3: 0}[stage] * 7_000  # bfloat16 weights and gradients
    assert many.total - many.gathered == whole + (one.total - one.gathered - whole) / 4
    assert one.optimizer == 12 * 7_000


@given(st.integers(1, 512), st.integers(0, 10**9), st.sampled_from(["adamw", "adamw_8bit"]))
def test_offloading_moves_bytes_and_loses_none(gpus: int, frozen: int, kind: str):
    sizes = {**SIZES, "gpus": gpus, "frozen": frozen, "numbers": "bfloat16"}
    here = training_cost.training_state(Fsdp2(), Optimizer(kind=kind), **sizes)
    away = training_cost.training_state(Fsdp2(offload=True), Optimizer(kind=kind), **sizes)
    assert (away.total, away.host) == (here.gathered, pytest.approx(here.total - here.gathered))
    here = training_cost.training_state(DeepSpeed(), Optimizer(kind=kind), **sizes)
    away = training_cost.training_state(DeepSpeed(offload=True), Optimizer(kind=kind), **sizes)
    assert away.total + away.host == pytest.approx(here.total)
    assert away.total == pytest.approx(here.gathered)


def test_frozen_weights_have_neither_gradients_nor_moments():
    state = training_cost.training_state(
        Fsdp2(), Optimizer(), trained=10, frozen=990, largest=100, gpus=1, numbers="bfloat16"
    )
    assert (state.weights, state.gradients, state.optimizer) == (2_020, 40, 80)


@pytest.mark.parametrize(("base", "stored"), [("full", 2_000), ("int8", 1_000), ("nf4", 531.25)])
def test_packed_frozen_weights_take_their_bytes(base: str, stored: float):
    sizes = {"trained": 10, "frozen": 1_100, "frozen_tables": 100, "largest": 100, "numbers": "bfloat16"}
    alone = training_cost.training_state(Ddp(), Optimizer(), **sizes, gpus=1, base=base)
    shard = training_cost.training_state(Fsdp2(), Optimizer(), **sizes, gpus=4, base=base)
    assert (alone.weights, shard.weights) == (440 + stored, (440 + stored) / 4)


def test_scores_grow_with_the_rows_of_a_gpu_times_all_rows():
    knobs = {"columns": 2, "views": 3, "prefixes": (16, 128), "dim": 128}
    small, large = (training_cost.score_bytes(rows=rows, ranks=1, **knobs) for rows in (4_000, 8_000))
    embeddings = 4.0 * 4_000 * 7 * (128 + 3 * 144)
    assert small - embeddings == (2 * 4 + 2) * 4_000 * 8_000  # two float32 scores and two masks a pair
    assert large - 2 * embeddings == 4 * (small - embeddings)
