from itertools import product

import numpy as np
import pytest

from scalingnote.quantize import kmeans
from synthetic_corpus import vectors


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return vectors(900, 16)


def error(sample: np.ndarray, codes: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    return np.square(sample.astype(np.float64) - kmeans.decode(codes, codebooks)).sum(axis=1)


@pytest.mark.parametrize("codes", [16, 11])  # faiss counts in bits, we do not
def test_a_beam_leaves_less_over_and_both_searches_find_the_same(sample: np.ndarray, codes: int) -> None:
    codebooks = kmeans.fit(sample, levels=4, codes=codes, seed=0)
    fresh = vectors(300, 16, seed=4)
    energies = [error(fresh, kmeans.encode_nearest(fresh, codebooks), codebooks).mean()]
    for width in (2, 8):
        found = kmeans.encode(fresh, codebooks, beam=width)
        assert found.max() < codes
        energies.append(error(fresh, found, codebooks).mean())
        np.testing.assert_allclose(
            error(fresh, found, codebooks),
            error(fresh, kmeans.encode_by_residuals(fresh, codebooks, beam=width), codebooks),
            atol=1e-5,
        )
    assert energies[2] < energies[1] < 0.99 * energies[0]


def test_a_beam_of_all_tuples_finds_the_best_one(sample: np.ndarray) -> None:
    codebooks = kmeans.fit(sample, levels=3, codes=5, seed=0)
    everything = np.array(list(product(range(5), repeat=3)))
    decoded = kmeans.decode(everything, codebooks).astype(np.float64)
    least = np.square(sample[:100, None] - decoded).sum(axis=2).min(axis=1)
    for search in (kmeans.encode_by_table, kmeans.encode_by_residuals):
        found = search(sample[:100], codebooks, beam=125)
        np.testing.assert_allclose(error(sample[:100], found, codebooks), least, atol=1e-5)


def test_a_beam_of_one_is_greedy(sample: np.ndarray) -> None:
    codebooks = kmeans.fit(sample, levels=3, codes=16, seed=0)
    greedy = kmeans.encode_nearest(sample, codebooks)
    np.testing.assert_array_equal(kmeans.encode_by_residuals(sample, codebooks, beam=1), greedy)
    assert (kmeans.encode_by_table(sample, codebooks, beam=1) == greedy).mean() > 0.999  # it rounds otherwise


def test_large_codebooks_are_searched_without_a_table(
    sample: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    codebooks = kmeans.fit(sample, levels=2, codes=16, seed=0)
    by_table = kmeans.encode(sample, codebooks, beam=4)
    monkeypatch.setattr(kmeans, "_TABLE_BYTES", 0)
    monkeypatch.delattr(kmeans, "encode_by_table")
    by_residuals = kmeans.encode(sample, codebooks, beam=4)
    assert (by_table == by_residuals).mean() > 0.99
    assert kmeans.encode(sample[:0], codebooks, beam=4).shape == (0, 2)
