"""Inverted lists cut into shards that share one quantizer: vectors go in, the best rows of a shard come out.

    queries ─choose_lists─► lists to scan ─scan─► candidates by their codes ─► the best by the vectors kept

The *quantizer* is what is trained: centroids of the inverted lists, codebooks, and the scalar ranges of the
vectors kept. Every shard starts as an empty copy of it, so that a query is compared with the centroids once,
and the lists it chose are scanned in every shard. Scores are inner products of unit vectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import faiss
import numpy as np
from jaxtyping import Float, Int, UInt8
from numpy import ndarray

from scalingnote import topk
from scalingnote.index import family as families
from scalingnote.index import rescore
from scalingnote.index.config import Family
from scalingnote.quantize.blas import blas_only

# Fewer training points per centroid than this and K-means describes noise (faiss's own bound).
POINTS_PER_CENTROID = 39

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
        coarse = coarse_of(centroids)
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
    return load(coarse_of(quantizer.centroids), quantizer.lists, quantizer.kept)


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


def choose_lists(queries: Float[ndarray, "queries dim"], coarse: Any, *, nprobe: int) -> Chosen:
    """The nprobe lists to scan for each query, and their scores: done once for all shards."""
    scores, numbers = coarse.search(np.ascontiguousarray(queries, np.float32), nprobe)
    return scores, numbers


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
    row comes first. `allowed` is a bitmap of the rows that may be found, least significant bit first; None
    allows all. Fewer than k columns come back where the shard has fewer rows.
    """
    if lists.kept is None:
        return topk.merge(*scan(lists, queries, chosen=chosen, k=k, allowed=allowed), k=k)
    rows = scan(lists, queries, chosen=chosen, k=k * refine_factor, allowed=allowed)[1]
    return rescore.best(lists.kept, queries, rows, k=k)


def scan(
    lists: Lists,
    queries: Float[ndarray, "queries dim"],
    *,
    chosen: Chosen,
    k: int,
    allowed: UInt8[ndarray, " bytes"] | None = None,
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best rows of the chosen lists by their codes, best first; as :func:`search`."""
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


def score_all(
    lists: Lists, queries: Float[ndarray, "queries dim"], rows: Int[ndarray, " candidates"], *, k: int
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """The k best of these rows, each scored by the vectors kept: for filters that leave few documents."""
    every = np.broadcast_to(rows, (len(queries), len(rows)))
    return rescore.best(lists.kept, queries, every, k=k)


def merge(pieces: Sequence[Lists]) -> Lists:
    """Several shards as one, their rows one after the other; the pieces are used up.

    Four shards then cost a query what one costs: neither tables nor lists are begun four times.
    """
    first, *others = pieces
    for other in others:
        if first.index is not None:
            first.index.merge_from(other.index, len(first))
        if first.kept is not None:
            first.kept.merge_from(other.kept, 0)
    return first


def dump(index: Any) -> bytes:
    """A faiss index as bytes."""
    return bytes(faiss.serialize_index(index).tobytes())


def dump_files(lists: Lists) -> list[bytes]:
    """A shard's files: its lists without the centroids, which all shards share, and the vectors it keeps."""
    index = [] if lists.index is None else [_dump_lists(lists.index)]
    return [*index, *([] if lists.kept is None else [dump(lists.kept)])]


def load(coarse: Any, lists: bytes | None, kept: bytes | None) -> Lists:
    """A shard from its files and the coarse quantizer that all shards share."""
    index = None if lists is None else parse(lists)
    if index is not None:
        index.own_fields = False
        index.quantizer = coarse
    return Lists(index, None if kept is None else parse(kept), coarse)


def coarse_of(centroids: Float[ndarray, "nlist dim"]) -> Any:
    """The coarse quantizer of these centroids: a flat faiss index."""
    index = faiss.IndexFlatIP(centroids.shape[1])
    index.add(np.ascontiguousarray(centroids, np.float32))
    return index


def parse(data: bytes) -> Any:
    """A faiss index from the bytes of :func:`dump`."""
    return faiss.deserialize_index(np.frombuffer(data, np.uint8))


def dump_quantizer(quantizer: Quantizer) -> dict[str, bytes]:
    """Its files, the centroids last: where they are, so are the others."""
    files = {"lists.faiss": quantizer.lists, "kept.faiss": quantizer.kept}
    files["coarse.faiss"] = dump(coarse_of(quantizer.centroids))
    return {name: data for name, data in files.items() if data is not None}


def parse_quantizer(files: Mapping[str, bytes]) -> Quantizer:
    """A quantizer from the files of :func:`dump_quantizer`."""
    coarse = parse(files["coarse.faiss"])
    centroids = coarse.reconstruct_n(0, coarse.ntotal)
    return Quantizer(centroids, files.get("lists.faiss"), files.get("kept.faiss"))


def bitmap(mask: Sequence[bool] | ndarray) -> UInt8[ndarray, " bytes"]:
    """A mask of rows as :func:`scan` takes it."""
    return np.packbits(np.asarray(mask, bool), bitorder="little")


def _compare_all(
    kept: Any, queries: Float[ndarray, "queries dim"], *, k: int, allowed: UInt8[ndarray, " bytes"] | None
) -> tuple[Float[ndarray, "queries k"], Int[ndarray, "queries k"]]:
    """A flat index is scanned by BLAS; what that rounds differently for a batch is set right by rescoring."""
    documents = rescore.floats(kept)
    if allowed is None:
        return topk.search(queries, documents, k=k)
    rows = np.flatnonzero(np.unpackbits(allowed, count=kept.ntotal, bitorder="little"))
    scores, columns = topk.search(queries, documents[rows], k=k)
    return scores, rows[columns]


def _dump_lists(index: Any) -> bytes:
    coarse, owned = index.quantizer, index.own_fields
    placeholder = faiss.IndexFlatIP(index.d)
    index.own_fields, index.quantizer = False, placeholder
    try:
        return dump(index)
    finally:
        index.own_fields, index.quantizer = owned, coarse
