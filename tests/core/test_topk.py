from types import SimpleNamespace

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core import topk


def _slow_order(scores: np.ndarray, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda j: (-row[j], j))[:k] for row in scores]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.integers(0, 45), st.integers(0, 2**32 - 1))
def test_select_equals_a_full_sort_with_many_ties(queries: int, columns: int, k: int, seed: int) -> None:
    scores = np.random.default_rng(seed).integers(0, 4, (queries, columns)).astype(np.float32)
    assert topk.select(scores, k=k).tolist() == _slow_order(scores, k)


@pytest.mark.parametrize("k", [1, 7, 200])
def test_search_equals_a_full_sort_across_blocks(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "DOCUMENT_BLOCK", 16)
    monkeypatch.setattr(topk, "QUERY_BLOCK", 3)
    rng = np.random.default_rng(0)
    # Small integers: products are exact in float32, and many are equal.
    queries = rng.integers(-2, 3, (10, 5)).astype(np.float32)
    documents = rng.integers(-2, 3, (100, 5)).astype(np.float32)
    scores, rows = topk.search(queries, documents, k=k)
    exact = queries.astype(np.float64) @ documents.T.astype(np.float64)
    assert rows.tolist() == _slow_order(exact, k)
    np.testing.assert_array_equal(scores, np.take_along_axis(exact, rows, axis=1))


def test_search_of_no_documents_or_no_queries_is_empty() -> None:
    rows, empty = np.ones((2, 3), np.float32), np.ones((0, 3), np.float32)
    assert topk.search(rows, empty, k=5)[0].shape == (2, 0)
    assert topk.search(empty, rows, k=5)[1].shape == (0, 2)


def test_merge_equals_select_in_any_order() -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(0, 6, (4, 60)).astype(np.float32)
    ids = np.broadcast_to(np.arange(60), scores.shape)
    best_ids = topk.select(scores, k=10)
    for shift in (0, 13, 37):
        actual = topk.merge(np.roll(scores, shift, axis=1), np.roll(ids, shift, axis=1), k=10)
        np.testing.assert_array_equal(actual[1], best_ids)
        np.testing.assert_array_equal(actual[0], np.take_along_axis(scores, best_ids, axis=1))


def test_merge_puts_missing_candidates_last() -> None:
    scores = np.array([[-np.inf, -2.0, -np.inf, 1.0]], np.float32)
    actual = topk.merge(scores, np.array([[-1, 8, -1, 9]]), k=3)
    assert actual[1].tolist() == [[9, 8, -1]]


def test_loops_compile_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*, nogil: bool, cache: bool = False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.jit(nopython=True, nogil=nogil)

    monkeypatch.setattr(topk, "numba", SimpleNamespace(njit=nowhere))
    assert topk.jit(lambda number: number + 1)(1) == 2
