from hypothesis import given
from hypothesis import strategies as st

from scalingnote.collect.clicks import click_triplets
from scalingnote.collect.triplet import Triplet

DOCS = st.sampled_from("abcdefgh")


def test_clicked_is_positive_and_the_only_unclicked_exposure_its_negative():
    log = [("a", False), ("b", True)]
    assert click_triplets("q", log, num_negatives=1) == [Triplet("b", ["a"])]


def test_a_click_in_another_session_forbids_a_negative():
    log = [("a", False), ("b", True), ("c", False), ("a", True)]
    assert click_triplets("q", log, num_negatives=2) == [Triplet("a", ["c"]), Triplet("b", ["c"])]


def test_min_clicks_keeps_a_rarely_clicked_document_out_of_both_roles():
    log = [("a", True), ("a", True), ("b", True), ("c", False)]
    assert click_triplets("q", log, num_negatives=3, min_clicks=2) == [Triplet("a", ["c"])]


def test_nothing_is_drawn_from_outside_of_the_exposures():
    assert click_triplets("q", [("a", True)], num_negatives=1) == [Triplet("a", [])]
    assert click_triplets("q", [("a", False)], num_negatives=1) == []
    assert click_triplets("q", [], num_negatives=1) == []


def test_the_draw_depends_on_query_and_seed():
    log = [("p", True), *((f"n{i}", False) for i in range(40))]
    drawn = {
        click_triplets(q, log, num_negatives=1, seed=s)[0].negatives[0] for q in "abcd" for s in range(4)
    }
    assert len(drawn) > 8


@given(st.lists(st.tuples(DOCS, st.booleans())), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_invariants(log, num_negatives, min_clicks, random):
    triplets = click_triplets("q", log, num_negatives=num_negatives, min_clicks=min_clicks)
    clicked = {doc for doc, click in log if click}
    for positive, negatives in triplets:
        assert sum(click for doc, click in log if doc == positive) >= min_clicks
        assert not clicked & set(negatives)
        assert set(negatives) <= {doc for doc, _ in log}
        assert len(negatives) == len(set(negatives)) == min(num_negatives, len({d for d, _ in log} - clicked))
    shuffled = random.sample(log, len(log))
    assert click_triplets("q", shuffled, num_negatives=num_negatives, min_clicks=min_clicks) == triplets
