"""What a search has found in some shards, and the merge of several such findings into one answer.

    each searcher ─► Found: candidates with scores of both kinds, and their documents ─merge─► the k best hits

Documents travel with their candidates: they are those of the very moment that was searched, whatever a live
index has become since.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import hybrid
from scalingnote.search.config import Joining


@dataclass(frozen=True)
class Found:
    """One query's candidates in some shards, in no promised order.

    `ids` sort equal scores the same way wherever they are merged. `sparse` is None where no terms were asked.
    """

    ids: Int[ndarray, " candidates"]
    shards: Int[ndarray, " candidates"]
    dense: Float[ndarray, " candidates"]
    sparse: Float[ndarray, " candidates"] | None
    documents: pa.Table


@dataclass(frozen=True)
class Hit:
    """A document of the answer. `score` is its cosine, or what dense and sparse scores were joined to."""

    score: float
    document: Mapping[str, Any]
    shard: int
    dense: float
    sparse: float | None


def merge(answers: Sequence[Found], *, k: int, joining: Joining, background: float = 0.0) -> list[Hit]:
    """The k best of disjoint shards, best first; of equal scores the lower id."""
    ids, dense = (np.concatenate([getattr(a, name) for a in answers]) for name in ("ids", "dense"))
    sparse = [answer.sparse for answer in answers if answer.sparse is not None]
    if len(sparse) < len(answers):
        best = np.lexsort((ids, -dense))[:k]
        scores = dense[best]
    else:
        scores, best = _joined(
            ids, dense, np.concatenate(sparse), k=k, joining=joining, background=background
        )
    bounds = np.cumsum([0, *(len(answer.ids) for answer in answers)])
    owner = np.searchsorted(bounds[1:], best, side="right")
    hits = []
    for score, place, number in zip(scores.tolist(), best.tolist(), owner.tolist(), strict=True):
        answer, row = answers[number], place - int(bounds[number])
        terms = None if answer.sparse is None else float(answer.sparse[row])
        document = {name: column[row].as_py() for name, column in _columns(answer.documents)}
        hits.append(Hit(score, document, int(answer.shards[row]), float(answer.dense[row]), terms))
    return hits


def _joined(
    ids: Int[ndarray, " candidates"],
    dense: Float[ndarray, " candidates"],
    sparse: Float[ndarray, " candidates"],
    *,
    k: int,
    joining: Joining,
    background: float,
) -> tuple[Float[ndarray, " k"], Int[ndarray, " k"]]:
    """Scores and places of the k best by both."""
    both = hybrid.Both(ids[None], dense[None], sparse[None])
    if joining.kind == "reciprocal_rank":
        scores, chosen = hybrid.by_rank(both, k=joining.k, candidates=max(k, joining.candidates), depth=k)
    else:
        assert joining.dense_weight is not None
        scores, chosen = hybrid.by_score(
            both, dense_weight=joining.dense_weight, background=background, depth=k
        )
    there = chosen[0] >= 0
    order = np.argsort(ids)
    return scores[0][there], order[np.searchsorted(ids, chosen[0][there], sorter=order)]


def _columns(documents: pa.Table) -> list[tuple[str, pa.ChunkedArray]]:
    return list(zip(documents.column_names, documents.columns, strict=True))
