"""Index families, which store the vectors of shards in different ways, and the training of their quantizers.

All shards of an index share one trained *quantizer*: the coarse quantizer of the inverted lists, codebooks,
and ranges of the scalar quantizer. Every shard starts as an empty copy of it, so a query is compared with the
centroids once, and the chosen lists are scanned in every shard.

This module builds indexes without faiss's index factory, because the factory enables polysemous training,
which takes 13 times as long for equal recall.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote.core.errors import ConfigError
from scalingnote.index.config import (
    IVFPQ,
    MAX_LISTS,
    Family,
    FastScan,
    Flat,
    IndexConfig,
    RaBitQ,
    Refine,
    ScalarQuantized,
)
from scalingnote.quantize.kmeans import ITERATIONS, blas_only
from scalingnote.storage import filesystem as fs

# With fewer training points per centroid, K-means fits noise (faiss's own bound).
POINTS_PER_CENTROID = 39
MIN_TRAINED = 200_000  # documents on which codebooks and ranges are trained, even for few lists
TWO_LEVEL_LISTS = 8_192  # from this number on, K-means splits clusters into clusters
GRAPH_LISTS = 16_384  # from this number on, a graph finds the nearest centroids
GRAPH_LINKS, GRAPH_BUILD_EF, GRAPH_EF = 32, 80, 32  # faiss's M, efConstruction, efSearch
INNER_PRODUCT = faiss.METRIC_INNER_PRODUCT
FAST_SCAN_BITS = 4
UNMAPPABLE = ("ivfpq_fast_scan", "ivf_rabitq")  # families whose lists faiss reads to memory
_ID_BYTES = 8  # size of a vector's number in the inverted lists
UNIT_TOLERANCE = 0.01  # allowed error of the mean length of unit vectors, which are stored in float16


@dataclass(frozen=True)
class Quantizer:
    """Trained but empty faiss indexes, serialized, that all shards share."""

    coarse: bytes
    lists: bytes | None
    kept: bytes | None

    @property
    def centroids(self) -> Float[ndarray, "nlist dim"]:
        """Centroids of the inverted lists."""
        coarse = parse(self.coarse)
        centroids: ndarray = coarse.reconstruct_n(0, coarse.ntotal)
        return centroids


def default_nlist(documents: int, *, train_documents: int) -> int:
    """Return 4*sqrt(documents), limited by the number of lists for which the training sample suffices."""
    fitted = min(documents, train_documents) // POINTS_PER_CENTROID
    return max(1, min(4 * isqrt(documents), fitted, MAX_LISTS))


def sample_size(config: IndexConfig, documents: int, *, nlist: int) -> int:
    """Return the number of training documents: enough for every list, within the limit of the settings."""
    return min(documents, config.train_documents, max(MIN_TRAINED, POINTS_PER_CENTROID * nlist))


def untrained_lists(family: Family, coarse: Any, *, dim: int, nlist: int) -> Any | None:
    """Build untrained inverted lists of a family over a coarse quantizer; None if the family has none."""
    index: Any
    match family:
        case FastScan():
            index = faiss.IndexIVFPQFastScan(
                coarse, dim, nlist, sub_quantizers(family, dim), FAST_SCAN_BITS, INNER_PRODUCT
            )
            index.by_residual = True  # off by default; at equal bytes +4 points of recall for 8 % more time
        case IVFPQ():
            index = faiss.IndexIVFPQ(
                coarse, dim, nlist, sub_quantizers(family, dim), family.nbits, INNER_PRODUCT
            )
        case ScalarQuantized():
            eight_bits = faiss.ScalarQuantizer.QT_8bit
            index = faiss.IndexIVFScalarQuantizer(coarse, dim, nlist, eight_bits, INNER_PRODUCT)
        case RaBitQ():
            index = faiss.IndexIVFRaBitQFastScan(coarse, dim, nlist, INNER_PRODUCT)
        case Flat():
            return None
    index.own_fields = False
    if isinstance(family, FastScan | IVFPQ):
        index.pq.cp.min_points_per_centroid = 1
    return index


def untrained_kept(family: Family, *, dim: int) -> Any | None:
    """Build an untrained index of kept vectors for rescoring; None if the family keeps none."""
    match refine_of(family):
        case "none":
            return None
        case "sq8":
            return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, INNER_PRODUCT)
        case "flat":
            return faiss.IndexFlatIP(dim)


def refine_of(family: Family) -> Refine:
    """Return the type of the vectors that a family keeps for rescoring; a flat index has only these."""
    match family:
        case ScalarQuantized():
            return "none"
        case Flat():
            return "flat"
        case _:
            return family.refine


def vector_bytes(family: Family, *, dim: int) -> int:
    """Compute the bytes of a document's code, its number in the lists and its kept vector."""
    lists = untrained_lists(family, faiss.IndexFlatIP(dim), dim=dim, nlist=1)
    kept_index = untrained_kept(family, dim=dim)
    code = 0 if lists is None else lists.code_size + _ID_BYTES
    return int(code + (0 if kept_index is None else kept_index.sa_code_size()))


