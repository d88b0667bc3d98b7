"""Queries a second of query towers from 7B parameters down to a table: two papers' tables in one.

ScalingNote's Table 6 is for students of 1, 4 and 12 layers and the LLM, batches of 500, on an A100.
LightRetriever's Table 1 is for an LLM and a lookup, on an H800 and without it. Here all run on one GPU, and
the table also on the CPU; every tower starts from token ids. What tokenizing adds is in
:mod:`benchmarks.query_encoder`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from benchmarks.gpu_towers import DIM, TINY, Figures, any_tokenizer, forget, llm, random_tower, timed
from scalingnote.models.backbone import Backbone
from scalingnote.models.batch import collate
from scalingnote.models.flops import Shape
from scalingnote.models.prompt import TokenRow
from scalingnote.models.tower import Tower

TOKENS = 16
BATCHES = (1, 64, 500)
VOCABULARY = 84_522  # of ScalingNote's student
# Queries a second as published: batches of 500 on an A100; of 256 on an H800, and on its host's CPUs.
PAPERS = {"1 layer": 52_205, "4 layers": 33_810, "12 layers": 19_090, "llm": 408}
PAPERS |= {"lookup": round(65_536 / 0.0185), "lookup on CPU": round(65_536 / 2.9990)}


def measure_all(shape: Shape, device: torch.device, *, seconds: float) -> list[Figures]:
    """A row per query tower, the largest first."""
    cpu = torch.device("cpu")
    makers: dict[str, Callable[[], Tower | torch.Tensor]] = {
        "llm": lambda: random_tower(llm(shape, device), role="query"),
        "12 layers": lambda: _student(12, device, tiny=shape is TINY),
        "4 layers": lambda: _student(4, device, tiny=shape is TINY),
        "1 layer": lambda: _student(1, device, tiny=shape is TINY),
        "lookup": lambda: _table(device),
        "lookup on CPU": lambda: _table(cpu),
    }
    rows = []
    for name, make in makers.items():
        forget(device)
        where = cpu if name.endswith("CPU") else device
        rows.append({"tower": name, **_measure(make(), where, seconds)})
    largest = f"batch {BATCHES[-1]}"
    return [
        row | {"over llm": row[largest] / rows[0][largest], "paper": PAPERS[row["tower"]]} for row in rows
    ]


def _measure(made: Tower | torch.Tensor, device: torch.device, seconds: float) -> Figures:
    """The parameters of a tower but for its embeddings, and queries a second by the batch."""
    row: Figures = {"parameters": 0}
    if isinstance(made, Tower):
        made.eval().requires_grad_(False)
        parameters = sum(p.numel() for p in made.parameters())
        row["parameters"] = parameters - made.token_embeddings.weight.numel()
    for batch in BATCHES:
        work = _encode(made, batch) if isinstance(made, Tower) else _look_up(made, batch)
        figures = timed(work, device, seconds)
        row[f"batch {batch}"] = batch * figures["steps"] / figures["seconds"]
    return row


def metrics(rows: list[Figures]) -> dict[str, float]:
    """Queries a second in batches of 500, and how many times the LLM's that is."""
    named = [(row["tower"].replace(" ", "_"), row) for row in rows]
    rates = {f"queries_per_s_{name}": row[f"batch {BATCHES[-1]}"] for name, row in named}
    return rates | {f"queries_{name}_over_llm": row["over llm"] for name, row in named}


def _student(layers: int, device: torch.device, *, tiny: bool) -> Tower:
    hidden = 64 if tiny else 768
    settings = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model: Any = BertModel(settings, add_pooling_layer=False)
        model.to(dtype)
    return random_tower(Backbone(model, any_tokenizer(), causal=False), role="query")


def _table(device: torch.device) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(VOCABULARY, DIM).to(device, torch.float16)


def _encode(tower: Tower, batch: int) -> Callable[[int], None]:
    vocabulary, device = tower.token_embeddings.weight.shape[0], tower.token_embeddings.weight.device
    ids = np.random.default_rng(0).integers(6, vocabulary, (batch, TOKENS)).tolist()
    rows = [TokenRow(row, [TOKENS - 1 if tower.causal else 0]) for row in ids]
    inputs = collate(rows, pad=tower.pad).to(device)

    @torch.inference_mode()
    def work(_: int) -> None:
        tower(inputs)

    return work


def _look_up(table: torch.Tensor, batch: int) -> Callable[[int], None]:
    """The mean of rows of a float16 table. A single query is one bag, as in a batch."""
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, batch * TOKENS)
    ids = torch.from_numpy(drawn).to(table.device)
    starts = torch.arange(0, batch * TOKENS, TOKENS, device=table.device)

    @torch.inference_mode()
    def work(_: int) -> None:
        F.embedding_bag(ids, table, starts, mode="mean")

    return work
