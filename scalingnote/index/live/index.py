"""A live index: all its shards in one process, each write sent to the shard that owns the document.

Where shards are processes of their own, each holds a :class:`~scalingnote.index.live.LiveShard`, and whoever
sends writes asks them :meth:`~scalingnote.index.live.LiveShard.knows` and decides by
:func:`~scalingnote.index.live.owners`, as is done here.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped
from numpy import ndarray

from scalingnote.errors import ConfigError, DataError
from scalingnote.index import shard
from scalingnote.index.live import compaction, versions
from scalingnote.index.live.shard import LiveShard, MovedError, owners
from scalingnote.index.live.snapshot import Snapshot
from scalingnote.index.live.writes import Written
from scalingnote.storage.artifact import Artifact

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
        merge_rows: int = 1024,
        segment_bytes: int = 64 << 20,
    ) -> None:
        """Open the current version and what was written since; `folder` holds both, see `versions`.

        `index`, the artifact that was built, is needed once. The other knobs are those of a LiveShard.
        """
        self.folder = Path(folder)
        self._version = versions.current(folder, index)
        self._adopting = threading.Lock()
        artifact = self._version.open()
        self.layout = shard.open_layout(artifact)
        if self.layout.sparse:
            raise ConfigError(
                f"{artifact.uri} holds terms, which live updates do not write: index embeddings without"
            )
        quantizer = versions.open_quantizer(artifact, self.layout)
        coarse = shard.open_coarse(artifact)
        self.shards = [
            LiveShard(
                shard.open_shard(artifact, number, layout=self.layout, coarse=coarse),
                quantizer,
                log=versions.log_folder(folder, number),
                after=after,
                shards=self.layout.shards,
                follow=follow,
                merge_rows=merge_rows,
                segment_bytes=segment_bytes,
            )
            for number, after in enumerate(versions.included(artifact))
        ]

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
            return self.shards[number].upsert(documents.take(pa.array(rows)), vectors[np.array(rows)])

        return self._routed(doc_ids, write)

    def delete(self, doc_ids: Sequence[str]) -> dict[int, Written]:
        """Delete documents; what became of it, by shard."""
        return self._routed(
            doc_ids, lambda number, rows: self.shards[number].delete([doc_ids[i] for i in rows])
        )

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """A document by its id, as of now."""
        return self.shards[self._owners([doc_id])[0]].get(doc_id)

    def refresh(self) -> None:
        """Follow the writing process: its version if that is a newer one, then its writes."""
        self.adopt()
        for each in self.shards:
            each.refresh()

    def compact(self) -> Artifact | None:
        """Write the next version here and now, and go over to it; None if there is nothing new."""
        written = compaction.compact(self.folder)
        self.adopt()
        return written

    def adopt(self) -> bool:
        """Go over to a version that a compaction, in any process, has made current; whether there was one."""
        with self._adopting:
            newest = versions.current(self.folder)
            if newest.number == self._version.number:
                return False
            artifact = newest.open()
            layout = shard.open_layout(artifact)
            quantizer, coarse = versions.open_quantizer(artifact, layout), shard.open_coarse(artifact)
            for each, after in zip(self.shards, versions.included(artifact), strict=True):
                number = each.snapshot.base.number
                opened = shard.open_shard(artifact, number, layout=layout, coarse=coarse)
                each.rebase(opened, quantizer, after=after)
            self._version, self.layout = newest, layout
            return True

    def close(self) -> None:
        """Close every shard."""
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
                return sent
            except MovedError:
                if attempt + 1 == _ASKED_AGAIN:
                    raise
        return sent
