"""Parameters and work of transformers equal those of the models and the counts of torch."""

import json
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

import tiny
from scalingnote.core.errors import ConfigError
from scalingnote.models import backbone as backbones
from scalingnote.models import flops
from scalingnote.models.config import Lora, Pretrained
from scalingnote.models.flops import Shape, adapter_parameters, backbone_shape, settings_shape

DECODER = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 36,
}
SHAPE, TOKENS = Shape(2, 32, 4, 2, 8, 48, 40, qkv_bias=True), 11.0
ENCODER = {**DECODER, "max_position_embeddings": 20}
KINDS = {
    "qwen2": DECODER,
    "qwen3": {**DECODER, "head_dim": 10},
    "llama": DECODER,
    "mistral": DECODER,
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "mpnet": ENCODER,
}
HEADLESS = {kind: {"add_pooling_layer": False} for kind, size in KINDS.items() if size is ENCODER}


def model_of(kind: str, **more: object) -> torch.nn.Module:
    settings = AutoConfig.for_model(kind, **KINDS[kind], **more)
    with torch.device("meta"):
        return AutoModel.from_config(settings, **HEADLESS.get(kind, {}))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in KINDS),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_parameters_equal_those_of_the_model(kind: str, more: dict[str, bool]):
    model = model_of(kind, **more)
    shape = settings_shape(model.config.to_dict(), source=kind)
    parameters = {name: p.numel() for name, p in model.named_parameters()}
    assert shape.parameters == sum(parameters.values())
    tables = sum(n for name, n in parameters.items() if "embed" in name and "LayerNorm" not in name)
    assert shape.non_embedding_parameters == shape.parameters - tables


@pytest.mark.parametrize("architecture", ["qwen2", "bert"])
def test_the_shape_of_a_scratch_backbone_is_the_models(architecture: str):
    # A corpus of a few words has fewer tokens than configured, so the vocabulary is set.
    scratch = tiny.CAUSAL.model_copy(update={"architecture": architecture, "layers": 2})
    texts = [row["content"] for row in tiny.document_rows()]
    tokenizer_json = backbones.train_tokenizer(texts, vocabulary=scratch.vocabulary)
    model = backbones.build(scratch, tokenizer_json=tokenizer_json, seed=0).model
    size = model.get_input_embeddings().num_embeddings
    shape = backbone_shape(scratch.model_copy(update={"vocabulary": size - 3}))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.causal == (architecture == "qwen2")


# As stated by their authors; with the output matrix, if it is not the token table.
@pytest.mark.parametrize(
    ("name", "total", "own_head"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768, False),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304, False),
        ("Qwen/Qwen2.5-3B", 3_085_938_688, False),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512, True),
        ("Qwen/Qwen2.5-14B", 14_770_033_664, True),
        ("Qwen/Qwen2.5-32B", 32_763_876_352, True),
        ("google-bert/bert-base-uncased", 108_891_648, False),
        ("meta-llama/Llama-3.1-8B", 8_030_261_248, True),
    ],
)
def test_published_shapes_have_the_published_size(name: str, total: int, own_head: bool):
    shape = backbone_shape(Pretrained(path=name))
    assert shape.parameters + own_head * shape.vocabulary * shape.hidden == total


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own
def test_adapter_parameters_equal_those_of_peft(kind: str, dora: bool):
    settings = AutoConfig.for_model(kind, **KINDS[kind])
    model = AutoModel.from_config(settings, **HEADLESS.get(kind, {}))
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(r=3, target_modules="all-linear", use_dora=dora, task_type="FEATURE_EXTRACTION"),
    )
    expected, _ = wrapped.get_nb_trainable_parameters()
    shape = settings_shape(settings.to_dict(), source=kind)
    assert adapter_parameters(shape, Lora(rank=3, dora=dora)) == expected


def test_a_folder_with_a_config_is_enough(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**DECODER, "model_type": "qwen2"}))
    assert backbone_shape(Pretrained(path=str(tmp_path), layers=2)).layers == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"model_type": "qwen2"}', "no 'num_attention_heads'"),
        (json.dumps({**DECODER, "model_type": "mamba"}), "shape of 'mamba' is not known"),
    ],
)
def test_a_config_without_a_shape_is_refused(tmp_path: Path, content: str, message: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        backbone_shape(Pretrained(path=str(tmp_path)))


def test_the_error_of_an_unknown_name_says_what_to_do():
    with pytest.raises(ConfigError, match=r"hf download no/where config.json"):
        backbone_shape(Pretrained(path="no/where"))


# --- work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_work_equals_the_count_of_torch(kind: str, checkpointing: bool):
    settings = AutoConfig.for_model(kind, **KINDS[kind], attn_implementation="eager")
    model = AutoModel.from_config(settings, **HEADLESS.get(kind, {}))
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.arange(33).view(3, 11)
    with FlopCounterMode(display=False) as counter:
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        (hidden[:, :2] @ torch.zeros(24, 16, requires_grad=True)).sum().backward()
    shape = settings_shape(settings.to_dict(), source=kind)
    work = flops.row(shape, tokens=TOKENS, pooled=2, dim=16, checkpointing=checkpointing)
    expected = 3 * work.total
    if shape.causal:  # torch computes the masked half, too
        expected += 3 * (4 if checkpointing else 3) * 2 * TOKENS**2 * shape.layers * shape.query_width
    assert counter.get_total_flops() == expected


def test_frozen_weights_have_no_gradient_work():
    lora = Lora(rank=2)
    full = flops.row(SHAPE, tokens=TOKENS, pooled=0, dim=1)
    adapted = flops.row(SHAPE, tokens=TOKENS, pooled=0, dim=1, lora=lora)
    adapters = 2 * TOKENS * adapter_parameters(SHAPE, lora)
    linear = 2 * TOKENS * SHAPE.layers * SHAPE.layer_weights
    assert adapted.forward == full.forward + adapters
    assert adapted.backward == full.backward - linear + 2 * adapters


@given(st.integers(1, 500).map(float), st.booleans())
def test_grad_cache_adds_one_forward_pass(tokens: float, checkpointing: bool):
    plain = flops.row(SHAPE, tokens=tokens, pooled=3, dim=8, checkpointing=checkpointing)
    cached = flops.row(SHAPE, tokens=tokens, pooled=3, dim=8, checkpointing=checkpointing, grad_cache=True)
    assert cached.total == plain.total + plain.forward
    assert cached.model == plain.model


def test_scores_cost_their_products():
    work = flops.loss(rows=5, columns=2, views=3, prefixes=(4, 8), bidirectional=True)
    there = sum(2 * 5 * 10 * m for m in (4, 8)) * 3
    back = sum(2 * 5 * 5 * m for m in (4, 8)) * 3
    assert (work.forward, work.backward) == (there + back, 2 * (there + back))
