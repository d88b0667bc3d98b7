"""Inverted lists of term impacts, in memory and as files: for every term, the documents that have it.

    terms, impacts ─► block of 65,536 documents ─► its lists: rows and impacts of each term ─► postings

Row numbers in a block fit in 16 bits, and the scores of its documents fit in the private cache of a core.
Later documents form separate postings, *segments*, with rows that follow those of the segments before them;
merging writes new lists. Each file is one numpy array, which is mapped into memory and checked before use.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float16, Int32, Int64, UInt16
from numpy import ndarray
from scipy.sparse import csc_array, csr_array

from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.storage.arrow import npy_bytes
from scalingnote.storage.schema import SPARSE

DOCUMENTS_PER_BLOCK = 1 << 16
Column: TypeAlias = pa.Array | pa.ChunkedArray
_DTYPES = {
    "blocks": np.int64,
    "terms": np.int32,
    "offsets": np.int64,
    "rows": np.uint16,
    "impacts": np.float16,
}
POSTING_FILES = tuple(f"sparse.{name}.npy" for name in _DTYPES)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclass(frozen=True)
class Postings:
    """Inverted lists, block after block. The row of a document is its position in the input of :func:`build`.

    Block b holds rows ``blocks[b, 0]`` up to ``blocks[b + 1, 0]`` and lists ``blocks[b, 1]`` up to
    ``blocks[b + 1, 1]``, by ascending term. List l holds entries ``offsets[l]`` up to ``offsets[l + 1]``, by
    ascending row, which is counted from the first row of the block. All arrays are read-only.
    """

    blocks: Int64[ndarray, "bounds 2"]
    terms: Int32[ndarray, " lists"]
    offsets: Int64[ndarray, " list_bounds"]
    rows: UInt16[ndarray, " entries"]
    impacts: Float16[ndarray, " entries"]

    def __len__(self) -> int:
        """Return the number of documents, including those without terms."""
        return int(self.blocks[-1, 0])

    @property
    def nbytes(self) -> int:
        """Bytes of memory: 4 per term of a document, and 12 per list."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))


Segments = Sequence[Postings]


def build(terms: Column, impacts: Column, *, strongest: int | None = None) -> Postings:
    """Build postings from the columns ``terms`` and ``impacts`` (``storage.schema.SPARSE``) of documents.

    Args:
        terms: of each document, ascending; null: no terms.
        impacts: of these terms, finite and at least 0; terms with impact 0 are dropped.
        strongest: number of terms kept per document, those with the largest impacts; ties go to the lower
            term; None: all.

    Raises:
        DataError: a document has invalid terms or impacts; the error names the first one.
    """
    if len(terms) != len(impacts):
        raise DataError(
            f"{len(terms)} documents have terms and {len(impacts)} have impacts: pass both of each"
        )
    return _join(
        _invert(
            _documents(
                terms[start : start + DOCUMENTS_PER_BLOCK],
                impacts[start : start + DOCUMENTS_PER_BLOCK],
                start,
            ),
            strongest,
        )
        for start in range(0, len(terms), DOCUMENTS_PER_BLOCK)
    )


