"""A live index: documents are written and deleted while it is searched, and no acknowledged write is lost.

    write ─► shard that owns the document ─► its log (durable) ─► its state ─► acknowledged, and visible to
    every later search

Concurrent writes to a shard share one sync of its log. A follower is a replica in another process that sees
the logs' folder: it shows what the writer had acknowledged by the follower's last refresh.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.core.log import get_logger
from scalingnote.index import families, ivf
from scalingnote.index.config import LIVE_DEFAULTS, LiveConfig
from scalingnote.index.live import compaction, fold, versions, wal
from scalingnote.index.live.delta import open_empty
from scalingnote.index.live.live_state import (
    Delete,
    LiveState,
    Snapshot,
    Upsert,
    WriteResult,
    catch_up,
    checked_delete,
    checked_upsert,
    encode_write,
)
from scalingnote.index.live.versions import LiveVersion, OpenVersion
from scalingnote.index.shard import Shard
from scalingnote.models.published_model import Similarity
from scalingnote.storage.arrow import take_rows
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import passage_id
from scalingnote.storage.shuffle import bucket_of

T = TypeVar("T")
MAX_ATTEMPTS = 3  # to route a write; a document moves at most once per compaction


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
        base: Shard,
        quantizer: families.Quantizer,
        *,
        log: str | Path,
        after: int = 0,
        needed: int | None = None,
        shards: int = 1,
        strongest: int | None = None,
        similarity: Similarity = "cosine",
        follow: bool = False,
        merge_rows: int = LIVE_DEFAULTS.merge_rows,
        whole_documents: bool = False,
    ) -> None:
        """Open at the last acknowledged write.

        Args:
            base: shard of an index version that includes the records of the log up to `after`.
            quantizer: what the shards of that index share.
            log: local folder of this shard's log.
            after: last log record that `base` includes.
            needed: records above it are kept, for versions that may be activated again; None: `after`.
            shards: number of shards of the index, see :func:`owners`.
            strongest: terms indexed per document, where the index holds terms; None: all.
            similarity: of the index; by cosine, vectors are scaled to length 1.
            follow: read only, and show the writes of another process.
            merge_rows: see LiveConfig.
            whole_documents: see LiveState; of a delta of passages.

        Raises:
            ConfigError: another process writes this log.
            ArtifactError: an acknowledged record is damaged or missing.
        """
        self._folder, self._merge_rows, self._shards = Path(log), merge_rows, shards
        self._strongest = strongest
        self._similarity: Similarity = similarity
        self._whole_documents = whole_documents
        self._state = self._start(base, quantizer, after)
        self._log = None if follow else wal.Log(log, after=after)
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
            sources: the documents whole, which the log keeps with them.

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
            similarity=self._similarity,
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
        state = self._start(base, quantizer, after)
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

    def _start(self, base: Shard, quantizer: families.Quantizer, after: int) -> LiveState:
        return LiveState(base, quantizer, sequence=after, whole_documents=self._whole_documents)

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
        number = self.snapshot.base.number
        hashed = owners(doc_ids, [], shards=self._shards)
        for doc_id, owner, known in zip(doc_ids, hashed, self.knows(doc_ids), strict=True):
            if owner != number and not known:
                raise MovedError(
                    f"doc_id {doc_id!r} belongs to shard {owner}, not {number}: ask the shards who owns it"
                )

    def _catch_up(self, state: LiveState) -> int:
        before = state.snapshot.sequence
        until = wal.last_acknowledged(self._folder) if self._log is None else self._log.acknowledged
        catch_up(state, self._folder, until=until)
        self._merge_if_long()
        return state.snapshot.sequence - before

    def _merge_if_long(self) -> None:
        """In the background, one at a time."""
        idle = self._merge is None or self._merge.done()
        if idle and len(self.snapshot.tail) >= self._merge_rows:
            # Should it fail, the rows are still searched exactly, and the next write tries again.
            self._merge = self._background.submit(_log_failure, self.merge, f"{self._folder}: merging")


class LiveIndex:
    """Every shard of an index, open for writing or following the writer. Threads may share one."""

    def __init__(
        self,
        folder: str | Path,
        index: str | None = None,
        *,
        delta: bool | None = None,
        follow: bool = False,
        config: LiveConfig = LIVE_DEFAULTS,
    ) -> None:
        """Open the current version and the writes since.

        Args:
            folder: of versions and logs, see :mod:`scalingnote.index.live.versions`.
            index: artifact that was built; needed the first time.
            delta: hold what is written beside the version, not the version, see
                :mod:`scalingnote.index.live.delta`; None: as the folder was made, a new one without.
            follow: read only, and follow the process that writes.
            config: settings.
        """
        self.folder, self._config = Path(folder), config
        self._adopting, self._deciding = threading.Lock(), threading.Lock()
        self._replacing = threading.Lock()  # of documents whose passages are replaced
        self._background = ThreadPoolExecutor(1, "compaction", faiss.omp_set_num_threads, (1,))
        self._compaction: Future[None] | None = None
        versions.current(folder, index, delta=delta)
        is_delta = versions.read_register(folder).delta
        self._empty = open_empty(folder) if is_delta else None  # what a delta opens in place of a version
        _with_current(folder, partial(self._open, follow=follow))

    def _open(self, version: LiveVersion, *, follow: bool) -> None:
        opened, needed = OpenVersion(version, self._empty), self._unneeded_until()
        with ExitStack() as on_failure:
            self.shards: list[LiveShard] = []
            for number, after in enumerate(opened.included):
                each = LiveShard(
                    opened.shard(number),
                    opened.quantizer,
                    log=versions.log_folder(self.folder, number),
                    after=after,
                    needed=needed[number],
                    shards=opened.layout.shards,
                    strongest=opened.config.terms,
                    similarity=opened.layout.similarity,
                    follow=follow,
                    merge_rows=self._config.merge_rows,
                    whole_documents=self._empty is not None and opened.layout.passages,
                )
                on_failure.callback(each.close)
                self.shards.append(each)
            on_failure.pop_all()
        self._version, self.layout = version, opened.layout

    def _unneeded_until(self) -> list[int]:
        """Of each log the last record that may be dropped."""
        found = versions.read_register(self.folder).unneeded_until
        return [0] * len(found) if self._config.keep_documents else found

    def __len__(self) -> int:
        """Number of documents."""
        return sum(len(each) for each in self.shards)

    @property
    def version(self) -> int:
        """Number of the index version that searches start from."""
        return self._version.number

    def snapshots(self) -> list[Snapshot]:
        """All shards as of now; a batch of writes may show in one shard before another."""
        return [each.snapshot for each in self.shards]

    def upsert(
        self, documents: pa.Table, vectors: Shaped[ndarray, "..."], sources: pa.Table | None = None
    ) -> dict[int, WriteResult]:
        """Write each document to its owner; outcomes by shard. See :meth:`LiveShard.upsert`.

        `sources` are the documents whole: kept in the log where the settings say so.
        Of an index of passages, `documents` has all passages of each document. Those of its earlier version
        that are not among them are deleted next: when this returns, none is left. After a crash in between,
        some are, until the write, which was not acknowledged, is sent again.
        """
        if "doc_id" not in documents.column_names or len(vectors) != len(documents):
            raise DataError(
                f"{len(documents)} documents and {len(vectors)} vectors, doc_id a column: pass these"
            )
        doc_ids = documents["doc_id"].cast(pa.string()).fill_null("").to_pylist()
        kept = sources if self._config.keep_documents else None

        def write(number: int, rows: Sequence[int]) -> WriteResult:
            own = np.array(rows)
            return self.shards[number].upsert(
                take_rows(documents, own), vectors[own], rows=rows, sources=kept
            )

        if not self.layout.passages:
            return self._route(doc_ids, write)
        if "document_id" not in documents.column_names:
            raise DataError("this index holds passages: pass all of a document, with its id in document_id")
        if self._empty is not None:  # one record, which replaces documents as a whole
            return self._route(doc_ids, write)
        with self._replacing:  # or passages of one write could outlive a later one
            before = self._passages(documents["document_id"].unique().to_pylist())
            written = self._route(doc_ids, write)
            self._delete([*before - {*doc_ids}])
        return written

    def delete(self, doc_ids: Sequence[str]) -> dict[int, WriteResult]:
        """Delete documents; outcomes by shard. DataError where a doc_id is not a non-empty string."""
        wanted = checked_delete(doc_ids).doc_ids
        if not self.layout.passages:
            return self._delete(wanted)
        if self._empty is not None:  # any passage names its document, wherever the others are
            return self._delete([passage_id(doc_id, 1) for doc_id in wanted])
        with self._replacing:
            return self._delete([*self._passages(wanted)])

    def _delete(self, rows: Sequence[str]) -> dict[int, WriteResult]:
        """Delete rows by their ids."""
        return self._route(rows, lambda number, own: self.shards[number].delete([rows[i] for i in own]))

    def _passages(self, document_ids: Sequence[str]) -> set[str]:
        return {passage for each in self.shards for passage in each.passages(document_ids)}

    # Writes go to the owner; reads ask every shard for the live document. Each process remembers different
    # deleted documents, so followers may determine other owners than the writer does.

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id, as of now."""
        found = (each.get(doc_id) for each in self.shards)
        return next((document for document in found if document is not None), None)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """A document's vector, as of now, as exact as the index keeps it."""
        found = (each.vector(doc_id) for each in self.shards)
        return next((vector for vector in found if vector is not None), None)

    def refresh(self) -> None:
        """Follow the writing process: switch to its version if needed, then apply its writes."""

        def follow(_: LiveVersion) -> None:
            self.adopt()
            for each in self.shards:
                each.refresh()

        _with_current(self.folder, follow)

    def compact(self) -> Artifact | None:
        """Write the next version and switch to it; None if there is nothing new."""
        if self._empty is not None:
            written = fold.fold(self.folder, keep_versions=self._config.keep_versions)
        else:
            written = compaction.compact(
                self.folder, retrain_at=self._config.retrain_at, keep_versions=self._config.keep_versions
            )
        self.adopt()
        return written

    def adopt(self) -> bool:
        """Switch to the current version, later or earlier; returns whether it was another one.

        Compaction or `versions.activate`, in any process, make a version current.
        """
        with self._adopting:
            before = self._version
            if versions.current(self.folder).number != before.number:
                _with_current(self.folder, self._switch)
            return self._version.number != before.number

    def _switch(self, version: LiveVersion) -> None:
        opened, needed = OpenVersion(version, self._empty), self._unneeded_until()
        for number, (each, after) in enumerate(zip(self.shards, opened.included, strict=True)):
            each.rebase(opened.shard(number), opened.quantizer, after=after, needed=needed[number])
        self._version, self.layout = version, opened.layout

    def require_claim(self) -> None:
        """ArtifactError unless this process can write the logs of all shards, where it is not a follower."""
        for each in self.shards:
            each.require_claim()

    def close(self) -> None:
        """Close every shard, after waiting for a running compaction."""
        self._background.shutdown()
        for each in self.shards:
            each.close()

    def _route(self, doc_ids: Sequence[str], send: Callable[[int, Sequence[int]], T]) -> dict[int, T]:
        """Send each row to the shard that owns it, and again where a compaction moved documents meanwhile."""
        sent: dict[int, T] = {}
        for left in reversed(range(MAX_ATTEMPTS)):
            known = [each.knows(doc_ids) for each in self.shards]
            owner = np.array(owners(doc_ids, known, shards=len(self.shards)), np.int64)
            try:
                for number in np.unique(owner).tolist():
                    sent[number] = send(number, np.flatnonzero(owner == number).tolist())
                break
            except MovedError:
                if not left:
                    raise
        self._compact_if_due()
        return sent

    def _compact_if_due(self) -> None:
        """In the background, one at a time."""
        share = self._config.compact_at
        if share is None:
            return
        with self._deciding:
            if self._compaction is not None and not self._compaction.done():
                return
            now, rows = self.snapshots(), self._version.documents
            changed = sum(int(np.count_nonzero(~each.base_alive)) + len(each.live_alive) for each in now)
            if changed >= share * max(rows, 1):
                # Should it fail, nothing has changed, and the next write tries again.
                self._compaction = self._background.submit(
                    _log_failure, self.compact, f"{self.folder}: compaction"
                )


def _log_failure(action: Callable[[], object], name: str) -> None:
    """Run a background task and log its failure."""
    try:
        action()
    except Exception:
        get_logger("index").exception("%s failed", name)


def _with_current(folder: str | Path, use: Callable[[LiveVersion], None]) -> None:
    """Use the current version; again with the next one if it was replaced and its files removed meanwhile."""
    while True:
        version = versions.current(folder)
        try:
            return use(version)
        except ArtifactError:
            if versions.current(folder).number == version.number:
                raise
