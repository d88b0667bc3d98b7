"""A shard at one moment: an immutable base, live rows beside it, and which rows still stand for a document.

    base rows 0 … B-1      lists of the index version, never changed
    live rows B … B+M-1    lists merged from earlier writes
              B+M … B+L-1  the tail: the latest writes, compared one by one

Whoever holds a snapshot sees the same documents for as long as it is held: each at most once, in its last
version as of `sequence`, whatever is written, merged or compacted meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import faiss
import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Integer
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.index import ivf
from scalingnote.index.postings import Postings
from scalingnote.index.shard import Shard
from scalingnote.storage.stored_rows import StoredRows, take


class Segment(NamedTuple):
    """Vectors that are scanned together, and their documents; rows of the shard from `first_row` on.

    `alive` says which of them still stand for a document; None: all.
    """

    first_row: int
    lists: ivf.Lists
    alive: Bool[ndarray, " rows"] | None
    documents: pa.Table


@dataclass(frozen=True)
class Snapshot:
    """A shard as of log record `sequence`. Threads may share one."""

    sequence: int
    base: Shard
    base_alive: Bool[ndarray, " base_rows"]
    live_alive: Bool[ndarray, " live_rows"]
    chunks: tuple[pa.RecordBatch, ...]  # documents of the live rows
    merged: ivf.Lists
    tail: Float[ndarray, "tail dim"]
    postings: tuple[Postings, ...] = ()  # terms of the live rows, where documents have terms

    def __len__(self) -> int:
        """Documents; rows that were deleted or replaced do not count."""
        return int(np.count_nonzero(self.base_alive) + np.count_nonzero(self.live_alive))

    @property
    def rows(self) -> int:
        """Rows, those included that stand for no document any more."""
        return len(self.base_alive) + len(self.live_alive)

    @property
    def alive(self) -> Bool[ndarray, " rows"]:
        """Which rows stand for a document."""
        return np.concatenate([self.base_alive, self.live_alive])

    @property
    def term_segments(self) -> tuple[Postings, ...]:
        """The terms of all rows, in order; nothing where the index holds none."""
        return () if self.base.postings is None else (self.base.postings, *self.postings)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """What a search by vectors scans."""
        base, merged, live = len(self.base_alive), len(self.merged), self._live_documents
        found = [Segment(0, self.base.lists, _some(self.base_alive), self.base.documents)]
        if merged:
            found.append(Segment(base, self.merged, _some(self.live_alive[:merged]), live[:merged]))
        if len(self.tail):
            alive = _some(self.live_alive[merged:])
            found.append(Segment(base + merged, self._exact, alive, live[merged:]))
        return tuple(found)

    def documents(self, rows: Sequence[int] | Integer[ndarray, " rows"]) -> pa.Table:
        """The documents of these rows, in order; a row that is dead by now still has the one it stood for."""
        wanted = np.asarray(rows, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.rows)]
        if len(outside):
            raise SearchError(f"no row {outside[0]}: there are {self.rows}")
        return take(pa.concat_tables([self.base.documents, self._live_documents]), wanted)

    def document(self, row: int) -> dict[str, Any]:
        """The document of a row that is there, as searches give it."""
        first = len(self.base_alive)
        return self.base.stored[row] if row < first else self._live_stored[row - first]

    @cached_property
    def _live_documents(self) -> pa.Table:
        return pa.Table.from_batches(self.chunks, schema=self.base.documents.schema)

    @cached_property
    def _live_stored(self) -> StoredRows:
        return StoredRows(self._live_documents)

    @cached_property
    def _exact(self) -> ivf.Lists:
        """The tail as a flat index; made by the first search, as most snapshots are never searched."""
        kept = faiss.IndexFlatIP(self.tail.shape[1])
        kept.add(self.tail)
        return ivf.Lists(None, kept, self.base.lists.coarse)


def _some(alive: Bool[ndarray, " rows"]) -> Bool[ndarray, " rows"] | None:
    """None where all are alive: a scan without a mask is faster."""
    return None if alive.all() else alive
