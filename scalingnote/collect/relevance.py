"""Relevance triplets: a ranking model's list for one query becomes a positive and hard negatives."""

from collections.abc import Collection, Sequence

from scalingnote.collect.triplet import Triplet, draw


def relevance_triplet(
    query_id: str,
    ranking: Sequence[tuple[str, float]],
    *,
    clicked: Collection[str] = (),
    top_k: int,
    top_t: int,
    num_negatives: int,
    max_score_ratio: float | None = None,
    seed: int = 0,
) -> Triplet | None:
    """The best of `ranking` (doc_id, score; best first) against random ones of ranks `top_k` + 1 to `top_t`.

    Ranks 2 to `top_k` are neither: many are relevant, and the model cannot say which (ScalingNote,
    section 4.1). Nor is a document that scores more than `max_score_ratio` times what the positive does
    (where that is above 0), or one in `clicked`. Returns None for an empty ranking; a short one gives
    fewer than `num_negatives` negatives.
    """
    if not ranking:
        return None
    positive, best = ranking[0]
    limit = best * max_score_ratio if max_score_ratio is not None and best > 0 else float("inf")
    candidates = {doc_id for doc_id, score in ranking[top_k:top_t] if score <= limit}
    candidates -= {*clicked, positive}
    return Triplet(positive, draw(candidates, num_negatives, seed=seed, key=f"relevance {query_id}"))
