import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel

from scalingnote.models.flops import settings_shape
from scalingnote.plan.memory import layer_bytes, score_bytes, tower_bytes, training_state
from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Optimizer

ROWS, TOKENS = 3, 29  # their product divides no width of the models below
SIZES = {"trained": 7_000, "frozen": 0, "largest": 900, "gpus": 4, "numbers": "bfloat16"}


def model_of(kind: str, *, layers: int, **more: float) -> torch.nn.Module:
    settings = AutoConfig.for_model(
        kind,
        vocab_size=40,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=104,
        attn_implementation="sdpa",
        **more,
    )
    return AutoModel.from_config(settings, **({"add_pooling_layer": False} if kind == "bert" else {}))


def saved_bytes(model: torch.nn.Module, *, autocast: bool) -> float:
    """Measure the bytes per token of the tensors with the size of the batch that autograd keeps."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() % (ROWS * TOKENS) == 0:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        model(input_ids=ids).last_hidden_state.sum()
    total = sum(size for size, _ in storages.values())
    return round(total / (ROWS * TOKENS), 6)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2", {"num_key_value_heads": 2}),
        ("qwen2", {"num_key_value_heads": 4}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 24}),
        ("bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    ],
)
@pytest.mark.parametrize("numbers", ["float32", "autocast", "bfloat16"])
def test_a_layer_keeps_the_counted_bytes(kind: str, more: dict[str, float], numbers: str):
    dtype, autocast = torch.bfloat16 if numbers == "bfloat16" else torch.float32, numbers == "autocast"
    one, two = (model_of(kind, layers=layers, **more).to(dtype) for layers in (1, 2))
    grown = round(saved_bytes(two, autocast=autocast) - saved_bytes(one, autocast=autocast), 3)
    assert layer_bytes(settings_shape(one.config.to_dict(), source=kind), numbers) == grown


def test_checkpointing_keeps_layer_inputs_and_one_layer():
    shape = settings_shape(model_of("qwen2", layers=30, num_key_value_heads=2).config.to_dict(), source="")
    plain, little = (tower_bytes(shape, "bfloat16", checkpointing=on) for on in (False, True))
    assert plain - little == 29 * layer_bytes(shape, "bfloat16") - 30 * 2 * shape.hidden


def test_the_state_of_one_process_equals_that_of_torch():
    layers = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    parameters = list(layers.parameters())
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    sizes = {"trained": sum(p.numel() for p in parameters), "largest": 0, "gpus": 1, "numbers": "float32"}
    state = training_state(Ddp(), Optimizer(), **SIZES | sizes)
    assert state.weights == sum(p.nbytes for p in parameters)
    assert state.gradients == sum(p.grad.nbytes for p in parameters)
    assert state.optimizer == sum(t.nbytes for t in moments)
    assert state.gathered == state.host == 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_of_zero_shards_more_of_sixteen_bytes(stage: int):
    one, many = (
        training_state(DeepSpeed(stage=stage), Optimizer(), **SIZES | {"gpus": gpus}) for gpus in (1, 4)
    )
    unsharded = {1: 2 + 2, 2: 2, 3: 0}[stage] * 7_000  # bfloat16 weights and gradients
    assert many.total - many.gathered == unsharded + (one.total - one.gathered - unsharded) / 4
    assert one.optimizer == 12 * 7_000


@given(st.integers(1, 512), st.integers(0, 10**9), st.sampled_from(["adamw", "adamw_8bit"]))
def test_offloading_moves_all_bytes_to_the_host(gpus: int, frozen: int, kind: str):
    sizes = SIZES | {"gpus": gpus, "frozen": frozen}
    for strategy in (Fsdp2, DeepSpeed):
        here, away = (
            training_state(strategy(offload=offload), Optimizer(kind=kind), **sizes)
            for offload in (False, True)
        )
        assert (away.total, away.host) == (here.gathered, pytest.approx(here.total - here.gathered))
    # Only the optimizer: 8 or 2 bytes of moments, and copies of weights and gradients in float32.
    here, away = (
        training_state(DeepSpeed(stage=1, offload=offload), Optimizer(kind=kind), **sizes)
        for offload in (False, True)
    )
    assert away.total + away.host == pytest.approx(here.total)
    assert away.host == pytest.approx((8 + {"adamw": 8, "adamw_8bit": 2}[kind]) * 7_000 / gpus)


@pytest.mark.parametrize(("base", "frozen_bytes"), [("full", 2_000), ("int8", 1_000), ("nf4", 531.25)])
def test_frozen_weights_have_no_gradient_or_optimizer_bytes(base: str, frozen_bytes: float):
    sizes = SIZES | {"trained": 10, "frozen": 1_100, "frozen_tables": 100, "largest": 100}
    single = training_state(Ddp(), Optimizer(), **sizes | {"gpus": 1}, base=base)
    shard = training_state(Fsdp2(), Optimizer(), **sizes, base=base)
    assert (single.weights, shard.weights) == (440 + frozen_bytes, (440 + frozen_bytes) / 4)
    assert (single.gradients, single.optimizer) == (40, 80)


def test_scores_grow_with_the_rows_of_a_gpu_times_all_rows():
    sizes = {"columns": 2, "views": 3, "prefixes": (16, 128), "dim": 128}
    small, large = (score_bytes(rows=rows, ranks=1, **sizes) for rows in (4_000, 8_000))
    embeddings = 4.0 * 4_000 * 7 * (128 + 3 * 144)
    assert small - embeddings == (2 * 4 + 2) * 4_000 * 8_000  # two float32 scores and two masks per pair
    assert large - 2 * embeddings == 4 * (small - embeddings)
