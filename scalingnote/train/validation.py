"""Measuring held-out queries while training: contrastive entropy, R@K and MRR on one small, fixed sample.

All ranks encode a share of it and gather the rest, so that each of them knows the same numbers. Training goes
on as if nobody had looked: no gradient, no random number drawn, every module in the mode it was in.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor, nn

from scalingnote.log import get_logger
from scalingnote.models.batch import collate
from scalingnote.models.prompt import Row
from scalingnote.storage import vectors
from scalingnote.train.config import Validation
from scalingnote.train.distributed import rank, world_size
from scalingnote.train.order import permuted
from scalingnote.train.stream import Rows, Store

SMALLER_IS_BETTER = frozenset({"contrastive_entropy", "squared_distance"})
INDEXED_VIEW = "summary"
_ROWS_PER_FORWARD = 64
_QUERIES, _DOCUMENTS, _NEGATIVES = range(3)  # what is drawn


def better(metric: str, found: float, best: float | None) -> bool:
    """Whether `found` beats `best` (None: nothing measured so far). A NaN beats nothing."""
    if best is None:
        return not np.isnan(found)
    return found < best if metric in SMALLER_IS_BETTER else found > best


@dataclass(frozen=True)
class Sample:
    """Validation queries, and a pool of documents that holds their positives and others drawn from all."""

    queries: list[Row]
    pool: list[Row]
    positives: Int64[ndarray, " queries"]  # the column of the pool that holds a query's positive
    relevant: Bool[ndarray, "queries docs"]  # the positive, and whatever else is known to answer the query
    negatives: Int64[ndarray, "queries negatives"]  # columns drawn from what does not answer the query


def draw(store: Store, config: Validation, *, seed: int) -> Sample | None:
    """The sample of a store; None where its triplets have no validation split.

    Negatives come from the pool's random documents alone where there are enough: the positives of other
    queries are no fair sample of all documents.
    """
    rows, documents, seed = store["validation"], store["documents"], seed % 2**64
    if not len(rows):
        return None
    chosen = _distinct(rows, config.queries, key=(seed, _QUERIES))
    positive = rows.values("documents", chosen)[:, 0]
    answers = np.unique(positive)
    wanted = max(config.documents - len(answers), config.negatives)
    drawn = np.arange(min(wanted + len(answers), len(documents)))
    others = permuted(drawn, size=len(documents), key=(seed, _DOCUMENTS))
    others = others[~np.isin(others, answers)][:wanted]
    pool = np.concatenate([answers, others])
    positives = np.searchsorted(answers, positive)
    relevant = np.stack([np.isin(pool, known) for known in rows.lists("known", chosen)])
    relevant[np.arange(len(chosen)), positives] = True
    first = len(answers) if (~relevant[:, len(answers) :]).sum(1).min() >= config.negatives else 0
    width = min(config.negatives, int((~relevant[:, first:]).sum(1).min()))
    negatives = [
        _some(first + np.flatnonzero(~row[first:]), width, key=(seed, _NEGATIVES, number))
        for number, row in enumerate(relevant)
    ]
    return Sample(rows.tokens(chosen), documents.tokens(pool), positives, relevant, np.stack(negatives))


def measure(
    queries: Float[ndarray, "queries dim"],
    pool: Float[ndarray, "docs dim"],
    sample: Sample,
    *,
    temperature: float,
) -> dict[str, float]:
    """Means over the queries, by cosine of embeddings of any length.

    ``contrastive_entropy`` is -log softmax of the positive against the negatives (the scaling laws' measure,
    ScalingNote, section 4.4). ``R@K`` and ``MRR@10`` look for the first relevant document of the pool; of
    equal scores it comes last, so that a tower that tells nothing apart finds nothing.
    """
    scores = vectors.unit(queries).astype(np.float64) @ vectors.unit(pool).astype(np.float64).T
    rows = np.arange(len(scores))
    right = scores[rows, sample.positives][:, None]
    others = np.take_along_axis(scores, sample.negatives, axis=1)
    logits = np.concatenate([np.zeros_like(right), (others - right) / temperature], axis=1)
    with np.errstate(invalid="ignore"):  # a NaN is told as such
        entropy = np.logaddexp.reduce(logits, axis=1)
    best = np.where(sample.relevant, scores, -np.inf).max(axis=1, keepdims=True)
    ahead = (~(scores < best) & ~sample.relevant).sum(axis=1)
    return {
        "contrastive_entropy": float(entropy.mean()),
        "R@1": float((ahead < 1).mean()),
        "R@10": float((ahead < 10).mean()),
        "MRR@10": float(np.where(ahead < 10, 1 / (ahead + 1), 0.0).mean()),
    }


@runtime_checkable
class Measured(Protocol):
    """What is needed of an engine."""

    module: nn.Module  # with `embeddings(name, rows)` of its towers, as stage I has it

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast of a forward pass."""
        ...


