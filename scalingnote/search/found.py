"""What a search has found in some shards, and the merge of several such findings into one answer.

    each searcher ─► Found: candidates with scores of both kinds, and their documents ─merge─► the k best hits

Documents travel with their candidates: they are those of the very moment that was searched, whatever a live
index has become since.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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

    def rows(self) -> Iterable[tuple[int, int, float, float | None, Mapping[str, Any]]]:
        """Each candidate: id, shard, both scores, document."""
        sparse = [None] * len(self.ids) if self.sparse is None else self.sparse.tolist()
        return zip(
            self.ids.tolist(), self.shards.tolist(), self.dense.tolist(), sparse, self.documents, strict=True
        )


class Hit(NamedTuple):
    """A document of the answer. `score` is its cosine, or what dense and sparse scores were joined to."""

    score: float
    document: Mapping[str, Any]
    shard: int
    dense: float
    sparse: float | None


def merge(answers: Sequence[Found], *, k: int, joining: Joining, layout: Layout) -> list[Hit]:
    """The k best of disjoint shards, best first; of equal scores the lower id."""
    hits = {
        number: Hit(dense, document, shard, dense, sparse)
        for answer in answers
        for number, shard, dense, sparse, document in answer.rows()
    }
    sparse = [answer.sparse for answer in answers if answer.sparse is not None]
    if len(sparse) < len(answers):
        # A few dozen at most, on every search's way: numpy would take ten times as long to begin.
        best = sorted(hits.items(), key=lambda item: (-item[1].dense, item[0]))
        return [hit for _, hit in best[:k]]
    ids, dense = (np.concatenate([getattr(a, name) for a in answers]) for name in ("ids", "dense"))
    both = Both(ids[None], dense[None], np.concatenate(sparse)[None])
    depth = max(k, joining.candidates)
    (scores,), (chosen,) = hybrid.best(both, joining, layout=layout, candidates=depth, k=k)
    joined = zip(scores.tolist(), chosen.tolist(), strict=True)
    return [hits[number]._replace(score=score) for score, number in joined if number >= 0]
