"""One pass of Lloyd's algorithm in pieces: each piece of the sample gives sums, and sums give new centroids.

What a piece gives (:class:`Moments`) is as large as a codebook, whatever the piece holds, and adds up.
"""

from dataclasses import dataclass

import faiss
import numpy as np
import scipy.sparse
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.quantize.blas import blas_only

_BLOCK = 1 << 14  # vectors that are summed at once
_APART = 1 / 1024  # how far the halves of a split cluster are pushed apart, as a share: faiss's value


@dataclass(frozen=True)
class Moments:
    """Of the vectors that each centroid is nearest to: their sum and number; and all squared distances."""

    sums: Float[ndarray, "codes dim"]
    counts: Int[ndarray, " codes"]
    energy: float

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.sums + other.sums, self.counts + other.counts, self.energy + other.energy)


def nothing(centroids: Float[ndarray, "codes dim"]) -> Moments:
    """The moments of no vectors."""
    return Moments(np.zeros(centroids.shape), np.zeros(len(centroids), np.int64), 0.0)


def assign(vectors: Float[ndarray, "docs dim"], centroids: Float[ndarray, "codes dim"]) -> Moments:
    """The moments of some vectors, in float64: their order and grouping change the last bits alone."""
    codes = len(centroids)
    moments = nothing(centroids)
    for start in range(0, len(vectors), _BLOCK):
        block = np.ascontiguousarray(vectors[start : start + _BLOCK], np.float32)
        with blas_only():
            distances, nearest = faiss.knn(block, np.ascontiguousarray(centroids), 1)
        rows = np.arange(len(block))
        chosen = scipy.sparse.csr_array((np.ones(len(block)), (nearest[:, 0], rows)), (codes, len(block)))
        moments += Moments(
            chosen @ block.astype(np.float64),
            np.bincount(nearest[:, 0], minlength=codes),
            float(distances.sum(dtype=np.float64)),
        )
    return moments


def move(moments: Moments, centroids: Float[ndarray, "codes dim"]) -> Float[ndarray, "codes dim"]:
    """Every centroid to the mean of its vectors.

    One that has none takes half of the largest cluster (the first of equals): both sit beside its mean, a
    little to either side, as in faiss, which draws the cluster to split where this takes the largest.
    """
    counts = moments.counts.astype(np.float64)
    filled = counts > 0
    moved = centroids.astype(np.float64)
    moved[filled] = moments.sums[filled] / counts[filled, None]
    sides = np.where(np.arange(centroids.shape[1]) % 2 == 0, 1 + _APART, 1 - _APART)
    for empty in np.flatnonzero(~filled):
        largest = int(counts.argmax())
        moved[empty] = moved[largest] * sides
        moved[largest] *= 2 - sides
        counts[empty] = counts[largest] = counts[largest] / 2
    return moved.astype(np.float32)
