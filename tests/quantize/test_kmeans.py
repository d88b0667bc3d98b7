from itertools import pairwise

import faiss
import numpy as np
import pytest

from scalingnote.core.errors import ConfigError
from scalingnote.quantize import kmeans
from synthetic_corpus import vectors

LEVELS, CODES = 4, 16


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return vectors(1500, 24)


@pytest.fixture(scope="module")
def codebooks(sample: np.ndarray) -> np.ndarray:
    return kmeans.fit(sample, levels=LEVELS, codes=CODES, seed=0)


def test_the_error_of_the_decoded_vector_falls_with_each_level(
    sample: np.ndarray, codebooks: np.ndarray
) -> None:
    fresh = vectors(1500, 24, seed=0)[:500] + 0.01  # near the sample, not of it
    codes = kmeans.encode_nearest(fresh, codebooks)
    errors = [
        np.square(fresh - kmeans.decode(codes[:, : level + 1], codebooks)).sum() for level in range(LEVELS)
    ]
    assert all(later < 0.97 * earlier for earlier, later in pairwise(errors))
    found = kmeans.residual_energy(fresh, codes, codebooks)
    assert found.shape == codes.shape
    np.testing.assert_allclose(found.sum(axis=0), errors, rtol=1e-4)


def test_encode_equals_a_brute_force_twin_in_float64(sample: np.ndarray, codebooks: np.ndarray) -> None:
    codes = kmeans.encode_nearest(sample, codebooks)
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
    np.testing.assert_allclose(kmeans.decode(codes, codebooks), expected, atol=1e-6)


def test_fit_and_encode_are_deterministic_whatever_the_batch(
    sample: np.ndarray, codebooks: np.ndarray
) -> None:
    again = kmeans.fit(sample, levels=LEVELS, codes=CODES, seed=0)
    assert again.tobytes() == codebooks.tobytes()
    other = kmeans.fit(sample, levels=LEVELS, codes=CODES, seed=1)
    assert other.tobytes() != codebooks.tobytes()
    whole = kmeans.encode_nearest(sample, codebooks)
    halves = [kmeans.encode_nearest(half, codebooks) for half in (sample[:700], sample[700:])]
    np.testing.assert_array_equal(whole, np.concatenate(halves))


def test_no_vectors_have_no_codes(codebooks: np.ndarray) -> None:
    assert kmeans.encode_nearest(np.empty((0, 24), np.float32), codebooks).shape == (0, LEVELS)


def test_a_sample_smaller_than_a_codebook_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize.codes=16 .* found 15: set quantize.codes=3"):
        kmeans.fit(vectors(15, 8), levels=1, codes=16, seed=0)


@pytest.mark.parametrize("rows", [700, kmeans.VECTORS_PER_BLOCK, 2 * kmeans.VECTORS_PER_BLOCK + 1])
def test_blocks_do_not_show(codebooks: np.ndarray, rows: int) -> None:
    many = vectors(rows, 24, seed=5)
    codes = kmeans.encode_nearest(many, codebooks)
    one_by_one = [kmeans.encode_nearest(many[i : i + 1], codebooks)[0] for i in range(0, rows, 97)]
    assert (codes[::97] == one_by_one).mean() > 0.995
    left = many - kmeans.decode(codes, codebooks)
    energy = kmeans.residual_energy(many, codes, codebooks)
    np.testing.assert_allclose(energy[:, -1], np.square(left).sum(axis=1), rtol=1e-4)


@pytest.mark.parametrize("gpus", [0, 3])
def test_a_level_is_clustered_on_every_gpu_there_is(
    sample: np.ndarray, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    asked = []

    class Kmeans(faiss.Kmeans):
        def __init__(self, *sizes: int, gpu: int, **knobs: int) -> None:
            asked.append(gpu)
            super().__init__(*sizes, **knobs)  # here, on the CPU

    monkeypatch.setattr(faiss, "Kmeans", Kmeans)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: gpus)
    kmeans.cluster(sample, codes=4, seed=0)
    assert asked == [gpus]


def test_blas_is_pinned_until_the_last_of_overlapping_blocks_ends() -> None:
    before = faiss.cvar.distance_compute_blas_threshold
    assert before != 1
    one, two = kmeans.blas_only(), kmeans.blas_only()  # as of two threads
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert faiss.cvar.distance_compute_blas_threshold == 1
    two.__exit__(None, None, None)
    assert faiss.cvar.distance_compute_blas_threshold == before
