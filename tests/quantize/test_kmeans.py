from itertools import pairwise, product

import faiss
import numpy as np
import pytest

from scalingnote.core.errors import ConfigError
from scalingnote.quantize import kmeans
from scalingnote.quantize.kmeans import draw, shares
from synthetic_corpus import vectors

LEVELS, CODES = 4, 16


@pytest.fixture(scope="module")
def sample() -> np.ndarray:
    return vectors(1500, 24)


@pytest.fixture(scope="module")
def codebooks(sample: np.ndarray) -> np.ndarray:
    return kmeans.fit(sample, levels=LEVELS, codes=CODES, seed=0)


def error(vectors: np.ndarray, codes: np.ndarray, codebooks: np.ndarray) -> np.ndarray:
    return np.square(vectors.astype(np.float64) - kmeans.decode(codes, codebooks)).sum(axis=1)


def test_the_error_of_the_decoded_vector_falls_with_each_level(
    sample: np.ndarray, codebooks: np.ndarray
) -> None:
    fresh = sample[:500] + np.float32(0.01)  # near the sample, but not in it
    codes = kmeans.encode_nearest(fresh, codebooks)
    errors = [error(fresh, codes[:, : level + 1], codebooks).sum() for level in range(LEVELS)]
    assert all(later < 0.97 * earlier for earlier, later in pairwise(errors))
    energy = kmeans.residual_energy(fresh, codes, codebooks)
    np.testing.assert_allclose(energy.sum(axis=0), errors, rtol=1e-4)


def test_encode_equals_brute_force_in_float64(sample: np.ndarray, codebooks: np.ndarray) -> None:
    codes = kmeans.encode_nearest(sample, codebooks)
    residual = sample.astype(np.float64)
    agree = 0
    for level in range(LEVELS):
        centroids = codebooks[level].astype(np.float64)
        distances = np.square(residual[:300, None] - centroids).sum(axis=2)
        codes_of_level = codes[:300, level]
        # Another centroid may be chosen only if float32 cannot distinguish the two.
        np.testing.assert_allclose(
            distances[np.arange(300), codes_of_level], distances.min(axis=1), atol=1e-6
        )
        agree += int((codes_of_level == distances.argmin(axis=1)).sum())
        residual -= centroids[codes[:, level]]
    assert agree >= 0.995 * 300 * LEVELS


def test_fit_is_deterministic_and_codes_ignore_block_size(sample: np.ndarray, codebooks: np.ndarray) -> None:
    assert kmeans.fit(sample, levels=LEVELS, codes=CODES, seed=0).tobytes() == codebooks.tobytes()
    assert kmeans.fit(sample, levels=LEVELS, codes=CODES, seed=1).tobytes() != codebooks.tobytes()
    assert len(sample) > kmeans.VECTORS_PER_BLOCK
    whole = kmeans.encode_nearest(sample, codebooks)
    halves = [kmeans.encode_nearest(half, codebooks) for half in (sample[:700], sample[700:])]
    np.testing.assert_array_equal(whole, np.concatenate(halves))
    one_by_one = [kmeans.encode_nearest(sample[i : i + 1], codebooks)[0] for i in range(0, 1500, 97)]
    assert (whole[::97] == one_by_one).mean() > 0.995
    assert kmeans.encode_nearest(sample[:0], codebooks).shape == (0, LEVELS)


def test_a_sample_smaller_than_a_codebook_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize.codes=16 .* found 15: set quantize.codes=3"):
        kmeans.fit(vectors(15, 8), levels=1, codes=16, seed=0)


@pytest.mark.parametrize("gpus", [0, 3])
def test_a_level_is_clustered_on_every_gpu(
    sample: np.ndarray, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    gpu_counts = []

    class Kmeans(faiss.Kmeans):
        def __init__(self, *sizes: int, gpu: int, **knobs: int) -> None:
            gpu_counts.append(gpu)
            super().__init__(*sizes, **knobs)  # on the CPU in this test

    monkeypatch.setattr(faiss, "Kmeans", Kmeans)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: gpus)
    kmeans.cluster(sample, codes=4, seed=0)
    assert gpu_counts == [gpus]


