"""What GPU measurements share: towers with random weights made on the device, and a stopwatch."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from scalingnote.models import backbone, published_model, tower
from scalingnote.models.backbone import Backbone
from scalingnote.models.config import Lora, Scratch, TowerConfig
from scalingnote.models.flops import Shape
from scalingnote.models.tower import Tower

DIM = 128
TINY = Shape(2, 64, 4, 2, 16, 128, 2048, qkv_bias=True)
Figures = dict[str, Any]


def timed(work: Callable[[int], None], device: torch.device, seconds: float) -> Figures:
    """Two calls to warm up, then as many as fit; `steps` tells which inputs were used how often."""
    for number in range(2):
        work(number)
    wait(device)
    start, number = time.perf_counter(), 0
    while number < 4 or time.perf_counter() - start < seconds:
        work(number)
        number += 1
        wait(device)
    return {"seconds": time.perf_counter() - start, "steps": number}


def llm(shape: Shape, device: torch.device) -> Backbone:
    """Random weights in bfloat16, made on the device: nothing of 28 GB is ever in host memory."""
    settings = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
    )
    torch.manual_seed(0)
    with device:
        model = Qwen2Model._from_config(settings, dtype=torch.bfloat16)
    return Backbone(model, any_tokenizer(), causal=True)


def random_tower(made: Backbone, *, role: published_model.Role, lora: Lora | None = None) -> Tower:
    """A tower around a backbone, where that lies."""
    config = TowerConfig(lora=lora, max_length=min(512, made.max_positions or 512))
    device = next(made.model.parameters()).device
    return tower.build(config, role=role, dim=DIM, tokenizer_json=None, seed=0, backbone=made).to(device)


def any_tokenizer() -> PreTrainedTokenizerFast:
    """Any tokenizer that knows the placeholders: rows are drawn as ids."""
    learnt = backbone.train_tokenizer(
        ["predict a query term: compress the above content into one word"], vocabulary=400
    )
    small = Scratch(layers=1, hidden=8, heads=1, intermediate=8, max_positions=8)
    return backbone.build(small, tokenizer_json=learnt, seed=0).tokenizer


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def forget(device: torch.device) -> None:
    """Give memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
