"""What the front-door benchmark computes: the field's measures, and hybrids that lie between their sides."""

import ir_measures
import numpy as np

from benchmarks import front_door


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
