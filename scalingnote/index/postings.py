"""Inverted lists of term impacts: documents' sparse vectors go in, for every term the documents that have it.

    terms, impacts ─► block of 65,536 documents ─► its lists: of each term, rows and impacts ─► postings

A block's row numbers fit 16 bits, and the scores of its documents a core's own cache. Documents that come
later are postings of their own, *segments*, whose rows count on from those before them; merging writes lists
anew.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float16, Int32, Int64, UInt16
from numpy import ndarray
from scipy.sparse import csc_array, csr_array

from scalingnote.errors import DataError
from scalingnote.storage.schema import SPARSE

BLOCK = 1 << 16  # documents
Column: TypeAlias = pa.Array | pa.ChunkedArray


@dataclass(frozen=True)
class Postings:
    """Inverted lists, block after block. A document's row is where it stood when they were built.

    Block b holds rows ``blocks[b, 0]`` up to ``blocks[b + 1, 0]`` and lists ``blocks[b, 1]`` up to
    ``blocks[b + 1, 1]``, by ascending term; list l holds entries ``offsets[l]`` up to ``offsets[l + 1]``, by
    ascending row, counted from the block's first. All arrays are read-only.
    """

    blocks: Int64[ndarray, "bounds 2"]
    terms: Int32[ndarray, " lists"]
    offsets: Int64[ndarray, " list_bounds"]
    rows: UInt16[ndarray, " entries"]
    impacts: Float16[ndarray, " entries"]

    def __len__(self) -> int:
        """How many documents there are, those without terms included."""
        return int(self.blocks[-1, 0])

    @property
    def nbytes(self) -> int:
        """Memory: 4 bytes per term of a document, and 12 per list."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


Segments = Sequence[Postings]


def build(terms: Column, impacts: Column, *, strongest: int | None = None) -> Postings:
    """Postings of documents, from their columns ``terms`` and ``impacts`` (``storage.schema.SPARSE``).

    A null, and an impact of 0, are no terms. `strongest` keeps that many terms per document, those of the
    largest impacts, and of equal impacts the lower terms. DataError names the first document whose terms are
    not ascending, or whose impacts are not finite numbers of at least 0.
    """
    if len(terms) != len(impacts):
        raise DataError(
            f"{len(terms)} documents have terms and {len(impacts)} have impacts: pass both of each"
        )
    return _end_to_end(
        _inverted(_documents(terms[start : start + BLOCK], impacts[start : start + BLOCK], start), strongest)
        for start in range(0, len(terms), BLOCK)
    )


def columns(segments: Segments) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """The documents again: what :func:`build` takes, and an empty list for a document without terms."""
    terms, impacts = [], []
    for block in (block for segment in segments for block in _blocks(segment)):
        # SciPy turns columns into rows in C; it knows no float16, so bits travel in its place.
        bits = block.impacts.view(np.uint16)
        found = csc_array(
            (bits, block.rows, block.offsets), shape=(block.documents, len(block.terms))
        ).tocsr()
        offsets = found.indptr.astype(np.int32)
        terms.append(pa.ListArray.from_arrays(offsets, pa.array(block.terms[found.indices])))
        impacts.append(pa.ListArray.from_arrays(offsets, pa.array(found.data.view(np.float16))))
    kinds = SPARSE.field("terms").type, SPARSE.field("impacts").type
    return pa.chunked_array(terms, kinds[0]), pa.chunked_array(impacts, kinds[1])


def merged(segments: Segments, *, kept: Bool[ndarray, " documents"] | None = None) -> Postings:
    """One segment of several: of all their documents, or of those that are `kept`, in the same order."""
    terms, impacts = columns(segments)
    if kept is None:
        return build(terms, impacts)
    mask = pa.array(kept)
    return build(terms.filter(mask), impacts.filter(mask))


def appended(segments: Segments, new: Postings) -> tuple[Postings, ...]:
    """The segments with another behind them, merged so that each has more documents than the one behind it.

    A document is written at most once for each doubling of what it lies in; after n single ones there are
    at most log2(n) + 1 segments.
    """
    stack = [*segments]
    while stack and len(stack[-1]) <= len(new):
        new = merged([stack.pop(), new])
    return (*stack, new)


def frozen(array: ndarray, kind: Any) -> ndarray:
    """A read-only view: compiled code is then of one type, whether arrays are built or mapped."""
    view = np.ascontiguousarray(array, kind).view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class _Block:
    """One block; offsets count from its first entry."""

    documents: int
    terms: Int32[ndarray, " lists"]
    offsets: Int64[ndarray, " list_bounds"]
    rows: UInt16[ndarray, " entries"]
    impacts: Float16[ndarray, " entries"]


