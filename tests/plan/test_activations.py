import pytest
import torch
from transformers import AutoConfig, AutoModel

from scalingnote.models.flops import settings_shape
from scalingnote.plan.training_cost import layer_bytes, tower_bytes

ROWS, TOKENS = 3, 29  # their product divides no width of the models below


def model_of(kind: str, *, layers: int, kv_heads: int, head_dim: int) -> torch.nn.Module:
    decoder = kind != "bert"
    more = (
        {"num_key_value_heads": kv_heads}
        if decoder
        else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    )
    more |= {"head_dim": head_dim} if kind == "qwen3" else {}
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
    return AutoModel.from_config(settings, **({} if decoder else {"add_pooling_layer": False}))


def saved_bytes(model: torch.nn.Module, *, autocast: bool) -> float:
    """Bytes per token of all that autograd keeps and that has the batch's size."""
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() % (ROWS * TOKENS) == 0:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    model.train()
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
        model(input_ids=ids).last_hidden_state.sum()
    total = sum(size for size, _ in kept.values())
    return round(total / (ROWS * TOKENS), 6)


@pytest.mark.parametrize(
    ("kind", "kv_heads", "head_dim"), [("qwen2", 2, 16), ("qwen2", 4, 16), ("qwen3", 1, 24), ("bert", 4, 16)]
)
@pytest.mark.parametrize("numbers", ["float32", "autocast", "bfloat16"])
def test_a_layer_keeps_what_is_counted(kind: str, kv_heads: int, head_dim: int, numbers: str):
    dtype = torch.bfloat16 if numbers == "bfloat16" else torch.float32
    one, two = (
        model_of(kind, layers=layers, kv_heads=kv_heads, head_dim=head_dim).to(dtype) for layers in (1, 2)
    )
    autocast = numbers == "autocast"
    more = round(saved_bytes(two, autocast=autocast) - saved_bytes(one, autocast=autocast), 3)
    assert layer_bytes(settings_shape(one.config.to_dict(), source=kind), numbers) == more


def test_checkpointing_keeps_layer_inputs_and_one_layer():
    shape = settings_shape(model_of("qwen2", layers=30, kv_heads=2, head_dim=16).config.to_dict(), source="")
    plain, little = (tower_bytes(shape, "bfloat16", checkpointing=on) for on in (False, True))
    assert plain - little == 29 * layer_bytes(shape, "bfloat16") - 30 * 2 * shape.hidden
