import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from scalingnote.evaluate.measures import auc


def by_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    right = total = 0.0
    for s, mine in zip(scores, labels, strict=True):
        for t, other in zip(scores, labels, strict=True):
            if mine > other:
                right += 1.0 if s > t else 0.5 if s == t else 0.0
                total += 1
    return right / total


def test_two_labels_give_the_area_under_the_curve():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    scores = np.round(labels * 0.3 + rng.random(200), 1)  # many are equal
    assert auc(scores, labels.astype(float)) == pytest.approx(roc_auc_score(labels, scores))
    assert auc(-scores, labels.astype(float)) == pytest.approx(1 - auc(scores, labels.astype(float)))


def test_grades_are_compared_pair_by_pair():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 80).astype(float)
    scores = np.round(labels * 0.2 + rng.random(80), 1)
    assert auc(scores, labels) == pytest.approx(by_pairs(scores, labels))


def test_equal_labels_tell_nothing():
    assert math.isnan(auc(np.array([0.1, 0.2]), np.ones(2)))
