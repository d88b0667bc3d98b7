"""Beam search for codes: the best few partial tuples go on from level to level, not only the nearest.

A centroid that is not the nearest may leave over what later levels describe better: the error after the last
level falls, at the price of first codes that are no longer the nearest ones.
"""

from math import ceil, log2

import faiss
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.quantize import residual_kmeans
from scalingnote.quantize.blas import blas_only

BLOCK = 256  # vectors that are searched at once; `beam` residuals of each
_TABLE_BYTES = 1 << 29  # products of all centroids with each other, as far as they may be kept in memory
_WORK_BYTES = 1 << 26  # distances that faiss holds at once; its own default is 5 GB, and no faster
_FAR = 1e6  # where the centroids lie that only fill a codebook up


def encode(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """Codes of the least error among the tuples that a beam of this width meets; 1 takes the nearest codes.

    Up to some 1,900 centroids per level (at 6 levels) faiss looks the products of centroids up in a table
    (ResidualQuantizer, `use_beam_LUT`); with more, the table outgrows memory and residuals are kept instead.
    """
    if beam == 1:
        return residual_kmeans.encode(vectors, codebooks)
    if not len(vectors):
        return np.empty((0, len(codebooks)), np.int32)
    codebooks = np.ascontiguousarray(codebooks, np.float32)
    size = 1 << ceil(log2(codebooks.shape[1]))
    if 4 * (len(codebooks) * size) ** 2 // 2 <= _TABLE_BYTES:
        return by_table(vectors, codebooks, beam=beam)
    return by_residuals(vectors, codebooks, beam=beam)


def by_table(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """faiss's search, which never forms a residual: distances are sums of products."""
    levels, codes, dim = codebooks.shape
    bits = ceil(log2(codes))
    # faiss counts codes in bits: a codebook of another size is filled up with centroids nobody takes.
    padding = np.full((levels, (1 << bits) - codes, dim), _FAR, np.float32)
    quantizer = faiss.ResidualQuantizer(dim, levels, bits)
    quantizer.max_beam_size = beam
    quantizer.use_beam_LUT = 1
    quantizer.max_mem_distances = _WORK_BYTES
    faiss.copy_array_to_vector(np.concatenate([codebooks, padding], axis=1).ravel(), quantizer.codebooks)
    quantizer.is_trained = True
    with blas_only():
        quantizer.compute_codebook_tables()  # type: ignore[attr-defined]  # its stub forgets it
        packed = quantizer.compute_codes(np.ascontiguousarray(vectors, np.float32))
    found: ndarray = faiss.unpack_bitstrings(packed, levels, bits)
    return found.astype(np.int32)


def by_residuals(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """The same, each partial tuple with its residual: any number of centroids."""
    found = np.empty((len(vectors), len(codebooks)), np.int32)
    with blas_only():
        for start in range(0, len(vectors), BLOCK):
            block = np.array(vectors[start : start + BLOCK], np.float32)
            found[start : start + BLOCK] = _search(block, codebooks, beam)
    return found


def _search(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], beam: int
) -> Int[ndarray, "docs levels"]:
    rows, dim = vectors.shape
    residuals, tuples = vectors[:, None], np.empty((rows, 1, 0), np.int32)
    for codebook in codebooks:
        # The best `beam` extensions of all tuples are among the best `beam` of each.
        near = min(beam, len(codebook))
        errors, codes = faiss.knn(np.ascontiguousarray(residuals.reshape(-1, dim)), codebook, near)
        errors, codes = errors.reshape(rows, -1), codes.reshape(rows, -1)
        best = np.argsort(errors, axis=1, kind="stable")[:, :beam]
        code = np.take_along_axis(codes, best, axis=1).astype(np.int32)
        parent = (best // near)[:, :, None]
        tuples = np.concatenate([np.take_along_axis(tuples, parent, axis=1), code[:, :, None]], axis=2)
        residuals = np.take_along_axis(residuals, parent, axis=1) - codebook[code]
    return tuples[:, 0]
