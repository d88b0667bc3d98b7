"""Search of a live index, and of views that are made anew when what they are of changes."""

from collections.abc import Callable, Mapping
from operator import is_not
from typing import Any, Generic, TypeVar

from jaxtyping import Float
from numpy import ndarray

from scalingnote.index.live.live_index import LiveIndex
from scalingnote.index.live.live_state import Snapshot
from scalingnote.index.shard import IndexLayout
from scalingnote.search.scan import IndexView, require_vectors
from scalingnote.search.searcher import Searcher

T = TypeVar("T")


def live_view(layout: IndexLayout, snapshots: Mapping[int, Snapshot]) -> IndexView:
    """The rows of snapshots of live shards, given by their numbers."""
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
    """A value, and the objects that it was made of: the same value while these are the same objects.

    Both are replaced as one, so threads may share it; two may make the value at once.
    """

    def __init__(self) -> None:
        self._held: tuple[tuple[object, ...], T] | None = None

    def of(self, *sources: object, make: Callable[[], T]) -> T:
        """The value of these objects, made anew if one is another than before."""
        held = self._held
        if held is None or len(held[0]) != len(sources) or any(map(is_not, held[0], sources)):
            self._held = held = sources, make()
        return held[1]


class LiveSearcher(Searcher):
    """Search of a live index: each search sees one moment of every shard, with all acknowledged writes."""

    def __init__(self, index: LiveIndex) -> None:
        self._index = index
        self._latest: Latest[IndexView] = Latest()

    def view(self) -> IndexView:
        """The rows of all shards as of now; the same view until something is written."""
        snapshots = self._index.snapshots()
        return self._latest.of(
            *snapshots, make=lambda: live_view(self._index.layout, dict(enumerate(snapshots)))
        )

    @property
    def layout(self) -> IndexLayout:
        """Layout of the index version."""
        return self._index.layout

    def refresh(self) -> None:
        """Show what the writing process has acknowledged by now, in the version that is open."""
        for shard in self._index.shards:
            shard.refresh()

    def get(self, doc_id: str) -> dict[str, Any] | None:
        """The document with this id as of now; None where there is none."""
        return self._index.get(doc_id)

    def vector(self, doc_id: str) -> Float[ndarray, " dim"] | None:
        """See :meth:`Searcher.vector`."""
        require_vectors(self.layout)
        return self._index.vector(doc_id)
