"""A live shard in memory: writes, the state they lead to, and snapshots of it that are searched.

    documents ─checked_upsert─► write ─encode_write─► log record
    writes ─apply─► tail, dead rows ─► a new snapshot          (microseconds, one writer at a time)
    tail   ─merge─► lists of the live rows ─► a new snapshot   (in the background, beside the searches)

    base rows 0 … B-1      lists of the index version, never changed
    live rows B … B+M-1    lists merged from earlier writes
              B+M … B+L-1  the tail: the latest writes, compared one by one

A snapshot always shows the same documents, each at most once, in its last version as of `sequence`,
regardless of later writes, merges and compactions. The same writes, applied in the order of their numbers,
give the same state in every process.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from jaxtyping import Bool, Float, Integer, Shaped
from numpy import ndarray

from scalingnote.core.errors import DataError, SearchError
from scalingnote.index import families, ivf, postings
from scalingnote.index.live import wal
from scalingnote.index.postings import Postings
from scalingnote.index.shard import Shard
from scalingnote.models.published_model import Similarity
from scalingnote.storage import arrow
from scalingnote.storage.arrow import StoredRows, take_rows, to_arrow, to_numpy
from scalingnote.storage.schema import SPARSE, document_of

VECTOR = "vector"  # column that a log record adds to those of the documents; deletions lack it
REPLAY_BATCH = 256  # records applied at once


@dataclass(frozen=True)
class Upsert:
    """Documents with distinct doc_ids, and their vectors as the index compares them."""

    documents: pa.RecordBatch
    vectors: Float[ndarray, "rows dim"]
    terms: pa.RecordBatch | None = None  # as storage.schema.SPARSE; None where the index holds no terms
    sources: pa.RecordBatch | None = None  # the documents whole, as they were sent; None: they are not kept

    @property
    def doc_ids(self) -> list[str]:
        """Ids of the documents, in order."""
        ids: list[str] = self.documents.column("doc_id").to_pylist()
        return ids


@dataclass(frozen=True)
class Delete:
    """Deletion of documents; unknown ids are allowed."""

    doc_ids: list[str]


@dataclass(frozen=True)
class WriteResult:
    """Outcome of a write, durable up to and including log record `sequence`."""

    sequence: int
    rows: int
    rejected: list[dict[str, str]] = field(default_factory=list)  # as storage.schema.REJECTED has them


def checked_upsert(
    documents: pa.Table,
    vectors: Shaped[ndarray, "..."],
    base: Shard,
    *,
    strongest: int | None,
    rows: Sequence[int] | None,
    similarity: Similarity = "cosine",
    sources: pa.Table | None = None,
) -> tuple[Upsert, list[dict[str, str]]]:
    """Separate the rows that can be written from those to reject; of rows with equal doc_ids the last counts.

    Args:
        documents: with the columns of the index; where it holds terms, with `terms` and `impacts`, which may
            be null or missing for documents without terms.
        vectors: one per document, of any length.
        base: a shard of the index.
        strongest: terms kept per document; None: all.
        rows: numbers that name rejected rows without a doc_id; None: their positions.
        similarity: of the index; by cosine, vectors are scaled to length 1.
        sources: the documents whole, to be kept; in any order, also of rows that are rejected.

    Returns:
        The write, and the rejected rows as in storage.schema.REJECTED.

    Raises:
        DataError: columns are missing or of another type, or `vectors` has another shape or type.
    """
    table, dim = _cast(documents, base.documents.schema), base.lists.coarse.d
    terms = None if base.postings is None else _terms_of(documents)
    unfit = {} if terms is None else _unfit(terms)
    if vectors.ndim != 2 or vectors.shape != (len(table), dim) or vectors.dtype.kind != "f":
        raise DataError(
            f"vectors are {vectors.dtype} of shape {vectors.shape}: pass floats of shape "
            f"({len(table)}, {dim}), one row per document, from the document tower of this index"
        )
    wide = vectors.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    numbers = range(len(table)) if rows is None else rows
    last: dict[str, int] = {}
    rejected = []
    for row, doc_id in enumerate(table["doc_id"].to_pylist()):
        if reason := _reason(doc_id, float(lengths[row])) or unfit.get(row, ""):
            rejected.append({"table": "documents", "row": doc_id or f"row {numbers[row]}", "reason": reason})
        else:
            last[doc_id] = row
    kept = sorted(last.values())
    searched = wide[kept] / lengths[kept, None] if similarity == "cosine" else wide[kept]
    places = pa.array(kept, pa.int64())
    strong = None if terms is None else _single_batch(_strongest(terms.take(places), strongest))
    written, own = table.take(places), None
    if sources is not None:
        ids = written["document_id" if "document_id" in written.column_names else "doc_id"]
        own = _single_batch(sources.filter(pc.is_in(sources["doc_id"], value_set=ids)))
    return Upsert(_single_batch(written), searched.astype(np.float32), strong, own), rejected


def checked_delete(doc_ids: Sequence[str]) -> Delete:
    """A deletion; DataError where a doc_id is not a non-empty string."""
    wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str) or not doc_id]
    if wrong:
        raise DataError(f"{wrong[0]!r} is no doc_id: pass strings that are not empty")
    return Delete(list(dict.fromkeys(doc_ids)))


def encode_write(write: Upsert | Delete) -> bytes:
    """A log record's payload: an Arrow stream of index rows, and one of whole documents if they are kept."""
    if isinstance(write, Upsert):
        batch = write.documents.append_column(VECTOR, to_arrow(write.vectors))
        if write.terms is not None:
            for name in SPARSE.names:
                batch = batch.append_column(name, write.terms.column(name))
    else:
        batch = pa.record_batch({"doc_id": pa.array(write.doc_ids, pa.string())})
    sources = write.sources if isinstance(write, Upsert) else None
    sink = pa.BufferOutputStream()
    for each in (batch,) if sources is None else (batch, sources):
        with pa.ipc.new_stream(sink, each.schema) as writer:
            writer.write_batch(each)
    return bytes(sink.getvalue().to_pybytes())