def validator(
    store: Store,
    engine: Measured,
    config: Validation | None,
    *,
    views: Sequence[str],
    pads: tuple[int, int],
    packed: bool,
    temperature: float,
    device: torch.device,
    seed: int,
) -> Callable[[], dict[str, float]] | None:
    """What measures the towers of `engine` as they are now; None where nothing is to be measured.

    Every rank must call it at the same step. `views` and `pads` are the towers'. `temperature` stays what it
    is when the losses learn one, so that the numbers of all steps can be compared.
    """
    sample = draw(store, config, seed=seed) if config else None
    if sample is None:
        if config:
            get_logger("train").info("the triplets have no validation split: nothing is measured in training")
        return None
    view = views.index(INDEXED_VIEW) if INDEXED_VIEW in views else len(views) - 1

    def validate() -> dict[str, float]:
        queries, pool = (
            encode(name, rows, engine=engine, pad=pad, packed=packed, device=device)
            for name, rows, pad in zip(
                ("query", "document"), (sample.queries, sample.pool), pads, strict=True
            )
        )
        found = measure(queries[:, 0], pool[:, view], sample, temperature=temperature)
        return agreed(found, device)

    return validate


def encode(
    name: str, rows: Sequence[Row], *, engine: Measured, pad: int, packed: bool, device: torch.device
) -> Float[ndarray, "rows views dim"]:
    """Embeddings of all rows by the tower `name` of `engine`, on every rank; training goes on undisturbed.

    Ranks make equally many forward passes: sharded weights are gathered in each.
    """
    with _undisturbed(engine.module, device), engine.precision():
        return _encode(name, rows, module=engine.module, pad=pad, packed=packed, device=device)


def _encode(
    name: str, rows: Sequence[Row], *, module: nn.Module, pad: int, packed: bool, device: torch.device
) -> Float[ndarray, "rows views dim"]:
    longest_first = np.argsort([-len(row.ids) for row in rows], kind="stable")
    world = world_size()
    share = -(-len(rows) // world)
    # Dealt out in turn, so that ranks have equally long rows; the last is dealt again to make shares equal.
    own = longest_first[np.minimum(np.arange(share) * world + rank(), len(rows) - 1)].tolist()
    encode = cast(Any, module).embeddings
    parts = []
    for start in range(0, share, _ROWS_PER_FORWARD):
        chosen = [rows[number] for number in own[start : start + _ROWS_PER_FORWARD]]
        parts.append(encode(name, collate(chosen, pad=pad, packed=packed).to(device)).float())
    dealt = torch.stack(_gathered(torch.cat(parts)), dim=1).flatten(0, 1)[: len(rows)]
    out = np.empty(tuple(dealt.shape), dtype=np.float32)
    out[longest_first] = dealt.cpu().numpy()
    return out


@contextmanager
def _undisturbed(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode and no graph; random states and modes are put back afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training


def _gathered(tensor: Tensor) -> list[Tensor]:
    """The tensor of every rank; all are of one shape."""
    if world_size() == 1:
        return [tensor]
    out = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(out, tensor.contiguous())
    return out


def agreed(found: dict[str, float], device: torch.device) -> dict[str, float]:
    """Rank 0's numbers: machines round differently, and ranks that disagree on when to stop would hang."""
    if world_size() == 1:
        return found
    values = torch.tensor(list(found.values()), dtype=torch.float64, device=device)
    dist.broadcast(values, src=0)
    return dict(zip(found, values.tolist(), strict=True))


def _distinct(rows: Rows, count: int, *, key: tuple[int, ...]) -> Int64[ndarray, " chosen"]:
    """Rows of up to `count` different queries, drawn from all."""
    chosen: dict[int, int] = {}
    for start in range(0, len(rows), count):
        numbers = np.arange(start, min(start + count, len(rows)))
        drawn = permuted(numbers, size=len(rows), key=key)
        for row, query in zip(drawn.tolist(), rows.values("query", drawn).tolist(), strict=True):
            chosen.setdefault(query, row)
        if len(chosen) >= count:
            break
    return np.array(list(chosen.values())[:count], dtype=np.int64)


def _some(
    numbers: Int64[ndarray, " numbers"], count: int, *, key: tuple[int, ...]
) -> Int64[ndarray, " count"]:
    """`count` of some numbers, drawn without repetition."""
    out: ndarray = numbers[permuted(np.arange(count), size=max(len(numbers), 1), key=key)]
    return out
