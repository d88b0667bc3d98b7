"""An IVFPQ index cut into shards that share one quantizer: vectors go in, the best rows of a shard come out.

The *quantizer* is what is trained: centroids of the inverted lists, PQ codebooks, and the scalar ranges of
the vectors kept for re-ranking. Every shard starts as an empty copy of it. A query is compared with the
centroids once, and the lists it chose are scanned in every shard. Scores are inner products of unit vectors.
"""

from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

import faiss
import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from scalingnote import topk
from scalingnote.errors import ConfigError
from scalingnote.quantize.blas import blas_only

Refine = Literal["none", "sq8", "flat"]

# Fewer training points per centroid than this and K-means describes noise (faiss's own bound).
POINTS_PER_CENTROID = 39


@dataclass(frozen=True)
class Quantizer:
    """What all shards share: centroids, and the trained but empty faiss indexes a shard starts from."""

    centroids: Float[ndarray, "nlist dim"]
    ivfpq: bytes
    refine: bytes | None


@dataclass(frozen=True)
class Lists:
    """The vectors of one shard. Row number = order in which they were added."""

    ivfpq: Any  # faiss.IndexIVFPQ
    refine: Any | None  # faiss.IndexFlatIP or IndexScalarQuantizer
    coarse: Any  # faiss.IndexFlatIP; the IVFPQ only points at it, so it must live as long

    def __len__(self) -> int:
        return int(self.ivfpq.ntotal)


