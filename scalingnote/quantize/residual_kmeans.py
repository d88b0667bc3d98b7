"""Residual K-means: vectors become tuples of codes, one per level, and codes become vectors again.

Level 0 clusters the vectors; each later level clusters what the levels before it left over. A vector is the
sum of its codes' centroids plus an error that shrinks from level to level.
"""

import faiss
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.errors import ConfigError
from scalingnote.quantize.blas import blas_only


def require_sample(documents: int, *, codes: int) -> None:
    """Refuse to fit more centroids than there are documents to place them on."""
    if documents < codes:
        raise ConfigError(
            f"quantize.codes={codes} needs a sample of at least as many documents, found {documents}: "
            f"set quantize.codes={max(2, documents // 4)} or less, or embed more documents"
        )


def fit(
    sample: Float[ndarray, "docs dim"], *, levels: int, codes: int, iterations: int, seed: int
) -> Float[ndarray, "levels codes dim"]:
    """Codebooks fitted greedily, level by level (ScalingNote's residual K-means).

    Raises ConfigError when the sample is smaller than a codebook.
    """
    require_sample(len(sample), codes=codes)
    residual = np.array(sample, np.float32)
    codebooks = np.empty((levels, codes, sample.shape[1]), np.float32)
    for level in range(levels):
        codebooks[level] = _kmeans(residual, codes, iterations, seed + level)
        residual -= codebooks[level][_nearest(residual, codebooks[level])]
    return codebooks


def encode(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"]
) -> Int[ndarray, "docs levels"]:
    """Each level's nearest centroid (Euclidean) to what the levels before it left over."""
    residual = np.array(vectors, np.float32)
    chosen = np.empty((len(vectors), len(codebooks)), np.int32)
    for level, codebook in enumerate(codebooks):
        chosen[:, level] = _nearest(residual, codebook)
        residual -= codebook[chosen[:, level]]
    return chosen


def decode(
    codes: Int[ndarray, "docs levels"], codebooks: Float[ndarray, "total codes dim"]
) -> Float[ndarray, "docs dim"]:
    """Sum of the codes' centroids. Fewer levels than there are codebooks give the coarser vector."""
    vectors = np.zeros((len(codes), codebooks.shape[2]), np.float32)
    for level in range(codes.shape[1]):
        vectors += codebooks[level][codes[:, level]]
    return vectors


def residual_energy(
    vectors: Float[ndarray, "docs dim"],
    codes: Int[ndarray, "docs levels"],
    codebooks: Float[ndarray, "levels codes dim"],
) -> Float[ndarray, " levels"]:
    """Summed squared norm of what is left over after each level, over all documents."""
    residual = vectors.astype(np.float64)
    energy = np.empty(len(codebooks))
    for level, codebook in enumerate(codebooks):
        residual -= codebook[codes[:, level]]
        energy[level] = np.square(residual).sum()
    return energy


def _kmeans(
    vectors: Float[ndarray, "docs dim"], codes: int, iterations: int, seed: int
) -> Float[ndarray, "codes dim"]:
    clustering = faiss.Kmeans(
        vectors.shape[1],
        codes,
        niter=iterations,
        seed=seed,
        # The caller chose the sample: faiss shall neither thin it out nor warn that it is small.
        max_points_per_centroid=len(vectors),
        min_points_per_centroid=1,
    )
    with blas_only():
        clustering.train(vectors)
    return np.asarray(clustering.centroids, np.float32)


def _nearest(
    vectors: Float[ndarray, "docs dim"], codebook: Float[ndarray, "codes dim"]
) -> Int[ndarray, " docs"]:
    if not len(vectors):
        return np.empty(0, np.int64)
    with blas_only():
        _, nearest = faiss.knn(vectors, np.ascontiguousarray(codebook), 1)
    return nearest[:, 0]
