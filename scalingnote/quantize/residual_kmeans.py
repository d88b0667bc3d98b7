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

BLOCK = 1024  # vectors: they, their residuals and a tile of their distances stay in a core's cache


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
        codebooks[level] = cluster(residual, codes=codes, iterations=iterations, seed=seed + level)
        if level + 1 < levels:
            residual = subtract(residual, codebooks[level : level + 1])
    return codebooks


def cluster(
    vectors: Float[ndarray, "docs dim"], *, codes: int, iterations: int, seed: int
) -> Float[ndarray, "codes dim"]:
    """One level: faiss's K-means, on the GPUs this process sees if its faiss is built for them."""
    clustering = faiss.Kmeans(
        vectors.shape[1],
        codes,
        niter=iterations,
        seed=seed,
        gpu=faiss.get_num_gpus(),
        # The caller chose the sample: faiss shall neither thin it out nor warn that it is small.
        max_points_per_centroid=len(vectors),
        min_points_per_centroid=1,
    )
    with blas_only():
        clustering.train(vectors)
    return np.asarray(clustering.centroids, np.float32)


def encode(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"]
) -> Int[ndarray, "docs levels"]:
    """Each level's nearest centroid (Euclidean) to what the levels before it left over."""
    codebooks = np.ascontiguousarray(codebooks, np.float32)
    chosen = np.empty((len(vectors), len(codebooks)), np.int32)
    with blas_only():
        for start in range(0, len(vectors), BLOCK):
            residual = np.array(vectors[start : start + BLOCK], np.float32)
            for level, codebook in enumerate(codebooks):
                if level:
                    residual -= codebooks[level - 1][nearest]
                nearest: ndarray = faiss.knn(residual, codebook, 1)[1][:, 0]
                chosen[start : start + BLOCK, level] = nearest
    return chosen


def decode(
    codes: Int[ndarray, "docs levels"], codebooks: Float[ndarray, "total codes dim"]
) -> Float[ndarray, "docs dim"]:
    """Sum of the codes' centroids. Fewer levels than there are codebooks give the coarser vector."""
    vectors = np.zeros((len(codes), codebooks.shape[2]), np.float32)
    for level in range(codes.shape[1]):
        vectors += codebooks[level][codes[:, level]]
    return vectors


def subtract(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"]
) -> Float[ndarray, "docs dim"]:
    """What these levels leave over of the vectors."""
    residual: ndarray = vectors - decode(encode(vectors, codebooks), codebooks)
    return residual


def residual_energy(
    vectors: Float[ndarray, "docs dim"],
    codes: Int[ndarray, "docs levels"],
    codebooks: Float[ndarray, "levels codes dim"],
) -> Float[ndarray, "docs levels"]:
    """Squared norm of what is left over of each vector after each level."""
    energy = np.empty(codes.shape, np.float32)
    for start in range(0, len(vectors), BLOCK):
        block = slice(start, start + BLOCK)
        residual = np.array(vectors[block], np.float32)
        for level, codebook in enumerate(codebooks):
            residual -= codebook[codes[block, level]]
            energy[block, level] = np.einsum("ij,ij->i", residual, residual)
    return energy
