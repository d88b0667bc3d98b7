"""A live shard: documents are written and deleted while it is searched, and no acknowledged write is lost.

    write ─► log (durable) ─► state ─► acknowledged, and in every search that starts from here on

Concurrent writes share one sync of the log. A follower is a replica of the shard in another process that sees
the log's folder: it shows what the writer had acknowledged by the follower's last refresh.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.errors import ConfigError, DataError
from scalingnote.index import families, ivf
from scalingnote.index.config import LIVE_DEFAULTS
from scalingnote.index.live import wal
from scalingnote.index.live.snapshot import Snapshot
from scalingnote.index.live.state import (
    Delete,
    LiveState,
    Upsert,
    WriteResult,
    checked_delete,
    checked_upsert,
    decode_write,
    encode_write,
)
from scalingnote.index.shard import Shard
from scalingnote.log import get_logger
from scalingnote.storage.shuffle import bucket_of

REPLAY_BATCH = 256  # records applied at once


class MovedError(DataError):
    """A document was sent to a shard that does not own it: determine the owner again, and send it there."""


def owners(doc_ids: Sequence[str], known: Sequence[Sequence[bool]], *, shards: int) -> list[int]:
    """Number of the shard that owns each document.

    A document stays in its shard; a new one belongs to the shard of its hash. So neither two writers nor a
    delete between two upserts put a document into two shards.

    Args:
        doc_ids: ids of the documents.
        known: for every shard, the result of :meth:`LiveShard.knows`.
        shards: number of shards.
    """
    hashed = bucket_of(pa.array(doc_ids, pa.string()), shards).tolist()
    return [
        next((number for number, knows in enumerate(known) if knows[i]), hashed[i])
        for i in range(len(doc_ids))
    ]


def catch_up(state: LiveState, log: Path, *, until: int) -> None:
    """Apply the records of a log that the state lacks, up to record `until`."""
    records = wal.read(log, after=state.snapshot.sequence, until=until)
    while group := [(r.sequence, decode_write(r.payload)) for r in islice(records, REPLAY_BATCH)]:
        state.apply(group)


class LiveShard:
    """A shard that takes writes. Threads may share it; a log has one writer and any number of followers."""

    def __init__(
        self,
        base: Shard,
        quantizer: families.Quantizer,
        *,
        log: str | Path,
        after: int = 0,
        needed: int | None = None,
        shards: int = 1,
        strongest: int | None = None,
        follow: bool = False,
        merge_rows: int = LIVE_DEFAULTS.merge_rows,
        segment_bytes: int = LIVE_DEFAULTS.segment_bytes,
    ) -> None:
        """Open at the last acknowledged write.

        Args:
            base: shard of an index version that includes the records of the log up to `after`
            quantizer: what the shards of that index share
            log: local folder of this shard's log
            needed: records above it are kept, for versions that may be activated again; None: `after`
            shards: number of shards of the index, see :func:`owners`
            strongest: terms indexed per document, where the index holds terms; None: all
            follow: read only, and show the writes of another process
            merge_rows: see LiveConfig
            segment_bytes: see LiveConfig

        Raises:
            ConfigError: another process writes this log
            ArtifactError: an acknowledged record is damaged or missing
        """
        self._folder, self._merge_rows, self._shards = Path(log), merge_rows, shards
        self._strongest = strongest
        self._state = LiveState(base, quantizer, sequence=after)
        self._log = None if follow else wal.Log(log, after=after, segment_bytes=segment_bytes)
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
        self, documents: pa.Table, vectors: Shaped[ndarray, "..."], *, rows: Sequence[int] | None = None
    ) -> WriteResult:
        """Write documents, replacing those with equal doc_ids; durable on return.

        A row without a doc_id or a direction, or with invalid terms, is rejected. The others are written
        atomically: after a crash all of them are there, or none.

        Args:
            documents: with the columns of the index; where it holds terms, `terms` and `impacts` as in
                storage.schema.SPARSE, or none; other columns are ignored.
            vectors: one per document; scaled to unit length.
            rows: numbers that name rejected rows without a doc_id; None: their positions.

        Raises:
            DataError: columns or vectors have another type or shape than the index.
            ArtifactError: the log cannot be written; writes that were not acknowledged may still be there.
        """
        base = self.snapshot.base
        write, rejected = checked_upsert(
            documents,
            vectors,
            schema=base.documents.schema,
            dim=self._state.dim,
            sparse=base.postings is not None,
            strongest=self._strongest,
            rows=rows,
        )
        return WriteResult(self._written(write), write.documents.num_rows, rejected)

    def delete(self, doc_ids: Sequence[str]) -> WriteResult:
        """Delete documents, ignoring unknown ids; durable on return."""
        write = checked_delete(doc_ids)
        return WriteResult(self._written(write), len(write.doc_ids))

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id, as of now."""
        snapshot, row = self._state.find(doc_id)
        found: dict[str, Any] | None = None if row < 0 else snapshot.document(row)
        return found

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """A document's vector as of now, as exact as the index keeps it; None where it is unknown."""
        snapshot, row = self._state.find(doc_id)
        if row < 0:
            return None
        segment = next(s for s in reversed(snapshot.segments) if s.first_row <= row)
        found: ndarray = ivf.vectors(segment.lists.kept, np.array([row - segment.first_row]))[0]
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

    def rebase(
        self, base: Shard, quantizer: families.Quantizer, *, after: int, needed: int | None = None
    ) -> None:
        """Switch to another index version, later or earlier, while searches go on.

        Args:
            base: shard of the version.
            quantizer: of the version.
            after: last log record that the version includes; later ones are replayed.
            needed: records up to this one are dropped; None: up to `after`.
        """
        state = LiveState(base, quantizer, sequence=after)
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
            self._log.drop(through=after if needed is None else needed)

    def close(self) -> None:
        """Stop writing and merging; existing snapshots can still be searched."""
        with self._commit:
            self._background.shutdown()
            if self._log is not None:
                self._log.close()

    def _written(self, write: Upsert | Delete) -> int:
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
        """MovedError where the sender determined the owners before this shard forgot deleted documents."""
        number = self.snapshot.base.number
        hashed = owners(doc_ids, [], shards=self._shards)
        for doc_id, owner, known in zip(doc_ids, hashed, self.knows(doc_ids), strict=True):
            if owner != number and not known:
                raise MovedError(
                    f"doc_id {doc_id!r} belongs to shard {owner}, not {number}: ask the shards who owns it"
                )

    def _catch_up(self, state: LiveState) -> int:
        before = state.snapshot.sequence
        until = wal.acknowledged(self._folder) if self._log is None else self._log.acknowledged
        catch_up(state, self._folder, until=until)
        self._merge_if_long()
        return state.snapshot.sequence - before

    def _merge_if_long(self) -> None:
        """In the background, one at a time."""
        idle = self._merge is None or self._merge.done()
        if idle and len(self.snapshot.tail) >= self._merge_rows:
            self._merge = self._background.submit(self._merge_and_log)

    def _merge_and_log(self) -> None:
        try:
            self.merge()
        except Exception:  # the rows are still searched exactly; the next write tries again
            get_logger("index").exception("%s: merging failed", self._folder)
