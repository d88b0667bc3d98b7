import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core import topk
from scalingnote.index import ivf
from synthetic_corpus import queries, vectors

DIM = 24
DOCUMENTS = vectors(300, DIM)
DOCUMENTS[50:60] = DOCUMENTS[0]  # equal documents have equal scores
KEPT = [
    faiss.IndexFlatIP(DIM),
    faiss.IndexScalarQuantizer(DIM, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT),
]
for kept in KEPT:
    kept.train(DOCUMENTS)
    kept.add(DOCUMENTS)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KEPT), st.integers(1, 40), st.integers(0, 60), st.integers(0, 99))
def test_the_best_are_those_of_a_full_sort(kept: faiss.Index, k: int, candidates: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    asked = queries(DOCUMENTS, 3, seed=seed)
    rows = np.stack([rng.permutation(300)[:candidates] for _ in asked])
    rows[rng.random(rows.shape) < 0.2] = -1
    scores, found = ivf.best(kept, asked, rows, k=k)
    decoded = ivf.vectors(kept, np.arange(300))
    exact = np.where(rows < 0, -np.inf, np.einsum("qd,qcd->qc", asked, decoded[rows])).astype(np.float32)
    np.testing.assert_allclose(ivf.scores(kept, asked, rows), exact, atol=1e-5)
    best, expected = topk.merge(ivf.scores(kept, asked, rows), rows, k=k)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(scores, best)


@pytest.mark.parametrize("kept", KEPT, ids=["floats", "bytes"])
def test_a_documents_score_does_not_depend_on_its_company(kept: faiss.Index) -> None:
    asked = queries(DOCUMENTS, 2)
    rows = np.array([np.arange(300), np.arange(300)[::-1]])
    together = ivf.scores(kept, asked, rows)
    for q, c in [(0, 7), (1, 13), (1, 299)]:
        alone = ivf.scores(kept, asked[q : q + 1], rows[q : q + 1, c : c + 1])
        assert alone[0, 0] == together[q, c]
    assert len(set(together[0, 50:60].tolist())) == 1
