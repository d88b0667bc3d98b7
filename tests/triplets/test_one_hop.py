"""One-hop triplets by clicks and by relevance, and the seeded draws behind them."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from row_files import table_of
from scalingnote.triplets.collect.triplets import (
    EVIDENCE,
    Triplet,
    condense,
    draw,
    hash_fraction,
    one_hop_triplets,
    relevance_triplet,
)
from scalingnote.triplets.config import CollectConfig

DOCS = st.sampled_from("abcdefgh")


def settings(**values: object) -> CollectConfig:
    """Also values that the config refuses together."""
    return CollectConfig().model_copy(update=values)


def clicked(log: Iterable[tuple[str, bool, bool]], *, query: str = "q", **values: object) -> list[Triplet]:
    """The triplets of a query by rows of a log: a document, whether it was clicked and satisfied."""
    rows = [(query, doc, int(click), int(satisfied), None) for doc, click, satisfied in log]
    config = settings(sources=("click",), **values)
    found, _, counts = one_hop_triplets(table_of(EVIDENCE, rows), pa.array([query]), config=config)
    assert counts["ignored_rows"] == 0
    return [Triplet(row["positive"], row["negatives"]) for row in found.to_pylist()]


@pytest.mark.parametrize(
    ("log", "values", "triplets"),
    [
        # The clicked document is the positive, the only other exposure its negative.
        ([("a", 0, 0), ("b", 1, 1)], {}, [("b", ["a"])]),
        # A click in another session forbids a negative.
        ([("a", 0, 0), ("b", 1, 1), ("c", 0, 0), ("a", 1, 1)], {}, [("a", ["c"]), ("b", ["c"])]),
        # A rarely clicked document has neither role.
        ([("a", 1, 1), ("a", 1, 1), ("b", 1, 1), ("c", 0, 0)], {"min_clicks": 2}, [("a", ["c"])]),
        # Nor has one whose click did not satisfy.
        ([("a", 1, 0), ("b", 1, 1), ("c", 0, 0)], {}, [("b", ["c"])]),
        # Nothing is drawn from outside of the exposures.
        ([("a", 1, 1)], {}, [("a", [])]),
        ([("a", 0, 0)], {}, []),
        ([], {}, []),
    ],
)
def test_triplets_of_clicks(log, values, triplets):
    assert clicked(log, num_negatives=3, **values) == [Triplet(*expected) for expected in triplets]


def test_the_draw_depends_on_query_and_seed():
    log = [("p", 1, 1), *((f"n{i}", 0, 0) for i in range(40))]
    drawn = {clicked(log, query=q, seed=s)[0].negatives[0] for q in "abcd" for s in range(4)}
    assert len(drawn) > 8


@given(
    st.lists(st.tuples(DOCS, st.booleans(), st.booleans())),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(),
)
def test_click_triplets_invariants(log, num_negatives, min_clicks, random):
    log = [(doc, click, click and satisfied) for doc, click, satisfied in log]
    values = {"num_negatives": num_negatives, "min_clicks": min_clicks}
    triplets = clicked(log, **values)
    with_click, exposed = {doc for doc, click, _ in log if click}, {doc for doc, _, _ in log}
    for positive, negatives in triplets:
        assert sum(satisfied for doc, _, satisfied in log if doc == positive) >= min_clicks
        assert set(negatives) <= exposed - with_click
        assert len(negatives) == len(set(negatives)) == min(num_negatives, len(exposed - with_click))
    assert sorted(clicked(random.sample(log, len(log)), **values)) == sorted(triplets)


def ranked(doc_ids: Iterable[str]) -> list[tuple[str, float]]:
    return [(doc_id, 1.0 - rank / 100) for rank, doc_id in enumerate(doc_ids)]


@pytest.mark.parametrize(
    ("documents", "values", "triplet"),
    [
        # The best is the positive, the only rank between K and T its negative.
        ("abcde", {"top_k": 3, "top_t": 4}, Triplet("a", ["d"])),
        ("abcde", {"top_k": 3, "top_t": 5, "num_negatives": 2}, Triplet("a", ["d", "e"])),
        ("ab", {"top_k": 2, "top_t": 9}, Triplet("a", [])),
        ("", {"top_k": 1, "top_t": 2}, None),
    ],
)
def test_triplets_of_rankings(documents, values, triplet):
    found = relevance_triplet("q", ranked(documents), settings(**values))
    assert (found and found._replace(negatives=sorted(found.negatives))) == triplet
    if len(documents) > 4:
        without = relevance_triplet("q", ranked(documents), settings(**values), clicked={"d"})
        assert without == triplet._replace(negatives=[doc for doc in triplet.negatives if doc != "d"])


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


def test_of_a_crowded_query_the_best_scores_are_kept():
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
