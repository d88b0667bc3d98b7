"""Measures of rankings and of judged pairs, against values by hand, loops and other libraries."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from scalingnote.evaluate.measures import ann_recall, auc, measure, per_query

QRELS = {
    "first": {"a": 1},
    "third": {"c": 1},
    "two": {"b": 2, "d": 1, "e": 0},
    "missing": {"z": 1},
    "unanswered": {"a": 1},
}
RANKINGS = {
    "first": ["a", "b", "c"],
    "third": ["a", "b", "c"],
    "two": ["a", "d", "e", "b"],
    "missing": ["a", "b", "c"],
}


def test_measures_have_the_values_computed_by_hand():
    gain = 1 / math.log2(3) + 2 / math.log2(5)
    best = 2 / math.log2(2) + 1 / math.log2(3)
    expected = {
        "R@1": [1, 0, 0, 0, 0],
        "R@2": [1, 0, 1, 0, 0],  # d, of grade 1, is enough for "two"
        "R@3": [1, 1, 1, 0, 0],
        "Recall@1": [1, 0, 0, 0, 0],
        "Recall@2": [1, 0, 1 / 2, 0, 0],  # one of two relevant documents
        "Recall@3": [1, 1, 1 / 2, 0, 0],
        "MRR@10": [1, 1 / 3, 1 / 2, 0, 0],
        "MAP@100": [1, 1 / 3, (1 / 2 + 2 / 4) / 2, 0, 0],
        "nDCG@10": [1, 1 / math.log2(4), gain / best, 0, 0],
    }
    found = per_query(RANKINGS, QRELS, recall_at=(1, 2, 3))
    assert {name: values.tolist() for name, values in found.items()} == {
        name: pytest.approx(values) for name, values in expected.items()
    }
    means = {name: np.mean(values) for name, values in expected.items()}
    assert measure(RANKINGS, QRELS, recall_at=(1, 2, 3)) == pytest.approx(means)


def test_recall_is_added_only_if_queries_have_several_documents():
    found = measure({"q": ["a"]}, {"q": {"a": 2, "b": 0}}, recall_at=(1,))
    assert set(found) == {"R@1", "MRR@10", "MAP@100", "nDCG@10"}


def test_success_and_reciprocal_rank_are_those_of_loops():
    rng = np.random.default_rng(0)
    rankings = {f"q{i}": [f"d{j}" for j in rng.permutation(30)[:20]] for i in range(40)}
    qrels = {q: {f"d{j}": int(rng.integers(0, 3)) for j in rng.permutation(30)[:4]} for q in rankings}
    found = measure(rankings, qrels, recall_at=(5,))
    hits, reciprocal = [], []
    for query, ranking in rankings.items():
        ranks = [rank for rank, doc in enumerate(ranking, 1) if qrels[query].get(doc, 0) > 0]
        hits.append(any(rank <= 5 for rank in ranks))
        reciprocal.append(1 / ranks[0] if ranks and ranks[0] <= 10 else 0)
    assert found["R@5"] == pytest.approx(np.mean(hits))
    assert found["MRR@10"] == pytest.approx(np.mean(reciprocal))


def test_index_recall_is_the_mean_overlap():
    exact = [list("abcd"), list("efgh")]
    assert ann_recall(exact, exact, k=4) == 1
    assert ann_recall([list("badc"), list("exyz")], exact, k=4) == pytest.approx((1 + 0.25) / 2)
    assert ann_recall([list("badc"), list("exyz")], exact, k=1) == pytest.approx(0.5)
    assert ann_recall([["a"], []], [["a"], ["b"]], k=10) == pytest.approx(0.5)  # a pool of one
    with pytest.raises(ValueError, match="1 answers for 2 queries"):
        ann_recall([["a"]], exact, k=1)


def area_by_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    right = total = 0.0
    for s, mine in zip(scores, labels, strict=True):
        for t, other in zip(scores, labels, strict=True):
            if mine > other:
                right += 1.0 if s > t else 0.5 if s == t else 0.0
                total += 1
    return right / total


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
