"""A live shard in memory: the state after all writes, and snapshots of it for searches.

    writes ─apply─► tail, dead rows ─► a new snapshot          (microseconds, one writer at a time)
    tail   ─merge─► lists of the live rows ─► a new snapshot   (in the background, during searches)

    base rows 0 … B-1      lists of the index version, never changed
    live rows B … B+M-1    lists merged from earlier writes
              B+M … B+L-1  the tail: the latest writes, compared one by one

A snapshot always has the same documents, each at most once and as of log record `sequence`, regardless of
later writes, merges and compactions. The same writes, applied in the order of their numbers, give the same
state in every process.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.ipc
from jaxtyping import Bool, Float, Integer
from numpy import ndarray

from scalingnote.core.errors import SearchError
from scalingnote.index import ivf, postings
from scalingnote.index.live.versions import OpenVersion
from scalingnote.index.live.writes import Delete, Upsert, logged_writes
from scalingnote.index.postings import Postings
from scalingnote.index.shard import Shard
from scalingnote.storage import arrow
from scalingnote.storage.arrow import StoredRows, take_rows
from scalingnote.storage.schema import document_of

REPLAY_BATCH = 256  # number of records applied at once


class Segment(NamedTuple):
    """Vectors that are scanned together, and their documents: rows of the shard from `first_row` on.

    `alive` marks rows that were not deleted or replaced; None: all.
    """

    first_row: int
    lists: ivf.Lists
    alive: ivf.RowMask | None
    documents: pa.Table


@dataclass(frozen=True)
class Snapshot:
    """A shard as of log record `sequence`. Threads may share one instance."""

    sequence: int
    base: Shard
    base_alive: Bool[ndarray, " base_rows"]
    live_alive: Bool[ndarray, " live_rows"]
    chunks: tuple[pa.RecordBatch, ...]  # documents of the live rows
    merged: ivf.Lists
    tail: Float[ndarray, "tail dim"]
    postings: tuple[Postings, ...] = ()  # terms of the live rows, if documents have terms

    def __len__(self) -> int:
        """Return the number of documents, without rows that were deleted or replaced."""
        return int(np.count_nonzero(self.base_alive) + np.count_nonzero(self.live_alive))

    @property
    def rows(self) -> int:
        """Number of rows, including those that were deleted or replaced."""
        return len(self.base_alive) + len(self.live_alive)

    @property
    def alive(self) -> Bool[ndarray, " rows"]:
        """Mask of the rows that were not deleted or replaced."""
        return np.concatenate([self.base_alive, self.live_alive])

    @property
    def term_segments(self) -> tuple[Postings, ...]:
        """Terms of all rows, in order; empty if the index has no terms."""
        return () if self.base.postings is None else (self.base.postings, *self.postings)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments for a search by vectors."""
        base, merged_rows, live = len(self.base_alive), len(self.merged), self.live_documents
        segments = [Segment(0, self.base.lists, _some(self.base_alive), self.base.documents)]
        if merged_rows:
            segments.append(
                Segment(base, self.merged, _some(self.live_alive[:merged_rows]), live[:merged_rows])
            )
        if len(self.tail):
            alive = _some(self.live_alive[merged_rows:])
            segments.append(Segment(base + merged_rows, self._exact, alive, live[merged_rows:]))
        return tuple(segments)

    def documents(self, rows: Sequence[int] | Integer[ndarray, " rows"]) -> pa.Table:
        """Return the documents of rows, in this order; a dead row still has its document."""
        numbers = np.asarray(rows, np.int64)
        outside = numbers[(numbers < 0) | (numbers >= self.rows)]
        if len(outside):
            raise SearchError(f"no row {outside[0]}: this shard has {self.rows} rows, counted from 0")
        return take_rows(pa.concat_tables([self.base.documents, self.live_documents]), numbers)

    def document(self, row: int) -> dict[str, Any]:
        """Return the document of an existing row, in the form of a search result."""
        first = len(self.base_alive)
        return self.base.rows[row] if row < first else self._live_stored[row - first]

    @cached_property
    def live_documents(self) -> pa.Table:
        """Documents of the live rows, in order."""
        return pa.Table.from_batches(self.chunks, schema=self.base.documents.schema)

    @cached_property
    def _live_stored(self) -> StoredRows:
        return StoredRows(self.live_documents)

    @cached_property
    def _exact(self) -> ivf.Lists:
        """Tail as a flat index, built by the first search, because most snapshots are never searched."""
        flat = faiss.IndexFlatIP(self.tail.shape[1])
        flat.add(self.tail)
        return ivf.Lists(None, flat, self.base.lists.coarse)


def _some(alive: Bool[ndarray, " rows"]) -> ivf.RowMask | None:
    """Return None if all rows are alive, because a scan without a mask is faster."""
    return None if alive.all() else ivf.RowMask(alive)


