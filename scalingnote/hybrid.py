"""Two retrievals in one: scores of dense and of sparse search are joined, or their ranks.

Cosines and inner products of term weights are on scales of their own, which differ from query to query. So
each is first put on [0, 1] for each query, 1 being the best document's score. What 0 is depends on who asks:

    whoever has scored the whole pool (evaluate)        the lowest score of any document
    whoever has the best candidates of both (search)    dense: `background`, what a random document scores
                                                        sparse: 0, no term in common

The lowest score among candidates would not do: it rises as fewer of them are fetched, so that the same weight
means something else at every depth, and the last candidate of one list counts no more than a document that is
not in it at all. `background` is a property of embeddings, one number per index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

WEIGHTS = tuple(step / 20 for step in range(21))


@dataclass(frozen=True)
class Both:
    """Candidates that either retrieval has found, each with its scores in both.

    Where a query has fewer than the widest, ids are -1, dense scores -inf and sparse ones 0.
    """

    ids: Int[ndarray, "queries candidates"]
    dense: Float[ndarray, "queries candidates"]
    sparse: Float[ndarray, "queries candidates"]


@dataclass(frozen=True)
class Tuned:
    """The weight of dense scores that served held-out queries best, and what each weight on the grid gave."""

    dense_weight: float
    curve: dict[float, float]


def normalised(
    scores: Float[ndarray, "queries docs"],
    low: Float[ndarray, " queries"],
    high: Float[ndarray, " queries"],
) -> Float[ndarray, "queries docs"]:
    """Scores between each query's `low` and `high` on [0, 1]; 0 where a query's scores are all the same."""
    spread = high - low
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
    put: ndarray = (scores - low[:, None]) * scale[:, None]
    return put


def interpolated(
    dense: Float[ndarray, "queries docs"], sparse: Float[ndarray, "queries docs"], *, dense_weight: float
) -> Float[ndarray, "queries docs"]:
    """Linear interpolation of normalised scores (LightRetriever, section 3.1)."""
    joined: ndarray = dense_weight * dense + (1 - dense_weight) * sparse
    return joined


def background_of(queries: Float[ndarray, "queries dim"], documents: Float[ndarray, "docs dim"]) -> float:
    """The mean cosine of held-out queries with random documents, from their unit vectors."""
    return float(queries.mean(0, dtype=np.float64) @ documents.mean(0, dtype=np.float64))


def union(*rankings: Int[ndarray, "queries _"]) -> Int[ndarray, "queries candidates"]:
    """The documents of several rankings, each once, ascending, and -1 behind the last."""
    ids = np.sort(np.concatenate(rankings, axis=1), axis=1)
    new = ids >= 0
    new[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    first = np.argsort(~new, axis=1, kind="stable")[:, : new.sum(1).max(initial=0)]
    return np.where(np.take_along_axis(new, first, axis=1), np.take_along_axis(ids, first, axis=1), -1)


def merge(answers: Sequence[Both], *, candidates: int) -> Both:
    """Disjoint shards' candidates as those of one: the best by either score, so many of each."""
    joined = Both(
        *(np.concatenate([getattr(a, side) for a in answers], axis=1) for side in Both.__annotations__)
    )
    by_dense, by_terms = _rankings(joined, depth=candidates)
    chosen = union(np.where(_ids(joined, by_dense) < 0, -1, by_dense), by_terms)
    return Both(_ids(joined, chosen), _of(joined.dense, chosen, -np.inf), _of(joined.sparse, chosen, 0.0))


def by_score(
    both: Both, *, dense_weight: float, background: float, depth: int
) -> tuple[Float[ndarray, "queries depth"], Int[ndarray, "queries depth"]]:
    """Candidates by their interpolated scores, in [0, 1], best first; of equal ones the lower id.

    A dense score below the background counts as the background. Behind the last come -inf and -1.
    """
    scores = _joined(both, dense_weight=dense_weight, background=background)
    order = np.lexsort((both.ids, -scores))[:, :depth]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(both.ids, order, axis=1)


def by_rank(
    both: Both, *, k: int, candidates: int, depth: int
) -> tuple[Float[ndarray, "queries depth"], Int[ndarray, "queries depth"]]:
    """Candidates by :func:`reciprocal_ranks` in the `candidates` best by each score.

    A document that shares no term with a query has no rank in its sparse list.
    """
    rankings = (_ids(both, columns) for columns in _rankings(both, depth=candidates))
    return reciprocal_ranks(*rankings, k=k, depth=depth)


