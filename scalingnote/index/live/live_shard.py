"""A shard of a live index: its log, its state, and the right to write to it."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.core.errors import ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.index import ivf
from scalingnote.index.live import wal
from scalingnote.index.live.live_state import LiveState, Snapshot
from scalingnote.index.live.versions import OpenVersion, log_folder
from scalingnote.index.live.writes import (
    Delete,
    Upsert,
    WriteResult,
    checked_delete,
    checked_upsert,
    encode_write,
)
from scalingnote.storage.shuffle import bucket_of

MERGE_ROWS = 1024  # rows of a shard from which the tail, which is searched exactly, is merged into lists


class MovedError(DataError):
    """A document was sent to a shard that does not own it; the sender must determine the owner again."""


def owners(doc_ids: Sequence[str], known: Sequence[Sequence[bool]], *, shards: int) -> list[int]:
    """Return the number of the shard that owns each document.

    A document stays in its shard; a new one belongs to the shard of its hash. So a document is never in two
    shards, not even with two writers or after a deletion between two upserts.

    Args:
        doc_ids: of the documents.
        known: results of :meth:`LiveShard.knows` of every shard.
        shards: number of shards.
    """
    hashed = bucket_of(pa.array(doc_ids, pa.string()), shards).tolist()
    return [
        next((number for number, knows in enumerate(known) if knows[i]), hashed[i])
        for i in range(len(doc_ids))
    ]


class LiveShard:
    """A shard that accepts writes. Threads may share it; a log has one writer and any number of followers."""

    def __init__(
        self,
        opened: OpenVersion,
        number: int,
        folder: str | Path,
        *,
        needed: int | None = None,
        follow: bool = False,
    ) -> None:
        """Open at the last acknowledged write.

        Args:
            opened: index version from which the shard starts.
            number: of the shard.
            folder: of the live index, with the shard's log.
            needed: records above this number are kept, for versions that may be activated again; None: those
                that the version does not include.
            follow: read only, and apply the writes of another process.

        Raises:
            ConfigError: another process writes this log.
            ArtifactError: an acknowledged record is damaged or missing.
        """
        self._number, self._folder = number, log_folder(folder, number)
        self._layout, self._strongest = opened.layout, opened.config.terms
        self._state, after = LiveState(opened, number), opened.included[number]
        self._log = None if follow else wal.Log(self._folder, after=after)
        self._order, self._commit = threading.Lock(), threading.Lock()
        self._waiting: list[tuple[int, Upsert | Delete]] = []
        self._background = ThreadPoolExecutor(1, "merge", faiss.omp_set_num_threads, (1,))
        self._merge: Future[None] | None = None
        try:
            self.refresh()
            self._state.forget()
            if self._log is not None:  # a crash may have prevented the deletion after a compaction
                self._log.drop(through=after if needed is None else needed)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """Current snapshot of the shard; row numbers are only valid in the snapshot that returned them."""
        return self._state.snapshot

    def upsert(
        self,
        documents: pa.Table,
        vectors: Shaped[ndarray, "..."],
        *,
        rows: Sequence[int] | None = None,
        sources: pa.Table | None = None,
    ) -> WriteResult:
        """Write documents durably, and replace those with equal doc_ids.

        A row without a doc_id, with a vector that is zero or not finite, or with invalid terms is rejected.
        The others are written atomically: after a crash the log has all of them, or none.

        Args:
            documents: with the columns of the index; if the index has terms, the columns `terms` and
                `impacts` of storage.schema.SPARSE are optional; other columns are ignored.
            vectors: one per document; they are scaled to unit length if the index compares by cosine.
            rows: numbers that name rejected rows without a doc_id; None: their positions.
            sources: complete documents for the log, in any order; may include those of rejected rows.

        Raises:
            DataError: columns or vectors have another type or shape than the index.
            ArtifactError: the log cannot be written; it may still contain writes without acknowledgement.
        """
        write, rejected = checked_upsert(
            documents,
            vectors,
            self.snapshot.base,
            strongest=self._strongest,
            rows=rows,
            similarity=self._layout.similarity,
            sources=sources,
        )
        return WriteResult(self._write(write), write.documents.num_rows, rejected)

    def delete(self, doc_ids: Sequence[str]) -> WriteResult:
        """Delete documents durably; unknown ids are ignored."""
        write = checked_delete(doc_ids)
        return WriteResult(self._write(write), len(write.doc_ids))

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """Return the current document with this id; None if there is none."""
        snapshot, row = self._state.find(doc_id)
        return None if row < 0 else snapshot.document(row)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """Return the current vector of a document, as exact as the index keeps it; None if it is unknown."""
        snapshot, row = self._state.find(doc_id)
        if row < 0:
            return None
        segment = next(s for s in reversed(snapshot.segments) if s.first_row <= row)
        vector: ndarray = ivf.vectors(segment.lists.kept, np.array([row - segment.first_row]))[0]
        return vector

    def passages(self, document_ids: Sequence[str]) -> list[str]:
        """Return the current ids of all passages of documents, including remains of an update after a crash.

        This reads two complete columns. It takes 10 ms for a million passages, less than encoding one
        passage.
        """
        snapshot, id_array = self.snapshot, pa.array(document_ids, pa.string())
        passage_ids: list[str] = []
        for segment in snapshot.segments:
            rows = pc.is_in(segment.documents["document_id"], value_set=id_array)
            if segment.alive is not None:
                rows = pc.and_(rows, pa.array(segment.alive.rows))
            passage_ids += segment.documents["doc_id"].filter(rows).to_pylist()
        return passage_ids

    def knows(self, doc_ids: Sequence[str]) -> list[bool]:
        """Return for each document whether it is in this shard, or was since the last change of version."""
        return self._state.knows(doc_ids)

    def refresh(self) -> int:
        """Apply all acknowledged records and return their number; a writer needs this only when it opens."""
        with self._commit:
            return self._catch_up(self._state)

    def merge(self) -> int:
        """Move the rows of the tail into lists now, and return their number."""
        return self._state.merge()

    def rebase(self, opened: OpenVersion, *, needed: int | None = None) -> None:
        """Switch to another index version, later or earlier, during searches.

        Args:
            opened: the version; records of the log that it does not include are replayed.
            needed: records up to this one are dropped; None: those that the version includes.
        """
        state = LiveState(opened, self._number)
        self._catch_up(state)
        state.merge()
        with self._commit, self._order:  # blocks writes
            if self._log is not None and self._waiting:
                self._log.sync()
                self._waiting = []
            self._catch_up(state)
            state.forget()
            self._state = state
            if self._log is not None:
                self._log.rotate()
        if self._log is not None:
            self._log.drop(through=opened.included[self._number] if needed is None else needed)

    def require_claim(self) -> None:
        """Raise an ArtifactError if this is not a follower and cannot write the log."""
        if self._log is not None:
            self._log.require_claim()

    def close(self) -> None:
        """Stop writes and merges; existing snapshots can still be searched."""
        with self._commit:
            self._background.shutdown()
            if self._log is not None:
                self._log.close()

    def _write(self, write: Upsert | Delete) -> int:
        """Log a write, make it durable and visible, and return its number in the log."""
        if self._log is None:
            raise ConfigError(f"this shard follows {self._folder}: send writes to the process that writes it")
        if not write.doc_ids:
            return self._log.acknowledged
        payload = encode_write(write)
        with self._order:
            if isinstance(write, Upsert):
                self._require_owned(write.doc_ids)
            sequence = self._log.append(payload)
            self._waiting.append((sequence, write))
        with self._commit:
            if self.snapshot.sequence < sequence:  # otherwise the sync of another thread included it
                with self._order:
                    group, self._waiting = self._waiting, []
                self._log.sync()
                self._state.apply(group)
                self._merge_if_long()
        return sequence

    def _require_owned(self, doc_ids: Sequence[str]) -> None:
        """Raise a MovedError if this shard forgot documents after the sender determined the owners."""
        hashed = owners(doc_ids, [], shards=self._layout.shards)
        for doc_id, owner, is_known in zip(doc_ids, hashed, self.knows(doc_ids), strict=True):
            if owner != self._number and not is_known:
                raise MovedError(
                    f"doc_id {doc_id!r} belongs to shard {owner}, not {self._number}: "
                    "determine its owner again"
                )

    def _catch_up(self, state: LiveState) -> int:
        before = state.snapshot.sequence
        until = wal.last_acknowledged(self._folder) if self._log is None else self._log.acknowledged
        state.catch_up(self._folder, until=until)
        self._merge_if_long()
        return state.snapshot.sequence - before

    def _merge_if_long(self) -> None:
        """Merge in the background, unless a merge is running."""
        idle = self._merge is None or self._merge.done()
        if idle and len(self.snapshot.tail) >= MERGE_ROWS:
            # If it fails, the rows are still searched exactly, and the next write starts another merge.
            self._merge = self._background.submit(log_failure, self.merge, f"{self._folder}: merging")


def log_failure(action: Callable[[], object], name: str) -> None:
    """Run a background task and log its failure."""
    try:
        action()
    except Exception:
        get_logger("index").exception("%s failed", name)
