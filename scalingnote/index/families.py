"""Index families: how vectors of shards are stored, and the training of what all shards share.

The *quantizer* is what is trained: the coarse quantizer of the inverted lists, codebooks, and ranges of the
scalar quantizer. Every shard starts as an empty copy of it, so a query is compared with the centroids once,
and the chosen lists are scanned in every shard.

Indexes are built directly, not by faiss's index factory, which turns on polysemous training: 13 times slower
for equal recall.
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
MIN_TRAINED = 200_000  # documents that codebooks and ranges are trained on, however few the lists
TWO_LEVEL_LISTS = 8_192  # from this many on, K-means splits clusters of clusters
GRAPH_LISTS = 16_384  # from this many on, the nearest centroids are found in a graph
GRAPH_LINKS, GRAPH_BUILD_EF, GRAPH_EF = 32, 80, 32  # faiss's M, efConstruction, efSearch
INNER_PRODUCT = faiss.METRIC_INNER_PRODUCT
FAST_SCAN_BITS = 4
_ID_BYTES = 8  # of a vector's number in the inverted lists
UNIT_TOLERANCE = 0.01  # of the mean length of unit vectors, which are stored in float16


@dataclass(frozen=True)
class Quantizer:
    """Shared by all shards: trained but empty faiss indexes, serialized."""

    coarse: bytes
    lists: bytes | None
    kept: bytes | None

    @property
    def centroids(self) -> Float[ndarray, "nlist dim"]:
        """Centroids of the inverted lists."""
        coarse = parse(self.coarse)
        found: ndarray = coarse.reconstruct_n(0, coarse.ntotal)
        return found


def default_nlist(documents: int, *, train_documents: int) -> int:
    """4*sqrt(documents), limited by what the training sample can fit."""
    fitted = min(documents, train_documents) // POINTS_PER_CENTROID
    return max(1, min(4 * isqrt(documents), fitted, MAX_LISTS))


def sample_size(config: IndexConfig, documents: int, *, nlist: int) -> int:
    """Number of documents to train on: enough for every list, as far as the settings allow."""
    return min(documents, config.train_documents, max(MIN_TRAINED, POINTS_PER_CENTROID * nlist))


def untrained_lists(family: Family, coarse: Any, *, dim: int, nlist: int) -> Any | None:
    """Untrained inverted lists of a family over a coarse quantizer; None where it has none."""
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
    """Untrained store of vectors for rescoring candidates; None where the family keeps none."""
    match refine_of(family):
        case "none":
            return None
        case "sq8":
            return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, INNER_PRODUCT)
        case "flat":
            return faiss.IndexFlatIP(dim)


def refine_of(family: Family) -> Refine:
    """What a family keeps beside its codes; a flat index only has the vectors it keeps."""
    match family:
        case ScalarQuantized():
            return "none"
        case Flat():
            return "flat"
        case _:
            return family.refine


def vector_bytes(family: Family, *, dim: int) -> int:
    """Bytes of a document's code, its number in the lists and its kept vector."""
    lists = untrained_lists(family, faiss.IndexFlatIP(dim), dim=dim, nlist=1)
    kept = untrained_kept(family, dim=dim)
    code = 0 if lists is None else lists.code_size + _ID_BYTES
    return int(code + (0 if kept is None else kept.sa_code_size()))


