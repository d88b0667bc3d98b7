"""The index versions of a gateway, and its change from one to another without a failed request.

    catalog ─► open on every searcher and encoder ─► describe ─► active

A request reads the active version when it arrives and keeps it. So the change is one assignment, and no
request uses two versions. With writes in a separate delta (`serve.live.delta`), the gateway holds the delta:

    writer ─► log ─┬─► gateway: the delta of each served version ─► candidates as of record n ┐
                   └─► searchers: the rows that it overrides ─────► candidates as of record n ┴► one ranking

A search uses the newest record n that its gateway has read and sends n to the searchers, which answer as of n
(:mod:`scalingnote.search.live_searcher`). So all parts of an answer are of one moment. A gateway reads the
log ten times a second, and at once after a write through it was acknowledged.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType

import pyarrow as pa

from scalingnote.core.errors import ConfigError
from scalingnote.index.live import versions
from scalingnote.index.shard import IndexLayout
from scalingnote.search.live_searcher import Delta
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import concatenate
from scalingnote.serve.access import conflict, unavailable
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import (
    Batcher,
    Handle,
    WorkerThread,
    broadcast,
    gather_in_time,
    run_periodically,
)
from scalingnote.serve.document_stores import DocumentStores
from scalingnote.serve.fan_out import MAX_SEARCHED, Answer, SearchCall, search_batch
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import Refused

OPEN_TIMEOUT_S = 600.0  # for all searchers to open a version; then the catalog lists it
LIVE_REFRESH_S = 0.1  # between two reads of the writes to a live index
log = get_logger()


@dataclass(frozen=True)
class VersionContent:
    """The content of some shards of a version, and the options of a search in them."""

    layout: IndexLayout
    held: int  # number of its shards
    documents: int  # when it was opened; in an index of passages, documents and not passages
    fields: pa.Schema  # that a search may filter by
    facets: Mapping[str, Mapping[str, int]]  # text field with few values -> value -> number of documents
    documents_apart: bool = False  # whether the gateway reads the documents from a store of the version

    def join(self, other: "VersionContent") -> "VersionContent":
        """Return the content of these shards and others together."""
        facets = {
            name: Counter(values) + Counter(other.facets[name])
            for name, values in self.facets.items()
            if name in other.facets
        }
        documents = self.documents + other.documents
        return replace(self, held=self.held + other.held, documents=documents, facets=facets)


class Versions:
    """The versions that are open on all searchers and encoders; call :meth:`start` first.

    Args:
        catalog: shared by all gateways.
        searchers: one handle for each group of shards.
        towers: handles of :class:`~scalingnote.serve.tower_versions.TowerVersions`, by their names in
            ``/healthz``.
    """

    def __init__(
        self,
        catalog: Catalog | LiveCatalog,
        searchers: Sequence[Handle],
        towers: Mapping[str, Handle] = MappingProxyType({}),
    ) -> None:
        self.catalog, self._searchers, self._towers = catalog, list(searchers), dict(towers)
        self._forms: dict[tuple[str, str], str] = {}
        self._changing = asyncio.Lock()
        self._contents: dict[str, VersionContent] = {}
        self.documents = DocumentStores(searchers)
        self.deltas: Deltas | None = None
        if isinstance(catalog, LiveCatalog) and catalog.delta:
            self.deltas = Deltas(catalog, group=len(self._searchers))

    async def start(self) -> None:
        """Read the list of served versions, and their contents."""
        served = await asyncio.to_thread(self.catalog.read)
        for version in served:
            if await self._describe(version):
                await self.documents.try_open(version.name, version.uri)
        self.served = served

    @property
    def active(self) -> Version:
        """The version that new requests are answered from."""
        return self.served[0]

    def content(self, name: str) -> VersionContent:
        """Return the content of an open version."""
        return self._contents[name]

    def form(self, tower: str) -> str | None:
        """Return the form of a query tower of the active version; None for one that all versions share."""
        return self._forms.get((self.active.name, tower))

    def has_teacher(self, name: str) -> bool:
        """Return whether a version has a teacher; if versions have no towers, one teacher serves all."""
        towers = next((each.towers for each in self.served if each.name == name), None)
        return towers is None or towers.teacher is not None

    async def activate(self, version: Version) -> None:
        """Open another version on every searcher and encoder, then answer from it.

        This continues if its request is cancelled, because opening a large index may take longer than a proxy
        waits.
        """
        if self.catalog.state is None:
            raise conflict("no index can be activated here: set serve.state to a folder that all nodes reach")
        await asyncio.shield(asyncio.create_task(self._change_to(version)))

    async def follow(self) -> None:
        """Change to the version that another gateway has activated; reopen documents that failed before."""
        served = await asyncio.to_thread(self.catalog.read)
        if served[0].name != self.active.name:
            async with self._changing:
                if await self._open(served[0]):
                    await self.documents.try_open(served[0].name, served[0].uri)
                self._serve(served)
        await self.documents.reopen()

    async def _change_to(self, version: Version) -> None:
        async with self._changing:
            version = await asyncio.to_thread(self.catalog.pair, version)
            if await self._open(version):
                await self.documents.open(version.name, version.uri)
            self._serve(await asyncio.to_thread(self.catalog.activate, version))
            await self._open(version)  # searchers of a live index open only the current version
            log.info("index version %s is active", version.name)

    def _serve(self, served: tuple[Version, ...]) -> None:
        self.served = served
        names = {version.name for version in served}
        self._forms = {key: form for key, form in self._forms.items() if key[0] in names}
        self.documents.keep(names)
        if self.deltas is not None:
            self.deltas.keep(names)

    async def _open(self, version: Version) -> bool:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            parts = (*self._searchers, *self._towers.values())
            await asyncio.gather(*(broadcast(part, "load", version) for part in parts))
            return await self._describe(version)

    async def _describe(self, version: Version) -> bool:
        """Read the content of a version from the searchers; return whether its documents are in a store."""
        calls = [searcher.describe.remote(version.name) for searcher in self._searchers]
        contents = await asyncio.gather(*calls)
        content: VersionContent = reduce(VersionContent.join, contents)
        if content.held != content.layout.shards:  # a deployed replica holds a fixed range of shards
            raise ConfigError(
                f"index {version.uri} has {content.layout.shards} shards, the searchers hold {content.held}: "
                f"build it with index.shards={content.held}, or start a service with this index"
            )
        self._contents[version.name] = content
        self.documents.shards_of_groups = [each.held for each in contents]
        for name, tower in self._towers.items() if version.towers is not None else ():
            self._forms[version.name, name] = await tower.form.remote(version.name)
        if self.deltas is not None:
            await self.deltas.open(version.name)
        return content.documents_apart


# --- deltas -----------------------------------------------------------------------------------------------


class Deltas:
    """The deltas of the versions that a gateway serves. The deltas of one model follow one log.

    Args:
        catalog: of the versions.
        group: number of the delta among the missing groups of an answer: the one after the groups of shards.
    """

    def __init__(self, catalog: LiveCatalog, *, group: int) -> None:
        self._catalog, self._group = catalog, group
        self._deltas: dict[str, Delta] = {}  # by the name of the version
        self._batcher: Batcher[SearchCall, Answer] = Batcher(
            search_batch, max_batch=MAX_SEARCHED, thread=WorkerThread("delta")
        )
        self._following: asyncio.Task[None] | None = None
        self.is_readable = True  # whether the last read of the log succeeded

    async def open(self, name: str) -> None:
        """Open the delta of a version, and follow the log from now on."""
        if name not in self._deltas:
            self._deltas[name] = await asyncio.to_thread(self._open, name)
        if self._following is None:
            self._following = asyncio.create_task(
                run_periodically(self.refresh, interval_s=LIVE_REFRESH_S, name="reading the log of the delta")
            )

    def keep(self, names: set[str]) -> None:
        """Release the deltas of all other versions."""
        self._deltas = {name: delta for name, delta in self._deltas.items() if name in names}

    async def refresh(self) -> None:
        """Read the records that were acknowledged so far."""
        try:
            for delta in [*self._deltas.values()]:
                await asyncio.to_thread(delta.refresh)
        except Exception:
            self.is_readable = False
            raise
        self.is_readable = True

    def of(self, name: str) -> Delta:
        """Return the delta of a version; RefusedError (503) if the version is no longer kept."""
        if name not in self._deltas:
            raise unavailable(f"version {name} of the index is no longer kept: try again")
        return self._deltas[name]

    async def search(
        self, query: Query, left_s: float, groups: Callable[[Query, float], Awaitable[Answer]]
    ) -> Answer:
        """Return the candidates of the groups of shards and of the delta, all as of one record of the log."""
        moment = self.of(query.version).now()
        query = replace(query, record=moment.record)
        if not len(moment):
            return await groups(query, left_s)
        # A copy, because the thread caches results in the query while it is pickled for the groups.
        delta_call = gather_in_time([self._batcher((moment, replace(query)))], deadline_s=left_s)
        of_groups, (of_delta,) = await asyncio.gather(groups(query, left_s), delta_call)
        if isinstance(of_groups, Refused):
            return of_groups
        if isinstance(of_delta, Refused):
            return of_delta
        if of_delta is None:
            return concatenate([of_groups], missing=[self._group])
        return concatenate([of_groups, of_delta])

    def _open(self, name: str) -> Delta:
        folder, number = self._catalog.place(name)
        return Delta(folder, versions.kept_version(folder, number), name=name)
