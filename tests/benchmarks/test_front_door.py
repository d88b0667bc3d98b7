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
