"""Residual K-means: vectors become tuples of codes, one per level, and codes become vectors again.

Level 0 clusters the vectors; each later level clusters the residuals of the levels before it. A vector is the
sum of its codes' centroids plus an error that shrinks from level to level:

    r_0 = x,  c_l = argmin_c |r_l - C_l[c]|^2,  r_{l+1} = r_l - C_l[c_l]

A beam keeps the best few partial tuples instead of the nearest code only: the final error falls, while first
codes may no longer be the nearest ones.

A sample that exceeds one worker lies in files (:func:`fit_files`). Level by level, one task places the first
centroids by faiss on as much as a worker holds; in every Lloyd pass each file is a task that returns sums of
its vectors (:class:`ClusterMoments`), and the driver adds them up in the order of the files; after the last
pass each file is replaced by its residuals. Every finished pass is recorded: after a kill, the next run
continues with the next pass.

A sample is drawn systematically: the rows of all parts form one line, with marks at equal distances from a
random start. The marks determine how many rows a part gives, a draw within the part determines which. Every
row is equally likely, and the driver keeps one number per part.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import ceil, log2

import faiss
import numpy as np
import pyarrow as pa
import scipy.sparse
from jaxtyping import Float, Int
from numpy import ndarray
from safetensors import numpy as safetensors

from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.storage import filesystem as fs
from scalingnote.storage.arrow import to_arrow, to_numpy
from scalingnote.storage.artifact import write_table
from scalingnote.storage.shuffle import TaskRunner, run_slices

BLOCK = 1024  # vectors: they, their residuals and a tile of their distances stay in a core's cache
BEAM_BLOCK = 256  # vectors per beam search, which holds `beam` residuals of each
LLOYD_BLOCK = 1 << 14  # vectors summed at once
SPLIT_DISTANCE = 1 / 1024  # relative distance between the halves of a split cluster: faiss's value
_TABLE_BYTES = 1 << 29  # limit for the table of products of all centroids
_WORK_BYTES = 1 << 26  # distances that faiss holds at once; its default of 5 GB is no faster
_FAR = 1e6  # coordinates of centroids that only pad a codebook

_blas_lock = threading.Lock()
_blas_blocks = 0  # `blas_only` blocks entered and not left, over all threads
_faiss_threshold = 0  # faiss's own, to be restored after the last of them


@contextmanager
def blas_only() -> Iterator[None]:
    """Let faiss compute all distances of this process by BLAS within the block.

    faiss uses its own loops below a batch size that suits some machines only: on others a batch is 5 to
    11 times faster through BLAS (flat search of 64 to 200 queries, K-means of short sub-vectors). Timing both
    at start-up would find the faster one, but they round differently, and a codebook must not depend on the
    clock.
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
    """ConfigError where a sample has fewer documents than a level has codes."""
    if documents < codes:
        raise ConfigError(
            f"quantize.codes={codes} needs a sample of at least as many documents, found {documents}: "
            f"set quantize.codes={max(2, documents // 4)} or less, or embed more documents"
        )


def fit(
    sample: Float[ndarray, "docs dim"], *, levels: int, codes: int, iterations: int, seed: int
) -> Float[ndarray, "levels codes dim"]:
    """Fit codebooks greedily, level by level (ScalingNote's residual K-means), by so many `iterations` each.

    ConfigError if the sample is smaller than a codebook.
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
    """Centroids of one level by faiss's K-means, on the GPUs of this process if faiss is built for them."""
    clustering = faiss.Kmeans(
        vectors.shape[1],
        codes,
        niter=iterations,
        seed=seed,
        gpu=faiss.get_num_gpus(),
        # The caller chose the sample: faiss must neither subsample it nor warn that it is small.
        max_points_per_centroid=len(vectors),
        min_points_per_centroid=1,
    )
    with blas_only():
        clustering.train(vectors)
    return np.asarray(clustering.centroids, np.float32)


