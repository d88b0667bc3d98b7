"""Queries a second of query towers from 7B parameters down to a table, for the tables of two papers.

ScalingNote's Table 6 has students of 1, 4 and 12 layers and the LLM, batches of 500, on an A100.
LightRetriever's Table 1 has an LLM and a lookup, on an H800 and without it. Here all run on one GPU, and the
table also on the CPU; every tower starts from token ids. :mod:`benchmarks.query_encoder` includes
tokenization.
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
STUDENTS = (1, 4, 12)
VOCABULARY = 84_522  # of ScalingNote's student
# Published queries a second: batches of 500 on an A100; of 256 on an H800, and on its host's CPUs.
PAPERS = {"1 layer": 52_205, "4 layers": 33_810, "12 layers": 19_090, "llm": 408}
PAPERS |= {"lookup": round(65_536 / 0.0185), "lookup on CPU": round(65_536 / 2.9990)}


def measure_all(shape: Shape, device: torch.device, *, seconds: float) -> list[Figures]:
    """Measure each query tower, the largest first."""
    rows = [_row("llm", _llm(shape, device), device, seconds)]
    for layers in STUDENTS[::-1]:
        forget(device)
        name = f"{layers} layer" + "s" * (layers > 1)
        rows.append(_row(name, _student(layers, device, tiny=shape is TINY), device, seconds))
    forget(device)
    rows.append(_row("lookup", _lookup(device), device, seconds))
    cpu = torch.device("cpu")
    rows.append(_row("lookup on CPU", _lookup(cpu), cpu, seconds))
    largest = BATCHES[-1]
    return [
        row
        | {"over llm": row[f"batch {largest}"] / rows[0][f"batch {largest}"], "paper": PAPERS[row["tower"]]}
        for row in rows
    ]


def metrics(rows: list[Figures]) -> dict[str, float]:
    """Return queries a second in batches of 500, and their ratio to the LLM's."""
    towers = [(row["tower"].replace(" ", "_"), row) for row in rows]
    rates = {f"queries_per_s_{name}": row[f"batch {BATCHES[-1]}"] for name, row in towers}
    return rates | {f"queries_{name}_over_llm": row["over llm"] for name, row in towers}


Work = tuple[Callable[[int], None], int]  # one batch of a size, and the tower's parameters without embeddings
Maker = Callable[[int], Work]


def _row(name: str, made: Maker, device: torch.device, seconds: float) -> Figures:
    row: Figures = {"tower": name}
    for batch in BATCHES:
        work, parameters = made(batch)
        figures = timed(work, device, seconds)
        row |= {"parameters": parameters, f"batch {batch}": batch * figures["steps"] / figures["seconds"]}
    return row


def _llm(shape: Shape, device: torch.device) -> Maker:
    return _transformer(random_tower(llm(shape, device), role="query"), shape.vocabulary, device)


def _student(layers: int, device: torch.device, *, tiny: bool) -> Maker:
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
    tower = random_tower(Backbone(model, any_tokenizer(), causal=False), role="query")
    return _transformer(tower, VOCABULARY, device)


def _transformer(made: Tower, vocabulary: int, device: torch.device) -> Maker:
    made.eval().requires_grad_(False)
    parameters = sum(p.numel() for p in made.parameters()) - made.token_embeddings.weight.numel()

    def of(batch: int) -> Work:
        ids = np.random.default_rng(0).integers(6, vocabulary, (batch, TOKENS)).tolist()
        rows = [TokenRow(row, [TOKENS - 1 if made.causal else 0]) for row in ids]
        inputs = collate(rows, pad=made.pad).to(device)

        @torch.inference_mode()
        def work(_: int) -> None:
            made(inputs)

        return work, parameters

    return of


def _lookup(device: torch.device) -> Maker:
    """Return the mean of rows of a float16 table; a single query is one bag, like in a batch."""
    torch.manual_seed(0)
    table = torch.randn(VOCABULARY, DIM).to(device, torch.float16)

    def of(batch: int) -> Work:
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, batch * TOKENS)).to(device)
        starts = torch.arange(0, batch * TOKENS, TOKENS, device=device)

        @torch.inference_mode()
        def work(_: int) -> None:
            F.embedding_bag(ids, table, starts, mode="mean")

        return work, 0

    return of
