"""Click triplets: what one query showed its users, and what they clicked, becomes its training examples."""

from collections import Counter
from collections.abc import Iterable

from scalingnote.collect.triplet import Triplet, draw


def click_triplets(
    query_id: str,
    exposures: Iterable[tuple[str, int, int]],
    *,
    num_negatives: int,
    min_clicks: int = 1,
    seed: int = 0,
) -> list[Triplet]:
    """One triplet per clicked document, sorted by it; hard negatives were exposed and never clicked.

    `exposures` are (doc_id, its clicks, how many of them satisfied) over all sessions of this query, in one
    row or several. A positive has `min_clicks` clicks that satisfied. A document that any session clicked
    is no negative, however short or seldom the clicks were. A triplet may have fewer than `num_negatives`
    negatives, down to none: nothing is drawn from outside of what was exposed, because a document nobody
    saw was not rejected by anybody (ScalingNote, section 4.1).
    """
    clicks: Counter[str] = Counter()
    satisfied: Counter[str] = Counter()
    for doc_id, clicked, of_these in exposures:
        clicks[doc_id] += clicked
        satisfied[doc_id] += of_these
    rejected = {doc_id for doc_id, count in clicks.items() if not count}
    return [
        Triplet(doc_id, draw(rejected, num_negatives, seed=seed, key=f"click {query_id} {doc_id}"))
        for doc_id in sorted(clicks.keys() - rejected)
        if satisfied[doc_id] >= min_clicks
    ]
