import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote import topk
from scalingnote.index import ivf
from scalingnote.index.config import Family, FastScan, Flat, ScalarQuantized
from scalingnote.search import scan
from synthetic_corpus import queries, vectors

DIM, LISTS, COUNT = 16, 20, 2000
BOUNDS = [0, 900, 900, 1300, COUNT]  # the second segment is empty
DOCUMENTS = vectors(COUNT, DIM)


def _segments(family: Family) -> list[ivf.Lists]:
    quantizer = ivf.train(
        DOCUMENTS, family, nlist=1 if isinstance(family, Flat) else LISTS, iterations=4, seed=0
    )
    segments = []
    for start, stop in pairwise(BOUNDS):
        lists = ivf.empty(quantizer)
        ivf.add(lists, DOCUMENTS[start:stop])
        segments.append(lists)
    return segments


FINE = _segments(FastScan(refine="flat"))
FLAT = _segments(Flat())
COARSE = _segments(ScalarQuantized())


def _rows(found: scan.Found) -> np.ndarray:
    """Numbered over all segments."""
    return np.where(found.rows < 0, -1, found.rows + np.array(BOUNDS)[found.segments])


def _masks(mask: np.ndarray) -> list[np.ndarray]:
    return [mask[start:stop] for start, stop in pairwise(BOUNDS)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1.0, 0.5, 0.1, 0.01, 0.001, 0.0]), st.integers(1, 40), st.integers(0, 99), st.booleans()
)
def test_filters_equal_brute_force_at_every_selectivity(
    selectivity: float, k: int, seed: int, flat: bool
) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random(COUNT) < selectivity
    asked = queries(DOCUMENTS, 3, seed=seed)
    left = np.flatnonzero(mask)
    segments = FLAT if flat else FINE
    # All lists and every candidate: what is found is then exact, whichever way the search takes.
    plan = scan.Plan(nprobe=LISTS, refine_factor=COUNT)
    found = scan.search(segments, asked, k=k, plan=plan, masks=_masks(mask))
    scores, exact = topk.search(asked, DOCUMENTS[left], k=k)
    width = min(k, len(left))
    np.testing.assert_array_equal(_rows(found)[:, :width], left[exact])
    np.testing.assert_allclose(found.scores[:, :width], scores, atol=1e-6)
    assert (found.rows[:, width:] == -1).all()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([0.3, 0.03, 0.003]),
    st.integers(1, 60),
    st.integers(0, 99),
    st.sampled_from([FINE, COARSE]),
)
def test_k_results_come_back_whenever_k_exist(
    selectivity: float, k: int, seed: int, segments: list[ivf.Lists]
) -> None:
    mask = np.random.default_rng(seed).random(COUNT) < selectivity
    plan = scan.Plan(nprobe=1, refine_factor=1)
    found = scan.search(segments, queries(DOCUMENTS, 4, seed=seed), k=k, plan=plan, masks=_masks(mask))
    rows = _rows(found)
    assert ((rows >= 0).sum(axis=1) == min(k, mask.sum())).all()
    assert mask[rows[rows >= 0]].all()
    assert all(len(set(line[line >= 0])) == (line >= 0).sum() for line in rows)


def test_without_a_filter_too_a_short_scan_is_repeated_over_more_lists() -> None:
    segments = FINE
    plan = scan.Plan(nprobe=1, refine_factor=1)
    found = scan.search(segments, queries(DOCUMENTS, 5), k=1000, plan=plan)
    assert (found.rows >= 0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_slow_segment_is_left_out_and_named(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = FINE
    asked = queries(DOCUMENTS, 2)
    go_on = threading.Event()
    search = ivf.search

    def slow(lists: ivf.Lists, *args: object, **named: object) -> object:
        if lists is segments[2]:
            go_on.wait(5)
        elif threads == 1:
            time.sleep(0.2)  # one after the other: the deadline passes with the first
        return search(lists, *args, **named)

    monkeypatch.setattr(ivf, "search", slow)
    with ThreadPoolExecutor(threads) as pool:
        plan = scan.Plan(LISTS, COUNT, deadline_s=0.1, pool=pool if threads > 1 else None)
        found = scan.search(segments, asked, k=5, plan=plan)
        go_on.set()
    assert found.late == ((2,) if threads > 1 else (2, 3))
    in_time = DOCUMENTS.copy()
    for number in found.late:
        in_time[BOUNDS[number] : BOUNDS[number + 1]] = 0
    np.testing.assert_array_equal(_rows(found), topk.search(asked, in_time, k=5)[1])


def test_threads_find_what_one_thread_finds() -> None:
    segments = FINE
    asked = queries(DOCUMENTS, 20)
    with ThreadPoolExecutor(3) as pool:
        plans = [scan.Plan(4, 4, pool=each) for each in (None, pool)]
        one, many = (scan.search(segments, asked, k=9, plan=p) for p in plans)
    np.testing.assert_array_equal(one.rows, many.rows)
    np.testing.assert_array_equal(one.scores, many.scores)