def reciprocal_ranks(
    *rankings: Int[ndarray, "queries _"], k: int, depth: int
) -> tuple[Float[ndarray, "queries depth"], Int[ndarray, "queries depth"]]:
    """Sums of 1 / (k + rank) over rankings (Cormack et al., 2009), best first, and the documents they are of.

    A ranking holds documents, best first and -1 behind the last; a document it lacks gets nothing from it.
    Of equal sums the lower document comes first.
    """
    scores = np.full((len(rankings[0]), depth), -np.inf)
    documents = np.full((len(rankings[0]), depth), -1, dtype=np.int64)
    for query, rows in enumerate(zip(*rankings, strict=True)):
        found = np.concatenate(rows)
        shares = np.concatenate([1 / (k + 1 + np.arange(len(row))) for row in rows])
        distinct, place = np.unique(found[found >= 0], return_inverse=True)
        sums = np.bincount(place, weights=shares[found >= 0], minlength=len(distinct))
        best = np.argsort(-sums, kind="stable")[:depth]
        scores[query, : len(best)], documents[query, : len(best)] = sums[best], distinct[best]
    return scores, documents


def tune_weight(
    both: Both,
    relevant: Sequence[Mapping[int, int]],
    *,
    background: float,
    measure: Literal["ndcg", "recall"] = "ndcg",
    depth: int = 10,
    weights: Sequence[float] = WEIGHTS,
) -> Tuned:
    """The best of `weights` for :func:`by_score` on held-out queries.

    `relevant` has each query's judged documents and their grades, found or not. The measure is nDCG at
    `depth`, or the share of queries with a relevant document so far up (R@K), as in evaluate.retrieval. Where
    several weights are equally good, the middle one of them is taken.
    """
    curve = {}
    for weight in weights:
        _, ids = by_score(both, dense_weight=weight, background=background, depth=depth)
        pairs = zip(ids.tolist(), relevant, strict=True)
        values = [_value([judged.get(i, 0) for i in row], judged, measure, depth) for row, judged in pairs]
        curve[weight] = float(np.mean(values))
    best = [weight for weight, value in curve.items() if value >= max(curve.values()) - 1e-12]
    return Tuned(best[len(best) // 2], curve)


def _joined(both: Both, *, dense_weight: float, background: float) -> Float[ndarray, "queries candidates"]:
    sides = (
        normalised(np.maximum(scores, low), np.full(len(scores), low), scores.max(1, initial=low))
        for scores, low in (
            (both.dense.astype(np.float64), background),
            (both.sparse.astype(np.float64), 0.0),
        )
    )
    return np.where(both.ids < 0, -np.inf, interpolated(*sides, dense_weight=dense_weight))


def _rankings(both: Both, *, depth: int) -> tuple[Int[ndarray, "queries d"], Int[ndarray, "queries s"]]:
    """Columns of the candidates by each score, best first; -1 where the sparse one is 0."""
    by_dense, by_terms = (np.lexsort((both.ids, -s))[:, :depth] for s in (both.dense, both.sparse))
    return by_dense, np.where(np.take_along_axis(both.sparse, by_terms, axis=1) > 0, by_terms, -1)


def _ids(both: Both, columns: Int[ndarray, "queries _"]) -> Int[ndarray, "queries _"]:
    return np.where(columns < 0, -1, np.take_along_axis(both.ids, columns, axis=1))


def _of(values: ndarray, columns: Int[ndarray, "queries _"], otherwise: float) -> ndarray:
    return np.where(columns < 0, otherwise, np.take_along_axis(values, columns, axis=1)).astype(values.dtype)


def _value(
    gains: Sequence[int], judged: Mapping[int, int], measure: Literal["ndcg", "recall"], depth: int
) -> float:
    if measure == "recall":
        return float(any(gain > 0 for gain in gains))
    ideal = _discounted(sorted(judged.values(), reverse=True)[:depth])
    return _discounted(gains) / ideal if ideal else 0.0


def _discounted(gains: Sequence[int]) -> float:
    return float(sum(max(gain, 0) / np.log2(rank + 2) for rank, gain in enumerate(gains)))
