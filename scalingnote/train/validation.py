"""Validation in training: contrastive entropy, R@K and MRR of held-out queries on one small, fixed sample.

Each rank encodes a share of the sample and gathers the rest, so that all ranks have the same numbers.
Training is not affected: no gradient is computed, no random number is drawn, and every module keeps its mode.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import nn

from scalingnote.core.log import get_logger
from scalingnote.models.batch import collate
from scalingnote.models.prompt import TokenRow, indexed_view
from scalingnote.storage import arrow
from scalingnote.train.config import TrainConfig, Validation
from scalingnote.train.data import RowTable, Store, permute
from scalingnote.train.engine import Engine, broadcast_numbers, gather, rank, world_size

_QUERIES, _DOCUMENTS, _NEGATIVES = range(3)  # purpose of a permutation, part of its key
NEGATIVES = 256  # number sampled per query for the contrastive entropy
_ROWS_PER_FORWARD = 64


def validator(
    store: Store,
    engine: Engine,
    config: TrainConfig,
    *,
    views: Sequence[str],
    pads: tuple[int, int],
    pool: RowTable | None = None,
) -> Callable[[], dict[str, float]] | None:
    """Build a function that measures the towers of `engine` when it is called; None without a sample.

    Every rank must call it at the same step.

    Args:
        store: of stage I.
        engine: its module has `embeddings(name, rows)` for ``query`` and ``document``.
        config: of stage I; its `validation` is the size of the sample, None measures nothing. The temperature
            of the contrastive entropy is that of the losses.
        views: of the document tower.
        pads: pad tokens of the query and the document tower.
        pool: documents of the sample, if those of the store are not available.
    """
    if config.validation is None:
        return None
    sample = draw_sample(store, config.validation, seed=config.seed, pool=pool)
    if sample is None:
        get_logger("train").info("the triplets have no validation split: nothing is measured in training")
        return None
    view = views.index(indexed_view(views))

    def validate() -> dict[str, float]:
        queries = encode_rows("query", sample.queries, engine=engine, pad=pads[0])
        documents = encode_rows("document", sample.pool, engine=engine, pad=pads[1])
        metrics = measure_retrieval(
            queries[:, 0], documents[:, view], sample, temperature=config.losses.temperature
        )
        return broadcast_numbers(metrics, engine.device)

    return validate


def encode_rows(
    name: str, rows: Sequence[TokenRow], *, engine: Engine, pad: int
) -> Float[ndarray, "rows views dim"]:
    """Encode all rows by the tower `name` of `engine`, on every rank; training is not affected.

    Ranks run the same number of forward passes, because sharded weights are gathered in each.
    """
    longest_first = np.argsort([-len(row.ids) for row in rows], kind="stable")
    world = world_size()
    share = -(-len(rows) // world)
    # In turn, so that ranks get rows of similar length; the last row is repeated to make shares equal.
    row_numbers = longest_first[np.minimum(np.arange(share) * world + rank(), len(rows) - 1)].tolist()
    encode = cast(Any, engine.module).embeddings
    parts = []
    with _evaluation_mode(engine.module, engine.device), engine.precision():
        for start in range(0, share, _ROWS_PER_FORWARD):
            chosen = [rows[number] for number in row_numbers[start : start + _ROWS_PER_FORWARD]]
            parts.append(encode(name, collate(chosen, pad=pad, packed=True).to(engine.device)).float())
        gathered = gather(torch.cat(parts)).unflatten(0, (world, share))
    sorted_rows = gathered.transpose(0, 1).flatten(0, 1)[: len(rows)]
    out = np.empty(tuple(sorted_rows.shape), dtype=np.float32)
    out[longest_first] = sorted_rows.cpu().numpy()
    return out


@contextmanager
def _evaluation_mode(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch to evaluation mode without a graph; random states and modes are restored afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training


# --- the sample and its measures ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidationSample:
    """Validation queries, and a pool of documents: their positives and others drawn from all documents."""

    queries: list[TokenRow]
    pool: list[TokenRow]
    positives: Int64[ndarray, " queries"]  # column of each query's positive in the pool
    relevant: Bool[ndarray, "queries docs"]  # the positive, and other documents known to answer the query
    negatives: Int64[ndarray, "queries negatives"]  # columns drawn from those not known to answer it


def draw_sample(
    store: Store, config: Validation, *, seed: int, pool: RowTable | None = None
) -> ValidationSample | None:
    """Draw the sample of a store; None if its triplets have no validation split.

    Negatives come only from the pool's random documents if there are enough: the positives of other queries
    are not a fair sample of all documents. `pool` are the documents that :func:`drawn_documents` returns, if
    those of the store are not available.
    """
    rows = store["validation"]
    if not len(rows):
        return None
    chosen, answers, documents = _drawn_rows(store, config, seed)
    positives = np.searchsorted(answers, rows.values("documents", chosen)[:, 0])
    relevant = np.stack([np.isin(documents, known) for known in rows.lists("known", chosen)])
    relevant[np.arange(len(chosen)), positives] = True
    first = len(answers) if (~relevant[:, len(answers) :]).sum(1).min() >= NEGATIVES else 0
    width = min(NEGATIVES, int((~relevant[:, first:]).sum(1).min()))
    negatives = np.empty((len(chosen), width), np.int64)
    for number, row in enumerate(relevant):
        others = first + np.flatnonzero(~row[first:])
        key = (seed % 2**64, _NEGATIVES, number)
        negatives[number] = others[permute(np.arange(width), size=max(len(others), 1), key=key)]
    tokens = store["documents"].tokens(documents) if pool is None else pool.tokens(np.arange(len(pool)))
    return ValidationSample(rows.tokens(chosen), tokens, positives, relevant, negatives)


def drawn_documents(store: Store, config: Validation, *, seed: int) -> Int64[ndarray, " docs"]:
    """Return the row numbers of the documents of a store's sample; needs only the table ``validation``."""
    return _drawn_rows(store, config, seed)[2] if len(store["validation"]) else np.empty(0, np.int64)


