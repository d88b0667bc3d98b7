"""What a search has found in some shards, and the merge of several such findings into one answer.

    each searcher ─► Found: candidates with scores of both kinds, and their documents ─merge─► the k best hits

Documents travel with their candidates: they are those of the very moment that was searched, whatever a live
index has become since.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.hybrid import Both
from scalingnote.index.shard import Layout
from scalingnote.search import hybrid
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
    documents: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Hit:
    """A document of the answer. `score` is its cosine, or what dense and sparse scores were joined to."""

    score: float
    document: Mapping[str, Any]
    shard: int
    dense: float
    sparse: float | None


def merge(answers: Sequence[Found], *, k: int, joining: Joining, layout: Layout) -> list[Hit]:
    """The k best of disjoint shards, best first; of equal scores the lower id."""
    ids, dense = (np.concatenate([getattr(a, name) for a in answers]) for name in ("ids", "dense"))
    sparse = [answer.sparse for answer in answers if answer.sparse is not None]
    if len(sparse) < len(answers):
        best = np.lexsort((ids, -dense))[:k]
        scores = dense[best]
    else:
        both = Both(ids[None], dense[None], np.concatenate(sparse)[None])
        depth = max(k, joining.candidates)
        (scores,), (chosen,) = hybrid.best(both, joining, layout=layout, candidates=depth, k=k)
        scores, chosen = scores[chosen >= 0], chosen[chosen >= 0]
        order = np.argsort(ids)
        best = order[np.searchsorted(ids, chosen, sorter=order)]
    bounds = np.cumsum([0, *(len(answer.ids) for answer in answers)])
    owners = np.searchsorted(bounds[1:], best, side="right")
    return [
        _hit(answers[owner], place - int(bounds[owner]), score)
        for score, place, owner in zip(scores.tolist(), best.tolist(), owners.tolist(), strict=True)
    ]


def _hit(answer: Found, row: int, score: float) -> Hit:
    terms = None if answer.sparse is None else float(answer.sparse[row])
    return Hit(score, answer.documents[row], int(answer.shards[row]), float(answer.dense[row]), terms)
