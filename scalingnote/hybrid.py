"""Two retrievals in one: scores of dense and of sparse search are joined, or their ranks.

Cosines and inner products of term weights are on scales of their own, which differ from query to query. So
each is first put on [0, 1] for each query: 0 is the lowest score of any document of the pool, 1 the highest.
"""

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray


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
