"""Lending and borrowing against a transcription with sets, one query at a time."""

from random import Random

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from row_files import table_of
from scalingnote.triplets.collect.triplets import (
    KNOWN,
    MULTI_HOP,
    ONE_HOP,
    hash_fraction,
    multi_hop_candidates,
    select_multi_hop,
)

DOCS = st.sampled_from("abcdef")
LOAN = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["q7", "q8", "q9"]),
    st.sampled_from([0.25, 0.5, 0.75]),
    DOCS,
    st.lists(DOCS, min_size=1, max_size=1),
    st.sampled_from(["click", "relevance"]),
)


def _drawn(loan: tuple) -> float:
    return hash_fraction(f"borrow {loan[1]} {loan[3]}", seed=5)


def slow_borrow(loans: list[tuple], known: dict[tuple[int, str], bool], most: int) -> list[tuple]:
    sound = [loan for loan in loans if (loan[0], loan[3]) not in known]
    answers = {pair for pair, positive in known.items() if positive} | {(loan[0], loan[3]) for loan in sound}
    usable = [loan for loan in sound if not any((loan[0], negative) in answers for negative in loan[4])]
    kept: list[tuple] = []
    for loan in sorted(usable, key=lambda loan: (loan[0], loan[5], -loan[2], _drawn(loan), loan[1])):
        same = [k for k in kept if (k[0], k[5]) == (loan[0], loan[5])]
        if len(same) < most and loan[3] not in [k[3] for k in same]:
            kept.append(loan)
    return kept


@given(
    st.lists(LOAN, unique_by=lambda loan: (loan[0], loan[1], loan[3], loan[5]), max_size=25),
    st.dictionaries(st.tuples(st.integers(0, 3), DOCS), st.booleans(), max_size=8),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_borrowing_equals_its_transcription(loans, known, most, order):
    found, counts = select_multi_hop(
        table_of(MULTI_HOP, Random(order).sample(loans, len(loans))),
        table_of(KNOWN, [(row, doc, positive) for (row, doc), positive in known.items()]),
        limit=most,
        seed=5,
    )
    assert [tuple(row.values()) for row in found.to_pylist()] == slow_borrow(loans, known, most)
    assert len(loans) == len(found) + sum(counts.values())  # every loan is kept or counted


def test_lenders_give_triplets_of_a_source_to_every_borrower():
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
