"""A live index: all its shards in one process, each write sent to the shard that owns the document.

Where shards are processes of their own, each holds a :class:`~scalingnote.index.live.LiveShard`, and whoever
sends writes asks them :meth:`~scalingnote.index.live.LiveShard.knows` and decides by
:func:`~scalingnote.index.live.owners`, as is done here.
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
from scalingnote.index.config import IndexConfig
from scalingnote.index.live import compaction, versions, writes
from scalingnote.index.live.config import DEFAULTS, LiveConfig
from scalingnote.index.live.registry import Version
from scalingnote.index.live.shard import LiveShard, MovedError, owners
from scalingnote.index.live.snapshot import Snapshot
from scalingnote.index.live.writes import Written
from scalingnote.log import get_logger
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.stored_rows import take

T = TypeVar("T")
_ASKED_AGAIN = 3  # times; a document moves at most once per compaction


class LiveIndex:
    """Every shard of an index, open for writing, or following who writes. Threads may share one."""

    def __init__(
        self,
        folder: str | Path,
        index: str | None = None,
        *,
        follow: bool = False,
        config: LiveConfig = DEFAULTS,
    ) -> None:
        """Open the current version and what was written since; `folder` holds both, see `versions`.

        `index`, the artifact that was built, is needed once.
        """
        self.folder, self._config = Path(folder), config
        self._adopting, self._deciding = threading.Lock(), threading.Lock()
        self._background = ThreadPoolExecutor(1, "compaction", faiss.omp_set_num_threads, (1,))
        self._compaction: Future[None] | None = None
        versions.current(folder, index)

        def open_shards(version: Version) -> None:
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
        """Documents."""
        return sum(len(each) for each in self.shards)

    @property
    def version(self) -> int:
        """Number of the index version that searches start from."""
        return self._version.number

    def snapshots(self) -> list[Snapshot]:
        """All shards as of now; of a batch of writes, the part of one may show before that of another."""
        return [each.snapshot for each in self.shards]

    def upsert(self, documents: pa.Table, vectors: Shaped[ndarray, "..."]) -> dict[int, Written]:
        """Write each document to its owner; what became of them, by shard. See :meth:`LiveShard.upsert`."""
        if "doc_id" not in documents.column_names or len(vectors) != len(documents):
            raise DataError(
                f"{len(documents)} documents and {len(vectors)} vectors, doc_id a column: pass these"
            )
        doc_ids = documents["doc_id"].cast(pa.string()).fill_null("").to_pylist()

        def write(number: int, rows: Sequence[int]) -> Written:
            own = np.array(rows)
            return self.shards[number].upsert(take(documents, own), vectors[own], rows=rows)

        return self._routed(doc_ids, write)

    def delete(self, doc_ids: Sequence[str]) -> dict[int, Written]:
        """Delete documents; what became of it, by shard. DataError when something else than ids is named."""
        wanted = writes.delete(doc_ids).doc_ids
        return self._routed(
            wanted, lambda number, rows: self.shards[number].delete([wanted[i] for i in rows])
        )

    # A write goes to the owner. What is read is wherever it is alive: of documents that were deleted, each
    # process remembers others, and so followers may name other owners than the writer does.

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id, as of now."""
        found = (each.get(doc_id) for each in self.shards)
        return next((document for document in found if document is not None), None)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """A document's vector, as of now, as exact as the index keeps it."""
        found = (each.vector(doc_id) for each in self.shards)
        return next((vector for vector in found if vector is not None), None)

    def refresh(self) -> None:
        """Follow the writing process: its version if that is another, then its writes."""

        def follow(_: Version) -> None:
            self.adopt()
            for each in self.shards:
                each.refresh()

        _with_current(self.folder, follow)

    def compact(self) -> Artifact | None:
        """Write the next version here and now, and go over to it; None if there is nothing new."""
        written = compaction.compact(
            self.folder, retrain_at=self._config.retrain_at, keep_versions=self._config.keep_versions
        )
        self.adopt()
        return written

    def adopt(self) -> bool:
        """Go over to the version that is current, if it is another, later or earlier; whether it was.

        It was made current, in any process, by a compaction or by `versions.activate`.
        """
        with self._adopting:
            before = self._version
            if versions.current(self.folder).number != before.number:
                _with_current(self.folder, self._go_over)
            return self._version.number != before.number

    def _go_over(self, version: Version) -> None:
        opened, needed = _Opened(version), versions.needed(self.folder)
        for number, (each, after) in enumerate(zip(self.shards, opened.included, strict=True)):
            each.rebase(opened.shard(number), opened.quantizer, after=after, needed=needed[number])
        self._version, self.layout = version, opened.layout

    def close(self) -> None:
        """Close every shard, after a compaction that is under way."""
        self._background.shutdown()
        for each in self.shards:
            each.close()

    def _owners(self, doc_ids: Sequence[str]) -> list[int]:
        return owners(doc_ids, [each.knows(doc_ids) for each in self.shards], shards=len(self.shards))

    def _routed(self, doc_ids: Sequence[str], send: Callable[[int, Sequence[int]], T]) -> dict[int, T]:
        """Send each row to the shard that owns it, and again where a compaction came between."""
        sent: dict[int, T] = {}
        for attempt in range(_ASKED_AGAIN):
            owner = np.array(self._owners(doc_ids), np.int64)
            try:
                for number in np.unique(owner).tolist():
                    sent[number] = send(number, np.flatnonzero(owner == number).tolist())
                self._compact_if_due()
                return sent
            except MovedError:
                if attempt + 1 == _ASKED_AGAIN:
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
                self._compaction = self._background.submit(self._compact_or_say_why)

    def _compact_or_say_why(self) -> None:
        try:
            self.compact()
        except Exception:  # everything is where it was; the next write tries again
            get_logger("index").exception("%s: compaction failed", self.folder)


class _Opened:
    """A version, open to take shards from."""

    def __init__(self, version: Version) -> None:
        self._artifact = version.open()
        self.included = versions.included(self._artifact)
        self.strongest = IndexConfig.model_validate(self._artifact.manifest.config).terms
        self.layout = shard.open_layout(self._artifact)
        self.quantizer = versions.open_quantizer(self._artifact, self.layout)
        self._coarse = shard.open_coarse(self._artifact)

    def shard(self, number: int) -> shard.Shard:
        return shard.open_shard(self._artifact, number, layout=self.layout, coarse=self._coarse)


def _with_current(folder: str | Path, use: Callable[[Version], None]) -> None:
    """Use the current version; the next one where it was replaced, and files of it or its log removed."""
    while True:
        version = versions.current(folder)
        try:
            return use(version)
        except ArtifactError:
            if versions.current(folder).number == version.number:
                raise
