"""Vectors of a shard: its inverted lists, and the search of these by codes and exact scores.

    queries ─choose_lists─► lists to scan ─scan─► candidates by their codes ─► the best by the kept vectors

Scores are inner products of unit queries with documents, which are unit vectors if search is by cosine. numba
compiles the exact scores and the heap of the best, because numpy would take longer than the scan that finds
the candidates. The terms of a score are added in the same order for all candidates and shards, so equal
documents have equal scores everywhere. Ties go to the lower row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, no_type_check
from weakref import WeakKeyDictionary

import faiss
import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from numpy import ndarray

from scalingnote.core import topk
from scalingnote.core.topk import jit
from scalingnote.index.families import Quantizer, dump, dump_lists, parse
from scalingnote.quantize.kmeans import blas_only

UnitQueries = Float[ndarray, "queries dim"]  # unit vectors
CandidateRows = Int[ndarray, "queries candidates"]  # -1 for none
CandidateScores = Float[ndarray, "queries candidates"]
Chosen = tuple[Float[ndarray, "queries probes"], Int[ndarray, "queries probes"]]
GRAPH_MAX_SHARE = 8  # for more than 1/8 of the centroids, a graph search is slower than comparing all
# Sums may be reordered, so that loops over dimensions are vectorised; infinities must remain infinities.
_REORDERED = {"reassoc", "contract", "nsz"}
RESCORE_COST = 16  # number of codes scanned in the time of scoring one kept vector (fast scan, dim 128)
# Caches, because reading these from faiss takes longer than scoring the candidates of one query.
_STORED: WeakKeyDictionary[Any, UInt8[ndarray, "rows bytes"]] = WeakKeyDictionary()
_RANGES: WeakKeyDictionary[Any, tuple[ndarray, ndarray]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Lists:
    """Vectors of one shard; row numbers follow the order of addition."""

    index: Any | None  # a faiss.IndexIVF...; None for a flat index, which only has `kept`
    kept: Any | None  # faiss.IndexFlatIP or IndexScalarQuantizer
    coarse: Any  # flat or HNSW faiss index; `index` holds a bare pointer to it, so it must live as long

    def __len__(self) -> int:
        vectors: Any = self.kept if self.index is None else self.index
        return int(vectors.ntotal)


@dataclass(frozen=True, eq=False)
class RowMask:
    """Rows of a segment that may be found, with arguments for faiss that the first scan computes."""

    rows: Bool[ndarray, " rows"]

    @cached_property
    def count(self) -> int:
        """Number of rows that may be found."""
        return int(np.count_nonzero(self.rows))

    @cached_property
    def _bits(self) -> UInt8[ndarray, " bytes"]:
        return np.packbits(self.rows, bitorder="little")

    @cached_property
    def selector(self) -> Any:
        """Selector of the rows for faiss, valid as long as this mask exists."""
        return faiss.IDSelectorBitmap(len(self._bits), faiss.swig_ptr(self._bits))

    @cached_property
    def parameters(self) -> Callable[[int], Any]:
        """Function that returns faiss's parameters of a scan for an nprobe; threads may share them."""
        return lru_cache(partial(_scan_parameters, selector=self.selector))


def _scan_parameters(nprobe: int, *, selector: Any = None) -> Any:
    parameters = faiss.SearchParametersIVF()
    parameters.nprobe = nprobe
    if selector is not None:
        parameters.sel = selector
    return parameters


# Parameters are built once, because that takes as long as scanning a dozen lists.
_all_rows = lru_cache(_scan_parameters)


def empty(quantizer: Quantizer) -> Lists:
    """Build a shard without vectors."""
    return load(parse(quantizer.coarse), quantizer.lists, quantizer.kept)


def load(coarse: Any, *files: bytes | None) -> Lists:
    """Load a shard from the contents of its files and the coarse quantizer that all shards share."""
    return _join(coarse, [parse(data) for data in files if data is not None])


def read(coarse: Any, files: Sequence[Path], *, mapped: bool = False) -> Lists:
    """Read a shard from local files of :func:`dump_files`; `mapped`: as views of the files, if faiss can."""
    flags = faiss.IO_FLAG_MMAP_IFC if mapped else 0
    return _join(coarse, [faiss.read_index(str(file), flags) for file in files])


def _join(coarse: Any, indexes: Sequence[Any]) -> Lists:
    index = kept_index = None
    for each in indexes:
        if isinstance(each, faiss.IndexIVF):
            index = each
            index.own_fields, index.quantizer = False, coarse
        else:
            kept_index = each
    return Lists(index, kept_index, coarse)


def dump_files(lists: Lists) -> list[bytes]:
    """Return the contents of the files of a shard: lists without the shared centroids, and kept vectors."""
    index = [] if lists.index is None else [dump_lists(lists.index)]
    return [*index, *([] if lists.kept is None else [dump(lists.kept)])]


