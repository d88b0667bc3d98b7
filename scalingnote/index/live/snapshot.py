"""A shard at one moment: an immutable base, live rows beside it, and which rows still stand for a document.

    base rows 0 … B-1      lists of the index version, never changed
    live rows B … B+M-1    lists merged from earlier writes
              B+M … B+L-1  the tail: the latest writes, compared one by one

A snapshot shows the same documents for as long as it is held: each at most once, in its last version as of
`sequence`, whatever is written, merged or compacted meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import faiss
import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int64, Integer
from numpy import ndarray

from scalingnote.errors import ArtifactError, DataError, SearchError
from scalingnote.index import ivf
from scalingnote.index.ivf import Lists
from scalingnote.index.postings import Postings
from scalingnote.index.shard import Shard
from scalingnote.storage.arrow import StoredRows, take_rows
from scalingnote.storage.shuffle import hash_of


class Segment(NamedTuple):
    """Vectors that are scanned together, and their documents; rows of the shard from `first_row` on.

    `alive` marks rows that still stand for a document; None: all.
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
        """Number of documents, without rows that were deleted or replaced."""
        return int(np.count_nonzero(self.base_alive) + np.count_nonzero(self.live_alive))

    @property
    def rows(self) -> int:
        """Number of rows, with those that no longer stand for a document."""
        return len(self.base_alive) + len(self.live_alive)

    @property
    def alive(self) -> Bool[ndarray, " rows"]:
        """Which rows stand for a document."""
        return np.concatenate([self.base_alive, self.live_alive])

    @property
    def term_segments(self) -> tuple[Postings, ...]:
        """Terms of all rows, in order; empty where the index holds no terms."""
        return () if self.base.postings is None else (self.base.postings, *self.postings)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments for a search by vectors."""
        base, merged, live = len(self.base_alive), len(self.merged), self._live_documents
        found = [Segment(0, self.base.lists, _some(self.base_alive), self.base.documents)]
        if merged:
            found.append(Segment(base, self.merged, _some(self.live_alive[:merged]), live[:merged]))
        if len(self.tail):
            alive = _some(self.live_alive[merged:])
            found.append(Segment(base + merged, self._exact, alive, live[merged:]))
        return tuple(found)

    def documents(self, rows: Sequence[int] | Integer[ndarray, " rows"]) -> pa.Table:
        """Documents of rows, in order; a dead row still has the document it stood for."""
        wanted = np.asarray(rows, np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.rows)]
        if len(outside):
            raise SearchError(f"no row {outside[0]}: there are {self.rows}")
        return take_rows(pa.concat_tables([self.base.documents, self._live_documents]), wanted)

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
        """The tail as a flat index, built by the first search: most snapshots are never searched."""
        kept = faiss.IndexFlatIP(self.tail.shape[1])
        kept.add(self.tail)
        return ivf.Lists(None, kept, self.base.lists.coarse)


def _some(alive: Bool[ndarray, " rows"]) -> Bool[ndarray, " rows"] | None:
    """None where all are alive: a scan without a mask is faster."""
    return None if alive.all() else alive


class DocIds:
    """Rows of document ids: a sorted array of hashes, 16 bytes per document.

    A dictionary of the ids would take ten times as much. Hashes may collide, so an id is found only where the
    stored id is equal. Threads may share one.
    """

    def __init__(self, doc_ids: pa.ChunkedArray) -> None:
        """ArtifactError where an id occurs twice: a write to it would be ambiguous."""
        self._doc_ids = doc_ids
        hashes = hash_of(doc_ids)
        self._rows = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._rows]
        equal = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        names = [doc_ids[row].as_py() for row in self._rows[np.union1d(equal, equal + 1)].tolist()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArtifactError(
                f"doc_id {twice!r} is in the shard twice: re-run prepare, which removes repeats"
            )

    def rows(self, doc_ids: Sequence[str]) -> Int64[ndarray, " ids"]:
        """Row of each id, -1 where it is unknown; DataError where an id is not a string."""
        wrong = [doc_id for doc_id in doc_ids if not isinstance(doc_id, str)]
        if wrong:
            raise DataError(f"{wrong[0]!r} is no doc_id: pass strings")
        found = np.full(len(doc_ids), -1, np.int64)
        if not len(doc_ids) or not len(self._hashes):
            return found
        hashes = hash_of(pa.array(doc_ids, pa.string()))
        starts = np.searchsorted(self._hashes, hashes)
        stops = np.searchsorted(self._hashes, hashes, side="right")
        for number in np.flatnonzero(starts < stops).tolist():
            for row in self._rows[starts[number] : stops[number]].tolist():
                if self._doc_ids[row].as_py() == doc_ids[number]:
                    found[number] = row
        return found


def copy_lists(lists: Lists) -> Lists:
    """Copy lists, to add rows to the copy while the original is searched.

    Serializing would not do: it detaches the centroids meanwhile, and searches would fail. The copy has its
    own centroids.
    """
    index, kept = (
        None if stored is None else faiss.clone_index(stored) for stored in (lists.index, lists.kept)
    )
    return replace(lists, index=index, kept=kept)


def drop_dead_rows(lists: Lists, alive: Bool[ndarray, " rows"]) -> None:
    """Drop dead rows in place; the others are renumbered in order.

    The lists must not be searched meanwhile. Later rows must be added by `ivf.merge`: the `add` of fast scan
    would combine new codes with remains of old ones in a half empty block (faiss 1.15.1).
    """
    dead = ivf.bitmap(~alive)
    selector = faiss.IDSelectorBitmap(len(dead), faiss.swig_ptr(dead))
    if lists.kept is not None:
        lists.kept.remove_ids(selector)  # a flat index closes its gaps itself
    if lists.index is None:
        return
    lists.index.remove_ids(selector)
    numbers = np.cumsum(alive) - 1
    inverted = lists.index.invlists
    for number in range(lists.index.nlist):
        if size := inverted.list_size(number):
            ids = faiss.rev_swig_ptr(inverted.get_ids(number), size)
            ids[:] = numbers[ids]
