"""Measures and their significance, compared with values by hand, loops and other libraries."""

import math
import random
from itertools import product

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from scalingnote.evaluate import measures
from scalingnote.evaluate.measures import (
    ann_recall,
    auc,
    bootstrap,
    holm,
    measure,
    paired_t_test,
    per_query,
    significance_section,
)

QRELS = {
    "first": {"a": 1},
    "third": {"c": 1},
    "two": {"b": 2, "d": 1, "e": 0},
    "eleventh": {"z": 1},
    "missing": {"z": 1},
    "unanswered": {"a": 1},
}
RANKINGS = {
    "first": ["a", "b", "c"],
    "third": ["a", "b", "c"],
    "two": ["a", "d", "e", "b"],
    "eleventh": [*"abcdefghij", "z"],
    "missing": ["a", "b", "c"],
}


def test_measures_have_the_values_computed_by_hand():
    gain = 1 / math.log2(3) + 2 / math.log2(5)
    best = 2 / math.log2(2) + 1 / math.log2(3)
    expected = {
        "R@1": [1, 0, 0, 0, 0, 0],
        "R@2": [1, 0, 1, 0, 0, 0],  # d, with grade 1, is sufficient for "two"
        "R@3": [1, 1, 1, 0, 0, 0],
        "Recall@1": [1, 0, 0, 0, 0, 0],
        "Recall@2": [1, 0, 1 / 2, 0, 0, 0],  # one of two relevant documents
        "Recall@3": [1, 1, 1 / 2, 0, 0, 0],
        "MRR@10": [1, 1 / 3, 1 / 2, 0, 0, 0],
        "MAP@100": [1, 1 / 3, (1 / 2 + 2 / 4) / 2, 1 / 11, 0, 0],
        "nDCG@10": [1, 1 / math.log2(4), gain / best, 0, 0, 0],
    }
    values_of = per_query(RANKINGS, QRELS, recall_at=(1, 2, 3))
    assert {name: values.tolist() for name, values in values_of.items()} == {
        name: pytest.approx(values) for name, values in expected.items()
    }
    means = {name: np.mean(values) for name, values in expected.items()}
    assert measure(RANKINGS, QRELS, recall_at=(1, 2, 3)) == pytest.approx(means)
    # If no query has several relevant documents, Recall@K equals R@K and is left out.
    single = measure({"q": ["a"]}, {"q": {"a": 2, "b": 0}}, recall_at=(1,))
    assert set(single) == {"R@1", "MRR@10", "MAP@100", "nDCG@10"}


def test_index_recall_is_the_mean_overlap():
    exact = [list("abcd"), list("efgh")]
    assert ann_recall(exact, exact, k=4) == 1
    assert ann_recall([list("badc"), list("exyz")], exact, k=4) == pytest.approx((1 + 0.25) / 2)
    assert ann_recall([list("badc"), list("exyz")], exact, k=1) == pytest.approx(0.5)
    assert ann_recall([["a"], []], [["a"], ["b"]], k=10) == pytest.approx(0.5)  # a pool of one
    with pytest.raises(ValueError, match="1 answers for 2 queries"):
        ann_recall([["a"]], exact, k=1)


def area_by_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    correct = total = 0.0
    for s, label in zip(scores, labels, strict=True):
        for t, other in zip(scores, labels, strict=True):
            if label > other:
                correct += 1.0 if s > t else 0.5 if s == t else 0.0
                total += 1
    return correct / total


def test_auc_is_the_area_under_the_curve_and_compares_grades():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200).astype(float)
    scores = np.round(labels * 0.3 + rng.random(200), 1)  # many are equal
    assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))
    assert auc(-scores, labels) == pytest.approx(1 - auc(scores, labels))
    grades = rng.integers(0, 4, 80).astype(float)
    scores = np.round(grades * 0.2 + rng.random(80), 1)
    assert auc(scores, grades) == pytest.approx(area_by_pairs(scores, grades))
    assert math.isnan(auc(np.array([0.1, 0.2]), np.ones(2)))


# --- significance -------------------------------------------------------------------------------------------


def random_values(queries: int = 60) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    base = rng.random(queries)
    better = base + rng.normal(0.1, 0.2, queries)
    same = base + rng.normal(0.0, 0.2, queries)
    values = {"teacher": base, "better": better, "same": same, "twin": base.copy()}
    return {name: {"nDCG@10": row, "R@1": (row > 0.5).astype(float)} for name, row in values.items()}