def encode_nearest(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"]
) -> Int[ndarray, "docs levels"]:
    """Code of the nearest centroid (Euclidean) to the residual, level by level."""
    codebooks = np.ascontiguousarray(codebooks, np.float32)
    chosen = np.empty((len(vectors), len(codebooks)), np.int32)
    with blas_only():
        for start in range(0, len(vectors), BLOCK):
            residual = np.array(vectors[start : start + BLOCK], np.float32)
            for level, codebook in enumerate(codebooks):
                nearest: ndarray = faiss.knn(residual, codebook, 1)[1][:, 0]
                chosen[start : start + BLOCK, level] = nearest
                if level + 1 < len(codebooks):
                    residual -= codebook[nearest]
    return chosen


def decode(
    codes: Int[ndarray, "docs levels"], codebooks: Float[ndarray, "total codes dim"]
) -> Float[ndarray, "docs dim"]:
    """Sum of the codes' centroids; codes may have fewer levels than there are codebooks."""
    vectors = np.zeros((len(codes), codebooks.shape[2]), np.float32)
    for level in range(codes.shape[1]):
        vectors += codebooks[level][codes[:, level]]
    return vectors


def subtract(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"]
) -> Float[ndarray, "docs dim"]:
    """Residuals of the vectors after these levels."""
    residual: ndarray = vectors - decode(encode_nearest(vectors, codebooks), codebooks)
    return residual


def residual_energy(
    vectors: Float[ndarray, "docs dim"],
    codes: Int[ndarray, "docs levels"],
    codebooks: Float[ndarray, "levels codes dim"],
) -> Float[ndarray, "docs levels"]:
    """Squared norm of each vector's residual after each level."""
    energy = np.empty(codes.shape, np.float32)
    for start in range(0, len(vectors), BLOCK):
        block = slice(start, start + BLOCK)
        residual = np.array(vectors[block], np.float32)
        for level, codebook in enumerate(codebooks):
            residual -= codebook[codes[block, level]]
            energy[block, level] = np.einsum("ij,ij->i", residual, residual)
    return energy