def default_nlist(documents: int, *, train_documents: int) -> int:
    """4*sqrt(documents), as many as the training sample can place."""
    return max(1, min(4 * isqrt(documents), min(documents, train_documents) // POINTS_PER_CENTROID))


def default_m(dim: int) -> int:
    """One sub-quantizer per 4 dimensions, or fewer if 4 does not divide them."""
    return next(m for m in range(max(1, dim // 4), 0, -1) if dim % m == 0)


def require_trainable(documents: int, *, dim: int, nlist: int, m: int, nbits: int) -> None:
    """Refuse settings that this many training vectors of this dimension cannot serve."""
    if dim % m:
        raise ConfigError(
            f"index.m={m} does not divide the embeddings' dim {dim}: set index.m={default_m(dim)}"
        )
    if documents < nlist:
        raise ConfigError(
            f"index.nlist={nlist} needs as many training documents, found {documents}: lower index.nlist"
        )
    if documents < 1 << nbits:
        raise ConfigError(
            f"index.nbits={nbits} needs {1 << nbits} training documents, found {documents}: "
            f"set index.nbits={max(1, documents.bit_length() - 1)} or index more documents"
        )


def train(
    sample: Float[ndarray, "docs dim"],
    *,
    nlist: int,
    m: int,
    nbits: int,
    refine: Refine,
    iterations: int,
    seed: int,
) -> Quantizer:
    """Quantizer fitted to a sample of unit vectors; raises ConfigError when the sample is too small."""
    dim = sample.shape[1]
    require_trainable(len(sample), dim=dim, nlist=nlist, m=m, nbits=nbits)
    sample = np.ascontiguousarray(sample, np.float32)
    with blas_only():
        # Spherical: centroids of unit vectors are kept on the sphere, or the longest would win every query.
        clustering = faiss.Kmeans(
            dim, nlist, niter=iterations, seed=seed, spherical=True, min_points_per_centroid=1
        )
        clustering.train(sample)
        centroids = np.array(clustering.centroids, np.float32)
        coarse = _flat(centroids)
        # Built directly: the index factory turns on polysemous training, 13 times slower for equal recall.
        ivfpq = faiss.IndexIVFPQ(coarse, dim, nlist, m, nbits, faiss.METRIC_INNER_PRODUCT)
        ivfpq.pq.cp.seed = seed
        ivfpq.pq.cp.min_points_per_centroid = 1
        ivfpq.train(sample)
    vectors = _refiner(refine, dim)
    if vectors is not None:
        vectors.train(sample)
    return Quantizer(centroids, _dump_ivfpq(ivfpq), None if vectors is None else dump(vectors))


def empty(quantizer: Quantizer) -> Lists:
    """A shard without vectors."""
    return load(quantizer.centroids, quantizer.ivfpq, quantizer.refine)


def add(lists: Lists, vectors: Float[ndarray, "docs dim"]) -> None:
    """Append vectors; their rows go on from those already there."""
    vectors = np.ascontiguousarray(vectors, np.float32)
    with blas_only():
        lists.ivfpq.add(vectors)
    if lists.refine is not None:
        lists.refine.add(vectors)


def choose_lists(
    queries: Float[ndarray, "queries dim"], centroids: Float[ndarray, "nlist dim"], *, nprobe: int
) -> tuple[Float[ndarray, "queries probes"], Int[ndarray, "queries probes"]]:
    """The nprobe lists to scan for each query, and their scores: done once for all shards."""
    return topk.search(queries, centroids, k=nprobe)


def search(
    lists: Lists,
    queries: Float[ndarray, "queries dim"],
    *,
    chosen: tuple[Float[ndarray, "queries probes"], Int[ndarray, "queries probes"]],
    k: int,
    refine_factor: int,
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """Scores and rows of each query's k best in the chosen lists; -inf and -1 where there are fewer.

    With kept vectors, refine_factor * k candidates of the PQ codes are scored anew. Of equal scores the lower
    row comes first.
    """
    wide = k if lists.refine is None else k * refine_factor
    scores, rows = _scan(lists, queries, chosen, min(wide, max(len(lists), 1)))
    if lists.refine is not None:
        scores = _rescore(lists.refine, queries, rows)
    return topk.merge(scores, rows, k=k)


def dump(index: Any) -> bytes:
    """A faiss index as bytes."""
    return bytes(faiss.serialize_index(index).tobytes())


def dump_lists(lists: Lists) -> list[bytes]:
    """A shard's files: IVFPQ without the centroids, which all shards share; kept vectors if there are any."""
    return [_dump_ivfpq(lists.ivfpq), *([] if lists.refine is None else [dump(lists.refine)])]


def load(centroids: Float[ndarray, "nlist dim"], ivfpq: bytes, refine: bytes | None = None) -> Lists:
    """A shard from its files and the shared centroids."""
    index = _parse(ivfpq)
    coarse = _flat(centroids)
    index.own_fields = False
    index.quantizer = coarse
    return Lists(index, None if refine is None else _parse(refine), coarse)


def load_centroids(coarse: bytes) -> Float[ndarray, "nlist dim"]:
    """The shared centroids, from the bytes of :func:`dump_centroids`."""
    index = _parse(coarse)
    centroids: ndarray = index.reconstruct_n(0, index.ntotal)
    return centroids


def dump_centroids(centroids: Float[ndarray, "nlist dim"]) -> bytes:
    """The shared centroids as a flat faiss index."""
    return dump(_flat(centroids))


def _scan(
    lists: Lists,
    queries: Float[ndarray, "queries dim"],
    chosen: tuple[Float[ndarray, "queries probes"], Int[ndarray, "queries probes"]],
    k: int,
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    list_scores, list_numbers = chosen
    scores = np.full((len(queries), k), -np.inf, np.float32)
    rows = np.full((len(queries), k), -1, np.int64)
    if len(lists) and len(queries):
        parameters = faiss.SearchParametersIVF()
        parameters.nprobe = list_numbers.shape[1]
        # Not the Python wrapper: that takes nprobe from the index, which threads share.
        lists.ivfpq.search_preassigned_c(
            len(queries),
            faiss.swig_ptr(np.ascontiguousarray(queries, np.float32)),
            k,
            faiss.swig_ptr(np.ascontiguousarray(list_numbers, np.int64)),
            faiss.swig_ptr(np.ascontiguousarray(list_scores, np.float32)),
            faiss.swig_ptr(scores),
            faiss.swig_ptr(rows),
            False,
            parameters,
        )
        scores[rows < 0] = -np.inf
    return scores, rows


def _rescore(
    kept: Any, queries: Float[ndarray, "queries dim"], rows: Int[ndarray, "queries candidates"]
) -> Float[ndarray, "queries candidates"]:
    """Scores of the kept vectors; -inf where the row is -1.

    einsum rather than BLAS: it sums each product in one order, so a document's score does not depend on which
    other candidates it stands among, nor on the shard it is in.
    """
    scores = np.full(rows.shape, -np.inf, np.float32)
    if not kept.ntotal:
        return scores
    stored = faiss.rev_swig_ptr(kept.codes.data(), kept.codes.size()).reshape(-1, kept.sa_code_size())
    for query, candidates, target in zip(queries, rows, scores, strict=True):
        found = candidates >= 0
        if found.any():
            vectors = kept.sa_decode(stored[candidates[found]])
            target[found] = np.einsum("nd,d->n", vectors, query)
    return scores


def _refiner(refine: Refine, dim: int) -> Any | None:
    match refine:
        case "none":
            return None
        case "sq8":
            return faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        case "flat":
            return faiss.IndexFlatIP(dim)


def _flat(centroids: Float[ndarray, "nlist dim"]) -> Any:
    index = faiss.IndexFlatIP(centroids.shape[1])
    index.add(np.ascontiguousarray(centroids, np.float32))
    return index


def _dump_ivfpq(index: Any) -> bytes:
    coarse, owned = index.quantizer, index.own_fields
    placeholder = faiss.IndexFlatIP(index.d)
    index.own_fields, index.quantizer = False, placeholder
    try:
        return dump(index)
    finally:
        index.own_fields, index.quantizer = owned, coarse


def _parse(data: bytes) -> Any:
    return faiss.deserialize_index(np.frombuffer(data, np.uint8))
