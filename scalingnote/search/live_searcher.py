"""Search of an index that takes writes: of all its shards, or of a large index and its delta.

    LiveIndex.snapshots() ──────────► one view of all shards, rebuilt after each write

    Delta.now() ─► its documents as of record n          ┐
    OverriddenSearcher.at(n) ─► the index without the    ├─ concatenate, rank ─► each document once
    rows of documents that records up to n name          ┘

The delta and the large index may be in different processes, and each process follows the log. A search uses
the newest record that the delta has read. The searchers of the index read at least as far, and ignore later
records. So no document is found twice or missed while a write reaches one process before another, and hidden
rows take no place among the k best. See :mod:`scalingnote.index.live.versions`.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import is_not
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from scalingnote.core.errors import ArtifactError
from scalingnote.index.live import versions, wal
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.live_shard import LiveShard
from scalingnote.index.live.live_state import Snapshot
from scalingnote.index.live.versions import LiveVersion, OpenVersion, open_empty
from scalingnote.index.live.writes import overridden
from scalingnote.index.shard import DocumentStore, IndexLayout, open_layout
from scalingnote.search.scan import IndexView, require_vectors
from scalingnote.search.searcher import Candidates, Searcher
from scalingnote.storage.schema import document_of

MOMENTS_KEPT = 4  # masks of rows as of earlier records: gateways read the log at different times
T = TypeVar("T")


def live_view(layout: IndexLayout, snapshots: Mapping[int, Snapshot]) -> IndexView:
    """Build the view of all rows of some snapshots of live shards, given as a mapping from shard numbers."""
    segments = [segment for snapshot in snapshots.values() for segment in snapshot.segments]
    return IndexView(
        layout,
        segments=[segment.lists for segment in segments],
        alive=[segment.alive for segment in segments],
        documents=[segment.documents for segment in segments],
        postings=[each for snapshot in snapshots.values() for each in snapshot.term_segments],
        shard_rows={number: snapshot.rows for number, snapshot in snapshots.items()},
        lookup={number: snapshot.document for number, snapshot in snapshots.items()},
    )


class Latest(Generic[T]):
    """A cached value and the objects that it was built from: the value is kept while these are identical.

    Both are replaced in one assignment, so threads may share it; two threads may build the value at once.
    """

    def __init__(self) -> None:
        self._held: tuple[tuple[object, ...], T] | None = None

    def of(self, *sources: object, make: Callable[[], T]) -> T:
        """Return the value for these objects, built again if one is not the object of the last call."""
        cached = self._held
        if cached is None or len(cached[0]) != len(sources) or any(map(is_not, cached[0], sources)):
            self._held = cached = sources, make()
        return cached[1]


class LiveSearcher(Searcher):
    """Search of a live index: each search sees one snapshot of every shard, with all acknowledged writes."""

    def __init__(self, index: LiveIndex) -> None:
        self._index = index
        self._latest: Latest[IndexView] = Latest()

    def view(self) -> IndexView:
        """Return the current rows of all shards; the view is the same until the next write."""
        snapshots = self._index.snapshots()
        return self._latest.of(
            *snapshots, make=lambda: live_view(self._index.layout, dict(enumerate(snapshots)))
        )

    def refresh(self) -> None:
        """Show all writes that the writing process has acknowledged, in the open version."""
        for shard in self._index.shards:
            shard.refresh()

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """Return the current document with this id; None if there is none."""
        return self._index.get(doc_id)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """See :meth:`Searcher.vector`."""
        require_vectors(self.layout)
        return self._index.vector(doc_id)


# --- a large index and its delta --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Overridden:
    """The rows that the log hides so far. One assignment replaces it, so that searches need no lock."""

    record: int  # the last one that was read
    alive: Bool[ndarray, " rows"]  # as of this record
    rows: Int[ndarray, " hidden"]  # in the order in which they were hidden
    records: Int[ndarray, " hidden"]  # that hide these rows


class OverriddenSearcher(Searcher):
    """Search of shards of a large index without overridden documents; call :meth:`follow` first."""

    def follow(self, log: str | Path, *, after: int) -> None:
        """Hide the documents that later records than `after` override; this version includes `after`."""
        self._log, self._reading = Path(log), threading.Lock()
        nothing = np.empty(0, np.int64)
        self._overridden = _Overridden(after, np.ones(len(self), bool), nothing, nothing)
        self._moments: dict[int, Searcher] = {}  # by the number of hidden rows
        self.rows_of([])  # sorts rows by ids now: no search waits for that after the first write
        self.refresh()

    @property
    def record(self) -> int:
        """The last record of the log that was read."""
        return self._overridden.record

    def refresh(self) -> None:
        """Read all acknowledged records of the log."""
        with self._reading:
            now, until = self._overridden, wal.last_acknowledged(self._log)
            if until <= now.record:
                return
            alive, rows, records = now.alive.copy(), [now.rows], [now.records]
            ids_of_records = overridden(
                self._log, after=now.record, until=until, passages=self.layout.passages
            )
            for record, doc_ids in ids_of_records:
                newly_hidden = self.rows_of(doc_ids)
                newly_hidden = newly_hidden[alive[newly_hidden]]
                alive[newly_hidden] = False
                rows.append(newly_hidden)
                records.append(np.full(len(newly_hidden), record))
            self._overridden = _Overridden(until, alive, np.concatenate(rows), np.concatenate(records))

    def at(self, record: int) -> Searcher:
        """Return a searcher of the rows that no record up to this one overrides.

        Raises:
            ArtifactError: the record was not read yet.
        """
        now = self._overridden
        if record > now.record:
            raise ArtifactError(
                f"{self._log} was read up to record {now.record}, not {record}: refresh first"
            )
        hidden = int(np.searchsorted(now.records, record, "right"))
        if not hidden:
            return self
        searcher = self._moments.get(hidden)
        if searcher is None:
            alive = now.alive
            if hidden < len(now.rows):
                alive = np.ones(len(self), bool)
                alive[now.rows[:hidden]] = False
            searcher = self.hiding(alive)
            newest = [*self._moments.items()][1 - MOMENTS_KEPT :]
            self._moments = dict([*newest, (hidden, searcher)])
        return searcher

    def hiding(self, alive: Bool[ndarray, " rows"]) -> Searcher:
        """See :meth:`Searcher.hiding`."""
        other = super().hiding(alive)
        vars(other)["_moments"] = {}  # or each searcher would keep all earlier ones in memory
        return other


class DeltaMoment(Searcher):
    """Search of a delta as of a record of its log.

    Args:
        view: its rows.
        record: number of the last record that it includes.
        version: name of the index version in its candidates.
    """

    def __init__(self, view: IndexView, record: int, version: str) -> None:
        self._view, self.record, self.version = view, record, version

    def find(self, *queries: Any, **options: Any) -> list[Candidates]:
        """See :meth:`Searcher.find`; a delta does not count as a shard of the index."""
        return [replace(candidates, searched=0) for candidates in super().find(*queries, **options)]


class Delta:
    """The delta of a version of a large index, in a process that follows the log.

    Args:
        folder: folder of the live index.
        version: an entry of its register of versions.
        name: name of the version in its candidates.
    """

    def __init__(self, folder: str | Path, version: LiveVersion, *, name: str = "") -> None:
        open_version, log = OpenVersion(version, open_empty(folder)), versions.log_folder(folder, 0)
        self._log, self._name, self._layout = log, name, open_version.layout
        self._number = open_layout(version.open()).shards  # candidates come after those of the index
        (self._read,) = open_version.included
        self._shard = LiveShard(open_version, 0, folder, follow=True)
        self._doc_ids: set[str] = set()
        self._reading = threading.Lock()
        self._latest: Latest[DeltaMoment] = Latest()
        self.refresh()

    def refresh(self) -> None:
        """Read all acknowledged records of the log."""
        with self._reading:
            self._shard.refresh()
            # Ids are read after the documents: an id in the set has its document, unless it was deleted.
            until, passages = self._shard.snapshot.sequence, self._layout.passages
            for _, doc_ids in overridden(self._log, after=self._read, until=until, passages=passages):
                self._doc_ids.update(doc_ids)
            self._read = until

    def now(self) -> DeltaMoment:
        """Return a searcher of the current documents of the delta."""
        snapshot = self._shard.snapshot

        def make() -> DeltaMoment:
            view = live_view(self._layout, {self._number: snapshot})
            return DeltaMoment(view, snapshot.sequence, self._name)

        return self._latest.of(snapshot, make=make)

    def overrides(self, doc_id: str) -> bool:
        """Return whether a document was written or deleted after the version was built, and so is hidden."""
        return doc_id in self._doc_ids

    def get(self, row: str) -> dict[str, Any] | None:
        """Return the current document or passage with this id; None if the delta has none."""
        return self._shard.get(row)

    def vector(self, row: str) -> Float[ndarray, " dim"] | None:
        """Return the vector of a document or passage, as exact as the index keeps it.

        Raises:
            SearchError: the index keeps only codes.
        """
        require_vectors(self._layout)
        return self._shard.vector(row)

    def close(self) -> None:
        """Stop following the log."""
        self._shard.close()


class SearcherWithDelta(Searcher):
    """Search of a large index and its delta in one process: see :class:`Searcher`."""

    def __init__(self, index: OverriddenSearcher, delta: Delta) -> None:
        self._index, self._delta = index, delta
        self._latest: Latest[IndexView] = Latest()

    @classmethod
    def over(cls, folder: str | Path, *, mapped: bool = False) -> "SearcherWithDelta":
        """Open the current version in the folder of a live index, and its delta."""
        version = versions.current(folder)
        index = OverriddenSearcher.open(version.uri, mapped=mapped)
        index.follow(versions.log_folder(folder, 0), after=version.included[0])
        return cls(index, Delta(folder, version))

    def __len__(self) -> int:
        return len(self._index)

    def refresh(self) -> None:
        """Show all writes that the writing process has acknowledged."""
        self._delta.refresh()

    def view(self) -> IndexView:
        """Return the current rows of both; the view is the same until the next write."""
        moment = self._delta.now()
        return self._latest.of(moment, make=partial(self._as_of, moment))

    def _as_of(self, moment: DeltaMoment) -> IndexView:
        if self._index.record < moment.record:
            self._index.refresh()
        return self._index.at(moment.record).view().beside(moment.view())

    @property
    def store(self) -> DocumentStore:
        """Documents of the large index."""
        return self._index.store

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """Return the document or passage with this id; None if there is none."""
        return self._holder(doc_id).get(doc_id)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """See :meth:`Searcher.vector`."""
        return self._holder(doc_id).vector(doc_id)

    def _holder(self, row: str) -> Delta | OverriddenSearcher:
        """Return the delta or the index, whichever has the document of a row (a document or a passage)."""
        document = document_of(row) if self._index.layout.passages else row
        return self._delta if self._delta.overrides(document) else self._index

    def close(self) -> None:
        """Stop following the log."""
        self._delta.close()
