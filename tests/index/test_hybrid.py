"""Fusion of dense and sparse retrieval, compared with slow loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalingnote.core import topk
from scalingnote.evaluate import measures
from scalingnote.index import hybrid
from scalingnote.index.hybrid import HybridCandidates


def draw_pool(
    seed: int, *, queries: int = 20, documents: int = 400
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw dense and sparse scores of a pool, and the relevant document of each query.

    Both scores are noisy similarities of the same topics; few documents share a term with a query.
    """
    rng = np.random.default_rng(seed)
    topics, relevant = rng.normal(size=(documents, 16)), rng.integers(documents, size=queries)
    query_topics = topics[relevant]
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (query_topics, topics)]
    dense = unit[0] @ unit[1].T + 0.35 * rng.normal(size=(queries, documents)) + 0.3
    terms = unit[0] @ unit[1].T + 0.35 * rng.normal(size=(queries, documents))
    return dense, np.maximum(terms - 0.1, 0) * rng.uniform(5, 30, (queries, 1)), relevant


def fetch(dense: np.ndarray, sparse: np.ndarray, n: int, *, columns: slice = slice(None)) -> HybridCandidates:
    """Select candidates as search does: the n best of each side among some documents, with both scores."""
    first = columns.start or 0
    sides = dense[:, columns], sparse[:, columns]
    rankings = [topk.select(scores, k=n) for scores in sides]
    rankings[1] = np.where(np.take_along_axis(sides[1], rankings[1], axis=1) > 0, rankings[1], -1)
    rows = hybrid.union(*rankings)
    scores_of = [np.take_along_axis(scores, rows, axis=1) for scores in sides]
    return HybridCandidates(
        np.where(rows < 0, -1, rows + first),
        np.where(rows < 0, -np.inf, scores_of[0]),
        np.where(rows < 0, 0, scores_of[1]),
    )


@given(st.integers(0, 2**32 - 1))
def test_union_has_each_document_once(seed: int):
    rng = np.random.default_rng(seed)
    rankings = [rng.integers(-1, 9, size=(4, width)) for width in (3, 0, 5)]
    union = hybrid.union(*rankings)
    for query, row in enumerate(union.tolist()):
        expected = sorted({int(i) for ranking in rankings for i in ranking[query]} - {-1})
        assert row == expected + [-1] * (union.shape[1] - len(expected))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]), st.integers(1, 12))
def test_candidates_are_ranked_by_interpolated_scores(seed: int, weight: float, depth: int):
    dense, sparse, _ = draw_pool(seed, queries=3, documents=30)
    both = fetch(dense, sparse, 6)
    scores, ids = hybrid.by_score(both, dense_weight=weight, background=0.3, depth=depth)
    for query in range(3):
        expected = {}
        for i in both.ids[query][both.ids[query] >= 0]:
            near = max(dense[query, i] - 0.3, 0) / (dense[query].max() - 0.3)
            shared = sparse[query, i] / sparse[query].max() if sparse[query].max() else 0
            if weight or shared:
                expected[int(i)] = weight * near + (1 - weight) * shared
        order = sorted(expected.items(), key=lambda pair: (-pair[1], pair[0]))[:depth]
        is_result = ids[query] >= 0
        np.testing.assert_allclose(scores[query][is_result], [score for _, score in order])
        assert np.isneginf(scores[query][~is_result]).all()
        assert is_result.sum() == len(order)
        assert ids[query][is_result].tolist() == [i for i, _ in order]


def test_scores_do_not_depend_on_the_number_of_candidates():
    dense, sparse, _ = draw_pool(0)
    few, many = (
        hybrid.by_score(fetch(dense, sparse, n), dense_weight=0.5, background=0.3, depth=5) for n in (20, 200)
    )
    for query in range(len(dense)):
        scores = dict(zip(many[1][query].tolist(), many[0][query].tolist(), strict=True))
        for i, score in zip(few[1][query].tolist(), few[0][query].tolist(), strict=True):
            assert scores.get(i, score) == score


def test_queries_without_scores_of_one_side_use_the_other():
    ids = np.array([[3, 5, -1]])
    worse = HybridCandidates(ids, np.array([[0.1, 0.2, -np.inf]]), np.array([[2.0, 1.0, 0.0]]))
    assert hybrid.by_score(worse, dense_weight=0.9, background=0.3, depth=3)[1].tolist() == [[3, 5, -1]]
    no_terms = HybridCandidates(ids, np.array([[0.4, 0.5, -np.inf]]), np.zeros((1, 3)))
    assert hybrid.by_score(no_terms, dense_weight=0.1, background=0.3, depth=3)[1].tolist() == [[5, 3, -1]]
    no_candidates = HybridCandidates(np.empty((2, 0), int), np.empty((2, 0)), np.empty((2, 0)))
    assert hybrid.by_score(no_candidates, dense_weight=0.5, background=0.3, depth=3)[1].shape == (2, 0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_merged_shards_equal_one_index(seed: int, cut: int):
    dense, sparse, _ = draw_pool(seed, queries=4, documents=41)
    sparse[1] = 0
    expected = fetch(dense, sparse, 7)
    merged = hybrid.merge(
        [fetch(dense, sparse, 7, columns=part) for part in (slice(0, cut), slice(cut, 41))], candidates=7
    )
    ranked, best = (
        hybrid.by_score(both, dense_weight=0.4, background=0.3, depth=9) for both in (merged, expected)
    )
    np.testing.assert_equal(ranked, best)


def test_the_tuned_weight_is_the_best_of_the_grid():
    dense, sparse, relevant_rows = draw_pool(3, queries=60)
    both = fetch(dense, sparse, 50)
    rng = np.random.default_rng(0)
    relevant = [{int(i): 2, int(rng.integers(400)): 1} for i in relevant_rows]
    chosen, curve = hybrid.tune_weight(both, relevant, background=0.3, depth=3)
    assert [*curve] == list(hybrid.WEIGHTS)
    qrels = {f"q{n}": {f"d{i}": grade for i, grade in judged.items()} for n, judged in enumerate(relevant)}
    for weight, value in curve.items():
        ids = hybrid.by_score(both, dense_weight=weight, background=0.3, depth=3)[1]
        run = {f"q{n}": [f"d{i}" for i in row if i >= 0] for n, row in enumerate(ids.tolist())}
        values = measures.measure(run, qrels, recall_at=[3])
        assert value == pytest.approx(values["nDCG@10"])  # of three results
    best = [weight for weight, value in curve.items() if value == max(curve.values())]
    assert chosen == best[len(best) // 2]
    assert curve[chosen] > min(curve.values())
    assert hybrid.tune_weight(both, [{}] * 60, background=0.3)[1][0.5] == 0
