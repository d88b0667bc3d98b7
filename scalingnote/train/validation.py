"""Validation while training: contrastive entropy, R@K and MRR of held-out queries on one small, fixed sample.

Each rank encodes a share of the sample and gathers the rest, so that all have the same numbers. Training is
not affected: no gradient is computed, no random number drawn, and every module keeps its mode.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor, nn

from scalingnote.log import get_logger
from scalingnote.models.batch import collate
from scalingnote.models.prompt import Row
from scalingnote.train.collectives import broadcast_numbers, rank, world_size
from scalingnote.train.config import Validation
from scalingnote.train.data import Rows, Store
from scalingnote.train.engine import Engine
from scalingnote.train.validation_sample import draw_sample, measure_retrieval

SMALLER_IS_BETTER = frozenset({"contrastive_entropy", "squared_distance", "qkd"})
INDEXED_VIEW = "summary"
_ROWS_PER_FORWARD = 64


def better(metric: str, value: float, best: float | None) -> bool:
    """Whether `value` is better than `best` (None: nothing measured so far). A NaN never is."""
    if best is None:
        return not np.isnan(value)
    return value < best if metric in SMALLER_IS_BETTER else value > best


def validator(
    store: Store,
    engine: Engine,
    config: Validation | None,
    *,
    views: Sequence[str],
    pads: tuple[int, int],
    packed: bool,
    temperature: float,
    device: torch.device,
    seed: int,
    pool: Rows | None = None,
) -> Callable[[], dict[str, float]] | None:
    """A function that measures the towers of `engine` as they are when it is called; None without a sample.

    Every rank must call it at the same step.

    Args:
        store: of stage I.
        engine: its module has `embeddings(name, rows)` for ``query`` and ``document``.
        config: size of the sample; None measures nothing.
        views: of the document tower.
        pads: pad tokens of the query and the document tower.
        packed: rows lie one after the other, without padding.
        temperature: of the contrastive entropy. It stays the same when the losses learn one, so that the
            numbers of all steps can be compared.
        device: of the towers.
        seed: of the sample.
        pool: its documents, where the store's are not at hand.
    """
    sample = draw_sample(store, config, seed=seed, pool=pool) if config else None
    if sample is None:
        if config:
            get_logger("train").info("the triplets have no validation split: nothing is measured in training")
        return None
    view = views.index(INDEXED_VIEW) if INDEXED_VIEW in views else len(views) - 1

    def validate() -> dict[str, float]:
        queries, pool = (
            encode_rows(name, rows, engine=engine, pad=pad, packed=packed, device=device)
            for name, rows, pad in zip(
                ("query", "document"), (sample.queries, sample.pool), pads, strict=True
            )
        )
        metrics = measure_retrieval(queries[:, 0], pool[:, view], sample, temperature=temperature)
        return broadcast_numbers(metrics, device)

    return validate


def encode_rows(
    name: str, rows: Sequence[Row], *, engine: Engine, pad: int, packed: bool, device: torch.device
) -> Float[ndarray, "rows views dim"]:
    """Embeddings of all rows by the tower `name` of `engine`, on every rank; training is not affected.

    Ranks make equally many forward passes, since sharded weights are gathered in each.
    """
    longest_first = np.argsort([-len(row.ids) for row in rows], kind="stable")
    world = world_size()
    share = -(-len(rows) // world)
    # In turn, so that ranks get equally long rows; the last row is repeated to make shares equal.
    own = longest_first[np.minimum(np.arange(share) * world + rank(), len(rows) - 1)].tolist()
    encode = cast(Any, engine.module).embeddings
    parts = []
    with _evaluation_mode(engine.module, device), engine.precision():
        for start in range(0, share, _ROWS_PER_FORWARD):
            chosen = [rows[number] for number in own[start : start + _ROWS_PER_FORWARD]]
            parts.append(encode(name, collate(chosen, pad=pad, packed=packed).to(device)).float())
        sorted_rows = torch.stack(_all_gathered(torch.cat(parts)), dim=1).flatten(0, 1)[: len(rows)]
    out = np.empty(tuple(sorted_rows.shape), dtype=np.float32)
    out[longest_first] = sorted_rows.cpu().numpy()
    return out


@contextmanager
def _evaluation_mode(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode without a graph; random states and modes are restored afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training


def _all_gathered(tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank; all have one shape."""
    if world_size() == 1:
        return [tensor]
    out = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(out, tensor.contiguous())
    return out
