"""Triplets from the evidence of a query, their seeded draws, and triplets from associated queries."""

from collections import Counter
from collections.abc import Iterable
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from row_files import table_of
from scalingnote.triplets.collect.triplets import (
    EVIDENCE,
    KNOWN,
    MULTI_HOP,
    ONE_HOP,
    Triplet,
    condense,
    draw,
    hash_fraction,
    multi_hop_candidates,
    one_hop_triplets,
    relevance_triplet,
    select_multi_hop,
)
from scalingnote.triplets.config import CollectConfig

DOCS = st.sampled_from("abcdefgh")


def settings(**values: object) -> CollectConfig:
    """Set values, also those that the config refuses together."""
    return CollectConfig().model_copy(update=values)


def clicked(log: Iterable[tuple[str, bool, bool]], *, query: str = "q", **values: object) -> list[Triplet]:
    """Make the triplets of a query from rows of a log: a document, whether it was clicked and satisfied."""
    rows = [(query, doc, int(click), int(satisfied), None) for doc, click, satisfied in log]
    config = settings(sources=("click",), **values)
    triplets, _, counts = one_hop_triplets(table_of(EVIDENCE, rows), pa.array([query]), config=config)
    assert counts["ignored_rows"] == 0
    return [Triplet(row["positive"], row["negatives"]) for row in triplets.to_pylist()]


@pytest.mark.parametrize(
    ("log", "values", "triplets"),
    [
        # The clicked document is the positive, and the only other exposure is its negative.
        ([("a", 0, 0), ("b", 1, 1)], {}, [("b", ["a"])]),
        # A click in another session forbids a negative.
        ([("a", 0, 0), ("b", 1, 1), ("c", 0, 0), ("a", 1, 1)], {}, [("a", ["c"]), ("b", ["c"])]),
        # A rarely clicked document has neither role.
        ([("a", 1, 1), ("a", 1, 1), ("b", 1, 1), ("c", 0, 0)], {"min_clicks": 2}, [("a", ["c"])]),
        # A document with a click that is not satisfied has neither role.
        ([("a", 1, 0), ("b", 1, 1), ("c", 0, 0)], {}, [("b", ["c"])]),
        # Negatives are drawn only from the exposures.
        ([("a", 1, 1)], {}, [("a", [])]),
        ([("a", 0, 0)], {}, []),
        ([], {}, []),
    ],
)
def test_click_triplets_of_small_logs(log, values, triplets):
    assert clicked(log, num_negatives=3, **values) == [Triplet(*expected) for expected in triplets]


def test_the_draw_depends_on_query_and_seed():
    log = [("p", 1, 1), *((f"n{i}", 0, 0) for i in range(40))]
    negatives = {clicked(log, query=q, seed=s)[0].negatives[0] for q in "abcd" for s in range(4)}
    assert len(negatives) > 8


@given(
    st.lists(st.tuples(DOCS, st.booleans(), st.booleans())),
    st.integers(1, 4),
    st.integers(1, 3),
    st.randoms(),
)
def test_click_triplets_keep_their_invariants(log, num_negatives, min_clicks, random):
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
        # The best document is the positive, and the only rank between K and T is its negative.
        ("abcde", {"top_k": 3, "top_t": 4}, Triplet("a", ["d"])),
        ("abcde", {"top_k": 3, "top_t": 5, "num_negatives": 2}, Triplet("a", ["d", "e"])),
        ("ab", {"top_k": 2, "top_t": 9}, Triplet("a", [])),
        ("", {"top_k": 1, "top_t": 2}, None),
    ],
)
def test_relevance_triplets_of_small_rankings(documents, values, triplet):
    result = relevance_triplet("q", ranked(documents), settings(**values))
    assert (result and result._replace(negatives=sorted(result.negatives))) == triplet
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
def test_relevance_triplets_keep_their_invariants(ranking, clicked, top_k, width, num_negatives):
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
    counts = Counter(draw("abcde", 1, seed=0, key=str(i))[0] for i in range(5000))
    assert all(abs(counts[doc] - 1000) < 150 for doc in "abcde")  # five standard deviations


def test_hash_fractions_are_spread_evenly():
    keys = [f"q{i}" for i in range(5000)]
    assert abs(sum(hash_fraction(key, seed=3) < 0.1 for key in keys) - 500) < 110
    assert hash_fraction("q", seed=1) != hash_fraction("q", seed=2)


