"""Click triplets: what one query showed its users, and what they clicked, becomes its training examples."""

from collections import Counter
from collections.abc import Iterable

from scalingnote.collect.triplet import Triplet, draw


def click_triplets(
    query_id: str,
    impressions: Iterable[tuple[str, bool, bool]],
    *,
    num_negatives: int,
    min_clicks: int = 1,
    seed: int = 0,
) -> list[Triplet]:
    """One triplet per clicked document, sorted by it; hard negatives were exposed and never clicked.

    `impressions` are the (doc_id, clicked, satisfied) of all sessions of this query. A positive has
    `min_clicks` clicks that satisfied. A document that any session clicked is no negative, however short
    or seldom the clicks were. A triplet may have fewer than `num_negatives` negatives, down to none:
    nothing is drawn from outside of what was exposed, because a document nobody saw was not rejected by
    anybody (ScalingNote, section 4.1).
    """
    exposed: set[str] = set()
    clicked: set[str] = set()
    clicks: Counter[str] = Counter()
    for doc_id, click, satisfied in impressions:
        exposed.add(doc_id)
        clicks[doc_id] += satisfied
        if click:
            clicked.add(doc_id)
    rejected = exposed - clicked
    return [
        Triplet(doc_id, draw(rejected, num_negatives, seed=seed, key=f"click {query_id} {doc_id}"))
        for doc_id in sorted(clicked)
        if clicks[doc_id] >= min_clicks
    ]
