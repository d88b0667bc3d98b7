"""Tiny towers, batches and an engine in plain PyTorch, shared by the tests of training steps."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tiny
from light import learnt
from scalingnote.models import dual_encoder
from scalingnote.models.batch import collate
from scalingnote.models.config import Scratch
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.train import engine, strategies
from scalingnote.train.data import MappedShares, Order, Store
from scalingnote.train.engine import Engine, Objective, surrogate
from scalingnote.train.objective import TripletBatches, Triplets

DIM = 8
Tensors = dict[str, Tensor]


def towers(scratch: Scratch = tiny.CAUSAL) -> DualEncoder:
    """Build both towers from scratch."""
    query, document = (
        dual_encoder.build_tower(config, role=role, dim=DIM, tokenizer_json=learnt(), seed=seed)
        for config, role, seed in (
            (tiny.query_tower(scratch), "query", 0),
            (tiny.document_tower(scratch), "document", 1),
        )
    )
    return DualEncoder(query, document)


def triplets(both: DualEncoder, rows: Sequence[int], *, of: int, packed: bool = False) -> Triplets:
    """Build rows of a global batch of `of`: ids repeat, a third is unscored, a fourth has no negative."""
    texts = tiny.document_rows(2 * of)
    documents = [texts[i] for i in (*rows, *(row + of for row in rows))]
    columns = ([document[name] for document in documents] for name in ("title", "topic", "content"))
    queries = both.query.prompt.rows([texts[i]["content"][:20] for i in rows])
    row_numbers = torch.tensor(rows)
    ids = row_numbers % max(of - 3, 1)
    scores = torch.stack([row_numbers * 0.3, 1.0 - row_numbers * 0.1], dim=1)
    scores[row_numbers % 3 == 1] = torch.nan
    scores[row_numbers % 4 == 2, 1] = torch.nan
    return Triplets(
        queries=collate(queries, pad=0, packed=packed),
        documents=collate(both.document.prompt.rows(*columns), pad=0, packed=packed),
        query_ids=ids,
        document_ids=torch.cat([ids, torch.where(row_numbers % 4 == 2, -1, row_numbers + 1000)]),
        known_positives=torch.stack([ids, (ids + 5) % 17], dim=1),
        weights=(1 + row_numbers % 3) / 3,
        scores=scores,
    )


def mapped_batches(store: str, order: Order, *, rank: int = 0, world: int = 1, **more: Any) -> TripletBatches:
    """Build a rank's batches from a mapped store."""
    opened = Store.open(store)
    return TripletBatches(MappedShares(opened, order, rank, world), opened.facts, pads=(0, 0), **more)


def gradients(module: nn.Module) -> Tensors:
    """Return the gradient of each parameter that has one."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def step(module: Objective, batch: object) -> Tensors:
    """Compute loss, parts and gradients of this rank's rows, all averaged over ranks."""
    loss, parts = module(batch)
    loss.backward()
    results = {"loss": loss.detach(), **parts, **gradients(module)}
    if dist.is_initialized():
        for value in results.values():
            dist.all_reduce(value)
            value /= dist.get_world_size()
    return results


class PlainEngine(Engine):
    """The parts of an engine that GradCache needs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self.module, self._dtype = module, dtype
        self.lasts: list[bool] = []

    def precision(self) -> AbstractContextManager[None]:
        return torch.autocast("cpu", self._dtype, enabled=self._dtype != torch.float32)

    def backward_from(self, embeddings: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        surrogate(embeddings, gradients).backward()
        self.lasts.append(last)


@contextmanager
def steady() -> Iterator[None]:
    """Make steps of optimizers independent of the last bit of a gradient near zero; clip gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "EPS", 1e-3)
        for module in (engine, strategies):
            patch.setattr(module, "CLIP_NORM", 0.5)
        yield
