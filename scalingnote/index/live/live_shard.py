"""A shard of a live index: its log, its state, and who may write to it."""

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

MERGE_ROWS = 1024  # of a shard, searched exactly before they are merged into lists


class MovedError(DataError):
    """A document was sent to a shard that does not own it: determine the owner again, and send it there."""


def owners(doc_ids: Sequence[str], known: Sequence[Sequence[bool]], *, shards: int) -> list[int]:
    """Number of the shard that owns each document; `known` has the result of every :meth:`LiveShard.knows`.

    A document stays in its shard; a new one belongs to the shard of its hash. So neither two writers nor a
    delete between two upserts put a document into two shards.
    """
    hashed = bucket_of(pa.array(doc_ids, pa.string()), shards).tolist()
    return [
        next((number for number, knows in enumerate(known) if knows[i]), hashed[i])
        for i in range(len(doc_ids))
    ]


class LiveShard:
    """A shard that takes writes. Threads may share it; a log has one writer and any number of followers."""

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
            opened: the index version to start from.
            number: of the shard.
            folder: of the live index, with the shard's log.
            needed: records above it are kept, for versions that may be activated again; None: those that the
                version does not include.
            follow: read only, and show the writes of another process.

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
            if self._log is not None:  # a crash may have prevented this after a compaction
                self._log.drop(through=after if needed is None else needed)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """The shard as of now; rows found in a snapshot are valid in that snapshot only."""
        return self._state.snapshot

    def upsert(
        self,
        documents: pa.Table,
        vectors: Shaped[ndarray, "..."],
        *,
        rows: Sequence[int] | None = None,
        sources: pa.Table | None = None,
    ) -> WriteResult:
        """Write documents, replacing those with equal doc_ids; durable on return.

        A row without a doc_id or a direction, or with invalid terms, is rejected. The others are written
        atomically: after a crash all of them are there, or none.

        Args:
            documents: with the columns of the index; where it holds terms, `terms` and `impacts` as in
                storage.schema.SPARSE, or none; other columns are ignored.
            vectors: one per document; scaled to unit length in an index that compares by cosine.
            rows: numbers that name rejected rows without a doc_id; None: their positions.
            sources: the documents whole, which the log keeps with them; in any order, also of rejected rows.

        Raises:
            DataError: columns or vectors have another type or shape than the index.
            ArtifactError: the log cannot be written; writes that were not acknowledged may still be there.
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
        """Delete documents, ignoring unknown ids; durable on return."""
        write = checked_delete(doc_ids)
        return WriteResult(self._write(write), len(write.doc_ids))

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id, as of now."""
        snapshot, row = self._state.find(doc_id)
        return None if row < 0 else snapshot.document(row)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """A document's vector as of now, as exact as the index keeps it; None where it is unknown."""
        snapshot, row = self._state.find(doc_id)
        if row < 0:
            return None
        segment = next(s for s in reversed(snapshot.segments) if s.first_row <= row)
        found: ndarray = ivf.vectors(segment.lists.kept, np.array([row - segment.first_row]))[0]
        return found

    def passages(self, document_ids: Sequence[str]) -> list[str]:
        """The ids of all passages of documents, as of now: what a crash has left of an earlier update, too.

        Two columns are read whole, 10 ms for a million passages, where encoding one takes longer.
        """
        snapshot, wanted = self.snapshot, pa.array(document_ids, pa.string())
        found: list[str] = []
        for segment in snapshot.segments:
            rows = pc.is_in(segment.documents["document_id"], value_set=wanted)
            if segment.alive is not None:
                rows = pc.and_(rows, pa.array(segment.alive.rows))
            found += segment.documents["doc_id"].filter(rows).to_pylist()
        return found

    def knows(self, doc_ids: Sequence[str]) -> list[bool]:
        """Which documents are in this shard, or were since it was opened or last changed version."""
        return self._state.knows(doc_ids)

    def refresh(self) -> int:
        """Apply all acknowledged records; returns their number. A writer does so only when it opens."""
        with self._commit:
            return self._catch_up(self._state)

    def merge(self) -> int:
        """Move the rows that are searched exactly into lists now; returns their number."""
        return self._state.merge()

    def rebase(self, opened: OpenVersion, *, needed: int | None = None) -> None:
        """Switch to another index version, later or earlier, while searches go on.

        Args:
            opened: the version; records of the log that it does not include are replayed.
            needed: records up to this one are dropped; None: those that the version includes.
        """
        state = LiveState(opened, self._number)
        self._catch_up(state)
        state.merge()
        with self._commit, self._order:  # no write may come between
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
        """ArtifactError unless this process can write the log, where it is not a follower."""
        if self._log is not None:
            self._log.require_claim()

    def close(self) -> None:
        """Stop writing and merging; existing snapshots can still be searched."""
        with self._commit:
            self._background.shutdown()
            if self._log is not None:
                self._log.close()

    def _write(self, write: Upsert | Delete) -> int:
        """Log a write, make it durable and visible; returns its number in the log."""
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
            if self.snapshot.sequence < sequence:  # else another thread's sync included it
                with self._order:
                    group, self._waiting = self._waiting, []
                self._log.sync()
                self._state.apply(group)
                self._merge_if_long()
        return sequence

    def _require_owned(self, doc_ids: Sequence[str]) -> None:
        """MovedError if the sender determined the owners before this shard forgot deleted documents."""
        hashed = owners(doc_ids, [], shards=self._layout.shards)
        for doc_id, owner, known in zip(doc_ids, hashed, self.knows(doc_ids), strict=True):
            if owner != self._number and not known:
                raise MovedError(
                    f"doc_id {doc_id!r} belongs to shard {owner}, not {self._number}: "
                    "ask the shards who owns it"
                )

    def _catch_up(self, state: LiveState) -> int:
        before = state.snapshot.sequence
        until = wal.last_acknowledged(self._folder) if self._log is None else self._log.acknowledged
        state.catch_up(self._folder, until=until)
        self._merge_if_long()
        return state.snapshot.sequence - before

    def _merge_if_long(self) -> None:
        """In the background, one at a time."""
        idle = self._merge is None or self._merge.done()
        if idle and len(self.snapshot.tail) >= MERGE_ROWS:
            # Should it fail, the rows are still searched exactly, and the next write tries again.
            self._merge = self._background.submit(log_failure, self.merge, f"{self._folder}: merging")


def log_failure(action: Callable[[], object], name: str) -> None:
    """Run a background task and log its failure."""
    try:
        action()
    except Exception:
        get_logger("index").exception("%s failed", name)