def log(rng: np.random.Generator, rows: int) -> pa.Table:
    """Draw evidence in which one query has half of the rows, and some rows are scored."""
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
def test_evidence_condensed_by_slices_equals_all_at_once(most: int):
    evidence = log(np.random.default_rng(0), 3000)
    expected = condense(evidence, most=most, seed=5)
    slices = [condense(evidence.slice(start, 170), most=most, seed=5) for start in range(0, 3000, 170)]
    assert rows_of(condense(pa.concat_tables(slices), most=most, seed=5)) == rows_of(expected)
    # The slices of a head query are bounded by the kept rows, not by its clicks.
    heads = [pc.sum(pc.equal(piece["query_id"], "q0")).as_py() for piece in slices]
    assert max(heads) <= 2 * most


def test_the_best_scores_of_a_crowded_query_are_kept():
    evidence = log(np.random.default_rng(1), 3000)
    condensed = condense(evidence, most=5, seed=0)
    head = [row for row in condensed.to_pylist() if row["query_id"] == "q0"]
    scores = [row["score"] for row in head if row["score"] is not None]
    complete = condense(evidence, most=1000, seed=0).to_pylist()
    every = [row for row in complete if row["query_id"] == "q0"]
    assert sorted(scores) == sorted(row["score"] for row in every if row["score"] is not None)[-5:]
    shown = [row for row in head if row["clicks"] is not None]
    assert len(shown) == 5
    assert all(row in every for row in shown)  # with all their clicks
    other = condense(evidence, most=5, seed=1).to_pylist()
    assert {row["doc_id"] for row in other if row["query_id"] == "q0"} != {row["doc_id"] for row in head}


# --- from associated queries --------------------------------------------------------------------------------

LOAN = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["q7", "q8", "q9"]),
    st.sampled_from([0.25, 0.5, 0.75]),
    DOCS,
    st.lists(DOCS, min_size=1, max_size=1),
    st.sampled_from(["click", "relevance"]),
)


def slow_borrow(loans: list[tuple], known: dict[tuple[int, str], bool], most: int) -> list[tuple]:
    """Select multi-hop triplets with sets, one query at a time."""

    def drawn(loan: tuple) -> float:
        return hash_fraction(f"borrow {loan[1]} {loan[3]}", seed=5)

    sound = [loan for loan in loans if (loan[0], loan[3]) not in known]
    answers = {pair for pair, positive in known.items() if positive} | {(loan[0], loan[3]) for loan in sound}
    usable = [loan for loan in sound if not any((loan[0], negative) in answers for negative in loan[4])]
    selected: list[tuple] = []
    for loan in sorted(usable, key=lambda loan: (loan[0], loan[5], -loan[2], drawn(loan), loan[1])):
        same = [k for k in selected if (k[0], k[5]) == (loan[0], loan[5])]
        if len(same) < most and loan[3] not in [k[3] for k in same]:
            selected.append(loan)
    return selected


@given(
    st.lists(LOAN, unique_by=lambda loan: (loan[0], loan[1], loan[3], loan[5]), max_size=25),
    st.dictionaries(st.tuples(st.integers(0, 3), DOCS), st.booleans(), max_size=8),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_multi_hop_selection_equals_a_slow_one(loans, known, most, order):
    selected, counts = select_multi_hop(
        table_of(MULTI_HOP, Random(order).sample(loans, len(loans))),
        table_of(KNOWN, [(row, doc, positive) for (row, doc), positive in known.items()]),
        limit=most,
        seed=5,
    )
    assert [tuple(row.values()) for row in selected.to_pylist()] == slow_borrow(loans, known, most)
    assert len(loans) == len(selected) + sum(counts.values())  # every candidate is kept or counted


def test_triplets_of_an_associate_go_to_every_paired_query():
    triplets = [(5, "b", ["x"], "click"), (2, "a", ["y"], "click"), (5, "c", ["z"], "click")]
    triplets = [(*row, None) for row in [*triplets, (5, "d", ["w"], "relevance")]]

    def lent(most: int) -> tuple[list[tuple], int]:
        found, over = multi_hop_candidates(
            table_of(ONE_HOP, triplets),
            pa.array([f"q{i}" for i in range(6)]),
            source="click",
            associates=np.array([5, 2, 5, 3]),
            queries=np.array([10, 11, 12, 13]),
            strength=np.array([0.5, 0.75, 0.25, 1.0], dtype=np.float32),
            limit=most,
            seed=0,
        )
        names = ("row", "via", "strength", "positive", "negatives")
        return sorted(tuple(row[name] for name in names) for row in found.to_pylist()), over

    everything = [
        (10, "q5", 0.5, "b", ["x"]),
        (10, "q5", 0.5, "c", ["z"]),
        (11, "q2", 0.75, "a", ["y"]),
        (12, "q5", 0.25, "b", ["x"]),
        (12, "q5", 0.25, "c", ["z"]),
    ]
    assert lent(2) == (everything, 0)
    fewer, over = lent(1)
    assert (len(fewer), over) == (3, 2)
    assert set(map(str, fewer)) < set(map(str, everything))
