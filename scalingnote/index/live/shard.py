"""A live shard: documents are written and deleted while it is searched, and no acknowledged write is lost.

    write ─► log (durable) ─► state ─► acknowledged, and in every search that starts from here on

Writes that wait at the same time share one sync of the log. A follower is a replica of the shard in another
process that sees the log's folder: it shows what the writer acknowledged by its last refresh.
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
from scalingnote.index import ivf, rescore
from scalingnote.index.live import wal, writes
from scalingnote.index.live.config import DEFAULTS
from scalingnote.index.live.snapshot import Snapshot
from scalingnote.index.live.state import LiveState
from scalingnote.index.live.writes import Delete, Upsert, Written
from scalingnote.index.shard import Shard
from scalingnote.log import get_logger
from scalingnote.storage.exchange import bucket_of

_REPLAYED_AT_ONCE = 256  # records


class MovedError(DataError):
    """A document belongs to another shard than the one it was sent to: ask again which, and send it there."""


def owners(doc_ids: Sequence[str], known: Sequence[Sequence[bool]], *, shards: int) -> list[int]:
    """The shard that each document is to be written to.

    `known` is what :meth:`LiveShard.knows` of every shard says: a document stays where it is; a new one goes
    where its hash says. So two writers, or a delete between two upserts, never put one into two shards.
    """
    hashed = bucket_of(pa.array(doc_ids, pa.string()), shards).tolist()
    return [
        next((number for number, here in enumerate(known) if here[i]), hashed[i]) for i in range(len(doc_ids))
    ]


def catch_up(state: LiveState, log: Path, *, until: int) -> None:
    """Apply what is in a log above the state's record, up to record `until`."""
    records = wal.read(log, after=state.snapshot.sequence, until=until)
    while group := [(r.sequence, writes.decode(r.payload)) for r in islice(records, _REPLAYED_AT_ONCE)]:
        state.apply(group)


class LiveShard:
    """A shard that takes writes. Threads may share one; a log has one writer and any number of followers."""

    def __init__(
        self,
        base: Shard,
        quantizer: ivf.Quantizer,
        *,
        log: str | Path,
        after: int = 0,
        needed: int | None = None,
        shards: int = 1,
        strongest: int | None = None,
        follow: bool = False,
        merge_rows: int = DEFAULTS.merge_rows,
        segment_bytes: int = DEFAULTS.segment_bytes,
    ) -> None:
        """Open at the last acknowledged write.

        Args:
            base: shard of an index version that includes the records of the log up to `after`
            quantizer: what the shards of that index share
            log: local folder of this shard's log
            needed: the log is kept above this record, for versions that may be gone back to; None: `after`
            shards: of the index; a document lives in one of them, see :func:`owners`
            strongest: terms of a document that are indexed, where the index holds terms; None: all
            follow: only read: show the writes of another process
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
            if self._log is not None:  # where a crash came between a compaction and this
                self._log.drop(through=after if needed is None else needed)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        """Documents."""
        return len(self.snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """The shard as of now. Search it and look up its rows in one and the same snapshot."""
        return self._state.snapshot

    def upsert(
        self, documents: pa.Table, vectors: Shaped[ndarray, "..."], *, rows: Sequence[int] | None = None
    ) -> Written:
        """Write documents, each in place of the one with its doc_id if there is one; durable when it returns.

        `documents` has the columns of the index's own, and `terms` and `impacts` as `storage.schema.SPARSE`
        where the index holds terms (else a document has none); further ones are left out. Vectors are scaled
        to unit length. A row without a doc_id or a direction, or with terms that are no terms, is set aside,
        the others are written as one: after a crash all of them are there or none. `rows` are their numbers
        in the table that they were taken from, to name those set aside by. Raises DataError when the table
        cannot be read at all, ArtifactError when the log cannot be written (what was not acknowledged may
        then still be there).
        """
        base = self.snapshot.base
        write, rejected = writes.upsert(
            documents,
            vectors,
            schema=base.documents.schema,
            dim=self._state.dim,
            sparse=base.postings is not None,
            strongest=self._strongest,
            rows=rows,
        )
        return Written(self._written(write), write.documents.num_rows, rejected)

    def delete(self, doc_ids: Sequence[str]) -> Written:
        """Delete documents; ids that are not there are no error. Durable when it returns."""
        write = writes.delete(doc_ids)
        return Written(self._written(write), len(write.doc_ids))

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id, as of now."""
        snapshot, row = self._state.find(doc_id)
        found: dict[str, Any] | None = None if row < 0 else snapshot.document(row)
        return found

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """A document's vector, as of now, as exact as the index keeps it; None where it is not here."""
        snapshot, row = self._state.find(doc_id)
        if row < 0:
            return None
        segment = next(s for s in reversed(snapshot.segments) if s.first_row <= row)
        found: ndarray = rescore.vectors(segment.lists.kept, np.array([row - segment.first_row]))[0]
        return found

    def knows(self, doc_ids: Sequence[str]) -> list[bool]:
        """Which of these documents are here, or were since the shard was opened or last went over."""
        return self._state.knows(doc_ids)

    def refresh(self) -> int:
        """Show what was acknowledged by now; the number of log records taken. A writer needs it only once."""
        with self._commit:
            return self._catch_up(self._state)

    def merge(self) -> int:
        """Move the rows that are searched exactly into lists, now; how many they were."""
        return self._state.merge()

    def rebase(self, base: Shard, quantizer: ivf.Quantizer, *, after: int, needed: int | None = None) -> None:
        """Go over to an index version that includes the log up to record `after`, while searches go on.

        It may be a later one or an earlier: what was written since is taken from the log. Then the records up
        to `needed`, or else up to `after`, are dropped.
        """
        state = LiveState(base, quantizer, sequence=after)
        self._catch_up(state)
        state.merge()
        with self._commit, self._order:  # no write comes between
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
        """Stop writing and merging; snapshots that are held can still be searched."""
        with self._commit:
            self._background.shutdown()
            if self._log is not None:
                self._log.close()

    def _written(self, write: Upsert | Delete) -> int:
        """Log a write, make it durable, show it; its number in the log."""
        if self._log is None:
            raise ConfigError(f"this shard follows {self._folder}: send writes to the process that writes it")
        if not write.doc_ids:
            return self._log.acknowledged
        payload = writes.encode(write)
        with self._order:
            if isinstance(write, Upsert):
                self._require_owned(write.doc_ids)
            sequence = self._log.append(payload)
            self._waiting.append((sequence, write))
        with self._commit:
            if self.snapshot.sequence < sequence:  # else whoever came first took this one along
                with self._order:
                    group, self._waiting = self._waiting, []
                self._log.sync()
                self._state.apply(group)
                self._merge_if_long()
        return sequence

    def _require_owned(self, doc_ids: Sequence[str]) -> None:
        """Whoever sent them may have asked for their owners before this shard forgot deleted ones."""
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
            self._merge = self._background.submit(self._merge_or_say_why)

    def _merge_or_say_why(self) -> None:
        try:
            self.merge()
        except Exception:  # searched exactly, the rows are still there; the next write tries again
            get_logger("index").exception("%s: merging failed", self._folder)
