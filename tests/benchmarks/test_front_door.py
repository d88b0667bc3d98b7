"""Computations of the front-door benchmark: standard measures, and hybrids between their two sides."""

import json
import math
from dataclasses import replace
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
    measures = ir_measures.calc_aggregate([ir_measures.nDCG @ 10, ir_measures.R @ 100], qrels, run)
    np.testing.assert_allclose(
        front_door.ndcg(ranking, gains).mean(), measures[ir_measures.nDCG @ 10], rtol=1e-6
    )
    np.testing.assert_allclose(front_door.recall(ranking, gains), measures[ir_measures.R @ 100], rtol=1e-6)


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
    ndcg_by_share = {
        row["share"]: row["nDCG@10"] for row in front_door.escalated("x", 0, pool, student, teacher)
    }
    expected = {
        0.0: (2 + 2 * second) / 4,
        0.3: (3 + second) / 4,
        0.5: (2 + 2 * second) / 4,
        1.0: (3 + second) / 4,
    }
    for share, value in expected.items():
        assert abs(ndcg_by_share[share] - value) < 1e-4


def test_bm25_is_as_good_as_the_library_that_it_is_compared_with():
    """Words of the same stems have the same scores, so both give the same order of documents."""
    corpus = ["how to install a key", "installing of the keys, keys", "of the to", "weights of a planet"]
    queries = ["installed keys", "what is the weight of planets"]
    lexical = front_door.BM25.build(corpus, language="english")
    ours = np.stack([lexical.scores(query) for query in queries])
    theirs = front_door.bm25s_scores(corpus, queries)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert (theirs > 0).tolist() == [[True, True, False, False], [False, False, False, True]]


def test_what_distill_expects_is_what_was_measured():
    file = Path(front_door.__file__).parents[1] / "docs/results/front_door.json"
    certificate = {
        name.removeprefix("certificate_"): value
        for name, value in json.loads(file.read_text())["metrics"].items()
        if name.startswith("certificate_")
    }
    assert certificate["start"] == pytest.approx(agreement.KEPT_START, abs=5e-4)
    assert certificate["per_overlap"] == pytest.approx(agreement.KEPT_PER_OVERLAP, abs=5e-4)
    assert math.ceil(100 * certificate["error_max"]) / 100 == agreement.KEPT_ERROR
    assert (certificate["overlap_min"], certificate["overlap_max"]) == pytest.approx(
        agreement.MEASURED_OVERLAPS, abs=5e-3
    )
    assert certificate["sets"] == agreement.MEASURED_COLLECTIONS


def test_a_certificate_is_a_line_and_its_error_on_a_set_that_it_leaves_out():
    overlaps = (0.5, 0.6, 0.7, 0.8)
    rows = [
        {"set": f"set {overlap}", "method": method, "kept": 0.2 + overlap + shift, "overlap@10": overlap}
        for overlap in overlaps
        for method, shift in zip(front_door.STUDENTS, (0.01, -0.01), strict=True)
    ]
    rows.append({"set": "set 0.5", "method": "bm25", "kept": 0.1, "overlap@10": ""})
    assert front_door.certificate(rows[:4]) == {}
    metrics = front_door.certificate(rows)
    assert metrics == {
        "certificate_start": 0.2,
        "certificate_per_overlap": 1.0,
        "certificate_error_max": 0.0,
        "certificate_overlap_min": 0.5,
        "certificate_overlap_max": 0.8,
        "certificate_sets": 4,
    }
    for row in rows[6:8]:  # the line through the other three predicts 1.0
        row["kept"] -= 0.3
    assert front_door.certificate(rows)["certificate_error_max"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("top10", "documents", "told"),
    [
        (0.6, agreement.MAX_DOCUMENTS, "expected to keep 81% to 97%"),
        (0.9, agreement.MAX_DOCUMENTS, "expected to keep 94% to 100%"),
        (agreement.MEASURED_OVERLAPS[0] - 0.01, agreement.MAX_DOCUMENTS, "is unknown: every table"),
        (0.99, agreement.MAX_DOCUMENTS - 1, "is unknown: fewer than 1,000 documents"),
        (None, 0, "is unknown: fewer than"),
    ],
)
def test_distill_says_what_a_table_is_expected_to_keep_or_that_it_cannot_tell(top10, documents, told):
    found = agreement.Agreement(100, documents, 0.9, top10, None, 1.0, 1, teacher_bytes=1)
    assert told in agreement.expected_kept(found, "table")
    assert "for tables only" in agreement.expected_kept(found, "some/model")
    assert "not available" in agreement.expected_kept(replace(found, teacher_bytes=None), "table")
