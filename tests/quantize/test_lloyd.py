import numpy as np

from scalingnote.quantize import kmeans
from synthetic_corpus import vectors


def twin(sample: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """A pass over the whole, one vector after the other, in float64; empty clusters stay where they are."""
    members: list[list[np.ndarray]] = [[] for _ in centroids]
    for vector in sample.astype(np.float64):
        members[int(np.square(vector - centroids).sum(axis=1).argmin())].append(vector)
    return np.array([np.mean(m, axis=0) if m else c for m, c in zip(members, centroids, strict=True)])


def test_passes_in_pieces_equal_passes_over_the_whole() -> None:
    sample = vectors(700, 12)
    whole, pieces = sample[:9].copy(), sample[:9].copy()
    for _ in range(4):
        cut = [kmeans.cluster_moments(piece, pieces) for piece in np.array_split(sample, [100, 101, 450])]
        total = cut[0] + cut[1] + cut[2] + cut[3]
        assert total.counts.sum() == len(sample)
        assert np.isclose(
            total.energy, np.square(sample[:, None] - pieces).sum(axis=2).min(axis=1).sum(), rtol=1e-5
        )
        whole, pieces = twin(sample, whole), kmeans.move_centroids(total, pieces)
        np.testing.assert_allclose(pieces, whole, atol=1e-6)


def test_a_pass_lowers_the_energy_and_nothing_has_no_moments() -> None:
    sample = vectors(500, 8)
    first = kmeans.cluster_moments(sample, sample[:6])
    second = kmeans.cluster_moments(sample, kmeans.move_centroids(first, sample[:6]))
    assert second.energy < 0.98 * first.energy
    nothing = kmeans.cluster_moments(sample[:0], sample[:6])
    assert (nothing + first).energy == first.energy


def test_an_empty_cluster_takes_half_of_the_largest() -> None:
    sample = np.concatenate([np.tile([1.0, 0.0], (6, 1)), np.tile([0.0, 1.0], (2, 1))]).astype(np.float32)
    sample += np.linspace(-0.01, 0.01, 8)[:, None].astype(np.float32)
    far = np.array([[1, 0], [9, 9], [0, 1], [-9, -9]], np.float32)
    moved = kmeans.move_centroids(kmeans.cluster_moments(sample, far), far)
    large, small = sample[:6].mean(axis=0), sample[6:].mean(axis=0)
    np.testing.assert_allclose(moved[2], small, atol=1e-6)
    np.testing.assert_allclose(moved[[0, 1, 3]], np.tile(large, (3, 1)), atol=0.003)
    assert len(np.unique(moved, axis=0)) == 4
    again = kmeans.cluster_moments(sample, moved)
    assert (again.counts[[0, 1, 3]] > 0).sum() >= 2
    np.testing.assert_array_equal(moved, kmeans.move_centroids(kmeans.cluster_moments(sample, far), far))
