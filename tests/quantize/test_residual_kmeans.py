from itertools import pairwise

import numpy as np
import pytest

from scalingnote.errors import ConfigError
from scalingnote.quantize import residual_kmeans
from scalingnote.quantize.sample import choose
from synthetic_corpus import vectors

LEVELS, CODES = 4, 16


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return vectors(1500, 24)


@pytest.fixture(scope="module")
def codebooks(sample: np.ndarray) -> np.ndarray:
    return residual_kmeans.fit(sample, levels=LEVELS, codes=CODES, iterations=8, seed=0)


def test_the_error_of_the_decoded_vector_falls_with_each_level(
    sample: np.ndarray, codebooks: np.ndarray
) -> None:
    fresh = vectors(1500, 24, seed=0)[:500] + 0.01  # near the sample, not of it
    codes = residual_kmeans.encode(fresh, codebooks)
    errors = [
        np.square(fresh - residual_kmeans.decode(codes[:, : level + 1], codebooks)).sum()
        for level in range(LEVELS)
    ]
    assert all(later < 0.97 * earlier for earlier, later in pairwise(errors))
    np.testing.assert_allclose(residual_kmeans.residual_energy(fresh, codes, codebooks), errors, rtol=1e-4)


def test_encode_equals_a_brute_force_twin_in_float64(sample: np.ndarray, codebooks: np.ndarray) -> None:
    codes = residual_kmeans.encode(sample, codebooks)
    residual = sample.astype(np.float64)
    agree = 0
    for level in range(LEVELS):
        centroids = codebooks[level].astype(np.float64)
        distances = np.array([[np.square(x - c).sum() for c in centroids] for x in residual[:300]])
        chosen = codes[:300, level]
        # Another centroid may be taken only where float32 cannot tell the two apart.
        np.testing.assert_allclose(distances[np.arange(300), chosen], distances.min(axis=1), atol=1e-6)
        agree += int((chosen == distances.argmin(axis=1)).sum())
        residual -= centroids[codes[:, level]]
    assert agree >= 0.995 * 300 * LEVELS


def test_decode_is_the_sum_of_centroids(codebooks: np.ndarray) -> None:
    codes = np.array([[1, 2, 3, 4], [0, 15, 0, 15]])
    expected = [sum(codebooks[level, code] for level, code in enumerate(row)) for row in codes]
    np.testing.assert_allclose(residual_kmeans.decode(codes, codebooks), expected, atol=1e-6)


def test_fit_and_encode_are_deterministic_whatever_the_batch(
    sample: np.ndarray, codebooks: np.ndarray
) -> None:
    again = residual_kmeans.fit(sample, levels=LEVELS, codes=CODES, iterations=8, seed=0)
    assert again.tobytes() == codebooks.tobytes()
    other = residual_kmeans.fit(sample, levels=LEVELS, codes=CODES, iterations=8, seed=1)
    assert other.tobytes() != codebooks.tobytes()
    whole = residual_kmeans.encode(sample, codebooks)
    halves = [residual_kmeans.encode(half, codebooks) for half in (sample[:700], sample[700:])]
    np.testing.assert_array_equal(whole, np.concatenate(halves))


def test_no_vectors_have_no_codes(codebooks: np.ndarray) -> None:
    assert residual_kmeans.encode(np.empty((0, 24), np.float32), codebooks).shape == (0, LEVELS)


def test_a_sample_smaller_than_a_codebook_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize.codes=16 .* found 15: set quantize.codes=3"):
        residual_kmeans.fit(vectors(15, 8), levels=1, codes=16, iterations=2, seed=0)


@pytest.mark.parametrize("size", [0, 1, 17, 60, 1000])
def test_the_sample_is_uniform_sorted_and_of_the_size_asked_for(size: int) -> None:
    rows = [10, 0, 25, 25]
    chosen = choose(rows, size=size, seed=3)
    assert sum(map(len, chosen)) == min(size, 60)
    for count, part in zip(rows, chosen, strict=True):
        assert part.tolist() == sorted(set(part.tolist()))
        assert all(0 <= row < count for row in part)


def test_every_document_is_as_likely_to_be_sampled() -> None:
    hits = np.zeros(30)
    for seed in range(600):
        parts = choose([10, 20], size=6, seed=seed)
        hits[parts[0]] += 1
        hits[10 + parts[1]] += 1
    # 600 draws of 6 of 30: mean 120, standard deviation 9.8.
    assert hits.min() > 120 - 4.5 * 9.8
    assert hits.max() < 120 + 4.5 * 9.8
