"""Answers of several searchers, merged: however the shards are dealt out, what one that holds all gives."""

import numpy as np
import pytest

from scalingnote.hybrid import Joining
from scalingnote.index.shard import Layout
from scalingnote.search.searcher import Candidates, rank

DOCUMENTS, CANDIDATES, K = 400, 10, 10
LAYOUT = Layout(
    dim=16,
    documents=DOCUMENTS,
    shards=4,
    family="FastScan",
    refine="flat",
    nlist=8,
    nprobe=8,
    refine_factor=4,
    recall=None,
    filters=(),
    sparse=True,
    background=0.3,
    dense_weight=0.4,
)


def found(dense: np.ndarray, sparse: np.ndarray, held: np.ndarray) -> Candidates:
    """The candidates of either kind of a searcher that holds some documents."""
    best = [held[np.argsort(-scores[held], kind="stable")[:CANDIDATES]] for scores in (dense, sparse)]
    ids = np.union1d(best[0], best[1][sparse[best[1]] > 0])
    documents = [{"doc_id": f"d{number}"} for number in ids]
    return Candidates(ids, ids % 4, dense[ids], sparse[ids], documents, 1)


@pytest.mark.parametrize("kind", ["interpolation", "reciprocal_rank"])
def test_four_searchers_answer_as_one_does(kind: str) -> None:
    joining = Joining(kind=kind, candidates=CANDIDATES)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        dense = rng.random(DOCUMENTS, np.float32)
        sparse = np.maximum(rng.standard_normal(DOCUMENTS), 0).astype(np.float32)
        everything = np.arange(DOCUMENTS)
        one = rank([found(dense, sparse, everything)], k=K, joining=joining, layout=LAYOUT).hits()
        searchers = [found(dense, sparse, everything[everything % 4 == number]) for number in (2, 0, 3, 1)]
        assert rank(searchers, k=K, joining=joining, layout=LAYOUT).hits() == one
        assert len(one) == K
