from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core import topk
from scalingnote.index import families, ivf
from scalingnote.index.config import Family, FastScan, Flat, RaBitQ, ScalarQuantized
from scalingnote.search import scan
from synthetic_corpus import queries, vectors

DIM, LISTS, COUNT = 16, 20, 2000
BOUNDS = [0, 900, 900, 1300, COUNT]  # the second segment is empty
DOCUMENTS = vectors(COUNT, DIM)


def _segments(family: Family) -> list[ivf.Lists]:
    quantizer = families.train(DOCUMENTS, family, nlist=1 if isinstance(family, Flat) else LISTS, seed=0)
    segments = []
    for start, stop in pairwise(BOUNDS):
        lists = ivf.empty(quantizer)
        ivf.add(lists, DOCUMENTS[start:stop])
        segments.append(lists)
    return segments


FINE = _segments(FastScan(refine="flat"))
FLAT = _segments(Flat())
COARSE = _segments(ScalarQuantized())
CODES = _segments(RaBitQ(refine="none"))


def _masks(mask: np.ndarray) -> list[ivf.RowMask]:
    return [ivf.RowMask(mask[start:stop]) for start, stop in pairwise(BOUNDS)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1.0, 0.5, 0.1, 0.01, 0.001, 0.0]), st.integers(1, 40), st.integers(0, 99), st.booleans()
)
def test_filters_equal_brute_force_at_every_selectivity(
    selectivity: float, k: int, seed: int, flat: bool
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random(COUNT) < selectivity
    probes = queries(DOCUMENTS, 3, seed=seed)
    allowed = np.flatnonzero(mask)
    segments = FLAT if flat else FINE
    # With all lists and candidates, each way of searching is exact.
    row_scores, rows = scan.search(
        segments, probes, k=k, nprobe=LISTS, refine_factor=COUNT, masks=_masks(mask)
    )
    scores, exact = topk.search(probes, DOCUMENTS[allowed], k=k)
    width = min(k, len(allowed))
    np.testing.assert_array_equal(rows[:, :width], allowed[exact])
    np.testing.assert_allclose(row_scores[:, :width], scores, atol=1e-6)
    assert (rows[:, width:] == -1).all()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.3, 0.03, 0.003]),
    st.integers(1, 60),
    st.integers(0, 99),
    st.sampled_from([FINE, COARSE, CODES]),
)
def test_a_search_returns_k_results_if_k_are_allowed(
    selectivity: float, k: int, seed: int, segments: list[ivf.Lists]
) -> None:
    mask = np.random.default_rng(seed).random(COUNT) < selectivity
    probes = queries(DOCUMENTS, 4, seed=seed)
    _, rows = scan.search(segments, probes, k=k, nprobe=1, refine_factor=1, masks=_masks(mask))
    assert ((rows >= 0).sum(axis=1) == min(k, mask.sum())).all()
    assert mask[rows[rows >= 0]].all()
    assert all(len(set(line[line >= 0])) == (line >= 0).sum() for line in rows)


def test_a_short_scan_is_repeated_over_more_lists() -> None:
    _, rows = scan.search(FINE, queries(DOCUMENTS, 5), k=1000, nprobe=1, refine_factor=1)
    assert (rows >= 0).all()


def test_a_filter_widens_a_scan_and_deleted_rows_do_not() -> None:
    quantizer = families.train(DOCUMENTS, FastScan(refine="flat"), nlist=LISTS, seed=0)
    is_alive = np.random.default_rng(0).random(COUNT) < 0.6
    all_lists, new_lists = ivf.empty(quantizer), ivf.empty(quantizer)
    ivf.add(all_lists, DOCUMENTS)
    ivf.add(new_lists, DOCUMENTS[is_alive])
    probes, sizes = queries(DOCUMENTS, 20), {"k": 20, "nprobe": 3, "refine_factor": COUNT}
    masks = [ivf.RowMask(is_alive)]
    _, expected = scan.search([new_lists], probes, **sizes)
    _, rows = scan.search([all_lists], probes, masks=masks, alive=masks, **sizes)
    np.testing.assert_array_equal(rows, np.flatnonzero(is_alive)[expected])
    filtered, _ = scan.search([all_lists], probes, masks=masks, **sizes)
    deleted, _ = scan.search([all_lists], probes, masks=masks, alive=masks, **sizes)
    assert (filtered >= deleted).all()
    assert (filtered > deleted).any()
