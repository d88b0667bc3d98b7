"""Inverted lists cut into shards that share one quantizer: vectors go in, the best rows of a shard come out.

    queries ─choose_lists─► lists to scan ─scan─► candidates by their codes ─rescore─► by the vectors kept

The *quantizer* is what is trained: centroids of the inverted lists, codebooks, and the scalar ranges of the
vectors kept. Every shard starts as an empty copy of it, so that a query is compared with the centroids once,
and the lists it chose are scanned in every shard. Scores are inner products of unit vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float, Int, UInt8
from numpy import ndarray

from scalingnote import topk
from scalingnote.index import family as families
from scalingnote.index.config import Family
from scalingnote.quantize.blas import blas_only

# Fewer training points per centroid than this and K-means describes noise (faiss's own bound).
POINTS_PER_CENTROID = 39
# Rows decoded at once where every row of a filter is scored: 8,192 of 128 floats stay in a core's cache.
BLOCK = 8192

Chosen = tuple[Float[ndarray, "queries probes"], Int[ndarray, "queries probes"]]


@dataclass(frozen=True)
class Quantizer:
    """What all shards share: centroids, and the trained but empty faiss indexes a shard starts from."""

    centroids: Float[ndarray, "nlist dim"]
    lists: bytes | None
    kept: bytes | None


@dataclass(frozen=True)
class Lists:
    """The vectors of one shard. Row number = order in which they were added."""

    index: Any | None  # a faiss.IndexIVF...; None for a flat index, which is nothing but `kept`
    kept: Any | None  # faiss.IndexFlatIP or IndexScalarQuantizer
    coarse: Any  # faiss.IndexFlatIP; the lists only point at it, so it must live as long

    def __len__(self) -> int:
        stored: Any = self.kept if self.index is None else self.index
        return int(stored.ntotal)


def default_nlist(documents: int, *, train_documents: int) -> int:
    """4*sqrt(documents), as many as the training sample can place."""
    return max(1, min(4 * isqrt(documents), min(documents, train_documents) // POINTS_PER_CENTROID))


def train(
    sample: Float[ndarray, "docs dim"], family: Family, *, nlist: int, iterations: int, seed: int
) -> Quantizer:
    """Quantizer fitted to a sample of unit vectors; raises ConfigError when the sample is too small.

    The centroids are found on GPUs where faiss sees some.
    """
    dim = sample.shape[1]
    families.require_trainable(family, len(sample), dim=dim, nlist=nlist)
    sample = np.ascontiguousarray(sample, np.float32)
    with blas_only():
        # Spherical: centroids of unit vectors are kept on the sphere, or the longest would win every query.
        clustering = faiss.Kmeans(
            dim,
            nlist,
            niter=iterations,
            seed=seed,
            spherical=True,
            min_points_per_centroid=1,
            gpu=faiss.get_num_gpus() > 0,
        )
        clustering.train(sample)
        centroids = np.array(clustering.centroids, np.float32)
        coarse = _flat(centroids)
        index = families.lists(family, coarse, dim=dim, nlist=nlist)
        if index is not None:
            index.train(sample)
    kept = families.kept_vectors(family, dim=dim)
    if kept is not None:
        kept.train(sample)
    return Quantizer(
        centroids,
        None if index is None else _dump_lists(index),
        None if kept is None else dump(kept),
    )


def empty(quantizer: Quantizer) -> Lists:
    """A shard without vectors."""
    return load(quantizer.centroids, quantizer.lists, quantizer.kept)


def add(lists: Lists, vectors: Float[ndarray, "docs dim"]) -> None:
    """Append vectors; their rows go on from those already there."""
    if not len(vectors):
        return  # not every family of faiss takes nothing
    vectors = np.ascontiguousarray(vectors, np.float32)
    if lists.index is not None:
        with blas_only():
            lists.index.add(vectors)
    if lists.kept is not None:
        lists.kept.add(vectors)


def choose_lists(
    queries: Float[ndarray, "queries dim"], centroids: Float[ndarray, "nlist dim"], *, nprobe: int
) -> Chosen:
    """The nprobe lists to scan for each query, and their scores: done once for all shards."""
    return topk.search(queries, centroids, k=nprobe)


def search(
    lists: Lists,
    queries: Float[ndarray, "queries dim"],
    *,
    chosen: Chosen,
    k: int,
    refine_factor: int,
    allowed: UInt8[ndarray, " bytes"] | None = None,
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """Scores and rows of each query's k best in the chosen lists; -inf and -1 where there are fewer.

    With kept vectors, refine_factor * k candidates of the codes are scored anew. Of equal scores the lower
    row comes first.
    """
    scores, rows = scan(lists, queries, chosen=chosen, k=k * refine_factor, allowed=allowed)
    return topk.merge(rescore(lists, queries, scores, rows), rows, k=k)


def scan(
    lists: Lists,
    queries: Float[ndarray, "queries dim"],
    *,
    chosen: Chosen,
    k: int,
    allowed: UInt8[ndarray, " bytes"] | None = None,
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best rows of the chosen lists by their codes, best first; -inf and -1 where there are fewer.

    `allowed` is a bitmap of the rows that may be found, least significant bit first; None allows all. Fewer
    than k columns come back where the shard has fewer rows.
    """
    k = min(k, max(len(lists), 1))
    if lists.index is None:
        return _compare_all(lists.kept, queries, k=k, allowed=allowed)
    list_scores, list_numbers = chosen
    scores = np.full((len(queries), k), -np.inf, np.float32)
    rows = np.full((len(queries), k), -1, np.int64)
    if len(lists) and len(queries):
        parameters = faiss.SearchParametersIVF()
        parameters.nprobe = list_numbers.shape[1]
        if allowed is not None:
            selector = faiss.IDSelectorBitmap(len(allowed), faiss.swig_ptr(allowed))
            parameters.sel = selector
        # Not the Python wrapper: that takes nprobe from the index, which threads share.
        lists.index.search_preassigned_c(
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


def rescore(
    lists: Lists,
    queries: Float[ndarray, "queries dim"],
    scores: Float[ndarray, "queries candidates"],
    rows: Int[ndarray, "queries candidates"],
) -> Float[ndarray, "queries candidates"]:
    """Scores of candidates by the vectors kept; -inf where the row is -1. `scores` stand if none are kept."""
    if lists.kept is None:
        return scores
    exact = np.full(rows.shape, -np.inf, np.float32)
    for query, candidates, target in zip(queries, rows, exact, strict=True):
        found = candidates >= 0
        if found.any():
            target[found] = _products(vectors(lists.kept, candidates[found]), query)
    return exact


def score_all(
    lists: Lists, queries: Float[ndarray, "queries dim"], rows: Int[ndarray, " candidates"], *, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best of these rows, each scored by the vectors kept: for filters that leave few documents."""
    best = np.empty((len(queries), 0), np.float32)
    found = np.empty((len(queries), 0), np.int64)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        decoded = vectors(lists.kept, block)
        scores = np.stack([_products(decoded, query) for query in queries])
        ids = np.broadcast_to(block, scores.shape)
        best, found = topk.merge(np.hstack([best, scores]), np.hstack([found, ids]), k=k)
    return best, found


def vectors(kept: Any, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows dim"]:
    """Vectors that a shard keeps, as floats."""
    decoded: ndarray = kept.sa_decode(_stored(kept)[rows])
    return decoded


def dump(index: Any) -> bytes:
    """A faiss index as bytes."""
    return bytes(faiss.serialize_index(index).tobytes())


def dump_files(lists: Lists) -> list[bytes]:
    """A shard's files: its lists without the centroids, which all shards share, and the vectors it keeps."""
    index = [] if lists.index is None else [_dump_lists(lists.index)]
    return [*index, *([] if lists.kept is None else [dump(lists.kept)])]


def load(centroids: Float[ndarray, "nlist dim"], lists: bytes | None, kept: bytes | None) -> Lists:
    """A shard from its files and the shared centroids."""
    coarse = _flat(centroids)
    index = None if lists is None else _parse(lists)
    if index is not None:
        index.own_fields = False
        index.quantizer = coarse
    return Lists(index, None if kept is None else _parse(kept), coarse)


def load_centroids(coarse: bytes) -> Float[ndarray, "nlist dim"]:
    """The shared centroids, from the bytes of :func:`dump_centroids`."""
    index = _parse(coarse)
    centroids: ndarray = index.reconstruct_n(0, index.ntotal)
    return centroids


def dump_centroids(centroids: Float[ndarray, "nlist dim"]) -> bytes:
    """The shared centroids as a flat faiss index."""
    return dump(_flat(centroids))


def bitmap(mask: Sequence[bool] | ndarray) -> UInt8[ndarray, " bytes"]:
    """A mask of rows as :func:`scan` takes it."""
    return np.packbits(np.asarray(mask, bool), bitorder="little")


def _compare_all(
    kept: Any, queries: Float[ndarray, "queries dim"], *, k: int, allowed: UInt8[ndarray, " bytes"] | None
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """A flat index is scanned by BLAS; the scores it rounds differently are set right by :func:`rescore`."""
    stored = _stored(kept).view(np.float32).reshape(kept.ntotal, kept.d)
    if allowed is None:
        return topk.search(queries, stored, k=k)
    rows = np.flatnonzero(np.unpackbits(allowed, count=kept.ntotal, bitorder="little"))
    scores, columns = topk.search(queries, stored[rows], k=k)
    return scores, rows[columns]


def _stored(kept: Any) -> UInt8[ndarray, "rows bytes"]:
    if not kept.ntotal:
        return np.empty((0, kept.sa_code_size()), np.uint8)
    flat: ndarray = faiss.rev_swig_ptr(kept.codes.data(), kept.codes.size())
    return flat.reshape(-1, kept.sa_code_size())


def _products(
    documents: Float[ndarray, "docs dim"], query: Float[ndarray, " dim"]
) -> Float[ndarray, " docs"]:
    """einsum rather than BLAS: it sums each product in one order, so a document's score does not depend on
    which other candidates it stands among, nor on the shard it is in."""
    products: ndarray = np.einsum("nd,d->n", documents, query)
    return products


def _flat(centroids: Float[ndarray, "nlist dim"]) -> Any:
    index = faiss.IndexFlatIP(centroids.shape[1])
    index.add(np.ascontiguousarray(centroids, np.float32))
    return index


def _dump_lists(index: Any) -> bytes:
    coarse, owned = index.quantizer, index.own_fields
    placeholder = faiss.IndexFlatIP(index.d)
    index.own_fields, index.quantizer = False, placeholder
    try:
        return dump(index)
    finally:
        index.own_fields, index.quantizer = owned, coarse


def _parse(data: bytes) -> Any:
    return faiss.deserialize_index(np.frombuffer(data, np.uint8))