def encode(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """Codes of vectors by beam search.

    Up to some 1,900 centroids per level (at 6 levels) faiss looks up products of centroids in a table
    (ResidualQuantizer, `use_beam_LUT`); with more, the table outgrows memory and residuals are kept instead.

    Args:
        vectors: to encode.
        codebooks: from :func:`fit`.
        beam: partial tuples kept per vector; 1 takes the nearest code of each level.
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
    """Beam search of faiss, which forms no residuals: distances are sums of products."""
    levels, codes, dim = codebooks.shape
    bits = ceil(log2(codes))
    # faiss needs codebooks of 2^bits centroids: others are padded with centroids that are never nearest.
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
    found: ndarray = faiss.unpack_bitstrings(packed, levels, bits)
    return found.astype(np.int32)


def encode_by_residuals(
    vectors: Float[ndarray, "docs dim"], codebooks: Float[ndarray, "levels codes dim"], *, beam: int
) -> Int[ndarray, "docs levels"]:
    """Beam search that keeps the residual of each partial tuple: for any number of centroids."""
    found = np.empty((len(vectors), len(codebooks)), np.int32)
    with blas_only():
        for start in range(0, len(vectors), BEAM_BLOCK):
            block = np.array(vectors[start : start + BEAM_BLOCK], np.float32)
            found[start : start + BEAM_BLOCK] = _beam_search(block, codebooks, beam)
    return found


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


@dataclass(frozen=True)
class ClusterMoments:
    """Sums and counts of the vectors nearest to each centroid, and the sum of all squared distances.

    As large as a codebook whatever the number of vectors, and additive over pieces of a sample.
    """

    sums: Float[ndarray, "codes dim"]
    counts: Int[ndarray, " codes"]
    energy: float

    def __add__(self, other: "ClusterMoments") -> "ClusterMoments":
        return ClusterMoments(self.sums + other.sums, self.counts + other.counts, self.energy + other.energy)


def zero_moments(centroids: Float[ndarray, "codes dim"]) -> ClusterMoments:
    """Moments of an empty set of vectors."""
    return ClusterMoments(np.zeros(centroids.shape), np.zeros(len(centroids), np.int64), 0.0)


def cluster_moments(
    vectors: Float[ndarray, "docs dim"], centroids: Float[ndarray, "codes dim"]
) -> ClusterMoments:
    """Moments of vectors, in float64: their order and grouping change only the last bits."""
    codes = len(centroids)
    moments = zero_moments(centroids)
    for start in range(0, len(vectors), LLOYD_BLOCK):
        block = np.ascontiguousarray(vectors[start : start + LLOYD_BLOCK], np.float32)
        with blas_only():
            distances, nearest = faiss.knn(block, np.ascontiguousarray(centroids), 1)
        rows = np.arange(len(block))
        chosen = scipy.sparse.csr_array((np.ones(len(block)), (nearest[:, 0], rows)), (codes, len(block)))
        moments += ClusterMoments(
            chosen @ block.astype(np.float64),
            np.bincount(nearest[:, 0], minlength=codes),
            float(distances.sum(dtype=np.float64)),
        )
    return moments


def move_centroids(
    moments: ClusterMoments, centroids: Float[ndarray, "codes dim"]
) -> Float[ndarray, "codes dim"]:
    """Move every centroid to the mean of its vectors.

    A centroid without vectors takes half of the largest cluster (the first of equals): both are placed close
    to its mean, on either side. faiss does the same, but draws the cluster to split.
    """
    counts = moments.counts.astype(np.float64)
    filled = counts > 0
    moved = centroids.astype(np.float64)
    moved[filled] = moments.sums[filled] / counts[filled, None]
    sides = np.where(np.arange(centroids.shape[1]) % 2 == 0, 1 + SPLIT_DISTANCE, 1 - SPLIT_DISTANCE)
    for empty in np.flatnonzero(~filled):
        largest = int(counts.argmax())
        moved[empty] = moved[largest] * sides
        moved[largest] *= 2 - sides
        counts[empty] = counts[largest] = counts[largest] / 2
    return moved.astype(np.float32)


# --- samples that exceed one worker -----------------------------------------------------------------

log = get_logger("quantize")


def shares(rows: Sequence[int], *, size: int, seed: int) -> list[int]:
    """Number of rows that each part contributes to a sample of `size`: all where there are fewer.

    Args:
        rows: number of rows of every part.
        size: of the sample.
        seed: of the marks; the same arguments give the same shares.
    """
    total = sum(rows)
    if size >= total:
        return list(rows)
    # Integers, because floats cannot tell apart the rows of a corpus of billions.
    start = int(np.random.default_rng(seed).integers(total))
    marks = [(size * end + start) // total for end in accumulate(rows, initial=0)]
    return [after - before for before, after in pairwise(marks)]


def draw(rows: int, *, take: int, seed: int, part: int) -> Int[ndarray, " chosen"]:
    """Draw `take` of the `rows` rows of a part without replacement; ascending row numbers."""
    if take >= rows:
        return np.arange(rows)
    # Part + 1, because numpy treats (seed, 0) like seed, whose numbers place the marks.
    return np.sort(np.random.default_rng((seed, part + 1)).choice(rows, take, replace=False))


def fit_files(
    config: QuantizeConfig, rows: Sequence[int], *, folder: str, each: TaskRunner
) -> Float[ndarray, "levels codes dim"]:
    """Fit codebooks to the vectors that :func:`store` wrote to `folder`, whose files have so many `rows`.

    `folder` also has the records of finished passes. A call of `each` holds one file, or
    `config.documents_per_worker` vectors.
    """
    codebooks = []
    for level in range(config.levels):
        centroids = _level(config, level, rows, folder=folder, each=each)
        codebooks.append(centroids)
        if level + 1 < config.levels:
            subtract = partial(_store_residuals, folder=folder, level=level, centroids=centroids)
            run_slices(f"level-{level + 1}", subtract, rows, folder=folder, each=each, section="quantize")
        fs.delete(_vectors(folder, level))
    return np.stack(codebooks)


def store(vectors: Float[ndarray, "docs dim"], *, folder: str, file: int, level: int = 0) -> int:
    """Write a file of the sample, or of its residuals before `level`; returns its rows."""
    write_table(_vectors(folder, level, file), pa.table({"vector": to_arrow(vectors)}))
    return len(vectors)


def _level(
    config: QuantizeConfig, level: int, rows: Sequence[int], *, folder: str, each: TaskRunner
) -> Float[ndarray, "codes dim"]:
    """Centroids of a level, continued from the last recorded pass."""
    passes = fs.join(folder, "passes", f"{level:02d}")
    names = [name for name in fs.list_files(passes) if name.endswith(".safetensors")]  # not unfinished files
    done = [safetensors.load(fs.read_bytes(fs.join(passes, name))) for name in names]
    if not done:
        first = partial(_initial_centroids, config=config, folder=folder, rows=list(rows))
        done = [{"centroids": next(iter(each(first, [level]))), "energy": np.array([np.inf])}]
        _record(done, passes)
    while len(done) <= config.refinements and not _converged(done, config.tolerance):
        before = done[-1]["centroids"]
        assign = partial(_assign, folder=folder, level=level, centroids=before)
        moments = sum(each(assign, range(len(rows))), start=zero_moments(before))
        done.append({"centroids": move_centroids(moments, before), "energy": np.array([moments.energy])})
        _record(done, passes)
        log.info(
            "level %d, pass %d: residual energy %.5f, %d codes without a document",
            level,
            len(done) - 1,
            moments.energy / sum(rows),
            (moments.counts == 0).sum(),
        )
    centroids: ndarray = done[-1]["centroids"]
    return centroids


def _converged(done: Sequence[dict[str, ndarray]], tolerance: float) -> bool:
    """Whether the last pass lowered the energy by no more than the tolerance."""
    if len(done) < 3:
        return False
    before, after = (float(found["energy"][0]) for found in done[-2:])
    return before - after <= tolerance * before


def _record(done: Sequence[dict[str, ndarray]], passes: str) -> None:
    fs.write_bytes(fs.join(passes, f"{len(done) - 1:05d}.safetensors"), safetensors.save(done[-1]))


def _initial_centroids(
    level: int, *, config: QuantizeConfig, folder: str, rows: list[int]
) -> Float[ndarray, "codes dim"]:
    """K-means on as many vectors as a worker holds, drawn evenly from all files."""
    take = shares(rows, size=config.documents_per_worker, seed=config.seed)
    pieces = [
        _read_file(folder, level, file)[draw(count, take=taken, seed=config.seed, part=file)]
        for file, (count, taken) in enumerate(zip(rows, take, strict=True))
        if taken
    ]
    return cluster(
        np.concatenate(pieces), codes=config.codes, iterations=config.iterations, seed=config.seed + level
    )


def _assign(file: int, *, folder: str, level: int, centroids: Float[ndarray, "codes dim"]) -> ClusterMoments:
    return cluster_moments(_read_file(folder, level, file), centroids)


def _store_residuals(
    item: tuple[int, int], *, folder: str, level: int, centroids: Float[ndarray, "codes dim"]
) -> int:
    residuals = subtract(_read_file(folder, level, item[0]), centroids[None])
    return store(residuals, folder=folder, file=item[0], level=level + 1)


def _read_file(folder: str, level: int, file: int) -> Float[ndarray, "docs dim"]:
    """Vectors of a file, mapped into memory where it is local."""
    with pa.ipc.open_file(fs.open_input(_vectors(folder, level, file))) as reader:
        return to_numpy(reader.read_all()["vector"])


def _vectors(folder: str, level: int, file: int | None = None) -> str:
    place = fs.join(folder, "vectors", f"{level:02d}")
    return place if file is None else fs.join(place, f"{file:05d}.arrow")
