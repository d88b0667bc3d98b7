import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

from scalingnote.models import flops
from scalingnote.models.config import Lora
from scalingnote.models.flops import Shape, adapter_parameters, settings_shape

SETTINGS = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
SHAPE = Shape(2, 32, 4, 2, 8, 48, 40, qkv_bias=True)
TOKENS = 11.0


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_work_is_what_torch_counts(kind: str, checkpointing: bool):
    settings = AutoConfig.for_model(kind, **SETTINGS, attn_implementation="eager")
    model = AutoModel.from_config(settings, **({"add_pooling_layer": False} if kind == "bert" else {}))
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.arange(33).view(3, 11)
    with FlopCounterMode(display=False) as counter:
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        (hidden[:, :2] @ torch.zeros(32, 16, requires_grad=True)).sum().backward()
    shape = settings_shape(settings.to_dict(), source=kind)
    work = flops.row(shape, tokens=TOKENS, pooled=2, dim=16, checkpointing=checkpointing)
    expected = 3 * work.total
    if shape.causal:  # torch computes the half that is masked, too
        expected += 3 * (4 if checkpointing else 3) * 2 * TOKENS**2 * shape.layers * shape.query_width
    assert counter.get_total_flops() == expected


def test_frozen_weights_need_no_gradient_of_their_own():
    lora = Lora(rank=2)
    full = flops.row(SHAPE, tokens=TOKENS, pooled=0, dim=1)
    adapted = flops.row(SHAPE, tokens=TOKENS, pooled=0, dim=1, lora=lora)
    adapters = 2 * TOKENS * adapter_parameters(SHAPE, lora)
    linear = 2 * TOKENS * SHAPE.layers * SHAPE.layer_weights
    assert adapted.forward == full.forward + adapters
    assert adapted.backward == full.backward - linear + 2 * adapters


@given(st.integers(1, 500).map(float), st.booleans())
def test_grad_cache_goes_forward_once_more(tokens: float, checkpointing: bool):
    plain = flops.row(SHAPE, tokens=tokens, pooled=3, dim=8, checkpointing=checkpointing)
    cached = flops.row(SHAPE, tokens=tokens, pooled=3, dim=8, checkpointing=checkpointing, grad_cache=True)
    assert cached.total == plain.total + plain.forward
    assert cached.model == plain.model


def test_scores_cost_what_their_products_do():
    work = flops.loss(rows=5, columns=2, views=3, prefixes=(4, 8), bidirectional=True)
    there = sum(2 * 5 * 10 * m for m in (4, 8)) * 3
    back = sum(2 * 5 * 5 * m for m in (4, 8)) * 3
    assert (work.forward, work.backward) == (there + back, 2 * (there + back))