def test_blas_stays_set_until_the_last_overlapping_block_ends() -> None:
    before = faiss.cvar.distance_compute_blas_threshold
    assert before != 1
    one, two = kmeans.blas_only(), kmeans.blas_only()  # like those of two threads
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert faiss.cvar.distance_compute_blas_threshold == 1
    two.__exit__(None, None, None)
    assert faiss.cvar.distance_compute_blas_threshold == before


# --- beams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codes", [16, 11])  # faiss needs powers of two, this module does not
def test_a_beam_lowers_the_error_and_both_searches_agree(
    sample: np.ndarray, codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codebooks = kmeans.fit(sample, levels=4, codes=codes, seed=0)
    fresh = vectors(300, 24, seed=4)
    energies = [error(fresh, kmeans.encode(fresh, codebooks, beam=1), codebooks).mean()]
    for width in (2, 8):
        by_table = kmeans.encode(fresh, codebooks, beam=width)
        with monkeypatch.context() as patched:
            patched.setattr(kmeans, "_TABLE_BYTES", 0)  # the same path as with large codebooks
            patched.delattr(kmeans, "encode_by_table")
            by_residuals = kmeans.encode(fresh, codebooks, beam=width)
        assert by_table.max() < codes
        errors = [error(fresh, each, codebooks) for each in (by_table, by_residuals)]
        np.testing.assert_allclose(*errors, atol=1e-5)
        energies.append(errors[0].mean())
    assert energies[2] < energies[1] < 0.99 * energies[0]
    assert kmeans.encode(fresh[:0], codebooks, beam=4).shape == (0, 4)


@pytest.mark.parametrize("search", [kmeans.encode_by_table, kmeans.encode_by_residuals])
def test_a_beam_of_one_is_greedy_and_a_full_beam_is_exact(sample: np.ndarray, search) -> None:
    codebooks = kmeans.fit(sample, levels=3, codes=5, seed=0)
    greedy = kmeans.encode_nearest(sample, codebooks)
    assert (search(sample, codebooks, beam=1) == greedy).mean() > 0.999  # the table rounds differently
    everything = np.array(list(product(range(5), repeat=3)))
    decoded = kmeans.decode(everything, codebooks).astype(np.float64)
    least = np.square(sample[:100, None] - decoded).sum(axis=2).min(axis=1)
    codes = search(sample[:100], codebooks, beam=125)
    np.testing.assert_allclose(error(sample[:100], codes, codebooks), least, atol=1e-5)


# --- samples -----------------------------------------------------------------------------------------------


def draw_sample(rows: list[int], *, size: int, seed: int) -> list[np.ndarray]:
    takes = shares(rows, size=size, seed=seed)
    return [draw(count, take=takes[n], seed=seed, part=n) for n, count in enumerate(rows)]


@pytest.mark.parametrize("size", [0, 1, 17, 60, 1000])
@pytest.mark.parametrize("rows", [[10, 0, 25, 25], [1] * 60])
def test_the_sample_is_sorted_and_has_the_requested_size(rows: list[int], size: int) -> None:
    sample = draw_sample(rows, size=size, seed=3)
    assert sum(map(len, sample)) == min(size, 60)
    for count, part in zip(rows, sample, strict=True):
        assert part.tolist() == sorted(set(part.tolist()))
        assert all(0 <= row < count for row in part)
        assert abs(len(part) - min(size, 60) * count / 60) < 1


def test_every_document_is_equally_likely_to_be_sampled() -> None:
    hits = np.zeros(30)
    for seed in range(600):
        first, second = draw_sample([11, 19], size=6, seed=seed)
        hits[first] += 1
        hits[11 + second] += 1
    # 600 draws of 6 of 30: mean 120, standard deviation 9.8.
    assert hits.min() > 120 - 4.5 * 9.8
    assert hits.max() < 120 + 4.5 * 9.8


def test_a_corpus_of_billions_is_sampled_without_listing_it() -> None:
    takes = shares([100_000_001] * 40, size=123_456_789, seed=0)
    assert sum(takes) == 123_456_789
    assert set(takes) == {3_086_419, 3_086_420}
    assert takes != shares([100_000_001] * 40, size=123_456_789, seed=5)
