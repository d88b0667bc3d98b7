"""Residual K-means: it converts vectors to tuples of codes, one code per level, and codes to vectors.

Level 0 clusters the vectors; each later level clusters the residuals of the levels before it. A vector is the
sum of its codes' centroids plus an error that shrinks from level to level:

    r_0 = x,  c_l = argmin_c |r_l - C_l[c]|^2,  r_{l+1} = r_l - C_l[c_l]

A beam keeps the best few partial tuples instead of only the nearest code: the final error falls, but the
first codes may no longer be the nearest ones.

A sample is drawn systematically: the rows of all parts form one line, with marks at equal distances from a
random start. The marks determine how many rows of a part are drawn, and a draw within the part determines
which. Every row is equally likely, and the driver keeps one number per part.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from math import ceil, log2

import faiss
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core.errors import ConfigError

VECTORS_PER_BLOCK = 1024  # vectors, residuals and a tile of their distances stay in a core's cache
ITERATIONS = 10  # K-means passes over a sample
SAMPLE_SEED = 0  # of samples and of initial centroids
BEAM_BLOCK = 256  # vectors per beam search, which holds `beam` residuals of each vector
_TABLE_BYTES = 1 << 29  # limit for the table of products of all centroids
_WORK_BYTES = 1 << 26  # distances that faiss holds at once; its default of 5 GB is no faster
_FAR = 1e6  # coordinates of the centroids that pad a codebook

_blas_lock = threading.Lock()
_blas_blocks = 0  # `blas_only` blocks entered and not left, over all threads
_faiss_threshold = 0  # faiss's default, restored after the last of these blocks


@contextmanager
def blas_only() -> Iterator[None]:
    """Make faiss compute all distances of this process by BLAS within the block.

    faiss uses its own loops below a batch size that suits only some machines: on others a batch is 5 to 11
    times faster through BLAS (flat search of 64 to 200 queries, K-means of short sub-vectors). Timing both at
    start-up would find the faster one, but they round differently, and a codebook must not depend on timing.
    """
    global _blas_blocks, _faiss_threshold
    with _blas_lock:
        if not _blas_blocks:
            _faiss_threshold = faiss.cvar.distance_compute_blas_threshold
            faiss.cvar.distance_compute_blas_threshold = 1
        _blas_blocks += 1
    try:
        yield
    finally:
        with _blas_lock:
            _blas_blocks -= 1
            if not _blas_blocks:
                faiss.cvar.distance_compute_blas_threshold = _faiss_threshold


def require_sample(documents: int, *, codes: int) -> None:
    """Raise ConfigError if a sample has fewer documents than a level has codes."""
    if documents < codes:
        raise ConfigError(
            f"quantize.codes={codes} needs a sample of at least as many documents, found {documents}: "
            f"set quantize.codes={max(2, documents // 4)} or less, or embed more documents"
        )


def fit(
    sample: Float[ndarray, "docs dim"], *, levels: int, codes: int, seed: int
) -> Float[ndarray, "levels codes dim"]:
    """Fit codebooks greedily, level by level (ScalingNote's residual K-means), by ITERATIONS of K-means each.

    Raises:
        ConfigError: the sample is smaller than a codebook.
    """
    require_sample(len(sample), codes=codes)
    residual = np.array(sample, np.float32)
    codebooks = np.empty((levels, codes, sample.shape[1]), np.float32)
    for level in range(levels):
        codebooks[level] = cluster(residual, codes=codes, seed=seed + level)
        if level + 1 < levels:
            residual -= codebooks[level][encode_nearest(residual, codebooks[level : level + 1])[:, 0]]
    return codebooks


def cluster(vectors: Float[ndarray, "docs dim"], *, codes: int, seed: int) -> Float[ndarray, "codes dim"]:
    """Compute the centroids of one level by faiss's K-means, on all GPUs of the process if faiss has GPUs."""
    clustering = faiss.Kmeans(
        vectors.shape[1],
        codes,
        niter=ITERATIONS,
        seed=seed,
        gpu=faiss.get_num_gpus(),
        # The caller chose the sample: faiss must not subsample it, and must not warn that it is small.
        max_points_per_centroid=len(vectors),
        min_points_per_centroid=1,
    )
    with blas_only():
        clustering.train(vectors)
    return np.asarray(clustering.centroids, np.float32)


def encode_nearest(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"]
) -> Int[ndarray, "docs levels"]:
    """Find the nearest centroid (Euclidean) to the residual, level by level; return the codes."""
    codebooks = np.ascontiguousarray(codebooks, np.float32)
    codes = np.empty((len(vectors), len(codebooks)), np.int32)
    with blas_only():
        for start in range(0, len(vectors), VECTORS_PER_BLOCK):
            residual = np.array(vectors[start : start + VECTORS_PER_BLOCK], np.float32)
            for level, codebook in enumerate(codebooks):
                nearest: ndarray = faiss.knn(residual, codebook, 1)[1][:, 0]
                codes[start : start + VECTORS_PER_BLOCK, level] = nearest
                if level + 1 < len(codebooks):
                    residual -= codebook[nearest]
    return codes


def decode(
    codes: Int[ndarray, "docs levels"], codebooks: Float[ndarray, "total codes dim"]
) -> Float[ndarray, "docs dim"]:
    """Sum the codes' centroids; codes may have fewer levels than there are codebooks."""
    vectors = np.zeros((len(codes), codebooks.shape[2]), np.float32)
    for level in range(codes.shape[1]):
        vectors += codebooks[level][codes[:, level]]
    return vectors


def residual_energy(
    vectors: Float[ndarray, "docs dim"],
    codes: Int[ndarray, "docs levels"],
    codebooks: Float[ndarray, "levels codes dim"],
) -> Float[ndarray, "docs levels"]:
    """Compute the squared norm of each vector's residual after each level."""
    energy = np.empty(codes.shape, np.float32)
    for start in range(0, len(vectors), VECTORS_PER_BLOCK):
        block = slice(start, start + VECTORS_PER_BLOCK)
        residual = np.array(vectors[block], np.float32)
        for level, codebook in enumerate(codebooks):
            residual -= codebook[codes[block, level]]
            energy[block, level] = np.einsum("ij,ij->i", residual, residual)
    return energy


def encode(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """Compute codes of vectors by beam search.

    With at most 2,048 centroids per level (at 6 levels) faiss looks up products of centroids in a table
    (ResidualQuantizer, `use_beam_LUT`). With more, the table is too large, and residuals are kept instead.

    Args:
        vectors: to encode.
        codebooks: from :func:`fit`.
        beam: partial tuples kept per vector; 1: the nearest code of each level.
    """
    if beam == 1:
        return encode_nearest(vectors, codebooks)
    if not len(vectors):
        return np.empty((0, len(codebooks)), np.int32)
    codebooks = np.ascontiguousarray(codebooks, np.float32)
    size = 1 << ceil(log2(codebooks.shape[1]))
    if 4 * (len(codebooks) * size) ** 2 // 2 <= _TABLE_BYTES:
        return encode_by_table(vectors, codebooks, beam=beam)
    return encode_by_residuals(vectors, codebooks, beam=beam)


def encode_by_table(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """Compute codes by the beam search of faiss, which forms no residuals: distances are sums of products."""
    levels, codes, dim = codebooks.shape
    bits = ceil(log2(codes))
    # faiss needs 2^bits centroids per codebook: centroids that are never nearest pad smaller codebooks.
    padding = np.full((levels, (1 << bits) - codes, dim), _FAR, np.float32)
    quantizer = faiss.ResidualQuantizer(dim, levels, bits)
    quantizer.max_beam_size = beam
    quantizer.use_beam_LUT = 1
    quantizer.max_mem_distances = _WORK_BYTES
    faiss.copy_array_to_vector(np.concatenate([codebooks, padding], axis=1).ravel(), quantizer.codebooks)
    quantizer.is_trained = True
    with blas_only():
        quantizer.compute_codebook_tables()  # type: ignore[attr-defined]  # missing in its stub
        packed = quantizer.compute_codes(np.ascontiguousarray(vectors, np.float32))
    unpacked: ndarray = faiss.unpack_bitstrings(packed, levels, bits)
    return unpacked.astype(np.int32)


def encode_by_residuals(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """Compute codes by a beam search that keeps residuals of partial tuples: for any number of centroids."""
    codes = np.empty((len(vectors), len(codebooks)), np.int32)
    with blas_only():
        for start in range(0, len(vectors), BEAM_BLOCK):
            block = np.array(vectors[start : start + BEAM_BLOCK], np.float32)
            codes[start : start + BEAM_BLOCK] = _beam_search(block, codebooks, beam)
    return codes


def _beam_search(
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


# --- samples -----------------------------------------------------------------------------------------------


def shares(rows: Sequence[int], *, size: int, seed: int) -> list[int]:
    """Compute how many rows each part contributes to a sample of `size`: all rows if there are fewer.

    Args:
        rows: number of rows of every part.
        size: of the sample.
        seed: of the marks; the same arguments give the same shares.
    """
    total = sum(rows)
    if size >= total:
        return list(rows)
    # Integers, because floats cannot distinguish the rows of a corpus of billions.
    start = int(np.random.default_rng(seed).integers(total))
    marks = [(size * end + start) // total for end in accumulate(rows, initial=0)]
    return [after - before for before, after in pairwise(marks)]


def draw(rows: int, *, take: int, seed: int, part: int) -> Int[ndarray, " chosen"]:
    """Draw `take` of the `rows` rows of a part without replacement; return ascending row numbers."""
    if take >= rows:
        return np.arange(rows)
    # Part + 1, because numpy treats (seed, 0) like seed, whose random numbers place the marks.
    return np.sort(np.random.default_rng((seed, part + 1)).choice(rows, take, replace=False))
