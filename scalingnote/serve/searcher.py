"""The searcher deployment: it searches some shards of an index by a query's embedding and terms.

It holds every version that the catalog keeps, and for some seconds those that it kept before. A call names
its version, so no answer mixes two while another one is activated; a version that is not open yet is opened
by the first call that names it.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.errors import SearchError
from scalingnote.hybrid import Joining
from scalingnote.index import filters, sparse
from scalingnote.index.live.index import LiveIndex
from scalingnote.models.sparse_query import SparseRows
from scalingnote.search.candidates import ShardCandidates
from scalingnote.search.searcher import LiveSearcher, Searcher
from scalingnote.serve.concurrency import LoopBatcher, ThreadBatcher, run_periodically
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.versions import OPEN_TIMEOUT_S, Catalog, LiveCatalog, Version, VersionContent

MAX_BATCH = 32  # queries scanned together
# Larger searches leave the event loop: MAX_BATCH searches of these sizes take about 5 ms.
INLINE_MAX_DOCUMENTS, INLINE_MAX_K = 500_000, 100
MAX_FACET_VALUES = 1000  # a text field with more values is no facet
RELEASE_AFTER_S = 10.0  # all gateways change within a second; requests from before name the old version
POLL_INTERVAL_S = 5.0  # between two reads of which versions are kept
AnySearcher = Searcher | LiveSearcher
log = get_logger()


@dataclass(frozen=True)
class ShardQuery:
    """A search of one version; `embedding` and `terms` have one row."""

    version: str
    embedding: Float[ndarray, "one dim"]
    k: int
    terms: SparseRows | None = None
    nprobe: int | None = None
    where: filters.Filter | None = None
    exact: bool = False

    @cached_property
    def batch_key(self) -> tuple[str | int | bool, ...]:
        """Searches with equal keys differ in embedding and terms only, and are done together."""
        where = json.dumps(self.where, sort_keys=True) if self.where else ""
        return self.version, self.k, self.nprobe or 0, self.exact, self.terms is None, where


@dataclass(frozen=True)
class Refused:
    """Why a search is refused. A value, as Ray would wrap an exception in one of its own."""

    reason: str


class ShardAnswer(NamedTuple):
    """Candidates of the shards of one searcher."""

    version: str  # of a live index the current one, whichever was named
    found: ShardCandidates
    shards: int  # number of shards searched


_Call = tuple[AnySearcher, ShardQuery]  # the searcher of the version, looked up when the call arrives


class IndexSearcher:
    """Holds some or all shards of each kept version of an index; of a live index all of the current version.

    The shards of a live index stay in one process, so that a search sees all of them at one moment.

    Args:
        catalog: of the versions to hold.
        shards: numbers of the shards held here; None: all.
        nprobe: inverted lists searched where a query does not say; None: the index's own.
        mapped: leave vectors in their files.
        refresh_s: interval at which the writes to a live index are read.
    """

    def __init__(
        self,
        catalog: Catalog | LiveCatalog,
        *,
        shards: Sequence[int] | None = None,
        nprobe: int | None = None,
        mapped: bool = False,
        refresh_s: float = 0.1,
    ) -> None:
        self._catalog, self._shards, self._nprobe, self._mapped = catalog, shards, nprobe, mapped
        self._joining, self._refresh_s = Joining(), refresh_s
        self._opening = asyncio.Lock()
        self._in_thread: ThreadBatcher[_Call, ShardCandidates | Refused] = ThreadBatcher(
            self._search_batch, max_batch=MAX_BATCH
        )
        self._in_loop: LoopBatcher[_Call, ShardCandidates | Refused] = LoopBatcher(
            self._search_batch, max_batch=MAX_BATCH
        )
        self._background: asyncio.Task[None] | None = None
        served = catalog.read()
        kept = served.versions[:1] if self._live else served.versions
        self._held = {version.name: self._open(version) for version in kept}
        # Versions are held until then whether the catalog lists them or not, in time.monotonic().
        self._held_until = dict.fromkeys(self._held, time.monotonic() + OPEN_TIMEOUT_S)

    async def search(self, query: ShardQuery) -> ShardAnswer | Refused:
        """The best candidates of the shards held here."""
        name, searcher = await self._require(query.version)
        query = query if query.version == name else replace(query, version=name)
        batcher = self._in_loop if self._is_short(searcher, query) else self._in_thread
        found = await batcher((searcher, query))
        return found if isinstance(found, Refused) else ShardAnswer(name, found, len(searcher.shards))

    def _is_short(self, searcher: AnySearcher, query: ShardQuery) -> bool:
        """Whether a search is sure to take less than a millisecond: of vectors only, all in memory."""
        if not isinstance(searcher, Searcher) or self._mapped or len(searcher) > INLINE_MAX_DOCUMENTS:
            return False
        plain = query.where is None and query.terms is None and not query.exact and not query.nprobe
        return plain and query.k <= INLINE_MAX_K

    async def document(self, version: str, doc_id: str) -> list[dict[str, Any]]:
        """The document of this id: one, or none."""
        _, searcher = await self._require(version)
        document = await self._in_thread.run_between_batches(lambda: searcher.get(doc_id))
        return [] if document is None else [document]

    async def vector(self, version: str, doc_id: str) -> Float[ndarray, "found dim"] | Refused:
        """The vector of the document of this id: one row, or none."""
        _, searcher = await self._require(version)
        try:
            vector = await self._in_thread.run_between_batches(lambda: searcher.vector(doc_id))
        except SearchError as error:
            return Refused(str(error))
        return np.empty((0, searcher.dim), np.float32) if vector is None else vector[np.newaxis]

    async def describe(self, version: str) -> VersionContent:
        """The content of the shards held here."""
        _, searcher = await self._require(version)
        facets = await asyncio.to_thread(searcher.facets, most=MAX_FACET_VALUES)
        return VersionContent(searcher.layout, len(searcher.shards), searcher.fields, facets)

    async def load(self, version: Version) -> bool:
        """Open a version beside those held, and release those that the catalog no longer keeps.

        Of a live index the current version is opened instead, if it is not held yet.
        """
        async with self._opening:
            served = await asyncio.to_thread(self._catalog.read)
            if self._live:
                version, kept = served.active, {served.active.name}
            else:
                kept = {each.name for each in served.versions} | {version.name}
            if version.name not in self._held:
                opened = await asyncio.to_thread(self._open, version)
                # Searches that run or wait have a reference to their searcher.
                self._held = {name: held for name, held in self._held.items() if name in kept}
                self._held[version.name] = opened
            self._held_until[version.name] = time.monotonic() + OPEN_TIMEOUT_S
        return True

    async def refresh(self) -> bool:
        """Read what was written to a live index, and change to its current version."""
        if self._live:
            active = (await asyncio.to_thread(self._catalog.read)).active
            if active.name not in self._held:
                await self.load(active)
            (searcher,) = self._held.values()
            assert isinstance(searcher, LiveSearcher)
            await asyncio.to_thread(searcher.refresh)
        return True

    async def release_old_versions(self) -> None:
        """Release versions that the catalog has not listed for some seconds, once the active one is open."""
        served = await asyncio.to_thread(self._catalog.read)
        listed, now = {version.name for version in served.versions}, time.monotonic()
        if served.active.name in self._held:
            until = {
                name: now + RELEASE_AFTER_S if name in listed else self._held_until[name]
                for name in self._held
            }
            self._held_until = {name: end for name, end in until.items() if end > now}
            self._held = {name: self._held[name] for name in self._held_until}

    async def ping(self, version: str) -> int:
        """The number of shards held of a version, or of another one while it is not open."""
        return len(self._held.get(version, next(iter(self._held.values()))).shards)

    @property
    def _live(self) -> bool:
        return isinstance(self._catalog, LiveCatalog)

    async def _require(self, name: str) -> tuple[str, AnySearcher]:
        """The version to search, opened if need be, and its name."""
        if self._background is None:  # the constructor runs before there is an event loop
            self._background = asyncio.create_task(self._follow_catalog())
        if self._live:
            (name,) = self._held
        elif name not in self._held:
            await self.load(self._catalog.read().named(name))
        return name, self._held[name]

    async def _follow_catalog(self) -> None:
        if self._live:
            await run_periodically(
                self.refresh, interval_s=self._refresh_s, name="refreshing from the live index"
            )
        else:
            await run_periodically(
                self.release_old_versions, interval_s=POLL_INTERVAL_S, name="reading which versions are kept"
            )

    def _open(self, version: Version) -> AnySearcher:
        log.info("opening index version %s: %s", version.name, version.uri)
        opened: AnySearcher
        if isinstance(self._catalog, LiveCatalog):
            live = LiveIndex(self._catalog.folder, self._catalog.index, follow=True)
            opened = LiveSearcher(live, nprobe=self._nprobe)
        else:
            opened = Searcher.open(version.uri, shards=self._shards, nprobe=self._nprobe, mapped=self._mapped)
        # The first search compiles code and loads pages, which would take part of a request's deadline.
        opened.find(np.ones((1, opened.dim), np.float32), k=10)
        if opened.layout.sparse:
            sparse.warm()
        return opened

    def _search_batch(self, batch: Sequence[_Call]) -> list[ShardCandidates | Refused | Exception]:
        """Answers in the order of the batch; searches with equal batch keys are done together."""
        order = sorted(range(len(batch)), key=lambda number: batch[number][1].batch_key)
        answers: dict[int, ShardCandidates | Refused | Exception] = {}
        for _, numbers in groupby(order, key=lambda number: batch[number][1].batch_key):
            group = list(numbers)
            searcher = batch[group[0]][0]
            answers |= zip(group, self._search_group(searcher, [batch[n][1] for n in group]), strict=True)
        return [answers[number] for number in range(len(batch))]

    def _search_group(
        self, searcher: AnySearcher, queries: Sequence[ShardQuery]
    ) -> Sequence[ShardCandidates | Refused | Exception]:
        first = queries[0]
        try:
            return searcher.find(
                np.concatenate([query.embedding for query in queries]),
                k=first.k,
                terms=_stack([query.terms for query in queries if query.terms is not None]),
                joining=self._joining,
                nprobe=first.nprobe,
                where=first.where,
                exact=first.exact,
            )
        except SearchError as error:
            if len(queries) > 1:  # one of them may be the reason: the others are answered by themselves
                return [answer for query in queries for answer in self._search_group(searcher, [query])]
            return [Refused(str(error))]
        except Exception as error:
            return [error] * len(queries)


def _stack(rows: Sequence[SparseRows]) -> SparseRows | None:
    """Concatenate sparse matrices by rows; None for no matrix."""
    if len(rows) <= 1:
        return rows[0] if rows else None
    sizes = np.concatenate([np.diff(each.offsets) for each in rows])
    return SparseRows(
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.concatenate([each.terms for each in rows]),
        np.concatenate([each.values for each in rows]),
    )
