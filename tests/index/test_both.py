"""What one side has found is scored by the other: candidates of a shard, against brute force."""

import numpy as np
import pyarrow as pa

from scalingnote.core import topk
from scalingnote.index import hybrid, postings
from scalingnote.index.sparse import hybrid_candidates
from scalingnote.models.sparse_query import SparseRows

DOCUMENTS, VOCABULARY, DIM = 60, 9, 6


def test_every_candidate_has_both_scores():
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(3, DIM)) @ rng.normal(size=(DIM, DOCUMENTS))
    weights = rng.integers(0, 3, (DOCUMENTS, VOCABULARY)).astype(np.float16)
    counts = np.array(
        [[1, 0, 2, 0, 0, 0, 0, 0, 0], [0] * VOCABULARY, [0, 1, 0, 0, 0, 0, 0, 0, 1]], np.float32
    )
    allowed = rng.random(DOCUMENTS) < 0.5
    terms = [np.flatnonzero(row) for row in weights]
    columns = (
        pa.array([row.astype(np.int32) for row in terms], pa.list_(pa.int32())),
        pa.array([row[t] for row, t in zip(weights, terms, strict=True)], pa.list_(pa.float16())),
    )
    segments = [
        postings.build(*(side[a:b] for side in columns)) for a, b in ((0, 45), (45, 45), (45, DOCUMENTS))
    ]
    asked = [np.flatnonzero(row).astype(np.int32) for row in counts]
    queries = SparseRows(
        np.cumsum([0, *map(len, asked)], dtype=np.int64),
        np.concatenate(asked),
        np.concatenate([row[t] for row, t in zip(counts, asked, strict=True)]),
    )

    def score(rows: np.ndarray) -> np.ndarray:
        return np.where(rows < 0, -np.inf, np.take_along_axis(dense, rows, axis=1))

    found = topk.select(np.where(allowed, dense, -np.inf), k=4)
    both = hybrid_candidates(found, score, segments, queries, k=5, allowed=allowed)
    sparse = counts @ weights.astype(np.float32).T
    for query in range(3):
        by_terms = np.argsort(-np.where(allowed, sparse[query], 0), kind="stable")[:5]
        expected = sorted({*found[query].tolist(), *(int(i) for i in by_terms if sparse[query, i] > 0)})
        kept = both.ids[query] >= 0
        assert both.ids[query][kept].tolist() == expected
        np.testing.assert_allclose(both.dense[query][kept], dense[query, expected])
        np.testing.assert_allclose(both.sparse[query][kept], sparse[query, expected])
    assert allowed[both.ids[both.ids >= 0]].all()
    # An empty query is answered by its embedding alone.
    assert (
        hybrid.by_score(both, dense_weight=0.1, background=-9.0, depth=4)[1][1].tolist() == found[1].tolist()
    )
