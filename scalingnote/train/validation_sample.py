"""The sample that validation measures on, and its measures: numpy alone, so that a report needs no torch."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64
from numpy import ndarray

from scalingnote.models.prompt import Row
from scalingnote.storage import arrow
from scalingnote.train.config import Validation
from scalingnote.train.data import Rows, Store, permuted

_QUERIES, _DOCUMENTS, _NEGATIVES = range(3)  # purpose of a permutation, part of its key


@dataclass(frozen=True)
class ValidationSample:
    """Validation queries, and a pool of documents: their positives and others drawn from all documents."""

    queries: list[Row]
    pool: list[Row]
    positives: Int64[ndarray, " queries"]  # the column of the pool that holds a query's positive
    relevant: Bool[ndarray, "queries docs"]  # the positive, and other documents known to answer the query
    negatives: Int64[ndarray, "queries negatives"]  # columns drawn from those not known to answer it


def draw_sample(
    store: Store, config: Validation, *, seed: int, pool: Rows | None = None
) -> ValidationSample | None:
    """The sample of a store; None where its triplets have no validation split.

    Negatives come from the pool's random documents alone where there are enough: the positives of other
    queries are no fair sample of all documents. `pool` are the documents that :func:`drawn_documents` names,
    where the store's are not at hand.
    """
    rows = store["validation"]
    if not len(rows):
        return None
    chosen, answers, documents = _drawn_rows(store, config, seed)
    positives = np.searchsorted(answers, rows.values("documents", chosen)[:, 0])
    relevant = np.stack([np.isin(documents, known) for known in rows.lists("known", chosen)])
    relevant[np.arange(len(chosen)), positives] = True
    first = len(answers) if (~relevant[:, len(answers) :]).sum(1).min() >= config.negatives else 0
    width = min(config.negatives, int((~relevant[:, first:]).sum(1).min()))
    negatives = [
        _drawn(first + np.flatnonzero(~row[first:]), width, key=(seed % 2**64, _NEGATIVES, number))
        for number, row in enumerate(relevant)
    ]
    tokens = store["documents"].tokens(documents) if pool is None else pool.tokens(np.arange(len(pool)))
    return ValidationSample(rows.tokens(chosen), tokens, positives, relevant, np.stack(negatives))


def drawn_documents(store: Store, config: Validation, *, seed: int) -> Int64[ndarray, " docs"]:
    """Row numbers of the documents of a store's sample; the store needs no table but ``validation``."""
    return _drawn_rows(store, config, seed)[2] if len(store["validation"]) else np.empty(0, np.int64)


def _drawn_rows(
    store: Store, config: Validation, seed: int
) -> tuple[Int64[ndarray, " queries"], Int64[ndarray, " answers"], Int64[ndarray, " docs"]]:
    """Rows of the sample's queries, their positives, and all its documents: the positives, then others."""
    rows, size, seed = store["validation"], store.facts["documents"], seed % 2**64
    chosen = _rows_of_distinct_queries(rows, config.queries, key=(seed, _QUERIES))
    answers = np.unique(rows.values("documents", chosen)[:, 0])
    wanted = max(config.documents - len(answers), config.negatives)
    drawn = np.arange(min(wanted + len(answers), size))
    others = permuted(drawn, size=size, key=(seed, _DOCUMENTS))
    others = others[~np.isin(others, answers)][:wanted]
    return chosen, answers, np.concatenate([answers, others])


def measure_retrieval(
    queries: Float[ndarray, "queries dim"],
    pool: Float[ndarray, "docs dim"],
    sample: ValidationSample,
    *,
    temperature: float,
) -> dict[str, float]:
    """Mean metrics of the queries, by cosine of embeddings of any length.

    ``contrastive_entropy`` is -log softmax of the positive against the negatives (the scaling laws' measure,
    ScalingNote, section 4.4). ``R@K`` and ``MRR@10`` look for the first relevant document of the pool; of
    equal scores it counts as last, so that a tower with constant embeddings has a recall of 0.
    """
    scores = arrow.l2_normalize(queries).astype(np.float64) @ arrow.l2_normalize(pool).astype(np.float64).T
    rows = np.arange(len(scores))
    right = scores[rows, sample.positives][:, None]
    others = np.take_along_axis(scores, sample.negatives, axis=1)
    logits = np.concatenate([np.zeros_like(right), (others - right) / temperature], axis=1)
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


def _rows_of_distinct_queries(rows: Rows, count: int, *, key: tuple[int, ...]) -> Int64[ndarray, " chosen"]:
    """Rows of up to `count` different queries, drawn from all rows."""
    chosen: dict[int, int] = {}
    for start in range(0, len(rows), count):
        numbers = np.arange(start, min(start + count, len(rows)))
        drawn = permuted(numbers, size=len(rows), key=key)
        for row, query in zip(drawn.tolist(), rows.values("query", drawn).tolist(), strict=True):
            chosen.setdefault(query, row)
        if len(chosen) >= count:
            break
    return np.array(list(chosen.values())[:count], dtype=np.int64)


def _drawn(
    numbers: Int64[ndarray, " numbers"], count: int, *, key: tuple[int, ...]
) -> Int64[ndarray, " count"]:
    """`count` of the numbers, drawn without repetition."""
    out: ndarray = numbers[permuted(np.arange(count), size=max(len(numbers), 1), key=key)]
    return out
