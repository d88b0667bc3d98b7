"""What a search has found in some shards, and the merge of several such findings into one answer.

    each searcher ─► Found: candidates with scores of both kinds, and their documents ─merge─► the k best hits

Documents travel with their candidates: they are those of the very moment that was searched, whatever a live
index has become since.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.hybrid import Both
from scalingnote.hybrid import merge as merge_both
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

    def rows(self) -> Iterable[tuple[int, int, float, Mapping[str, Any]]]:
        """Each candidate: id, shard, score of embeddings, document."""
        return zip(self.ids.tolist(), self.shards.tolist(), self.dense.tolist(), self.documents, strict=True)


class Hit(NamedTuple):
    """A document of the answer. `score` is its cosine, or what dense and sparse scores were joined to."""

    score: float
    document: Mapping[str, Any]
    shard: int
    dense: float
    sparse: float | None


def merge(answers: Sequence[Found], *, k: int, joining: Joining, layout: Layout) -> list[Hit]:
    """The k best of disjoint shards, best first; of equal scores the lower id.

    However the shards are dealt to searchers, the answer is that of one that holds them all: of what is
    joined, as many candidates of either kind are looked at as one searcher brings.
    """
    sparse = [answer.sparse for answer in answers if answer.sparse is not None]
    if len(sparse) < len(answers):
        # A few dozen at most, on every search's way: numpy would take ten times as long to begin.
        hits = {
            number: Hit(dense, document, shard, dense, None)
            for answer in answers
            for number, shard, dense, document in answer.rows()
        }
        best = sorted(hits.items(), key=lambda item: (-item[1].dense, item[0]))
        return [hit for _, hit in best[:k]]
    depth = max(k, joining.candidates)
    each = [Both(a.ids[None], a.dense[None], s[None]) for a, s in zip(answers, sparse, strict=True)]
    both = each[0] if len(each) == 1 else merge_both(each, candidates=depth)
    (scores,), (chosen,) = hybrid.best(both, joining, layout=layout, candidates=depth, k=k)
    places = {
        number: (answer, place) for answer in answers for place, number in enumerate(answer.ids.tolist())
    }
    joined = zip(scores.tolist(), chosen.tolist(), strict=True)
    return [_hit(*places[number], score=score) for score, number in joined if number >= 0]


def _hit(answer: Found, place: int, *, score: float) -> Hit:
    assert answer.sparse is not None
    shard, dense, sparse = (column[place].item() for column in (answer.shards, answer.dense, answer.sparse))
    return Hit(score, answer.documents[place], shard, dense, sparse)
