"""Fusing dense and sparse retrieval, against slow twins."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scalingnote import hybrid


def test_scores_are_put_between_each_querys_lowest_and_highest():
    scores = np.array([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0]])
    found = hybrid.normalised(scores, scores.min(1), scores.max(1))
    assert found.tolist() == [[0, 1, 0.5], [0, 0, 0]]


def test_weights_of_one_and_nothing_are_one_side_alone():
    dense, sparse = np.array([[0.2, 1.0]]), np.array([[1.0, 0.0]])
    assert hybrid.interpolated(dense, sparse, dense_weight=1.0).tolist() == dense.tolist()
    assert hybrid.interpolated(dense, sparse, dense_weight=0.0).tolist() == sparse.tolist()
    np.testing.assert_allclose(hybrid.interpolated(dense, sparse, dense_weight=0.25), [[0.8, 0.25]])


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(0, 60))
def test_reciprocal_ranks_are_summed_over_rankings(seed: int, depth: int, k: int):
    rng = np.random.default_rng(seed)
    rankings = []
    for width in (4, 6):
        rows = np.stack([rng.permutation(9)[:width] for _ in range(3)])
        rows[0, width - 1] = -1
        rankings.append(rows)
    scores, documents = hybrid.reciprocal_ranks(*rankings, k=k, depth=depth)
    for query in range(3):
        sums: dict[int, float] = {}
        for ranking in rankings:
            for rank, document in enumerate(ranking[query], 1):
                if document >= 0:
                    sums[document] = sums.get(document, 0.0) + 1 / (k + rank)
        expected = sorted(sums, key=lambda d: (-sums[d], d))[:depth]
        kept = documents[query] >= 0
        assert kept.sum() == len(expected)
        np.testing.assert_allclose(scores[query][kept], [sums[d] for d in expected])
        np.testing.assert_allclose([sums[d] for d in documents[query][kept]], [sums[d] for d in expected])
        assert np.isneginf(scores[query][~kept]).all()