def decode_write(payload: bytes) -> Upsert | Delete:
    """The inverse of :func:`encode_write`."""
    stored = pa.BufferReader(payload)
    batch = _read_batch(stored)
    if VECTOR not in batch.schema.names:
        return Delete(batch.column("doc_id").to_pylist())
    sparse = SPARSE.names if batch.schema.names[-2:] == SPARSE.names else []
    documents = batch.drop_columns([VECTOR, *sparse])
    terms = batch.select(sparse) if sparse else None
    sources = _read_batch(stored) if stored.tell() < stored.size() else None
    return Upsert(documents, to_numpy(batch.column(VECTOR)), terms, sources)


def _read_batch(stored: pa.BufferReader) -> pa.RecordBatch:
    """The only batch of the stream that begins here; `stored` is at its end then."""
    with pa.ipc.open_stream(stored) as stream:
        (batch,) = stream
    return batch


def _terms_of(documents: pa.Table) -> pa.Table:
    """Terms of documents, null where the columns are missing."""
    if any(name in documents.column_names for name in SPARSE.names):
        return _cast(documents, SPARSE)
    return pa.table([pa.nulls(len(documents), field.type) for field in SPARSE], schema=SPARSE)


def _unfit(terms: pa.Table) -> dict[int, str]:
    """Rows whose terms cannot be indexed, with the reasons."""

    def reason(rows: pa.Table) -> str:
        try:
            postings.build(rows["terms"], rows["impacts"])
        except DataError as error:
            return str(error).removeprefix("document 0 ")
        return ""

    if not reason(terms):
        return {}
    return {row: why for row in range(len(terms)) if (why := reason(terms.slice(row, 1)))}


def _strongest(terms: pa.Table, k: int | None) -> pa.Table:
    if k is None:
        return terms
    cut = postings.build(terms["terms"], terms["impacts"], strongest=k)
    return pa.table(postings.columns([cut]), schema=SPARSE)


def _cast(documents: pa.Table, schema: pa.Schema) -> pa.Table:
    missing = [name for name in schema.names if name not in documents.column_names]
    if missing:
        raise DataError(
            f"documents have no column {missing[0]!r}: this index holds {', '.join(schema.names)}"
        )
    try:
        return documents.select(schema.names).cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"documents are not of the types this index holds: {error}") from None


def _reason(doc_id: str | None, length: float) -> str:
    if not doc_id:
        return "doc_id is missing"
    if not np.isfinite(length):
        return "vector is not finite"
    return "" if length > 0 else "vector is all zero: it has no direction"


def _single_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


class Segment(NamedTuple):
    """Vectors that are scanned together, and their documents; rows of the shard from `first_row` on.

    `alive` marks rows that were not deleted or replaced; None: all.
    """

    first_row: int
    lists: ivf.Lists
    alive: ivf.RowMask | None
    documents: pa.Table


