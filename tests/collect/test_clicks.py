from hypothesis import given
from hypothesis import strategies as st

from scalingnote.collect.clicks import click_triplets
from scalingnote.collect.triplet import Triplet

DOCS = st.sampled_from("abcdefgh")


def seen(*log: tuple[str, bool]) -> list[tuple[str, bool, bool]]:
    """Impressions whose every click satisfied."""
    return [(doc, clicked, clicked) for doc, clicked in log]


def test_clicked_is_positive_and_the_only_unclicked_exposure_its_negative():
    log = seen(("a", False), ("b", True))
    assert click_triplets("q", log, num_negatives=1) == [Triplet("b", ["a"])]


def test_a_click_in_another_session_forbids_a_negative():
    log = seen(("a", False), ("b", True), ("c", False), ("a", True))
    assert click_triplets("q", log, num_negatives=2) == [Triplet("a", ["c"]), Triplet("b", ["c"])]


def test_min_clicks_keeps_a_rarely_clicked_document_out_of_both_roles():
    log = seen(("a", True), ("a", True), ("b", True), ("c", False))
    assert click_triplets("q", log, num_negatives=3, min_clicks=2) == [Triplet("a", ["c"])]


def test_a_click_that_did_not_satisfy_makes_neither_a_positive_nor_a_negative():
    log = [("a", True, False), ("b", True, True), ("c", False, False)]
    assert click_triplets("q", log, num_negatives=3) == [Triplet("b", ["c"])]


def test_nothing_is_drawn_from_outside_of_the_exposures():
    assert click_triplets("q", seen(("a", True)), num_negatives=1) == [Triplet("a", [])]
    assert click_triplets("q", seen(("a", False)), num_negatives=1) == []
    assert click_triplets("q", [], num_negatives=1) == []


def test_the_draw_depends_on_query_and_seed():
    log = seen(("p", True), *((f"n{i}", False) for i in range(40)))
    drawn = {
        click_triplets(q, log, num_negatives=1, seed=s)[0].negatives[0] for q in "abcd" for s in range(4)
    }
    assert len(drawn) > 8


@given(
    st.lists(st.tuples(DOCS, st.booleans(), st.booleans())),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(),
)
def test_invariants(log, num_negatives, min_clicks, random):
    log = [(doc, click, click and satisfied) for doc, click, satisfied in log]
    triplets = click_triplets("q", log, num_negatives=num_negatives, min_clicks=min_clicks)
    clicked = {doc for doc, click, _ in log if click}
    for positive, negatives in triplets:
        assert sum(satisfied for doc, _, satisfied in log if doc == positive) >= min_clicks
        assert not clicked & set(negatives)
        exposed = {doc for doc, _, _ in log}
        assert set(negatives) <= exposed
        assert len(negatives) == len(set(negatives)) == min(num_negatives, len(exposed - clicked))
    shuffled = random.sample(log, len(log))
    assert click_triplets("q", shuffled, num_negatives=num_negatives, min_clicks=min_clicks) == triplets
