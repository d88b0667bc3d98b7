"""The deployment that searches shards of an index.

A searcher holds every version that the catalog keeps, and dropped versions for a few more seconds. A call
names its version, so no answer mixes two versions during a change. The first call that names a version opens
it, if it is not open yet.
"""

import asyncio
import pickle
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.core.errors import DatabaseError, SearchError
from scalingnote.index import filters, sparse
from scalingnote.index.config import SearchConfig
from scalingnote.index.live import versions
from scalingnote.index.live.live_index import LiveIndex
from scalingnote.search.backend import DatabaseSearcher, SearchBackend
from scalingnote.search.live_searcher import LiveSearcher, OverriddenSearcher
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Searcher, candidate_places
from scalingnote.serve.catalog import Catalog, Version, version_named
from scalingnote.serve.concurrency import Batcher, WorkerThread, gather_in_time, run_periodically
from scalingnote.serve.document_stores import READ_ERRORS, REOPEN_AFTER_S
from scalingnote.serve.fan_out import MAX_SEARCHED, Answer, SearchCall, search_batch
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import Refused
from scalingnote.serve.versions import LIVE_REFRESH_S, OPEN_TIMEOUT_S, VersionContent
from scalingnote.storage import filesystem as fs

# Larger searches run in a thread. In the event loop, MAX_SEARCHED searches of these sizes take about 5 ms.
INLINE_MAX_DOCUMENTS, INLINE_MAX_K = 500_000, 100
MAX_FACET_CARDINALITY = 1000  # a text field with more values is not a facet
RELEASE_AFTER_S = 10.0  # all gateways change within a second; earlier requests name the old version
RELEASE_POLL_INTERVAL_S = 5.0  # between two reads of the list of kept versions
DEFAULT_SEARCH = SearchConfig()
log = get_logger()