@dataclass(frozen=True)
class Snapshot:
    """A shard as of log record `sequence`. Threads may share one."""

    sequence: int
    base: Shard
    base_alive: Bool[ndarray, " base_rows"]
    live_alive: Bool[ndarray, " live_rows"]
    chunks: tuple[pa.RecordBatch, ...]  # documents of the live rows
    merged: ivf.Lists
    tail: Float[ndarray, "tail dim"]
    postings: tuple[Postings, ...] = ()  # terms of the live rows, where documents have terms

    def __len__(self) -> int:
        """Number of documents, without rows that were deleted or replaced."""
        return int(np.count_nonzero(self.base_alive) + np.count_nonzero(self.live_alive))

    @property
    def rows(self) -> int:
        """Number of rows, with those that were deleted or replaced."""
        return len(self.base_alive) + len(self.live_alive)

    @property
    def alive(self) -> Bool[ndarray, " rows"]:
        """Which rows were not deleted or replaced."""
        return np.concatenate([self.base_alive, self.live_alive])

    @property
    def term_segments(self) -> tuple[Postings, ...]:
        """Terms of all rows, in order; empty where the index holds no terms."""
        return () if self.base.postings is None else (self.base.postings, *self.postings)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments for a search by vectors."""
        base, merged, live = len(self.base_alive), len(self.merged), self._live_documents
        found = [Segment(0, self.base.lists, _some(self.base_alive), self.base.documents)]
        if merged:
            found.append(Segment(base, self.merged, _some(self.live_alive[:merged]), live[:merged]))
        if len(self.tail):
            alive = _some(self.live_alive[merged:])
            found.append(Segment(base + merged, self._exact, alive, live[merged:]))
        return tuple(found)

    def documents(self, rows: Sequence[int] | Integer[ndarray, " rows"]) -> pa.Table:
        """Documents of rows, in order; a dead row still has its document."""
        wanted = np.asarray(rows, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.rows)]
        if len(outside):
            raise SearchError(f"no row {outside[0]}: there are {self.rows}")
        return take_rows(pa.concat_tables([self.base.documents, self._live_documents]), wanted)

    def document(self, row: int) -> dict[str, Any]:
        """The document of an existing row, in the form of a search result."""
        first = len(self.base_alive)
        return self.base.stored[row] if row < first else self._live_stored[row - first]

    @cached_property
    def _live_documents(self) -> pa.Table:
        return pa.Table.from_batches(self.chunks, schema=self.base.documents.schema)

    @cached_property
    def _live_stored(self) -> StoredRows:
        return StoredRows(self._live_documents)

    @cached_property
    def _exact(self) -> ivf.Lists:
        """The tail as a flat index, built by the first search: most snapshots are never searched."""
        kept = faiss.IndexFlatIP(self.tail.shape[1])
        kept.add(self.tail)
        return ivf.Lists(None, kept, self.base.lists.coarse)


def _some(alive: Bool[ndarray, " rows"]) -> ivf.RowMask | None:
    """None where all are alive: a scan without a mask is faster."""
    return None if alive.all() else ivf.RowMask(alive)


class LiveState:
    """State of a shard in memory; its snapshots follow the writes applied to it."""

    def __init__(
        self, base: Shard, quantizer: families.Quantizer, *, sequence: int = 0, whole_documents: bool = False
    ) -> None:
        """Start from `base`, which includes the writes up to `sequence`; shards share the quantizer.

        `whole_documents`: a write ends all passages of each document that it names one of, whatever version
        they are in: that of a delta, whose log alone says what is written.
        """
        self._passages: dict[str, list[str]] | None = {} if whole_documents else None  # of documents
        self._base_rows = base.doc_ids
        # Rows of the base whose documents belong to this shard.
        self._known = np.ones(len(base.documents), bool)
        self._live_rows: dict[str, int] = {}  # counted from 0; -1 where the document was deleted again
        self._tail = np.empty((0, base.lists.coarse.d), np.float32)  # with spare capacity
        self._lock, self._merging = threading.Lock(), threading.Lock()
        self.snapshot = Snapshot(
            sequence=sequence,
            base=base,
            base_alive=self._known,
            live_alive=np.ones(0, bool),
            chunks=(),
            merged=ivf.load(base.lists.coarse, quantizer.lists, quantizer.kept),
            tail=self._tail,
        )

    def apply(self, writes: Sequence[tuple[int, Upsert | Delete]]) -> None:
        """Apply numbered writes in order; the next snapshot shows all of them at once.

        Writes that the snapshot includes already are skipped.
        """
        with self._lock:
            now = self.snapshot
            writes = [(number, write) for number, write in writes if number > now.sequence]
            chunks, tail, rows = now.chunks, now.tail, len(now.live_alive)
            dead_base: list[int] = []
            dead_live: list[int] = []
            segments, terms = now.postings, list[pa.RecordBatch]()
            for _, write in writes:
                base_rows = self._base_rows.rows(write.doc_ids)
                dead_base += base_rows[base_rows >= 0].tolist()
                ended = [doc_id for doc_id in self._ending_ids(write) if doc_id in self._live_rows]
                dead_live += [row for doc_id in ended if (row := self._live_rows[doc_id]) >= 0]
                self._live_rows |= dict.fromkeys(ended, -1)
                if isinstance(write, Upsert):
                    self._live_rows |= {doc_id: rows + i for i, doc_id in enumerate(write.doc_ids)}
                    rows += write.documents.num_rows
                    chunks = _append(chunks, write.documents)
                    tail = self._extend(tail, write.vectors)
                    terms += [] if write.terms is None else [write.terms]
            if terms:
                new = pa.Table.from_batches(terms)
                segments = postings.append(segments, postings.build(new["terms"], new["impacts"]))
            added = np.ones(rows - len(now.live_alive), bool)
            self.snapshot = replace(
                now,
                sequence=writes[-1][0] if writes else now.sequence,
                base_alive=_without(now.base_alive, dead_base),
                live_alive=_without(np.concatenate([now.live_alive, added]), dead_live),
                chunks=chunks,
                tail=tail,
                postings=segments,
            )

    def find(self, doc_id: str) -> tuple[Snapshot, int]:
        """The newest snapshot, and the document's row in it; -1 where it has none."""
        with self._lock:
            now = self.snapshot
            live = self._live_rows.get(doc_id, -1)
            if live >= 0:
                return now, len(now.base_alive) + live
            row = int(self._base_rows.rows([doc_id])[0])
            return now, row if row >= 0 and now.base_alive[row] else -1

    def knows(self, doc_ids: Sequence[str]) -> list[bool]:
        """Which of these documents are in this shard, or were since :meth:`forget`."""
        rows = self._base_rows.rows(doc_ids)
        with self._lock:
            known = (rows >= 0) & self._known[rows] if len(self._known) else rows >= 0
            return [
                bool(base) or doc_id in self._live_rows for base, doc_id in zip(known, doc_ids, strict=True)
            ]

    def forget(self) -> None:
        """Forget deleted documents: from now on they belong to the shard of their hash.

        Must be called before the first :meth:`knows`. The documents that belong to a shard then depend on the
        writes only, not on the version that it is opened from: a version may still have rows of a document
        that was deleted, forgotten and written to another shard since.
        """
        with self._lock:
            self._known = self.snapshot.base_alive
            self._live_rows = {doc_id: row for doc_id, row in self._live_rows.items() if row >= 0}

    def merge(self) -> int:
        """Move the current tail into lists while writes and searches go on; returns the rows moved."""
        with self._merging:
            before = self.snapshot
            moved = len(before.tail)
            if moved:
                merged = ivf.copy_lists(before.merged)  # the original is being searched
                ivf.add(merged, before.tail)
                with self._lock:
                    self._tail = self.snapshot.tail[moved:].copy()
                    self.snapshot = replace(self.snapshot, merged=merged, tail=self._tail)
            return moved

    def _ending_ids(self, write: Upsert | Delete) -> list[str]:
        """Ids of the rows that a write ends; `_passages` are then those that it leaves."""
        if self._passages is None:
            return write.doc_ids
        owners = [document_of(doc_id) for doc_id in write.doc_ids]
        before = [each for owner in dict.fromkeys(owners) for each in self._passages.pop(owner, ())]
        if isinstance(write, Upsert):
            for owner, doc_id in zip(owners, write.doc_ids, strict=True):
                self._passages.setdefault(owner, []).append(doc_id)
        return before

    def _extend(
        self, tail: Float[ndarray, "rows dim"], vectors: Float[ndarray, "new dim"]
    ) -> Float[ndarray, "more dim"]:
        """Append rows to the tail. Snapshots see only their own rows, so memory behind these may change."""
        stop = len(tail) + len(vectors)
        if stop > len(self._tail):
            grown = np.empty((max(2 * stop, 64), tail.shape[1]), np.float32)
            grown[: len(tail)] = tail
            self._tail = grown
        self._tail[len(tail) : stop] = vectors
        return self._tail[:stop]


def _without(alive: Bool[ndarray, " rows"], dead: Sequence[int]) -> Bool[ndarray, " rows"]:
    """A copy without dead rows, as older snapshots keep theirs; the array itself where none died."""
    if dead:
        alive = alive.copy()
        alive[list(dead)] = False
    return alive


def _append(chunks: tuple[pa.RecordBatch, ...], batch: pa.RecordBatch) -> tuple[pa.RecordBatch, ...]:
    """Append a chunk; each is full or at least twice as long as the next, so rows are rarely copied."""
    left, most = list(chunks), arrow.BATCH_BYTES
    while left and left[-1].num_rows < 2 * batch.num_rows and left[-1].nbytes + batch.nbytes <= most:
        batch = pa.concat_batches([left.pop(), batch])
    return (*left, batch) if batch.num_rows else tuple(left)


def catch_up(state: LiveState, log: Path, *, until: int) -> None:
    """Apply the records of a log that the state lacks, up to record `until`."""
    records = wal.read(log, after=state.snapshot.sequence, until=until)
    while group := [(r.sequence, decode_write(r.payload)) for r in islice(records, REPLAY_BATCH)]:
        state.apply(group)