def sub_quantizers(family: FastScan | IVFPQ, dim: int) -> int:
    """Return the configured `m`; else one per 2 (fast scan) or 4 dimensions, or fewer to divide dim."""
    width = 2 if isinstance(family, FastScan) else 4
    return family.m or next(m for m in range(max(1, dim // width), 0, -1) if dim % m == 0)


def require_trainable(family: Family, documents: int, *, dim: int, nlist: int) -> None:
    """Raise a ConfigError if the settings need more training vectors, or another dimension."""
    if documents < nlist:
        raise ConfigError(
            f"index.nlist={nlist} needs {nlist} training documents, found {documents}: lower index.nlist"
        )
    if not isinstance(family, FastScan | IVFPQ):
        return
    if dim % sub_quantizers(family, dim):
        fits = sub_quantizers(family.model_copy(update={"m": None}), dim)
        raise ConfigError(
            f"index.family.m={family.m} does not divide the embeddings' dim {dim}: set index.family.m={fits}"
        )
    bits = FAST_SCAN_BITS if isinstance(family, FastScan) else family.nbits
    if documents < 1 << bits:
        raise ConfigError(
            f"codes of {bits} bits need {1 << bits} training documents, found {documents}: "
            "set index.family.kind=flat, or index more documents"
        )


def train(sample: Float[ndarray, "docs dim"], family: Family, *, nlist: int, seed: int) -> Quantizer:
    """Fit a quantizer to a sample of vectors; centroids are fitted on GPUs if faiss finds any.

    Lists are chosen by direction. If vectors are longer or shorter than 1, the centroids of product codes get
    the mean length, so that the residual that a code encodes is small. RaBitQ scales each vector itself: with
    such centroids faiss 1.15 loses most of its recall.

    Raises:
        ConfigError: the sample is too small for these settings.
    """
    dim = sample.shape[1]
    require_trainable(family, len(sample), dim=dim, nlist=nlist)
    sample = np.ascontiguousarray(sample, np.float32)
    with blas_only():
        fit = _two_levels if nlist >= TWO_LEVEL_LISTS else _kmeans
        centroids = fit(sample, nlist, seed=seed)
        length = float(np.linalg.norm(sample, axis=1).mean())
        if isinstance(family, FastScan | IVFPQ) and abs(length - 1) > UNIT_TOLERANCE:
            centroids = centroids * np.float32(length)
        coarse = coarse_of(centroids)
        index = untrained_lists(family, coarse, dim=dim, nlist=nlist)
        if index is not None:
            index.train(sample)
    kept_index = untrained_kept(family, dim=dim)
    if kept_index is not None:
        kept_index.train(sample)
    return Quantizer(
        dump(coarse),
        None if index is None else dump_lists(index),
        None if kept_index is None else dump(kept_index),
    )


def _kmeans(
    sample: Float[ndarray, "docs dim"],
    count: int,
    *,
    seed: int,
    iterations: int = ITERATIONS,
    start: Float[ndarray, "count dim"] | None = None,
) -> Float[ndarray, "count dim"]:
    """Run spherical K-means: without unit centroids, the longest would be the nearest of every query."""
    clustering = faiss.Kmeans(
        sample.shape[1],
        count,
        niter=iterations,
        seed=seed,
        spherical=True,
        min_points_per_centroid=1,
        gpu=faiss.get_num_gpus() > 0,
    )
    clustering.train(sample, init_centroids=start)
    return np.array(clustering.centroids, np.float32)


def _two_levels(sample: Float[ndarray, "docs dim"], count: int, *, seed: int) -> Float[ndarray, "count dim"]:
    """Split sqrt(count) clusters, each into centroids in proportion to its size, then update all once.

    For 4,096 lists of 1 million synthetic vectors (32 dimensions, one thread) this takes 0.8 s instead of
    4.8 s. Recall@100 is 0.925 instead of 0.928 at nprobe 16, and 0.987 in both cases at 64; without the last
    update it is 0.908 and 0.978.
    """
    clusters = faiss.IndexFlatIP(sample.shape[1])
    clusters.add(_kmeans(sample, isqrt(count), seed=seed))
    nearest = clusters.search(sample, 1)[1][:, 0]
    sizes = np.bincount(nearest, minlength=clusters.ntotal)
    members = np.split(sample[np.argsort(nearest, kind="stable")], np.cumsum(sizes)[:-1])
    pairs = zip(members, _shares(sizes, count).tolist(), strict=True)
    centroids = [_kmeans(cluster, share, seed=seed) for cluster, share in pairs if share]
    return _kmeans(sample, count, seed=seed, iterations=1, start=np.concatenate(centroids))


def _shares(sizes: Int[ndarray, " clusters"], count: int) -> Int[ndarray, " clusters"]:
    """Divide `count` centroids between clusters by size: at least one each, at most one per vector."""
    shares: ndarray = np.clip(sizes * count // sizes.sum(), sizes > 0, sizes)
    # The clusters with the most vectors per centroid get the missing ones; those with the fewest lose one.
    while missing := count - int(shares.sum()):
        eligible = np.flatnonzero(shares < sizes if missing > 0 else shares > 1)
        vectors_per_centroid = sizes[eligible] / (shares[eligible] + (missing > 0))
        positions = eligible[
            np.argsort(-vectors_per_centroid if missing > 0 else vectors_per_centroid, kind="stable")
        ][: abs(missing)]
        shares[positions] += np.sign(missing)
    return shares


def coarse_of(centroids: Float[ndarray, "nlist dim"]) -> Any:
    """Build a coarse quantizer from centroids: a flat faiss index, or a graph (HNSW) from GRAPH_LISTS on.

    With 16,384 and 65,536 centroids of 128 dimensions a graph finds the 32 nearest 47 and 26 times as fast on
    a busy machine, and loses 0.005 and 0.006 of recall; with 4,096 it is slower. With 65,536 it finds the
    nearest centroid of a vector as fast as BLAS compares all. It is built in 2 s and 8 s.
    """
    centroids = np.ascontiguousarray(centroids, np.float32)
    if len(centroids) < GRAPH_LISTS:
        flat = faiss.IndexFlatIP(centroids.shape[1])
        flat.add(centroids)
        return flat
    graph = faiss.IndexHNSWFlat(centroids.shape[1], GRAPH_LINKS, INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = GRAPH_BUILD_EF, GRAPH_EF
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # with threads, the links would differ from run to run
    try:
        graph.add(centroids)
    finally:
        faiss.omp_set_num_threads(threads)
    return graph


def dump(index: Any) -> bytes:
    """Convert a faiss index to bytes."""
    return bytes(faiss.serialize_index(index).tobytes())


def dump_lists(index: Any) -> bytes:
    """Convert inverted lists to bytes, without the coarse quantizer that all shards share."""
    coarse, owned = index.quantizer, index.own_fields
    placeholder = faiss.IndexFlatIP(index.d)
    index.own_fields, index.quantizer = False, placeholder
    try:
        return dump(index)
    finally:
        index.own_fields, index.quantizer = owned, coarse


def parse(data: bytes) -> Any:
    """Parse a faiss index from the bytes of :func:`dump`."""
    return faiss.deserialize_index(np.frombuffer(data, np.uint8))


def write_quantizer(folder: str, quantizer: Quantizer) -> None:
    """Write the files of a quantizer; the coarse one is last and so marks the set as complete."""
    for name in ("lists", "kept", "coarse"):
        if (data := getattr(quantizer, name)) is not None:
            fs.write_bytes(fs.join(folder, f"{name}.faiss"), data)


def read_quantizer(folder: str) -> Quantizer:
    """Read the quantizer from a folder of :func:`write_quantizer`."""
    list_bytes, kept_bytes = (
        fs.read_if_exists(fs.join(folder, f"{name}.faiss")) for name in ("lists", "kept")
    )
    return Quantizer(fs.read_bytes(fs.join(folder, "coarse.faiss")), list_bytes, kept_bytes)