def _drawn_rows(
    store: Store, config: Validation, seed: int
) -> tuple[Int64[ndarray, " queries"], Int64[ndarray, " answers"], Int64[ndarray, " docs"]]:
    """Draw rows of the sample's queries, their positives, and all documents: the positives, then others."""
    rows, size, seed = store["validation"], store.facts["documents"], seed % 2**64
    chosen = _rows_of_distinct_queries(rows, config.queries, key=(seed, _QUERIES))
    answers = np.unique(rows.values("documents", chosen)[:, 0])
    wanted = max(config.documents - len(answers), NEGATIVES)
    candidates = np.arange(min(wanted + len(answers), size))
    others = permute(candidates, size=size, key=(seed, _DOCUMENTS))
    others = others[~np.isin(others, answers)][:wanted]
    return chosen, answers, np.concatenate([answers, others])


def measure_retrieval(
    queries: Float[ndarray, "queries dim"],
    pool: Float[ndarray, "docs dim"],
    sample: ValidationSample,
    *,
    temperature: float,
) -> dict[str, float]:
    """Compute mean metrics of the queries, by cosine of embeddings of any length.

    ``contrastive_entropy`` is -log softmax of the positive against the negatives (the measure of the scaling
    laws, ScalingNote, section 4.4). ``R@K`` and ``MRR@10`` use the first relevant document of the pool; among
    equal scores it counts as last, so that a tower with constant embeddings has a recall of 0.
    """
    scores = arrow.l2_normalize(queries).astype(np.float64) @ arrow.l2_normalize(pool).astype(np.float64).T
    rows = np.arange(len(scores))
    positive_scores = scores[rows, sample.positives][:, None]
    others = np.take_along_axis(scores, sample.negatives, axis=1)
    logits = np.concatenate(
        [np.zeros_like(positive_scores), (others - positive_scores) / temperature], axis=1
    )
    with np.errstate(invalid="ignore"):  # a NaN is reported as NaN
        entropy = np.logaddexp.reduce(logits, axis=1)
    best = np.where(sample.relevant, scores, -np.inf).max(axis=1, keepdims=True)
    ahead = (~(scores < best) & ~sample.relevant).sum(axis=1)
    return {
        "contrastive_entropy": float(entropy.mean()),
        "R@1": float((ahead < 1).mean()),
        "R@10": float((ahead < 10).mean()),
        "MRR@10": float(np.where(ahead < 10, 1 / (ahead + 1), 0.0).mean()),
    }


def _rows_of_distinct_queries(
    rows: RowTable, count: int, *, key: tuple[int, ...]
) -> Int64[ndarray, " chosen"]:
    """Draw rows of up to `count` different queries from all rows."""
    chosen: dict[int, int] = {}
    for start in range(0, len(rows), count):
        numbers = np.arange(start, min(start + count, len(rows)))
        row_numbers = permute(numbers, size=len(rows), key=key)
        for row, query in zip(row_numbers.tolist(), rows.values("query", row_numbers).tolist(), strict=True):
            chosen.setdefault(query, row)
        if len(chosen) >= count:
            break
    return np.array(list(chosen.values())[:count], dtype=np.int64)
