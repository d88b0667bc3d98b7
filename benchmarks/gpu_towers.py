"""Common parts of GPU measurements: towers with random weights on the device, rows, a timer, the peak."""

import gc
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from scalingnote.models import backbone, dual_encoder, published_model
from scalingnote.models.backbone import Backbone
from scalingnote.models.config import Lora, Scratch, TowerConfig
from scalingnote.models.flops import Shape
from scalingnote.models.prompt import TokenRow
from scalingnote.models.tower import Tower
from scalingnote.plan.config import GPUS

DIM = 128
QUERY_TOKENS, DOCUMENT_TOKENS = 24, 256  # means
WARM_UP, LEAST_CALLS = 2, 4  # of a measurement
TINY = Shape(2, 64, 4, 2, 16, 128, 2048, qkv_bias=True)
Figures = dict[str, Any]


def timed(work: Callable[[int], None], device: torch.device, seconds: float) -> Figures:
    """Call `work` to warm up, then for `seconds`; `steps` is the number of timed calls."""
    for number in range(WARM_UP):
        work(number)
    wait(device)
    start, number = time.perf_counter(), 0
    while number < LEAST_CALLS or time.perf_counter() - start < seconds:
        work(number)
        number += 1
        wait(device)
    return {"seconds": time.perf_counter() - start, "steps": number}


def llm(shape: Shape, device: torch.device) -> Backbone:
    """Make a backbone with random bfloat16 weights on the device: its 28 GB are never in host memory."""
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


def random_tower(network: Backbone, *, role: published_model.Role, lora: Lora | None = None) -> Tower:
    """Return a tower around a backbone, on the backbone's device."""
    config = TowerConfig(lora=lora, max_length=min(512, network.max_positions or 512))
    device = next(network.model.parameters()).device
    return dual_encoder.build_tower(
        config, role=role, dim=DIM, tokenizer_json=None, seed=0, backbone=network
    ).to(device)


def any_tokenizer() -> PreTrainedTokenizerFast:
    """Return any tokenizer with the placeholders: rows are drawn as ids."""
    learnt = backbone.train_tokenizer(
        ["predict a query term: compress the above content into one word"], vocabulary=400
    )
    small = Scratch(layers=1, hidden=8, heads=1, intermediate=8, max_positions=8)
    return backbone.build(small, tokenizer_json=learnt, seed=0).tokenizer


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def forget(device: torch.device) -> None:
    """Free unused memory, and reset the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def document_rows(shape: Shape, rows: int, seed: int) -> list[TokenRow]:
    """Draw documents of log-normal lengths; three positions are pooled, like in the paper's prompt."""
    rng = np.random.default_rng(seed)
    mean = 32 if shape is TINY else DOCUMENT_TOKENS
    lengths = rng.lognormal(np.log(mean) - 0.08, 0.4, rows).round().clip(16, 512).astype(int)
    ids = (rng.integers(300, shape.vocabulary, length).tolist() for length in lengths)
    return [TokenRow(row, [len(row) // 4, len(row) - 8, len(row) - 1]) for row in ids]


def query_rows(shape: Shape, rows: int, seed: int, *, causal: bool) -> list[TokenRow]:
    """Draw queries of log-normal lengths; the last position is pooled, or the first if not causal."""
    rng = np.random.default_rng(seed + 1000)
    lengths = rng.lognormal(np.log(QUERY_TOKENS) - 0.08, 0.4, rows).round().clip(4, 64).astype(int)
    ids = (rng.integers(6, min(shape.vocabulary, 200), length).tolist() for length in lengths)
    return [TokenRow(row, [len(row) - 1 if causal else 0]) for row in ids]


def tokens(rows: Sequence[TokenRow]) -> int:
    """Count the tokens of rows."""
    return sum(len(row.ids) for row in rows)


def peak_rate(device: torch.device) -> float:
    """Return dense bfloat16 operations per second: the maker's figure, or the rate of a large product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        known = next((gpu for label, gpu in GPUS.items() if label in re.findall(r"\w+", name)), None)
        if known:
            return known.peak
    width = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    square = torch.ones(width, width, device=device, dtype=dtype)
    figures = timed(lambda _: _multiply(square), device, 0.2)
    return float(2 * width**3 * figures["steps"] / figures["seconds"])


def _multiply(square: torch.Tensor) -> None:
    square.mm(square)


def allocated(device: torch.device) -> float:
    """Return the peak of torch's bytes on the device since :func:`forget`."""
    return float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0