@dataclass(frozen=True)
class _Documents:
    """Documents of one block, row by row: terms ascending, no impact of 0."""

    offsets: Int64[ndarray, " bounds"]
    terms: Int32[ndarray, " entries"]
    impacts: Float16[ndarray, " entries"]

    def only(self, kept: Bool[ndarray, " entries"]) -> "_Documents":
        before = np.concatenate([np.zeros(1, np.int64), kept.cumsum(dtype=np.int64)])
        return _Documents(before[self.offsets], self.terms[kept], self.impacts[kept])


def _documents(terms: Column, impacts: Column, first: int) -> _Documents:
    lengths, others = (
        pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        for column in (terms, impacts)
    )
    if (lengths != others).any():
        row = int(np.flatnonzero(lengths != others)[0])
        raise DataError(
            f"document {first + row} has {lengths[row]} terms and {others[row]} impacts: pass one for each"
        )
    numbers, given = (_flat(column) for column in (terms, impacts))
    offsets = _bounds(lengths)
    with np.errstate(over="ignore"):  # becomes infinite, and is refused
        values = given.astype(np.float16)
    rising = np.ones(len(numbers), bool)
    rising[1:] = numbers[1:] > numbers[:-1]
    rising[offsets[:-1][lengths > 0]] = True
    broken = ~rising | (numbers < 0) | ~(values >= 0) | np.isinf(values)
    if broken.any():
        entry = int(np.flatnonzero(broken)[0])
        row = int(np.searchsorted(offsets, entry, "right")) - 1
        raise DataError(
            f"document {first + row} has term {numbers[entry]} with impact {given[entry]}: terms must be "
            "ascending and not negative, impacts from 0 to 65504"
        )
    return _Documents(offsets, numbers.astype(np.int32, copy=False), values).only(values > 0)


def _inverted(documents: _Documents, strongest: int | None) -> _Block:
    if strongest is not None:
        documents = documents.only(_strongest(documents, strongest))
    shape = len(documents.offsets) - 1, int(documents.terms.max(initial=-1)) + 1
    by_row = csr_array((documents.impacts.view(np.uint16), documents.terms, documents.offsets), shape=shape)
    by_term = by_row.tocsc()
    lengths = np.diff(by_term.indptr)
    terms = np.flatnonzero(lengths)
    rows, impacts = by_term.indices.astype(np.uint16), by_term.data.view(np.float16)
    return _Block(shape[0], terms.astype(np.int32), _bounds(lengths[terms]), rows, impacts)


def _strongest(documents: _Documents, k: int) -> Bool[ndarray, " entries"]:
    """Which entries are among the k of largest impact in their document, ties to the lower term."""
    lengths = np.diff(documents.offsets)
    owner = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    # Sorted as one number of 64 bits: the document, its impacts from large to small, and the entry's place.
    weakness = (0xFFFF - documents.impacts.view(np.uint16)).astype(np.uint64)
    place = np.arange(len(owner), dtype=np.uint64)
    order = np.sort(owner << np.uint64(48) | weakness << np.uint64(32) | place) & np.uint64(0xFFFFFFFF)
    kept = np.empty(len(owner), bool)
    kept[order] = np.arange(len(owner)) - np.repeat(documents.offsets[:-1], lengths) < k
    return kept


def _end_to_end(blocks: Iterable[_Block]) -> Postings:
    every = [*blocks]
    shapes = np.array([(0, 0), *((block.documents, len(block.terms)) for block in every)], np.int64)
    before = _bounds(np.array([len(block.rows) for block in every], np.int64))
    offsets = [block.offsets[1:] + start for block, start in zip(every, before, strict=False)]
    laid: dict[str, list[ndarray]] = {
        "terms": [np.empty(0, np.int32), *(block.terms for block in every)],
        "offsets": [np.zeros(1, np.int64), *offsets],
        "rows": [np.empty(0, np.uint16), *(block.rows for block in every)],
        "impacts": [np.empty(0, np.float16), *(block.impacts for block in every)],
    }
    arrays = {name: frozen(np.concatenate(pieces), pieces[0].dtype) for name, pieces in laid.items()}
    return Postings(frozen(shapes.cumsum(0), np.int64), **arrays)


def _blocks(postings: Postings) -> Iterator[_Block]:
    for (first, start), (last, stop) in pairwise(postings.blocks):
        offsets = postings.offsets[start : stop + 1]
        entries = slice(offsets[0], offsets[-1])
        terms, rows, impacts = postings.terms[start:stop], postings.rows[entries], postings.impacts[entries]
        yield _Block(int(last - first), terms, offsets - offsets[0], rows, impacts)


def _flat(column: Column) -> ndarray:
    values: ndarray = pc.list_flatten(column).to_numpy(zero_copy_only=False)
    return values


def _bounds(lengths: Int64[ndarray, " lists"]) -> Int64[ndarray, " bounds"]:
    return np.concatenate([np.zeros(1, np.int64), lengths.cumsum(dtype=np.int64)])