def sub_quantizers(family: FastScan | IVFPQ, dim: int) -> int:
    """`m` as configured; else one per 2 (4 bits) or 4 (8 bits) dimensions, or fewer to divide dim."""
    width = 2 if isinstance(family, FastScan) else 4
    return family.m or next(m for m in range(max(1, dim // width), 0, -1) if dim % m == 0)


def require_trainable(family: Family, documents: int, *, dim: int, nlist: int) -> None:
    """ConfigError where this many training vectors of this dimension do not suffice for the settings."""
    if documents < nlist:
        raise ConfigError(
            f"index.nlist={nlist} needs as many training documents, found {documents}: lower index.nlist"
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
    """Fit a quantizer to a sample of vectors; centroids are fitted on GPUs where faiss sees some.

    Lists are chosen by direction. Of vectors that are longer or shorter than 1, centroids of product codes
    get the mean length, so that the difference from a centroid, which a code stands for, is small. RaBitQ
    scales each vector itself: with such centroids faiss 1.15 loses most of its recall.
    ConfigError where the sample is too small for these settings.
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
    kept = untrained_kept(family, dim=dim)
    if kept is not None:
        kept.train(sample)
    return Quantizer(
        dump(coarse), None if index is None else dump_lists(index), None if kept is None else dump(kept)
    )


def _kmeans(
    sample: Float[ndarray, "docs dim"],
    count: int,
    *,
    seed: int,
    iterations: int = ITERATIONS,
    start: Float[ndarray, "count dim"] | None = None,
) -> Float[ndarray, "count dim"]:
    """Spherical: centroids are kept on the sphere, or the longest would win every query."""
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
    """Split sqrt(count) clusters, each into centroids in proportion to its size, then move all of them once.

    4,096 lists of 1 million synthetic vectors (32 dimensions, one thread): 0.8 s instead of 4.8 s, recall@100
    0.925 instead of 0.928 at nprobe 16 and 0.987 either way at 64; without the last pass 0.908 and 0.978.
    """
    clusters = faiss.IndexFlatIP(sample.shape[1])
    clusters.add(_kmeans(sample, isqrt(count), seed=seed))
    nearest = clusters.search(sample, 1)[1][:, 0]
    sizes = np.bincount(nearest, minlength=clusters.ntotal)
    members = np.split(sample[np.argsort(nearest, kind="stable")], np.cumsum(sizes)[:-1])
    pairs = zip(members, _shares(sizes, count).tolist(), strict=True)
    split = [_kmeans(own, share, seed=seed) for own, share in pairs if share]
    return _kmeans(sample, count, seed=seed, iterations=1, start=np.concatenate(split))


def _shares(sizes: Int[ndarray, " clusters"], count: int) -> Int[ndarray, " clusters"]:
    """Divide `count` centroids between clusters by size: one each at least, at most one per vector."""
    shares: ndarray = np.clip(sizes * count // sizes.sum(), sizes > 0, sizes)
    # The largest clusters per centroid get what is left over, or give what is too much.
    while missing := count - int(shares.sum()):
        able = np.flatnonzero(shares < sizes if missing > 0 else shares > 1)
        rest = sizes[able] / (shares[able] + (missing > 0))
        chosen = able[np.argsort(-rest if missing > 0 else rest, kind="stable")][: abs(missing)]
        shares[chosen] += np.sign(missing)
    return shares


def coarse_of(centroids: Float[ndarray, "nlist dim"]) -> Any:
    """The coarse quantizer of these centroids: a flat faiss index, or of GRAPH_LISTS and more a graph (HNSW).

    Of 16,384 and 65,536 centroids of 128 dimensions a graph finds the 32 nearest 47 and 26 times as fast on a
    busy machine, and loses 0.005 and 0.006 of recall; of 4,096 it is slower.
    Of 65,536 it finds a vector's nearest as fast as BLAS compares all. It is built in 2 s and 8 s.
    """
    centroids = np.ascontiguousarray(centroids, np.float32)
    if len(centroids) < GRAPH_LISTS:
        flat = faiss.IndexFlatIP(centroids.shape[1])
        flat.add(centroids)
        return flat
    graph = faiss.IndexHNSWFlat(centroids.shape[1], GRAPH_LINKS, INNER_PRODUCT)
    graph.hnsw.efConstruction, graph.hnsw.efSearch = GRAPH_BUILD_EF, GRAPH_EF
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # threads would link the same centroids differently in every run
    try:
        graph.add(centroids)
    finally:
        faiss.omp_set_num_threads(threads)
    return graph


def dump(index: Any) -> bytes:
    """A faiss index as bytes."""
    return bytes(faiss.serialize_index(index).tobytes())


def dump_lists(index: Any) -> bytes:
    """Inverted lists as bytes, without the coarse quantizer that all shards share."""
    coarse, owned = index.quantizer, index.own_fields
    placeholder = faiss.IndexFlatIP(index.d)
    index.own_fields, index.quantizer = False, placeholder
    try:
        return dump(index)
    finally:
        index.own_fields, index.quantizer = owned, coarse


def parse(data: bytes) -> Any:
    """A faiss index from the bytes of :func:`dump`."""
    return faiss.deserialize_index(np.frombuffer(data, np.uint8))


def write_quantizer(folder: str, quantizer: Quantizer) -> None:
    """Write the files of a quantizer; the coarse one comes last, so that it marks the set as complete."""
    for name in ("lists", "kept", "coarse"):
        if (data := getattr(quantizer, name)) is not None:
            fs.write_bytes(fs.join(folder, f"{name}.faiss"), data)


def read_quantizer(folder: str) -> Quantizer:
    """The quantizer in a folder of :func:`write_quantizer`."""
    lists, kept = (fs.read_if_exists(fs.join(folder, f"{name}.faiss")) for name in ("lists", "kept"))
    return Quantizer(fs.read_bytes(fs.join(folder, "coarse.faiss")), lists, kept)