def add(lists: Lists, vectors: Float[ndarray, "docs dim"]) -> None:
    """Append vectors; their rows follow the existing ones."""
    if not len(vectors):
        return  # some faiss indexes fail on an empty matrix
    vectors = np.ascontiguousarray(vectors, np.float32)
    if lists.index is not None:
        with blas_only():
            lists.index.add(vectors)
    if lists.kept is not None:
        lists.kept.add(vectors)


def merge(pieces: Sequence[Lists]) -> Lists:
    """Merge shards into the first one, in the order of their rows; the others become empty.

    A query of four shards then costs the same as a query of one: lookup tables are computed once and lists
    are opened once.
    """
    first, *others = pieces
    for other in others:
        if first.index is not None:
            first.index.merge_from(other.index, len(first))
        if first.kept is not None:
            first.kept.merge_from(other.kept, 0)
    return first


def copy_lists(lists: Lists) -> Lists:
    """Copy lists, to add rows to the copy while the original is searched.

    Serializing is not an alternative: it detaches the centroids meanwhile, and searches would fail. The
    index of the copy has its own centroids.
    """
    index, kept_index = (
        None if original is None else faiss.clone_index(original) for original in (lists.index, lists.kept)
    )
    return replace(lists, index=index, kept=kept_index)


def drop_dead_rows(lists: Lists, alive: Bool[ndarray, " rows"]) -> None:
    """Drop dead rows in place and renumber the others in order.

    The lists must not be searched meanwhile. Later rows must be added by `ivf.merge`: the `add` of fast scan
    would combine new codes with remains of old ones in a partly filled block (faiss 1.15.1).
    """
    dead = RowMask(~alive)
    selector = dead.selector
    if lists.kept is not None:
        lists.kept.remove_ids(selector)  # a flat index closes its gaps itself
    if lists.index is None:
        return
    lists.index.remove_ids(selector)
    numbers = np.cumsum(alive) - 1
    inverted = lists.index.invlists
    for number in range(lists.index.nlist):
        if size := inverted.list_size(number):
            ids = faiss.rev_swig_ptr(inverted.get_ids(number), size)
            ids[:] = numbers[ids]


def choose_lists(queries: UnitQueries, coarse: Any, *, nprobe: int) -> Chosen:
    """Find the nprobe nearest lists of each query, once for all shards: their scores and numbers."""
    parameters = None
    if isinstance(coarse, faiss.IndexHNSW):
        if nprobe * GRAPH_MAX_SHARE > coarse.ntotal:
            coarse = faiss.downcast_index(coarse.storage)
        else:
            ef = max(coarse.hnsw.efSearch, 4 * nprobe)
            parameters = faiss.SearchParametersHNSW(efSearch=ef)  # type: ignore[attr-defined]
    scores, numbers = coarse.search(np.ascontiguousarray(queries, np.float32), nprobe, params=parameters)
    return scores, numbers


def candidates(
    lists: Lists,
    queries: UnitQueries,
    *,
    chosen: Chosen,
    k: int,
    refine_factor: int,
    allowed: RowMask | None = None,
) -> tuple[CandidateScores, CandidateRows]:
    """Find rows of one shard that include its k best documents, in any order.

    Args:
        lists: the shard.
        queries: unit vectors.
        chosen: lists to scan, from :func:`choose_lists`.
        k: documents per query.
        refine_factor: number of candidates by codes, per requested document, that kept vectors rescore.
        allowed: rows that may be found; None: all.

    Returns:
        Scores and rows for :func:`topk.merge`; the score of row -1 is undefined.
    """
    if lists.kept is None:
        return scan(lists, queries, chosen=chosen, k=k, allowed=allowed)
    _, rows = scan(lists, queries, chosen=chosen, k=k * refine_factor, allowed=allowed)
    return scores(lists.kept, queries, rows), rows


def scan(
    lists: Lists, queries: UnitQueries, *, chosen: Chosen, k: int, allowed: RowMask | None = None
) -> tuple[CandidateScores, CandidateRows]:
    """Find the k best rows of the chosen lists by codes, best first; the score of row -1 is undefined."""
    count = len(lists)  # once, because this call of faiss takes a microsecond
    k = min(k, max(count, 1))
    if lists.index is None:
        return _compare_all(lists.kept, queries, k=k, allowed=allowed)
    list_scores, list_numbers = chosen
    scores = np.empty((len(queries), k), np.float32)
    rows = np.full((len(queries), k), -1, np.int64)
    if count and len(queries):
        parameters = (_all_rows if allowed is None else allowed.parameters)(list_numbers.shape[1])
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
    return scores, rows


