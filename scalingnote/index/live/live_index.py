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
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.core.errors import ArtifactError, DataError
from scalingnote.index.config import LIVE_DEFAULTS, LiveConfig
from scalingnote.index.live import compaction, versions
from scalingnote.index.live.live_shard import LiveShard, MovedError, log_failure, owners
from scalingnote.index.live.live_state import Snapshot
from scalingnote.index.live.versions import LiveVersion, OpenVersion
from scalingnote.index.live.writes import WriteResult, checked_delete
from scalingnote.storage.arrow import take_rows
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import passage_id

T = TypeVar("T")
MAX_ATTEMPTS = 3  # to route a write; a document moves at most once per compaction


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
                :mod:`scalingnote.index.live.versions`; None: as the folder was made, a new one without.
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
        # What a delta opens in place of a version.
        self._empty = versions.open_empty(folder) if is_delta else None
        _with_current(folder, partial(self._open, follow=follow))

    def _open(self, version: LiveVersion, *, follow: bool) -> None:
        opened, needed = OpenVersion(version, self._empty), self._last_droppable()
        with ExitStack() as on_failure:
            self.shards: list[LiveShard] = []
            for number, record in enumerate(needed):
                each = LiveShard(opened, number, self.folder, needed=record, follow=follow)
                on_failure.callback(each.close)
                self.shards.append(each)
            on_failure.pop_all()
        self._version, self.layout = version, opened.layout

    def _last_droppable(self) -> list[int]:
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
        opened, needed = OpenVersion(version, self._empty), self._last_droppable()
        for each, record in zip(self.shards, needed, strict=True):
            each.rebase(opened, needed=record)
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
                    log_failure, self.compact, f"{self.folder}: compaction"
                )


def _with_current(folder: str | Path, use: Callable[[LiveVersion], None]) -> None:
    """Use the current version; again with the next one if it was replaced and its files removed meanwhile."""
    while True:
        version = versions.current(folder)
        try:
            return use(version)
        except ArtifactError:
            if versions.current(folder).number == version.number:
                raise