def columns(segments: Segments) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Convert postings to columns ``terms`` and ``impacts``; a document without terms has empty lists."""
    terms, impacts = [], []
    for block in (block for segment in segments for block in _blocks(segment)):
        # SciPy transposes in C, but has no float16: the bit patterns are transposed instead.
        bits = block.impacts.view(np.uint16)
        by_row = csc_array((bits, block.rows, block.offsets), shape=(len(block), len(block.terms))).tocsr()
        offsets = by_row.indptr.astype(np.int32)
        terms.append(pa.ListArray.from_arrays(offsets, pa.array(block.terms[by_row.indices])))
        impacts.append(pa.ListArray.from_arrays(offsets, pa.array(by_row.data.view(np.float16))))
    kinds = SPARSE.field("terms").type, SPARSE.field("impacts").type
    return pa.chunked_array(terms, kinds[0]), pa.chunked_array(impacts, kinds[1])


def merge(segments: Segments, *, kept: Bool[ndarray, " documents"] | None = None) -> Postings:
    """Merge segments into one, with all documents or only those that are `kept`, in the same order."""
    terms, impacts = columns(segments)
    if kept is None:
        return build(terms, impacts)
    mask = pa.array(kept)
    return build(terms.filter(mask), impacts.filter(mask))


def append(segments: Segments, new: Postings) -> tuple[Postings, ...]:
    """Append a segment and merge segments, so that each has more documents than the next.

    A document is rewritten at most once per doubling of its segment; n documents that are appended one by one
    form at most log2(n) + 1 segments.
    """
    stack = [*segments]
    while stack and len(stack[-1]) <= len(new):
        new = merge([stack.pop(), new])
    return (*stack, new)


def frozen(array: ndarray, kind: Any) -> ndarray:
    """Return a read-only view, so that built and mapped arrays have the same type for compiled code."""
    view = np.ascontiguousarray(array, kind).view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class _Documents:
    """Documents of one block, row by row, with ascending terms and no impact of 0."""

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
    numbers, raw = (_flat(column) for column in (terms, impacts))
    offsets = _bounds(lengths)
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which is refused below
        values = raw.astype(np.float16)
    rising = np.ones(len(numbers), bool)
    rising[1:] = numbers[1:] > numbers[:-1]
    rising[offsets[:-1][lengths > 0]] = True
    is_invalid = ~rising | (numbers < 0) | ~(values >= 0) | np.isinf(values)
    if is_invalid.any():
        entry = int(np.flatnonzero(is_invalid)[0])
        row = int(np.searchsorted(offsets, entry, "right")) - 1
        raise DataError(
            f"document {first + row} has term {numbers[entry]} with impact {raw[entry]}: terms must be "
            "ascending and not negative, impacts from 0 to 65504"
        )
    return _Documents(offsets, numbers.astype(np.int32, copy=False), values).only(values > 0)


def _invert(documents: _Documents, strongest: int | None) -> Postings:
    if strongest is not None:
        documents = documents.only(_strongest(documents, strongest))
    shape = len(documents.offsets) - 1, int(documents.terms.max(initial=-1)) + 1
    by_row = csr_array((documents.impacts.view(np.uint16), documents.terms, documents.offsets), shape=shape)
    by_term = by_row.tocsc()
    lengths = np.diff(by_term.indptr)
    terms = np.flatnonzero(lengths)
    impacts = by_term.data.view(np.float16)
    return _block(shape[0], terms, _bounds(lengths[terms]), by_term.indices, impacts)


def _strongest(documents: _Documents, k: int) -> Bool[ndarray, " entries"]:
    """Mark the k entries with the largest impacts of each document; ties go to the lower term."""
    lengths = np.diff(documents.offsets)
    owner = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    # Sort one 64-bit number per entry, made of document, descending impact and position of the entry.
    weakness = (0xFFFF - documents.impacts.view(np.uint16)).astype(np.uint64)
    position = np.arange(len(owner), dtype=np.uint64)
    order = np.sort(owner << np.uint64(48) | weakness << np.uint64(32) | position) & np.uint64(0xFFFFFFFF)
    is_kept = np.empty(len(owner), bool)
    is_kept[order] = np.arange(len(owner)) - np.repeat(documents.offsets[:-1], lengths) < k
    return is_kept


def _block(documents: int, terms: ndarray, offsets: ndarray, rows: ndarray, impacts: ndarray) -> Postings:
    return _postings(np.array([(0, 0), (documents, len(terms))]), terms, offsets, rows, impacts)


def _postings(*arrays: ndarray) -> Postings:
    return Postings(*(frozen(array, kind) for array, kind in zip(arrays, _DTYPES.values(), strict=True)))


def _join(pieces: Iterable[Postings]) -> Postings:
    """Concatenate postings; rows of each follow those of the one before."""
    nothing = np.empty(0)
    empty = _postings(np.zeros((1, 2)), nothing, np.zeros(1), nothing, nothing)
    postings_list = [empty, *pieces]
    starts = _bounds(np.array([len(piece.rows) for piece in postings_list]))
    offsets = [piece.offsets[1:] + start for piece, start in zip(postings_list, starts, strict=False)]
    return _postings(
        np.concatenate([empty.blocks, *(np.diff(piece.blocks, axis=0) for piece in postings_list)]).cumsum(0),
        np.concatenate([piece.terms for piece in postings_list]),
        np.concatenate([empty.offsets, *offsets]),
        np.concatenate([piece.rows for piece in postings_list]),
        np.concatenate([piece.impacts for piece in postings_list]),
    )


def _blocks(postings: Postings) -> Iterator[Postings]:
    for (first, start), (last, stop) in pairwise(postings.blocks):
        offsets = postings.offsets[start : stop + 1]
        entries = slice(offsets[0], offsets[-1])
        terms, rows, impacts = postings.terms[start:stop], postings.rows[entries], postings.impacts[entries]
        yield _block(int(last - first), terms, offsets - offsets[0], rows, impacts)


def _flat(column: Column) -> ndarray:
    values: ndarray = pc.list_flatten(column).to_numpy(zero_copy_only=False)
    return values


def _bounds(lengths: Int64[ndarray, " lists"]) -> Int64[ndarray, " bounds"]:
    return np.concatenate([np.zeros(1, np.int64), lengths.cumsum(dtype=np.int64)])


def dump(postings: Postings) -> dict[str, bytes]:
    """Convert postings to the contents of the POSTING_FILES."""
    columns = zip(POSTING_FILES, fields(postings), strict=True)
    return {name: npy_bytes(getattr(postings, field.name)) for name, field in columns}


def load(files: Mapping[str, Any], *, documents: int | None = None) -> Postings:
    """Open postings from bytes or from buffers, for example of memory maps, which are not copied.

    All assumptions of search are checked, because compiled code reads and writes at these offsets without
    bounds checks.

    Args:
        files: contents of the POSTING_FILES, by name.
        documents: expected number of documents; None: any.

    Raises:
        ArtifactError: a file is missing, damaged, or inconsistent with the others.
    """
    missing = [name for name in POSTING_FILES if name not in files]
    if missing:
        raise ArtifactError(f"{missing[0]} is missing: re-run index")
    arrays = {
        name: _parse_array(file, files[file], kind)
        for file, (name, kind) in zip(POSTING_FILES, _DTYPES.items(), strict=True)
    }
    invalid = _invalid_array(**arrays)
    if invalid:
        raise ArtifactError(
            f"sparse.{invalid}.npy does not fit the other files of its shard: restore it or re-run index"
        )
    postings = Postings(**arrays)
    if documents is not None and len(postings) != documents:
        raise ArtifactError(
            f"sparse.blocks.npy has {len(postings)} documents, the shard has {documents}: re-run index"
        )
    return postings


def _parse_array(name: str, data: Any, kind: Any) -> ndarray:
    view = memoryview(data)
    head = io.BytesIO(bytes(view[:4096]))
    try:
        shape, by_column, dtype = _HEADERS[np.lib.format.read_magic(head)](head)
        if dtype != kind or by_column:
            raise ValueError(f"type {dtype}, expected {np.dtype(kind)}")
        array = np.frombuffer(view, dtype, offset=head.tell()).reshape(shape)
    except (ValueError, KeyError) as error:
        raise ArtifactError(f"{name} is damaged ({error}): restore it or re-run index") from None
    return frozen(array, kind)


def _invalid_array(blocks: ndarray, terms: ndarray, offsets: ndarray, rows: ndarray, impacts: ndarray) -> str:
    """Return the name of the first array that violates :class:`Postings`; "" if all are valid."""
    if blocks.ndim != 2 or blocks.shape[1] != 2 or not len(blocks) or blocks[0].any():
        return "blocks"
    if any(array.ndim != 1 for array in (terms, offsets, rows, impacts)):
        return "terms"
    sizes = np.diff(blocks, axis=0)
    if (sizes < 0).any() or (sizes[:, 0] > DOCUMENTS_PER_BLOCK).any() or blocks[-1, 1] != len(terms):
        return "blocks"
    if len(terms) and (terms.min() < 0 or not _ascends(terms, starts=blocks[:, 1])):
        return "terms"
    if len(offsets) != len(terms) + 1 or offsets[0] or (np.diff(offsets) <= 0).any():
        return "offsets"
    if len(rows) != offsets[-1]:
        return "rows"
    for (first, start), (last, stop) in pairwise(blocks):
        bounds = offsets[start : stop + 1]
        within = rows[bounds[0] : bounds[-1]]
        if len(within) and (within.max() >= last - first or not _ascends(within, starts=bounds - bounds[0])):
            return "rows"
    # Positive floats and their bit patterns have the same order; 0x7C00 is infinity.
    bits = impacts.view(np.uint16)
    if len(impacts) != len(rows) or (len(bits) and (bits.min() == 0 or bits.max() >= 0x7C00)):
        return "impacts"
    return ""


def _ascends(values: ndarray, *, starts: ndarray) -> bool:
    """Return whether values ascend in each list."""
    rising = values[1:] > values[:-1]
    inner = starts[(starts > 0) & (starts < len(values))]
    rising[inner - 1] = True
    return bool(rising.all())
