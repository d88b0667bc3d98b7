"""What the front-door benchmark computes: the field's measures, and hybrids that lie between their sides."""

import json
import math
from pathlib import Path

import ir_measures
import numpy as np
import pytest

from benchmarks import front_door
from scalingnote.train.distillation import agreement


def test_ndcg_and_recall_are_trec_evals():
    rng = np.random.default_rng(0)
    gains = np.where(rng.random((6, 150)) < 0.05, rng.integers(1, 4, (6, 150)), 0).astype(np.float32)
    gains[:, 0] = 1  # each query has an answer
    scores = rng.standard_normal((6, 150)).astype(np.float32)
    ranking = front_door.ranked(scores)
    qrels = {f"q{q}": {f"d{d}": int(g) for d, g in enumerate(row) if g} for q, row in enumerate(gains)}
    run = {f"q{q}": {f"d{d}": float(s) for d, s in enumerate(row)} for q, row in enumerate(scores)}
    found = ir_measures.calc_aggregate([ir_measures.nDCG @ 10, ir_measures.R @ 100], qrels, run)
    np.testing.assert_allclose(
        front_door.ndcg(ranking, gains).mean(), found[ir_measures.nDCG @ 10], rtol=1e-6
    )
    np.testing.assert_allclose(front_door.recall(ranking, gains), found[ir_measures.R @ 100], rtol=1e-6)


def test_a_hybrid_of_weight_one_orders_as_its_dense_side_does():
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((3, 1200)).astype(np.float32)
    lexical = np.maximum(rng.standard_normal((3, 1200)), 0).astype(np.float32)
    for weight, side in ((1.0, dense), (0.0, lexical)):
        joined = front_door.joined(dense, lexical, weight)
        np.testing.assert_array_equal(front_door.ranked(joined)[:, :50], front_door.ranked(side)[:, :50])


def test_the_queries_in_most_doubt_get_the_teachers_order(monkeypatch):
    monkeypatch.setattr(front_door, "doubt", lambda _: np.array([0.1, 0.3, 0.2, 0.0]))
    relevant = np.tile(np.float32([0, 1]), (4, 1))
    empty = np.zeros((4, 2), np.float32)
    pool = front_door.Pool([], empty, [], relevant, empty, empty)
    student = np.float32([[2, 1], [2, 1], [1, 2], [1, 2]])  # right about the last two queries
    teacher = np.float32([[1, 2], [1, 2], [2, 1], [1, 2]])  # right about all but the third
    second = 1 / np.log2(3)  # nDCG of a relevant document at the second place
    found = {row["share"]: row["nDCG@10"] for row in front_door.escalated("x", 0, pool, student, teacher)}
    expected = {
        0.0: (2 + 2 * second) / 4,
        0.3: (3 + second) / 4,
        0.5: (2 + 2 * second) / 4,
        1.0: (3 + second) / 4,
    }
    for share, value in expected.items():
        assert abs(found[share] - value) < 1e-4


def test_bm25_is_as_good_as_the_library_that_it_is_compared_with():
    """Words of the same stems have the same scores, so both order the documents alike."""
    corpus = ["how to install a key", "installing of the keys, keys", "of the to", "weights of a planet"]
    queries = ["installed keys", "what is the weight of planets"]
    lexical = front_door.BM25.build(corpus, language="english")
    ours = np.stack([lexical.scores(query) for query in queries])
    theirs = front_door.bm25s_scores(corpus, queries)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert (theirs > 0).tolist() == [[True, True, False, False], [False, False, False, True]]


def test_what_distill_expects_is_what_was_measured():
    metrics = json.loads((Path(front_door.__file__).parents[1] / "docs/results/front_door.json").read_text())
    found = metrics["metrics"]
    low, high = agreement.MEASURED_KEPT
    assert (low, high) == (
        math.floor(100 * found["certificate_low"]) / 100,
        math.ceil(100 * found["certificate_high"]) / 100,
    )
    assert math.floor(100 * found["certificate_overlap"]) / 100 == agreement.MEASURED_OVERLAP
    sets = {row["set"] for table in ("rows", "further") for row in metrics[table]}
    assert len(sets) == agreement.MEASURED_COLLECTIONS


def test_a_certificate_errs_by_what_a_set_is_outside_of_the_others():
    kept = {"a": (0.98, 0.97), "b": (0.95, 0.96), "c": (1.0, 0.99)}
    rows = [
        {"set": name, "method": method, "kept": value, "overlap@10": value / 2}
        for name, values in kept.items()
        for method, value in zip(front_door.STUDENTS, values, strict=True)
    ]
    assert front_door.certificate([*rows, {"set": "a", "method": "bm25", "kept": 0.1}]) == {
        "certificate_low": 0.95,
        "certificate_high": 1.0,
        "certificate_overlap": 0.475,
        "certificate_error_max": 0.02,
    }


@pytest.mark.parametrize(
    ("top10", "documents", "told"),
    [
        (agreement.MEASURED_OVERLAP, agreement.MAX_DOCUMENTS, "public collections"),
        (agreement.MEASURED_OVERLAP - 0.01, agreement.MAX_DOCUMENTS, "cannot be told: every table"),
        (0.99, agreement.MAX_DOCUMENTS - 1, "cannot be told: too few"),
        (None, 0, "cannot be told: too few"),
    ],
)
def test_a_certificate_says_when_it_cannot_tell(top10, documents, told):
    found = agreement.Agreement(100, documents, 0.9, top10, None, 1.0, 1)
    assert told in agreement.expected_kept(found)