class LiveState:
    """State of a shard in memory; each write that is applied gives a new snapshot."""

    def __init__(self, opened: OpenVersion, number: int) -> None:
        """Start from a shard of a version and the writes that the version includes.

        If the version has `whole_documents`, a write ends all earlier passages of each document that it
        names. This is the case for a delta, because only its log defines the passages of a document.
        """
        base, quantizer = opened.shard(number), opened.quantizer
        # Passages of each document.
        self._passages: dict[str, list[str]] | None = {} if opened.whole_documents else None
        self._base = base.rows
        # Rows of the base with documents that belong to this shard.
        self._known = np.ones(len(base.documents), bool)
        self._live_rows: dict[str, int] = {}  # counted from 0; -1 if the document was deleted again
        self._tail = np.empty((0, base.lists.coarse.d), np.float32)  # with spare capacity
        self._lock, self._merging = threading.Lock(), threading.Lock()
        self.snapshot = Snapshot(
            sequence=opened.included[number],
            base=base,
            base_alive=self._known,
            live_alive=np.ones(0, bool),
            chunks=(),
            merged=ivf.load(base.lists.coarse, quantizer.lists, quantizer.kept),
            tail=self._tail,
        )

    def apply(self, writes: Sequence[tuple[int, Upsert | Delete]]) -> None:
        """Apply numbered writes in order and make one new snapshot, which has all of them.

        Writes that the snapshot already includes are skipped.
        """
        with self._lock:
            now = self.snapshot
            writes = [(number, write) for number, write in writes if number > now.sequence]
            chunks, tail, rows = now.chunks, now.tail, len(now.live_alive)
            dead_base: list[int] = []
            dead_live: list[int] = []
            segments, terms = now.postings, list[pa.RecordBatch]()
            for _, write in writes:
                base_rows = self._base.find(write.doc_ids)
                dead_base += base_rows[base_rows >= 0].tolist()
                ended_ids = [doc_id for doc_id in self._ending_ids(write) if doc_id in self._live_rows]
                dead_live += [row for doc_id in ended_ids if (row := self._live_rows[doc_id]) >= 0]
                self._live_rows |= dict.fromkeys(ended_ids, -1)
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

    def catch_up(self, log: Path, *, until: int) -> None:
        """Apply the records of a log that the state does not include, up to record `until`."""
        writes = logged_writes(log, after=self.snapshot.sequence, until=until)
        while group := [*islice(writes, REPLAY_BATCH)]:
            self.apply(group)

    def find(self, doc_id: str) -> tuple[Snapshot, int]:
        """Return the newest snapshot and the document's row in it, -1 if it has none."""
        with self._lock:
            now = self.snapshot
            live = self._live_rows.get(doc_id, -1)
            if live >= 0:
                return now, len(now.base_alive) + live
            row = int(self._base.find([doc_id])[0])
            return now, row if row >= 0 and now.base_alive[row] else -1

    def knows(self, doc_ids: Sequence[str]) -> list[bool]:
        """Return for each document whether it is in this shard, or was since :meth:`forget`."""
        rows = self._base.find(doc_ids)
        with self._lock:
            in_base = (rows >= 0) & self._known[rows] if len(self._known) else rows >= 0
            return [
                bool(base) or doc_id in self._live_rows for base, doc_id in zip(in_base, doc_ids, strict=True)
            ]

    def forget(self) -> None:
        """Forget deleted documents: from now on they belong to the shard of their hash.

        This must be called before the first :meth:`knows`. The documents that belong to a shard then depend
        only on the writes, and not on the version from which it was opened: a version may still have rows of
        a document that was since deleted, forgotten and written to another shard.
        """
        with self._lock:
            self._known = self.snapshot.base_alive
            self._live_rows = {doc_id: row for doc_id, row in self._live_rows.items() if row >= 0}

    def merge(self) -> int:
        """Move the current tail into lists, also during writes and searches; return the number of rows."""
        with self._merging:
            before = self.snapshot
            count = len(before.tail)
            if count:
                lists = ivf.copy_lists(before.merged)  # the original is being searched
                ivf.add(lists, before.tail)
                with self._lock:
                    self._tail = self.snapshot.tail[count:].copy()
                    self.snapshot = replace(self.snapshot, merged=lists, tail=self._tail)
            return count

    def _ending_ids(self, write: Upsert | Delete) -> list[str]:
        """Return the ids of the rows that a write ends, and update `_passages`."""
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
        """Append rows to the tail. Snapshots use only their own rows, so memory after these may change."""
        stop = len(tail) + len(vectors)
        if stop > len(self._tail):
            larger = np.empty((max(2 * stop, 64), tail.shape[1]), np.float32)
            larger[: len(tail)] = tail
            self._tail = larger
        self._tail[len(tail) : stop] = vectors
        return self._tail[:stop]


def _without(alive: Bool[ndarray, " rows"], dead: Sequence[int]) -> Bool[ndarray, " rows"]:
    """Mark rows as dead, in a copy because older snapshots use the array; without dead rows return it."""
    if dead:
        alive = alive.copy()
        alive[list(dead)] = False
    return alive


def _append(chunks: tuple[pa.RecordBatch, ...], batch: pa.RecordBatch) -> tuple[pa.RecordBatch, ...]:
    """Append a chunk; each is full or at least twice as long as the next, so rows are rarely copied."""
    stack, most = list(chunks), arrow.BATCH_BYTES
    while stack and stack[-1].num_rows < 2 * batch.num_rows and stack[-1].nbytes + batch.nbytes <= most:
        batch = pa.concat_batches([stack.pop(), batch])
    return (*stack, batch) if batch.num_rows else tuple(stack)
