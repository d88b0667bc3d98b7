"""Relevance triplets: a ranking model's list for one query becomes a positive and hard negatives."""

from collections.abc import Collection, Sequence

from scalingnote.collect.triplet import Triplet, draw


def relevance_triplet(
    query_id: str,
    ranking: Sequence[str],
    *,
    clicked: Collection[str] = (),
    top_k: int,
    top_t: int,
    num_negatives: int,
    seed: int = 0,
) -> Triplet | None:
    """The best of `ranking` (doc_ids, best first) against random ones of ranks `top_k` + 1 to `top_t`.

    Ranks 2 to `top_k` are neither: many are relevant, and the model cannot say which (ScalingNote,
    section 4.1). Documents in `clicked` are no negatives of this query either. Returns None for an empty
    ranking; a short one gives fewer than `num_negatives` negatives.
    """
    if not ranking:
        return None
    positive = ranking[0]
    candidates = set(ranking[top_k:top_t]) - set(clicked) - {positive}
    return Triplet(positive, draw(candidates, num_negatives, seed=seed, key=f"relevance {query_id}"))
