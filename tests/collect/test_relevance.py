from collections import Counter
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from scalingnote.collect.relevance import relevance_triplet
from scalingnote.collect.triplet import Triplet, draw, share


def ranked(doc_ids: Iterable[str]) -> list[tuple[str, float]]:
    return [(doc_id, 1.0 - rank / 100) for rank, doc_id in enumerate(doc_ids)]


def test_best_is_positive_and_the_only_rank_between_k_and_t_is_negative():
    triplet = relevance_triplet("q", ranked("abcde"), top_k=3, top_t=4, num_negatives=1)
    assert triplet == Triplet("a", ["d"])


def test_a_clicked_document_is_no_negative():
    triplet = relevance_triplet("q", ranked("abcde"), clicked={"d"}, top_k=3, top_t=5, num_negatives=2)
    assert triplet == Triplet("a", ["e"])


def test_what_scores_nearly_as_well_as_the_positive_is_no_negative():
    ranking = [("a", 0.8), ("b", 0.7), ("c", 0.5), ("d", 0.4)]
    triplet = relevance_triplet("q", ranking, top_k=1, top_t=4, num_negatives=3, max_score_ratio=0.625)
    assert triplet == Triplet("a", sorted(["c", "d"], key=triplet.negatives.index))
    below_zero = [("a", -1.0), ("b", -2.0)]  # a ratio of negative scores says nothing
    triplet = relevance_triplet("q", below_zero, top_k=1, top_t=2, num_negatives=1, max_score_ratio=0.5)
    assert triplet == Triplet("a", ["b"])


def test_short_rankings():
    assert relevance_triplet("q", [], top_k=1, top_t=2, num_negatives=1) is None
    assert relevance_triplet("q", ranked("ab"), top_k=2, top_t=9, num_negatives=1) == Triplet("a", [])


@given(
    st.lists(st.text("abcdefghij", min_size=1, max_size=2), unique=True),
    st.sets(st.text("abcdefghij", min_size=1, max_size=2)),
    st.integers(1, 5),
    st.integers(1, 10),
    st.integers(1, 4),
)
def test_invariants(ranking, clicked, top_k, width, num_negatives):
    triplet = relevance_triplet(
        "q", ranked(ranking), clicked=clicked, top_k=top_k, top_t=top_k + width, num_negatives=num_negatives
    )
    if triplet is None:
        assert not ranking
        return
    assert triplet.positive == ranking[0]
    assert triplet.positive not in triplet.negatives
    assert not clicked & set(triplet.negatives)
    assert all(top_k <= ranking.index(doc) < top_k + width for doc in triplet.negatives)
    assert len(triplet.negatives) == len(set(triplet.negatives)) <= num_negatives


def test_draws_are_uniform_over_candidates():
    drawn = Counter(draw("abcde", 1, seed=0, key=str(i))[0] for i in range(5000))
    assert all(abs(drawn[doc] - 1000) < 150 for doc in "abcde")  # five standard deviations


def test_shares_are_spread_evenly():
    keys = [f"q{i}" for i in range(5000)]
    assert abs(sum(share(key, seed=3) < 0.1 for key in keys) - 500) < 110
    assert share("q", seed=1) != share("q", seed=2)
