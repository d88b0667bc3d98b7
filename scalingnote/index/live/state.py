"""What a live shard holds in memory: an index version, the rows written since, and where every document is.

    writes ─apply─► tail, dead rows ─► a new snapshot          (microseconds, one writer at a time)
    tail   ─merge─► lists of the live rows ─► a new snapshot   (in the background, beside the searches)

It knows no log: applied in the order of their numbers, the same writes give the same state anywhere.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float
from numpy import ndarray

from scalingnote.index import ivf, postings
from scalingnote.index.live import rows as live_rows
from scalingnote.index.live.doc_ids import DocIds
from scalingnote.index.live.snapshot import Snapshot
from scalingnote.index.live.writes import Delete, Upsert
from scalingnote.index.postings import Postings
from scalingnote.index.shard import Shard
from scalingnote.storage import stored_rows


class LiveState:
    """A shard whose snapshots follow the writes applied to it."""

    def __init__(self, base: Shard, quantizer: ivf.Quantizer, *, sequence: int = 0) -> None:
        """`quantizer` is what all shards of the index share; `base` includes the writes up to `sequence`."""
        self._base_rows = DocIds(base.documents["doc_id"])
        self._known = np.ones(len(base.documents), bool)  # rows of the base whose documents belong here
        self._live_rows: dict[str, int] = {}  # from 0; -1 where the document was deleted again
        self._tail = np.empty((0, quantizer.centroids.shape[1]), np.float32)  # with room to grow
        self._lock, self._merging = threading.Lock(), threading.Lock()
        self.snapshot = Snapshot(
            sequence=sequence,
            base=base,
            base_alive=np.ones(len(base.documents), bool),
            live_alive=np.ones(0, bool),
            chunks=(),
            merged=ivf.load(base.lists.coarse, quantizer.lists, quantizer.kept),
            tail=self._tail,
        )

    @property
    def dim(self) -> int:
        """Of the vectors."""
        return self._tail.shape[1]

    def apply(self, writes: Sequence[tuple[int, Upsert | Delete]]) -> None:
        """Take writes, each with its number, in order; the next snapshot shows all of them.

        Those that it shows already are passed over.
        """
        with self._lock:
            now = self.snapshot
            writes = [(number, write) for number, write in writes if number > now.sequence]
            chunks, tail, rows = now.chunks, now.tail, len(now.live_alive)
            dead_base: list[int] = []
            dead_live: list[int] = []
            terms: list[pa.RecordBatch] = []
            for _, write in writes:
                base_rows = self._base_rows.rows(write.doc_ids)
                dead_base += base_rows[base_rows >= 0].tolist()
                live_rows = [self._live_rows.get(doc_id, -1) for doc_id in write.doc_ids]
                dead_live += [row for row in live_rows if row >= 0]
                if isinstance(write, Upsert):
                    self._live_rows |= {doc_id: rows + i for i, doc_id in enumerate(write.doc_ids)}
                    rows += write.documents.num_rows
                    chunks = _appended(chunks, write.documents)
                    tail = self._extended(tail, write.vectors)
                    terms += [] if write.terms is None else [write.terms]
                else:
                    self._live_rows |= {i: -1 for i in write.doc_ids if i in self._live_rows}
            added = np.ones(rows - len(now.live_alive), bool)
            self.snapshot = replace(
                now,
                sequence=writes[-1][0] if writes else now.sequence,
                base_alive=_without(now.base_alive, dead_base),
                live_alive=_without(np.concatenate([now.live_alive, added]), dead_live),
                chunks=chunks,
                tail=tail,
                postings=_with_terms(now.postings, terms),
            )

    def find(self, doc_id: str) -> tuple[Snapshot, int]:
        """The newest snapshot, and the row that stands for this document there; -1 if none does."""
        with self._lock:
            now = self.snapshot
            live = self._live_rows.get(doc_id, -1)
            if live >= 0:
                return now, len(now.base_alive) + live
            row = int(self._base_rows.rows([doc_id])[0])
            return now, row if row >= 0 and now.base_alive[row] else -1

    def knows(self, doc_ids: Sequence[str]) -> list[bool]:
        """Which of these documents are here, or were since :meth:`forget`."""
        rows = self._base_rows.rows(doc_ids)
        with self._lock:
            known = (rows >= 0) & self._known[rows] if len(self._known) else rows >= 0
            return [
                bool(base) or doc_id in self._live_rows for base, doc_id in zip(known, doc_ids, strict=True)
            ]

    def forget(self) -> None:
        """Know deleted documents no more: from here on they belong where their hash says.

        To be called before the first question. Which documents belong to a shard then depends on what was
        written, not on the version it is opened from; a version may still have the rows of one that was
        deleted, forgotten and written to another shard since.
        """
        with self._lock:
            self._known = self.snapshot.base_alive
            self._live_rows = {doc_id: row for doc_id, row in self._live_rows.items() if row >= 0}

    def merge(self) -> int:
        """Move the tail, as it is now, into lists; the number of rows moved. Writes and searches go on."""
        with self._merging:
            before = self.snapshot
            moved = len(before.tail)
            if moved:
                merged = live_rows.copy(before.merged)  # which is being searched
                ivf.add(merged, before.tail)
                with self._lock:
                    self._tail = self.snapshot.tail[moved:].copy()
                    self.snapshot = replace(self.snapshot, merged=merged, tail=self._tail)
            return moved

    def _extended(
        self, tail: Float[ndarray, "rows dim"], vectors: Float[ndarray, "new dim"]
    ) -> Float[ndarray, "more dim"]:
        """The tail and more rows. A snapshot sees only the rows it began with: room behind these is free."""
        stop = len(tail) + len(vectors)
        if stop > len(self._tail):
            room = np.empty((max(2 * stop, 64), tail.shape[1]), np.float32)
            room[: len(tail)] = tail
            self._tail = room
        self._tail[len(tail) : stop] = vectors
        return self._tail[:stop]


def _without(alive: Bool[ndarray, " rows"], dead: Sequence[int]) -> Bool[ndarray, " rows"]:
    """A copy, as older snapshots keep theirs; itself where nothing died."""
    if dead:
        alive = alive.copy()
        alive[list(dead)] = False
    return alive


def _with_terms(segments: tuple[Postings, ...], batches: Sequence[pa.RecordBatch]) -> tuple[Postings, ...]:
    """Term lists of the live rows with those of further ones; few, as a row is copied once per doubling."""
    if not batches:
        return segments
    new = pa.Table.from_batches(batches)
    return postings.appended(segments, postings.build(new["terms"], new["impacts"]))


def _appended(chunks: tuple[pa.RecordBatch, ...], batch: pa.RecordBatch) -> tuple[pa.RecordBatch, ...]:
    """A chunk is full, or twice as long as the next or more: they are few, and a row is copied few times."""
    left, most = list(chunks), stored_rows.BATCH_BYTES
    while left and left[-1].num_rows < 2 * batch.num_rows and left[-1].nbytes + batch.nbytes <= most:
        batch = pa.concat_batches([left.pop(), batch])
    return (*left, batch) if batch.num_rows else tuple(left)
