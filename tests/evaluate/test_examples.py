"""Examples are the queries on which methods differ, wins and losses of each in turn."""

import numpy as np
import pyarrow as pa

import tiny
from scalingnote.evaluate import test_set
from scalingnote.evaluate.test_set import ChosenQuery, ResultDocument, choose_queries, example_queries
from scalingnote.storage.artifact import Draft

BASE = np.full(6, 0.5)
METHODS = {
    "dual": BASE,
    "student": np.array([0.5, 0.9, 0.4, 0.7, 0.2, 0.5]),
    "bm25": np.array([0.5, 1.0, 0.1, 0.5, 0.5, 0.6]),
}


def test_wins_and_losses_of_each_method_in_turn():
    found = choose_queries(METHODS, baseline="dual", number=5, seed=0)
    expected = [("student", 1, 0.4), ("student", 4, -0.3), ("bm25", 2, -0.4), ("student", 3, 0.2)]
    assert [(one.method, one.row, one.difference) for one in found[:4]] == expected
    assert (found[4].method, found[4].row) == ("bm25", 5)
    # What differs nowhere comes last, drawn; another baseline is another question.
    assert choose_queries(METHODS, baseline="dual", number=9, seed=0)[5:] == [ChosenQuery(0)]
    assert choose_queries(METHODS, baseline="bm25", number=1, seed=0) == [ChosenQuery(2, "dual", 0.4)]
    assert choose_queries(METHODS, baseline="dual", number=0, seed=0) == []


def test_the_seed_decides_between_equals_and_nothing_else():
    wins = np.where(np.arange(40) < 20, 0.1 + 0.2, 0.3)  # equal but for rounding
    methods = {"dual": np.zeros(40), "student": wins}
    of = [
        [one.row for one in choose_queries(methods, baseline="dual", number=8, seed=seed)]
        for seed in (0, 0, 1)
    ]
    assert of[0] == of[1] != of[2]
    assert min(of[0]) < 20 <= max(of[0])
    alone = choose_queries({"dual": np.zeros(40)}, baseline="dual", number=3, seed=1)
    assert [one.method for one in alone] == [""] * 3


def test_the_first_relevant_document_is_told_however_deep_it_is(tmp_path):
    draft = Draft(str(tmp_path / "dataset"), kind="dataset", config=tiny.Nothing(), parents={})
    ids = [f"d{number}" for number in range(9)]
    draft.write_table("documents.parquet", pa.table({"doc_id": ids, "title": [i.upper() for i in ids]}))
    test = test_set.TestSet(["q1", "q2"], ["one", "two"], {"q1": {"d7": 1, "d0": 0}, "q2": {"d1": 2}}, 0)
    rankings = {"dual": {"q1": ids, "q2": ids}, "bm25": {"q1": ids[:3], "q2": ids[1:]}}
    (found,) = example_queries(draft.commit(counts={}), rankings, [ChosenQuery(0, "bm25", -0.2)], test=test)
    assert found.first_relevant == {"dual": 8, "bm25": None}
    assert found.results["dual"] == [ResultDocument(doc, doc.upper(), relevant=False) for doc in ids[:3]]
    assert (found.query, found.method, found.difference) == ("one", "bm25", -0.2)
