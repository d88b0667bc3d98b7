"""A live index, which is written and searched at the same time without loss of an acknowledged write.

    write ─► shard that owns the document ─► its log (durable) ─► its state ─► acknowledged, and visible to
    every later search

Concurrent writes to a shard share one sync of its log. A follower is a replica in another process that has
access to the folder of the logs: it has the writes that were acknowledged before its last refresh.
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
MAX_ATTEMPTS = 3  # limit of attempts to route a write; a document moves at most once per compaction


class LiveIndex:
    """All shards of an index, open for writing or as a follower. Threads may share one instance."""

    def __init__(
        self,
        folder: str | Path,
        index: str | None = None,
        *,
        delta: bool | None = None,
        follow: bool = False,
        config: LiveConfig = LIVE_DEFAULTS,
    ) -> None:
        """Open the current version and apply later writes.

        Args:
            folder: of versions and logs, see :mod:`scalingnote.index.live.versions`.
            index: artifact that was built; required the first time.
            delta: open only the delta and not the version, see :mod:`scalingnote.index.live.versions`; None:
                as in an existing folder, and no delta in a new folder.
            follow: read only, and follow the process that writes.
            config: settings.
        """
        self.folder, self._config = Path(folder), config
        self._adopting, self._deciding = threading.Lock(), threading.Lock()
        self._replacing = threading.Lock()  # while the passages of documents are replaced
        self._background = ThreadPoolExecutor(1, "compaction", faiss.omp_set_num_threads, (1,))
        self._compaction: Future[None] | None = None
        versions.current(folder, index, delta=delta)
        is_delta = versions.read_register(folder).delta
        # A delta opens this in place of a version.
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
        """Return the last record of each log that may be dropped."""
        unneeded = versions.read_register(self.folder).unneeded_until
        return [0] * len(unneeded) if self._config.keep_documents else unneeded

    def __len__(self) -> int:
        """Return the number of documents."""
        return sum(len(each) for each in self.shards)

    @property
    def version(self) -> int:
        """Number of the index version that is open."""
        return self._version.number

    def snapshots(self) -> list[Snapshot]:
        """Return the current snapshots of all shards; a batch may be visible in one shard before another."""
        return [each.snapshot for each in self.shards]

    def upsert(
        self, documents: pa.Table, vectors: Shaped[ndarray, "..."], sources: pa.Table | None = None
    ) -> dict[int, WriteResult]:
        """Write each document to the shard that owns it, see :meth:`LiveShard.upsert`.

        In an index of passages, `documents` must have all passages of each document. Earlier passages not
        among them are then deleted, before this returns. After a crash in between, some remain until
        the write, which was not acknowledged, is sent again.

        Args:
            documents: with the columns of the index.
            vectors: one per document.
            sources: complete documents, which the log keeps if `keep_documents` is set.

        Returns:
            Outcomes by shard.
        """
        if "doc_id" not in documents.column_names or len(vectors) != len(documents):
            raise DataError(
                f"{len(documents)} documents and {len(vectors)} vectors: pass a column doc_id and one vector "
                "per document"
            )
        doc_ids = documents["doc_id"].cast(pa.string()).fill_null("").to_pylist()
        log_sources = sources if self._config.keep_documents else None

        def write(number: int, rows: Sequence[int]) -> WriteResult:
            shard_rows = np.array(rows)
            return self.shards[number].upsert(
                take_rows(documents, shard_rows), vectors[shard_rows], rows=rows, sources=log_sources
            )

        if not self.layout.passages:
            return self._route(doc_ids, write)
        if "document_id" not in documents.column_names:
            raise DataError("this index has passages: pass all of a document, with its id in document_id")
        if self._empty is not None:  # one record, which replaces all passages of its documents
            return self._route(doc_ids, write)
        with self._replacing:  # otherwise passages of one write could remain after a later one
            before = self._passages(documents["document_id"].unique().to_pylist())
            results = self._route(doc_ids, write)
            self._delete([*before - {*doc_ids}])
        return results

    def delete(self, doc_ids: Sequence[str]) -> dict[int, WriteResult]:
        """Delete documents and return outcomes by shard; raise a DataError if a doc_id is not valid."""
        document_ids = checked_delete(doc_ids).doc_ids
        if not self.layout.passages:
            return self._delete(document_ids)
        if self._empty is not None:  # one passage is enough to name its document in the log
            return self._delete([passage_id(doc_id, 1) for doc_id in document_ids])
        with self._replacing:
            return self._delete([*self._passages(document_ids)])

    def _delete(self, rows: Sequence[str]) -> dict[int, WriteResult]:
        return self._route(rows, lambda number, at: self.shards[number].delete([rows[i] for i in at]))

    def _passages(self, document_ids: Sequence[str]) -> set[str]:
        return {passage for each in self.shards for passage in each.passages(document_ids)}

    # Writes go to the owner; reads look in every shard for the live document. Processes remember different
    # deleted documents, so followers may determine other owners than the writer.

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """Return the current document with this id; None if there is none."""
        candidates = (each.get(doc_id) for each in self.shards)
        return next((document for document in candidates if document is not None), None)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """Return the current vector of a document, as exact as the index keeps it; None if it is unknown."""
        candidates = (each.vector(doc_id) for each in self.shards)
        return next((vector for vector in candidates if vector is not None), None)

    def refresh(self) -> None:
        """Follow the writer: switch to the current version if needed, then apply acknowledged writes."""

        def follow(_: LiveVersion) -> None:
            self.adopt()
            for each in self.shards:
                each.refresh()

        _with_current(self.folder, follow)

    def compact(self) -> Artifact | None:
        """Write the next version, switch to it and return it; None if there are no new writes."""
        index = compaction.compact(
            self.folder, retrain_at=self._config.retrain_at, keep_versions=self._config.keep_versions
        )
        self.adopt()
        return index

    def adopt(self) -> bool:
        """Switch to the current version, which may be earlier, and return whether it is another one.

        Compaction or `versions.activate`, in any process, makes a version current.
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
        """Raise an ArtifactError if this is not a follower and cannot write the logs of all shards."""
        for each in self.shards:
            each.require_claim()

    def close(self) -> None:
        """Wait for a running compaction, then close every shard."""
        self._background.shutdown()
        for each in self.shards:
            each.close()

    def _route(self, doc_ids: Sequence[str], send: Callable[[int, Sequence[int]], T]) -> dict[int, T]:
        """Send each row to the shard that owns it, and again if a compaction moved documents meanwhile."""
        results: dict[int, T] = {}
        for remaining in reversed(range(MAX_ATTEMPTS)):
            memberships = [each.knows(doc_ids) for each in self.shards]
            owner = np.array(owners(doc_ids, memberships, shards=len(self.shards)), np.int64)
            try:
                for number in np.unique(owner).tolist():
                    results[number] = send(number, np.flatnonzero(owner == number).tolist())
                break
            except MovedError:
                if not remaining:
                    raise
        self._compact_if_due()
        return results

    def _compact_if_due(self) -> None:
        """Compact in the background, unless a compaction is running."""
        share = self._config.compact_at
        if share is None:
            return
        with self._deciding:
            if self._compaction is not None and not self._compaction.done():
                return
            now, rows = self.snapshots(), self._version.documents
            changed = sum(int(np.count_nonzero(~each.base_alive)) + len(each.live_alive) for each in now)
            if changed >= share * max(rows, 1):
                # If it fails, nothing has changed, and the next write starts another one.
                self._compaction = self._background.submit(
                    log_failure, self.compact, f"{self.folder}: compaction"
                )


def _with_current(folder: str | Path, use: Callable[[LiveVersion], None]) -> None:
    """Use the current version; retry with the next one if it was replaced and deleted meanwhile."""
    while True:
        version = versions.current(folder)
        try:
            return use(version)
        except ArtifactError:
            if versions.current(folder).number == version.number:
                raise
