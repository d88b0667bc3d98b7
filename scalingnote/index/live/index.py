"""A live index: all its shards in one process, each write sent to the shard that owns the document.

With a process per shard, each would hold a :class:`LiveShard`, and the sender of writes would determine the
owners from :meth:`LiveShard.knows` by :func:`owners`, as :class:`LiveIndex` does.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import faiss
import numpy as np
import pyarrow as pa
from jaxtyping import Float, Shaped
from numpy import ndarray

from scalingnote.errors import ArtifactError, DataError
from scalingnote.index import shard
from scalingnote.index.config import LIVE_DEFAULTS, IndexConfig, LiveConfig
from scalingnote.index.live import compaction, state, versions
from scalingnote.index.live.shard import LiveShard, MovedError, owners
from scalingnote.index.live.snapshot import Snapshot
from scalingnote.index.live.state import WriteResult
from scalingnote.index.live.versions import LiveVersion
from scalingnote.log import get_logger
from scalingnote.storage.arrow import take_rows
from scalingnote.storage.artifact import Artifact

T = TypeVar("T")
MAX_ATTEMPTS = 3  # to route a write; a document moves at most once per compaction


class LiveIndex:
    """Every shard of an index, open for writing or following the writer. Threads may share one."""

    def __init__(
        self,
        folder: str | Path,
        index: str | None = None,
        *,
        follow: bool = False,
        config: LiveConfig = LIVE_DEFAULTS,
    ) -> None:
        """Open the current version and the writes since.

        Args:
            folder: of versions and logs, see :mod:`scalingnote.index.live.versions`.
            index: artifact that was built; needed the first time.
            follow: read only, and follow the process that writes.
            config: settings.
        """
        self.folder, self._config = Path(folder), config
        self._adopting, self._deciding = threading.Lock(), threading.Lock()
        self._background = ThreadPoolExecutor(1, "compaction", faiss.omp_set_num_threads, (1,))
        self._compaction: Future[None] | None = None
        versions.current(folder, index)

        def open_shards(version: LiveVersion) -> None:
            opened = _Opened(version)
            needed = versions.needed(folder)
            with ExitStack() as on_failure:
                shards = []
                for number, after in enumerate(opened.included):
                    each = LiveShard(
                        opened.shard(number),
                        opened.quantizer,
                        log=versions.log_folder(folder, number),
                        after=after,
                        needed=needed[number],
                        shards=opened.layout.shards,
                        strongest=opened.strongest,
                        follow=follow,
                        merge_rows=config.merge_rows,
                        segment_bytes=config.segment_bytes,
                    )
                    on_failure.callback(each.close)
                    shards.append(each)
                on_failure.pop_all()
            self._version, self.layout, self.shards = version, opened.layout, shards

        _with_current(folder, open_shards)

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

    def upsert(self, documents: pa.Table, vectors: Shaped[ndarray, "..."]) -> dict[int, WriteResult]:
        """Write each document to its owner; outcomes by shard. See :meth:`LiveShard.upsert`."""
        if "doc_id" not in documents.column_names or len(vectors) != len(documents):
            raise DataError(
                f"{len(documents)} documents and {len(vectors)} vectors, doc_id a column: pass these"
            )
        doc_ids = documents["doc_id"].cast(pa.string()).fill_null("").to_pylist()

        def write(number: int, rows: Sequence[int]) -> WriteResult:
            own = np.array(rows)
            return self.shards[number].upsert(take_rows(documents, own), vectors[own], rows=rows)

        return self._routed(doc_ids, write)

    def delete(self, doc_ids: Sequence[str]) -> dict[int, WriteResult]:
        """Delete documents; outcomes by shard. DataError where a doc_id is not a non-empty string."""
        wanted = state.checked_delete(doc_ids).doc_ids
        return self._routed(
            wanted, lambda number, rows: self.shards[number].delete([wanted[i] for i in rows])
        )

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
        opened, needed = _Opened(version), versions.needed(self.folder)
        for number, (each, after) in enumerate(zip(self.shards, opened.included, strict=True)):
            each.rebase(opened.shard(number), opened.quantizer, after=after, needed=needed[number])
        self._version, self.layout = version, opened.layout

    def close(self) -> None:
        """Close every shard, after waiting for a running compaction."""
        self._background.shutdown()
        for each in self.shards:
            each.close()

    def _owners(self, doc_ids: Sequence[str]) -> list[int]:
        return owners(doc_ids, [each.knows(doc_ids) for each in self.shards], shards=len(self.shards))

    def _routed(self, doc_ids: Sequence[str], send: Callable[[int, Sequence[int]], T]) -> dict[int, T]:
        """Send each row to the shard that owns it, and again where a compaction moved documents meanwhile."""
        sent: dict[int, T] = {}
        for attempt in range(MAX_ATTEMPTS):
            owner = np.array(self._owners(doc_ids), np.int64)
            try:
                for number in np.unique(owner).tolist():
                    sent[number] = send(number, np.flatnonzero(owner == number).tolist())
                self._compact_if_due()
                return sent
            except MovedError:
                if attempt + 1 == MAX_ATTEMPTS:
                    raise
        return sent

    def _compact_if_due(self) -> None:
        """In the background, one at a time."""
        share = self._config.compact_at
        if share is None:
            return
        with self._deciding:
            idle = self._compaction is None or self._compaction.done()
            if idle and compaction.due(self.snapshots(), share=share):
                self._compaction = self._background.submit(self._compact_and_log)

    def _compact_and_log(self) -> None:
        try:
            self.compact()
        except Exception:  # nothing has changed; the next write tries again
            get_logger("index").exception("%s: compaction failed", self.folder)


class _Opened:
    """An open version, of which shards are opened one by one."""

    def __init__(self, version: LiveVersion) -> None:
        self._artifact = version.open()
        self.included = versions.included(self._artifact)
        self.strongest = IndexConfig.model_validate(self._artifact.manifest.config).terms
        self.layout = shard.open_layout(self._artifact)
        self.quantizer = versions.open_quantizer(self._artifact, self.layout)
        self._coarse = shard.open_coarse(self._artifact)

    def shard(self, number: int) -> shard.Shard:
        return shard.open_shard(self._artifact, number, layout=self.layout, coarse=self._coarse)


def _with_current(folder: str | Path, use: Callable[[LiveVersion], None]) -> None:
    """Use the current version; again with the next one if it was replaced and its files removed meanwhile."""
    while True:
        version = versions.current(folder)
        try:
            return use(version)
        except ArtifactError:
            if versions.current(folder).number == version.number:
                raise