class IndexSearcher:
    """A searcher of some or all shards of each kept version of an index.

    Of a live index it holds all shards of the current version, so that a search sees all of them at one
    moment. For an index with a delta, a search names the moment: a record of the log of the delta, which is
    followed here.

    Args:
        catalog: of the versions to hold.
        shards: numbers of the shards held here; None: all.
        mapped: whether vectors stay in their files.
        search: the engine; a database has all shards.
        timeout_s: of the answers of a database.
        shows_documents: whether gateways read the documents of these shards from here if the index is remote.
    """

    def __init__(
        self,
        catalog: Catalog | LiveCatalog,
        *,
        shards: Sequence[int] | None = None,
        mapped: bool = False,
        search: SearchConfig = DEFAULT_SEARCH,
        timeout_s: float = 2.0,
        shows_documents: bool = False,
    ) -> None:
        self._catalog, self._shards, self._mapped = catalog, shards, mapped
        self._shows_documents, self._documents_closed_until = shows_documents, 0.0  # of time.monotonic()
        self._search, self._timeout_s = search, timeout_s
        self._opening = asyncio.Lock()
        self._thread = WorkerThread("searches")
        self._in_thread: Batcher[SearchCall, Answer] = Batcher(
            self._search_batch, max_batch=MAX_SEARCHED, thread=self._thread
        )
        self._in_loop: Batcher[SearchCall, Answer] = Batcher(self._search_batch, max_batch=MAX_SEARCHED)
        self._background: asyncio.Task[None] | None = None
        self._exact_searches = 0  # running now
        served = catalog.read()
        kept_versions = served[:1] if self._live else served
        self._held = {version.name: self._open(version) for version in kept_versions}
        # Versions are held until this time, in time.monotonic(), whether the catalog lists them or not.
        self._held_until = dict.fromkeys(self._held, time.monotonic() + OPEN_TIMEOUT_S)
        self._last_active = {served[0].name: time.monotonic()}

    async def search(self, query: Query) -> Answer:
        """Return the best candidates of the shards held here; of a live index, of its current version."""
        searcher = await self._require(query.version)
        if query.version != searcher.version:
            query = replace(query, version=searcher.version)
        if query.record is not None and isinstance(searcher, OverriddenSearcher):
            if searcher.record < query.record:
                await asyncio.to_thread(searcher.refresh)
            searcher = searcher.at(query.record)
        batcher = self._in_loop if self._is_short(searcher, query) else self._in_thread
        return await batcher((searcher, query))

    async def search_many(self, pickled: bytes, left_s: float) -> bytes:
        """Search for pickled queries; return the pickled candidates of each, None for one over `left_s`."""
        calls = [self.search(query) for query in pickle.loads(pickled)]
        return pickle.dumps(await gather_in_time(calls, deadline_s=left_s))

    def _is_short(self, searcher: SearchBackend, query: Query) -> bool:
        """Return whether a search surely takes less than a millisecond: only vectors, all in memory."""
        in_memory = isinstance(searcher, Searcher) and not self._mapped
        if self._live or not in_memory or len(searcher) > INLINE_MAX_DOCUMENTS:
            return False
        plain = query.where is None and query.terms is None and not query.exact and not query.nprobe
        return plain and query.k <= INLINE_MAX_K

    async def document(self, version: str, doc_id: str) -> list[dict[str, Any]]:
        """Return the document with this id, as a list of one document or none."""
        searcher = await self._require(version)
        document = await self._thread.run(lambda: searcher.get(doc_id))
        return [] if document is None else [document]

    async def open_documents(self, version: str) -> None:
        """Open the documents of the shards held here; one of READ_ERRORS if they cannot be read."""
        searcher = await self._require(version)
        await asyncio.to_thread(lambda: searcher.store)
        self._documents_closed_until = 0.0

    async def documents(self, version: str, ids: Sequence[int]) -> dict[int, dict[str, Any]] | Refused:
        """Return the documents of the candidates that are held here; refused if they cannot be read.

        After an error they are opened again after REOPEN_AFTER_S.
        """
        searcher = await self._require(version)
        if time.monotonic() >= self._documents_closed_until:
            try:
                return await asyncio.to_thread(_documents, searcher, ids)
            except READ_ERRORS:
                log.exception("the documents of version %s cannot be read here", version)
                self._documents_closed_until = time.monotonic() + REOPEN_AFTER_S
                vars(searcher).pop("store", None)  # a cached property
        return Refused("the documents of these shards cannot be read", temporary=True)

    async def columns(self, version: str, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return id and filter columns of the candidates held here, for when documents cannot be read."""
        searcher = await self._require(version)
        return await self._thread.run(lambda: searcher.columns(ids))

    async def vector(self, version: str, doc_id: str) -> Float[ndarray, "found dim"] | Refused:
        """Return the vector of the document with this id, as one row or none."""
        searcher = await self._require(version)
        try:
            vector = await self._thread.run(lambda: searcher.vector(doc_id))
        except (SearchError, DatabaseError) as error:
            return Refused(str(error), temporary=isinstance(error, DatabaseError))
        return np.empty((0, searcher.dim), np.float32) if vector is None else vector[np.newaxis]

    async def describe(self, version: str) -> VersionContent:
        """Return the content of the shards held here."""
        searcher = await self._require(version)

        def content() -> VersionContent:
            documents = searcher.documents()
            return VersionContent(
                searcher.layout,
                len(searcher.shards),
                sum(map(len, documents)),
                searcher.fields,
                filters.facets(documents, searcher.fields, most=MAX_FACET_CARDINALITY),
                documents_apart=not self._live,
            )

        return await asyncio.to_thread(content)

    async def load(self, version: Version) -> None:
        """Release versions that the catalog does not keep when this one is active, then open this one.

        So a replica holds no more versions than the catalog keeps, except one that was active seconds ago. Of
        a live index the current version is opened instead, if it is not held yet.
        """
        async with self._opening:
            served = await asyncio.to_thread(self._catalog.read)
            if self._live:
                version = served[0]
                if version.name not in self._held:
                    self._held = {version.name: await asyncio.to_thread(self._open, version)}
            elif version.name not in self._held:
                needed = await asyncio.to_thread(self._catalog.names_to_keep, version)
                needed |= self._active_lately(served[0].name)
                # Searches that run or wait have a reference to their searcher.
                self._held = {name: searcher for name, searcher in self._held.items() if name in needed}
                self._held[version.name] = await asyncio.to_thread(self._open, version)
            self._held_until[version.name] = time.monotonic() + OPEN_TIMEOUT_S

    async def refresh(self) -> None:
        """Read new writes of a live index or a delta; change to the current version of a live index."""
        if self._live:
            active = (await asyncio.to_thread(self._catalog.read))[0]
            if active.name not in self._held:
                await self.load(active)
        for searcher in [*self._held.values()]:
            if isinstance(searcher, LiveSearcher | OverriddenSearcher):
                await asyncio.to_thread(searcher.refresh)

    async def release_old_versions(self) -> None:
        """Release versions that the catalog has not listed for some seconds, if the active one is open."""
        served = await asyncio.to_thread(self._catalog.read)
        self._active_lately(served[0].name)
        listed_names, now = {version.name for version in served}, time.monotonic()
        if served[0].name in self._held:
            until = {
                name: now + RELEASE_AFTER_S if name in listed_names else self._held_until[name]
                for name in self._held
            }
            self._held_until = {name: end for name, end in until.items() if end > now}
            self._held = {name: self._held[name] for name in self._held_until}

    def _active_lately(self, active: str) -> set[str]:
        """Return the versions that a gateway may still name: those active now or seconds ago."""
        now = time.monotonic()
        self._last_active[active] = now
        self._last_active = {n: at for n, at in self._last_active.items() if now - at <= RELEASE_AFTER_S}
        return set(self._last_active)

    async def check_health(self) -> None:
        """Raise an error if a version cannot be searched or the thread hangs. Ray Serve calls this.

        An exact search of a large index may take minutes. While one runs, nothing is checked.
        """
        if not self._exact_searches:
            searchers = [*self._held.values()]
            await self._thread.check(partial(_probe, searchers))

    async def ping(self, version: str) -> int:
        """Return the number of shards held of a version, or of another one while it is not open.

        It is 0 if a database does not answer.
        """
        searcher = self._held.get(version, next(iter(self._held.values())))
        if isinstance(searcher, DatabaseSearcher):
            try:
                await self._thread.run(searcher.answers)
            except DatabaseError as error:
                log.warning("the health check failed: %s", error)
                return 0
        return len(searcher.shards)

    @property
    def _live(self) -> bool:
        """Whether the writes are in the held index itself, not in a separate delta."""
        return isinstance(self._catalog, LiveCatalog) and not self._catalog.delta

    async def _require(self, name: str) -> SearchBackend:
        """Return the searcher of a version, opened if needed; for a live index, of the current version."""
        if self._background is None:  # the constructor runs before there is an event loop
            self._background = asyncio.create_task(self._follow_catalog())
        if self._live:
            (searcher,) = self._held.values()
            return searcher
        if name not in self._held:
            # It continues if its request ends, because the next request would start it again.
            await asyncio.shield(asyncio.create_task(self.load(version_named(self._catalog.read(), name))))
        return self._held[name]

    async def _follow_catalog(self) -> None:
        tasks = []
        if isinstance(self._catalog, LiveCatalog):
            name = "refreshing from the live index"
            tasks.append(run_periodically(self.refresh, interval_s=LIVE_REFRESH_S, name=name))
        if not self._live:
            name, interval_s = "reading the list of kept versions", RELEASE_POLL_INTERVAL_S
            tasks.append(run_periodically(self.release_old_versions, interval_s=interval_s, name=name))
        await asyncio.gather(*tasks)

    def _open(self, version: Version) -> SearchBackend:
        log.info("opening index version %s: %s", version.name, version.uri)
        searcher: SearchBackend
        if self._search.backend != "own":
            collection = self._search.collection_of(version.name)
            searcher = DatabaseSearcher.open(
                version.uri, self._search, collection=collection, timeout_s=self._timeout_s
            )
        elif isinstance(self._catalog, LiveCatalog) and self._catalog.delta:
            searcher = OverriddenSearcher.open(version.uri, shards=self._shards, mapped=self._mapped)
            folder, number = self._catalog.place(version.name)
            record = versions.kept_version(folder, number)
            searcher.follow(versions.log_folder(folder, 0), after=record.included[0])
        elif isinstance(self._catalog, LiveCatalog):
            live = LiveIndex(self._catalog.folder, self._catalog.first.index, follow=True)
            searcher = LiveSearcher(live)
        else:
            searcher = Searcher.open(version.uri, shards=self._shards, mapped=self._mapped)
        searcher.version = version.name
        # The first search compiles code and loads pages, which would use time of a request's deadline.
        _probe([searcher])
        if searcher.layout.sparse and self._search.backend == "own":
            sparse.warm()
        if self._shows_documents and not self._live and not fs.is_local(version.uri):
            try:
                _documents(searcher, [])  # copies the documents to this machine
            except READ_ERRORS:
                log.exception("the documents of version %s cannot be read here", version.name)
        return searcher

    def _search_batch(self, batch: Sequence[SearchCall]) -> list[Answer | Exception]:
        exact = any(query.exact for _, query in batch)
        self._exact_searches += exact
        try:
            return search_batch(batch)
        finally:
            self._exact_searches -= exact


def _probe(searchers: Iterable[SearchBackend]) -> None:
    """Search for a fixed vector. A replica is healthy even if the database that it calls does not answer."""
    for searcher in searchers:
        with suppress(DatabaseError):
            searcher.find(np.ones((1, searcher.dim), np.float32), k=10)


def _documents(searcher: SearchBackend, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    shards, store = {*searcher.shards}, searcher.store
    places = zip(ids, candidate_places(ids), strict=True)
    return {each: store.read(shard, row) for each, (shard, row) in places if shard in shards}
