"""Dense vectors of shards: index families, training, adding, and search of inverted lists in faiss.

    queries ─choose_lists─► lists to scan ─scan─► candidates by their codes ─► the best by the vectors kept

The *quantizer* is what is trained: centroids of the inverted lists, codebooks, and ranges of the scalar
quantizer. Every shard starts as an empty copy of it, so a query is compared with the centroids once, and the
chosen lists are scanned in every shard. Scores are inner products of unit vectors.

Families are built directly, not by faiss's index factory, which turns on polysemous training: 13 times slower
for equal recall.
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
from scalingnote.errors import ConfigError
from scalingnote.index import rescore
from scalingnote.index.config import IVFPQ, Family, FastScan, Flat, RaBitQ, Refine, ScalarQuantized
from scalingnote.quantize.kmeans import blas_only

# With fewer training points per centroid, K-means fits noise (faiss's own bound).
POINTS_PER_CENTROID = 39

Chosen = tuple[Float[ndarray, "queries probes"], Int[ndarray, "queries probes"]]
INNER_PRODUCT = faiss.METRIC_INNER_PRODUCT
FAST_SCAN_BITS = 4


@dataclass(frozen=True)
class Quantizer:
    """Shared by all shards: centroids, and trained but empty faiss indexes, serialized."""

    centroids: Float[ndarray, "nlist dim"]
    lists: bytes | None
    kept: bytes | None


@dataclass(frozen=True)
class Lists:
    """Vectors of one shard. Rows are numbered in the order in which they were added."""

    index: Any | None  # a faiss.IndexIVF...; None for a flat index, which only has `kept`
    kept: Any | None  # faiss.IndexFlatIP or IndexScalarQuantizer
    coarse: Any  # faiss.IndexFlatIP; `index` holds a bare pointer to it, so it must live as long

    def __len__(self) -> int:
        stored: Any = self.kept if self.index is None else self.index
        return int(stored.ntotal)


def default_nlist(documents: int, *, train_documents: int) -> int:
    """4*sqrt(documents), limited by what the training sample can fit."""
    return max(1, min(4 * isqrt(documents), min(documents, train_documents) // POINTS_PER_CENTROID))


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


def train(
    sample: Float[ndarray, "docs dim"], family: Family, *, nlist: int, iterations: int, seed: int
) -> Quantizer:
    """Fit a quantizer to a sample of unit vectors; centroids are fitted on GPUs where faiss sees some.

    Args:
        sample: unit vectors.
        family: how vectors are stored and scanned.
        nlist: number of inverted lists.
        iterations: of K-means.
        seed: of the initial centroids.

    Raises:
        ConfigError: the sample is too small for these settings.
    """
    dim = sample.shape[1]
    require_trainable(family, len(sample), dim=dim, nlist=nlist)
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
        index = untrained_lists(family, coarse, dim=dim, nlist=nlist)
        if index is not None:
            index.train(sample)
    kept = untrained_kept(family, dim=dim)
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
    """Append vectors; their rows follow those already there."""
    if not len(vectors):
        return  # some faiss indexes fail on an empty matrix
    vectors = np.ascontiguousarray(vectors, np.float32)
    if lists.index is not None:
        with blas_only():
            lists.index.add(vectors)
    if lists.kept is not None:
        lists.kept.add(vectors)


def choose_lists(queries: Float[ndarray, "queries dim"], coarse: Any, *, nprobe: int) -> Chosen:
    """Scores and numbers of the nprobe nearest lists of each query; computed once for all shards."""
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
    """Search the chosen lists of one shard.

    Args:
        lists: the shard.
        queries: unit vectors.
        chosen: lists to scan, from :func:`choose_lists`.
        k: documents per query.
        refine_factor: candidates by codes, per document, that are rescored by the vectors kept.
        allowed: bitmap of the rows that may be found, see :func:`bitmap`; None: all.

    Returns:
        Scores and rows, best first, padded with -inf and -1; fewer than k columns where the shard has fewer
        rows. Ties go to the lower row.
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
        # faiss's Python wrapper would take nprobe from the index, which threads share.
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
    """The k best of these rows by the vectors kept: for filters that leave few documents."""
    every = np.broadcast_to(rows, (len(queries), len(rows)))
    return rescore.best(lists.kept, queries, every, k=k)


def merge(pieces: Sequence[Lists]) -> Lists:
    """Merge shards into the first, rows one after the other; the others become empty.

    A query then costs the same for four shards as for one: lookup tables are computed and lists opened once.
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
    """Files of a shard: its lists without the shared centroids, and the vectors it keeps."""
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
    """Files of a quantizer; the centroids come last, so that their presence marks the set as complete."""
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
    """Scan a flat index by BLAS, which rounds differently per batch size; rescoring corrects that."""
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
