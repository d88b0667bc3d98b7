"""One-hop triplets by clicks and by relevance, and the seeded draws behind them."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.triplets.collect.config import CollectConfig
from scalingnote.triplets.collect.triplets import (
    EVIDENCE,
    Triplet,
    click_triplets,
    condense,
    draw,
    hash_fraction,
    relevance_triplet,
)

DOCS = st.sampled_from("abcdefgh")


def settings(**values: object) -> CollectConfig:
    """Also values that the config refuses together."""
    return CollectConfig().model_copy(update=values)


def seen(*log: tuple[str, bool]) -> list[tuple[str, bool, bool]]:
    """Impressions whose every click satisfied."""
    return [(doc, clicked, clicked) for doc, clicked in log]


def test_clicked_is_positive_and_the_only_unclicked_exposure_its_negative():
    log = seen(("a", False), ("b", True))
    assert click_triplets("q", log, settings(num_negatives=1)) == [Triplet("b", ["a"])]


def test_a_click_in_another_session_forbids_a_negative():
    log = seen(("a", False), ("b", True), ("c", False), ("a", True))
    assert click_triplets("q", log, settings(num_negatives=2)) == [Triplet("a", ["c"]), Triplet("b", ["c"])]


def test_min_clicks_keeps_a_rarely_clicked_document_out_of_both_roles():
    log = seen(("a", True), ("a", True), ("b", True), ("c", False))
    assert click_triplets("q", log, settings(num_negatives=3, min_clicks=2)) == [Triplet("a", ["c"])]


def test_a_click_that_did_not_satisfy_makes_neither_a_positive_nor_a_negative():
    log = [("a", True, False), ("b", True, True), ("c", False, False)]
    assert click_triplets("q", log, settings(num_negatives=3)) == [Triplet("b", ["c"])]


def test_nothing_is_drawn_from_outside_of_the_exposures():
    assert click_triplets("q", seen(("a", True)), settings(num_negatives=1)) == [Triplet("a", [])]
    assert click_triplets("q", seen(("a", False)), settings(num_negatives=1)) == []
    assert click_triplets("q", [], settings(num_negatives=1)) == []


def test_the_draw_depends_on_query_and_seed():
    log = seen(("p", True), *((f"n{i}", False) for i in range(40)))
    drawn = {
        click_triplets(q, log, settings(num_negatives=1, seed=s))[0].negatives[0]
        for q in "abcd"
        for s in range(4)
    }
    assert len(drawn) > 8


@given(
    st.lists(st.tuples(DOCS, st.booleans(), st.booleans())),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(),
)
def test_click_triplets_invariants(log, num_negatives, min_clicks, random):
    log = [(doc, click, click and satisfied) for doc, click, satisfied in log]
    triplets = click_triplets("q", log, settings(num_negatives=num_negatives, min_clicks=min_clicks))
    clicked = {doc for doc, click, _ in log if click}
    for positive, negatives in triplets:
        assert sum(satisfied for doc, _, satisfied in log if doc == positive) >= min_clicks
        assert not clicked & set(negatives)
        exposed = {doc for doc, _, _ in log}
        assert set(negatives) <= exposed
        assert len(negatives) == len(set(negatives)) == min(num_negatives, len(exposed - clicked))
    shuffled = random.sample(log, len(log))
    assert (
        click_triplets("q", shuffled, settings(num_negatives=num_negatives, min_clicks=min_clicks))
        == triplets
    )


def ranked(doc_ids: Iterable[str]) -> list[tuple[str, float]]:
    return [(doc_id, 1.0 - rank / 100) for rank, doc_id in enumerate(doc_ids)]


def test_best_is_positive_and_the_only_rank_between_k_and_t_is_negative():
    triplet = relevance_triplet("q", ranked("abcde"), settings(top_k=3, top_t=4, num_negatives=1))
    assert triplet == Triplet("a", ["d"])


def test_a_clicked_document_is_no_negative():
    triplet = relevance_triplet(
        "q", ranked("abcde"), settings(top_k=3, top_t=5, num_negatives=2), clicked={"d"}
    )
    assert triplet == Triplet("a", ["e"])


def test_short_rankings():
    assert relevance_triplet("q", [], settings(top_k=1, top_t=2, num_negatives=1)) is None
    assert relevance_triplet("q", ranked("ab"), settings(top_k=2, top_t=9, num_negatives=1)) == Triplet(
        "a", []
    )


@given(
    st.lists(st.text("abcdefghij", min_size=1, max_size=2), unique=True),
    st.sets(st.text("abcdefghij", min_size=1, max_size=2)),
    st.integers(1, 5),
    st.integers(1, 10),
    st.integers(1, 4),
)
def test_relevance_triplet_invariants(ranking, clicked, top_k, width, num_negatives):
    triplet = relevance_triplet(
        "q",
        ranked(ranking),
        settings(top_k=top_k, top_t=top_k + width, num_negatives=num_negatives),
        clicked=clicked,
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
    assert abs(sum(hash_fraction(key, seed=3) < 0.1 for key in keys) - 500) < 110
    assert hash_fraction("q", seed=1) != hash_fraction("q", seed=2)


def log(rng: np.random.Generator, rows: int) -> pa.Table:
    """Evidence of which one query has half of the rows, some of them scored."""
    queries = np.where(rng.random(rows) < 0.5, 0, rng.integers(1, 30, rows))
    scored = rng.random(rows) < 0.3
    clicked = rng.random(rows) < 0.2
    columns = {
        "query_id": [f"q{number}" for number in queries],
        "doc_id": [f"d{number}" for number in rng.integers(0, 60, rows)],
        "clicks": pa.array(np.where(scored, 0, clicked), mask=scored),
        "satisfied": pa.array(np.where(scored, 0, clicked), mask=scored),
        "score": pa.array(rng.random(rows).astype(np.float32), mask=~scored),
    }
    return pa.table(columns).cast(EVIDENCE)


def rows_of(evidence: pa.Table) -> list[tuple[object, ...]]:
    return sorted(map(tuple, (row.values() for row in evidence.to_pylist())), key=str)


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_evidence_condensed_slice_by_slice_is_that_of_the_whole(most: int):
    evidence = log(np.random.default_rng(0), 3000)
    whole = condense(evidence, most=most, seed=5)
    slices = [condense(evidence.slice(start, 170), most=most, seed=5) for start in range(0, 3000, 170)]
    assert rows_of(condense(pa.concat_tables(slices), most=most, seed=5)) == rows_of(whole)
    # The slices of a head query are bounded by what is kept, not by its clicks.
    heads = [pc.sum(pc.equal(piece["query_id"], "q0")).as_py() for piece in slices]
    assert max(heads) <= 2 * most


def test_of_a_crowded_query_shown_documents_are_drawn_and_the_best_scores_kept():
    evidence = log(np.random.default_rng(1), 3000)
    kept = condense(evidence, most=5, seed=0)
    head = [row for row in kept.to_pylist() if row["query_id"] == "q0"]
    scores = [row["score"] for row in head if row["score"] is not None]
    whole = condense(evidence, most=1000, seed=0).to_pylist()
    every = [row for row in whole if row["query_id"] == "q0"]
    assert sorted(scores) == sorted(row["score"] for row in every if row["score"] is not None)[-5:]
    shown = [row for row in head if row["clicks"] is not None]
    assert len(shown) == 5
    assert all(row in every for row in shown)  # with all their clicks
    other = condense(evidence, most=5, seed=1).to_pylist()
    assert {row["doc_id"] for row in other if row["query_id"] == "q0"} != {row["doc_id"] for row in head}
