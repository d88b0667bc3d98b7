"""Hybrid search: one ranking from the scores of dense and of sparse retrieval.

Scores of embeddings and of term weights are on different scales, which also vary from query to query.
Therefore each is normalised to [0, 1] per query; 1 is the score of the best document. The score that becomes
0 depends on the set of scored documents:

    all documents of a pool (evaluate)          the lowest score of any document
    the best candidates of both (search)        dense: `background`, the score of a random document
                                                sparse: 0, no term in common

The lowest score among candidates is not a suitable 0: it rises if fewer candidates are fetched, so the same
weight would have another effect at every depth, and the last candidate of one ranking would count the same as
a document that is not in it. `background` is a property of the embeddings, one number per index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

WEIGHTS = tuple(step / 20 for step in range(21))  # weights of dense scores that tuning tries
UNTUNED_WEIGHT = 0.5  # weight of dense scores if neither the request nor the index has one
CANDIDATES_PER_SCORE = 100  # documents that a search fetches by embeddings, and by terms, at least


@dataclass(frozen=True)
class HybridCandidates:
    """Candidates of dense and sparse retrieval, each with both scores.

    Rows are padded to the same width with id -1, dense score -inf and sparse score 0.
    """

    ids: Int[ndarray, "queries candidates"]
    dense: Float[ndarray, "queries candidates"]
    sparse: Float[ndarray, "queries candidates"]


def normalise(
    scores: Float[ndarray, "queries docs"], low: Float[ndarray, " queries"], high: Float[ndarray, " queries"]
) -> Float[ndarray, "queries docs"]:
    """Map scores linearly so that each query's `low` becomes 0 and `high` 1; all 0 if these are equal."""
    spread = high - low
    scale = np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0)
    scaled: ndarray = (scores - low[:, None]) * scale[:, None]
    return scaled


def interpolate(
    dense: Float[ndarray, "queries docs"], sparse: Float[ndarray, "queries docs"], *, dense_weight: float
) -> Float[ndarray, "queries docs"]:
    """Interpolate normalised scores linearly (LightRetriever, section 3.1)."""
    scores: ndarray = dense_weight * dense + (1 - dense_weight) * sparse
    return scores


def background_of(queries: Float[ndarray, "queries dim"], documents: Float[ndarray, "docs dim"]) -> float:
    """Compute the mean score of queries and random documents from the vectors that search compares."""
    return float(queries.mean(0, dtype=np.float64) @ documents.mean(0, dtype=np.float64))


def union(*rankings: Int[ndarray, "queries _"]) -> Int[ndarray, "queries candidates"]:
    """Return the distinct documents of several rankings per query, ascending, padded with -1."""
    ids = np.sort(np.concatenate(rankings, axis=1), axis=1)
    new = ids >= 0
    new[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    first = np.argsort(~new, axis=1, kind="stable")[:, : new.sum(1).max(initial=0)]
    return np.where(np.take_along_axis(new, first, axis=1), np.take_along_axis(ids, first, axis=1), -1)


def merge(answers: Sequence[HybridCandidates], *, candidates: int) -> HybridCandidates:
    """Merge candidates of disjoint shards, and keep the `candidates` best by each of the two scores."""
    candidates_of_all = HybridCandidates(
        np.concatenate([answer.ids for answer in answers], axis=1),
        np.concatenate([answer.dense for answer in answers], axis=1),
        np.concatenate([answer.sparse for answer in answers], axis=1),
    )
    by_dense, by_terms = _rankings(candidates_of_all, depth=candidates)
    columns = union(np.where(_ids(candidates_of_all, by_dense) < 0, -1, by_dense), by_terms)
    return HybridCandidates(
        _ids(candidates_of_all, columns),
        _of(candidates_of_all.dense, columns, -np.inf),
        _of(candidates_of_all.sparse, columns, 0.0),
    )


def by_score(
    both: HybridCandidates, *, dense_weight: float, background: float, depth: int
) -> tuple[Float[ndarray, "queries depth"], Int[ndarray, "queries depth"]]:
    """Rank candidates by interpolated scores in [0, 1]; ties go to the lower id; padded with -inf and -1.

    A dense score below `background` counts as `background`. With a weight of 0, only terms determine the
    ranking, and documents without a term of the query are left out.
    """
    sides = (
        normalise(np.maximum(scores, low), np.full(len(scores), low), scores.max(1, initial=low))
        for scores, low in (
            (both.dense.astype(np.float64), background),
            (both.sparse.astype(np.float64), 0.0),
        )
    )
    ranked = (both.ids >= 0) & ((both.sparse > 0) | (dense_weight > 0))
    ids = np.where(ranked, both.ids, -1)
    scores = np.where(ranked, interpolate(*sides, dense_weight=dense_weight), -np.inf)
    order = np.lexsort((ids, -scores))[:, :depth]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)


def tune_weight(
    both: HybridCandidates, relevant: Sequence[Mapping[int, int]], *, background: float, depth: int = 10
) -> tuple[float, dict[float, float]]:
    """Find the weight for :func:`by_score` with the best nDCG@depth on held-out queries.

    Args:
        both: candidates of these queries.
        relevant: judged documents of each query and their grades, including those that are not candidates.
        background: dense score that becomes 0.
        depth: rank at which nDCG is cut.

    Returns:
        The weight, and the nDCG of each weight.
    """
    ideal = [_discount(sorted(judged.values(), reverse=True)[:depth]) for judged in relevant]
    curve = {}
    for weight in WEIGHTS:
        _, ids = by_score(both, dense_weight=weight, background=background, depth=depth)
        gains = [
            _discount([judged.get(i, 0) for i in row])
            for row, judged in zip(ids.tolist(), relevant, strict=True)
        ]
        values = [gain / most if most else 0.0 for gain, most in zip(gains, ideal, strict=True)]
        curve[weight] = float(np.mean(values))
    # If several are equally good, take the middle one.
    best = [weight for weight, value in curve.items() if value >= max(curve.values()) - 1e-12]
    return best[len(best) // 2], curve


def _rankings(
    both: HybridCandidates, *, depth: int
) -> tuple[Int[ndarray, "queries d"], Int[ndarray, "queries s"]]:
    """Sort columns by dense score and by sparse score, best first; -1 if the sparse score is 0."""
    by_dense, by_terms = (np.lexsort((both.ids, -s))[:, :depth] for s in (both.dense, both.sparse))
    return by_dense, np.where(np.take_along_axis(both.sparse, by_terms, axis=1) > 0, by_terms, -1)


def _ids(both: HybridCandidates, columns: Int[ndarray, "queries _"]) -> Int[ndarray, "queries _"]:
    return np.where(columns < 0, -1, np.take_along_axis(both.ids, columns, axis=1))


def _of(values: ndarray, columns: Int[ndarray, "queries _"], otherwise: float) -> ndarray:
    return np.where(columns < 0, otherwise, np.take_along_axis(values, columns, axis=1)).astype(values.dtype)


def _discount(gains: Sequence[int]) -> float:
    return float(sum(max(gain, 0) / np.log2(rank + 2) for rank, gain in enumerate(gains)))