def test_the_t_test_equals_scipys_or_a_sign_flip_test():
    rows = [row["nDCG@10"] for row in random_values().values()]
    p_values = paired_t_test(np.stack([row - rows[0] for row in rows[1:3]], axis=1))
    assert p_values == pytest.approx([stats.ttest_rel(row, rows[0]).pvalue for row in rows[1:3]])
    signs = np.array([*product((-1, 1), repeat=5)])
    by_hand = np.mean(np.abs(signs.mean(1)) >= 1)  # all signs equal: 2 of 32
    p_values = paired_t_test(np.stack([np.zeros(5), np.full(5, 0.1), np.full(5, -0.1)], axis=1))
    assert p_values.tolist() == [1, by_hand, by_hand]
    assert math.isnan(paired_t_test(np.ones((1, 1)))[0])


def test_holms_correction_equals_values_by_hand():
    assert holm({"a": 0.04, "b": 0.01, "c": 0.03}) == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    adjusted = holm({"a": math.nan, "b": 0.03})
    assert (math.isnan(adjusted["a"]), adjusted["b"]) == (True, 0.03)


def test_bootstrap_equals_loops(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measures, "MAX_DRAWS", 700)  # several blocks of draws
    monkeypatch.setattr(measures, "RESAMPLES", 4000)
    values = np.random.default_rng(0).normal(0.2, 1.0, 40)
    low, high = bootstrap(values[:, None], families="a", seed=1)[:, 0]
    draw = random.Random(2)
    means = sorted(sum(draw.choices(values.tolist(), k=40)) / 40 for _ in range(4000))
    assert low == pytest.approx(means[100], abs=0.03)
    assert high == pytest.approx(means[3900], abs=0.03)
    assert low < values.mean() < high


def test_intervals_of_a_family_hold_jointly(monkeypatch: pytest.MonkeyPatch):
    """Count the trials in which one of nine methods, all equal to the baseline, seems to differ."""
    monkeypatch.setattr(measures, "RESAMPLES", 300)
    monkeypatch.setattr(measures, "SIGNIFICANCE_LEVEL", 0.1)
    rng, joint, separate = np.random.default_rng(5), 0, 0
    for trial in range(200):
        differences = rng.normal(size=(80, 9)) + rng.normal(size=(80, 1))
        low, high = bootstrap(differences, families=["R@1"] * 9, seed=trial)
        joint += bool(((low > 0) | (high < 0)).any())
        low, high = bootstrap(differences, families=range(9), seed=trial)
        separate += bool(((low > 0) | (high < 0)).any())
    assert joint <= 0.17 * 200  # the level, two standard errors, and an error because 80 queries are few
    assert separate > 0.3 * 200


def test_each_family_has_its_own_correction():
    columns = np.random.default_rng(1).normal(0.3, 1.0, (50, 4))
    columns[:, 3] = 0.1  # varies only by rounding
    joint = bootstrap(columns, families=["a", "b", "b", "b"], seed=2)
    separate = bootstrap(columns, families=range(4), seed=2)
    np.testing.assert_array_equal(joint[:, 0], separate[:, 0])
    assert (joint[1, 1:3] > separate[1, 1:3]).all()
    np.testing.assert_allclose(joint[:, 3], 0.1)
    without_last = bootstrap(columns[:, :3], families=["a", "b", "b"], seed=2)
    np.testing.assert_allclose(joint[:, :3], without_last)


def test_each_method_is_compared_with_the_baseline():
    methods = random_values()
    section = significance_section(methods, baseline="teacher")
    assert (section["baseline"], section["alpha"], section["resamples"]) == ("teacher", 0.05, 1000)
    differences = section["differences"]
    assert set(differences) == {"better", "same", "twin"}
    rows = {name: methods[name]["nDCG@10"] - methods["teacher"]["nDCG@10"] for name in differences}
    columns = np.stack([*rows.values()], axis=1)
    low, high = bootstrap(columns, families=["nDCG@10"] * 3, seed=0)
    p_values = paired_t_test(columns).tolist()
    corrected = holm(dict(zip(rows, p_values, strict=True)))
    for number, (name, row) in enumerate(rows.items()):
        assert differences[name]["nDCG@10"] == {
            "difference": pytest.approx(row.mean()),
            "low": pytest.approx(low[number]),
            "high": pytest.approx(high[number]),
            "p": pytest.approx(p_values[number]),
            "p_holm": pytest.approx(corrected[name]),
        }
    assert differences["better"]["nDCG@10"]["p_holm"] < 0.05 < differences["same"]["nDCG@10"]["p_holm"]
    assert differences["twin"]["R@1"] == {"difference": 0, "low": 0, "high": 0, "p": 1, "p_holm": 1}
    single = significance_section({"a": {"R@1": np.ones(1)}, "b": {"R@1": np.zeros(1)}}, baseline="a")
    assert single["differences"]["b"]["R@1"]["p_holm"] is None
    assert significance_section({"a": {"R@1": np.ones(3)}}, baseline="a")["differences"] == {}