def _compare_all(
    kept: Any, queries: UnitQueries, *, k: int, allowed: RowMask | None
) -> tuple[CandidateScores, CandidateRows]:
    """Scan a flat index by BLAS, which rounds differently per batch size; rescoring corrects the scores."""
    documents = floats(kept)
    if allowed is None:
        return topk.search(queries, documents, k=k)
    if 2 * allowed.count > kept.ntotal:  # copying these rows would cost more than scoring all
        return topk.search(queries, documents, k=k, allowed=allowed.rows)
    rows = np.flatnonzero(allowed.rows)
    scores, columns = topk.search(queries, documents[rows], k=k)
    return scores, rows[columns]


# --- exact scores -----------------------------------------------------------------------------------------


def scores(kept: Any, queries: UnitQueries, rows: CandidateRows) -> CandidateScores:
    """Compute inner products with kept vectors; -inf if the row is -1."""
    queries = np.ascontiguousarray(queries, np.float32)
    if isinstance(kept, faiss.IndexFlat):
        products: ndarray = _of_floats(floats(kept), queries, rows)
    else:
        products = _of_bytes(stored_codes(kept), *_range(kept), queries, rows)
    return products


def scores_over(
    pieces: Iterable[tuple[int, Any]], queries: UnitQueries, rows: CandidateRows
) -> CandidateScores:
    """Compute :func:`scores` of rows over several pieces, in order, given by first row and kept vectors."""
    products = np.full(rows.shape, -np.inf, np.float32)
    for first, kept_vectors in pieces:
        inside = (rows >= first) & (rows < first + kept_vectors.ntotal)
        products = np.where(
            inside, scores(kept_vectors, queries, np.where(inside, rows - first, -1)), products
        )
    return products


def vectors(kept: Any, rows: Int[ndarray, " rows"]) -> Float[ndarray, "rows dim"]:
    """Decode the kept vectors of rows to floats."""
    decoded: ndarray = kept.sa_decode(stored_codes(kept)[rows])
    return decoded


def floats(kept: Any) -> Float[ndarray, "rows dim"]:
    """Return all vectors of a flat index, as a view of faiss's memory."""
    return stored_codes(kept).view(np.float32).reshape(kept.ntotal, kept.d)


def stored_codes(kept: Any) -> UInt8[ndarray, "rows bytes"]:
    """Return the codes of an index of flat codes, as a view of faiss's memory."""
    codes = _STORED.get(kept)
    if codes is None or len(codes) != kept.ntotal:  # not read yet, or vectors were added since
        size = kept.sa_code_size()
        flat = (
            faiss.rev_swig_ptr(kept.codes.data(), kept.codes.size()) if kept.ntotal else np.empty(0, np.uint8)
        )
        codes = _STORED[kept] = flat.reshape(-1, size)
    return codes


def _range(kept: Any) -> tuple[Float[ndarray, " dim"], Float[ndarray, " dim"]]:
    """Return the minimum and the width of each dimension of a trained scalar quantizer."""
    limits = _RANGES.get(kept)
    if limits is None:
        low, spread = faiss.vector_to_array(kept.sq.trained).reshape(2, kept.d)
        limits = _RANGES[kept] = low, spread
    return limits


# --- compiled ---------------------------------------------------------------------------------------------


compiled_fastmath = partial(jit, fastmath=_REORDERED)


@compiled_fastmath
@no_type_check
def _of_floats(documents, queries, rows):
    products = np.full(rows.shape, -np.inf, np.float32)
    dim = queries.shape[1]
    for q in range(rows.shape[0]):
        query = queries[q]
        for c in range(rows.shape[1]):
            row = rows[q, c]
            if row < 0:
                continue
            document = documents[row]
            total = np.float32(0)
            for j in range(dim):
                total += document[j] * query[j]
            products[q, c] = total
    return products


@compiled_fastmath
@no_type_check
def _of_bytes(codes, low, spread, queries, rows):
    """Compute scores of codes: byte c of a dimension is low + (c + 1/2) / 255 * spread (faiss's QT_8bit)."""
    products = np.full(rows.shape, -np.inf, np.float32)
    dim = queries.shape[1]
    weights = np.empty(dim, np.float32)
    for q in range(rows.shape[0]):
        first = np.float32(0)
        for j in range(dim):
            weights[j] = queries[q, j] * spread[j] / np.float32(255)
            first += queries[q, j] * low[j] + weights[j] / np.float32(2)
        for c in range(rows.shape[1]):
            row = rows[q, c]
            if row < 0:
                continue
            document = codes[row]
            total = np.float32(0)
            for j in range(dim):
                total += np.float32(document[j]) * weights[j]
            products[q, c] = first + total
    return products
