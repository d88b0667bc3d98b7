"""A gateway's view of the index versions, and how it changes from one to another without a failed request.

    catalog ─► open on every searcher and encoder ─► described ─► active

A request takes the active version when it arrives and keeps it, so the change is one assignment: no request
sees two versions. Of a version with writes beside it (`serve.live.delta`) a gateway holds the delta:

    writer ─► log ─┬─► gateway: the delta of each served version ─► candidates as of record n ┐
                   └─► searchers: the rows that it overrides ─────► candidates as of record n ┴► one ranking

A search takes the newest record n that its gateway has read and names it to the searchers, which answer as of
n (:mod:`scalingnote.search.live_searcher`). So all parts of an answer are of one moment. A gateway reads the
log ten times a second, and at once when a write through it was acknowledged.
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

OPEN_TIMEOUT_S = 600.0  # for all searchers to open a version; the catalog does not list it before
LIVE_REFRESH_S = 0.1  # between two reads of the writes to a live index
log = get_logger()


@dataclass(frozen=True)
class VersionContent:
    """The content of some shards of a version, and the options of a search in them."""

    layout: IndexLayout
    held: int  # number of its shards
    documents: int  # when it was opened; of an index of passages those that the passages are of
    fields: pa.Schema  # that a search may filter by
    facets: Mapping[str, Mapping[str, int]]  # text field with few values -> value -> number of documents
    documents_apart: bool = False  # searchers leave documents to the gateway, which has a store of them

    def join(self, other: "VersionContent") -> "VersionContent":
        """The content of these shards and others together."""
        facets = {
            name: Counter(values) + Counter(other.facets[name])
            for name, values in self.facets.items()
            if name in other.facets
        }
        documents = self.documents + other.documents
        return replace(self, held=self.held + other.held, documents=documents, facets=facets)


class Versions:
    """The versions that are open on all searchers and encoders; :meth:`start` must be called first.

    Args:
        catalog: shared by all gateways.
        searchers: one handle for each group of shards.
        towers: handles of :class:`~scalingnote.serve.tower_versions.TowerVersions`, by what they are for.
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
        """Read which versions are served, and what they hold."""
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
        """The content of an open version."""
        return self._contents[name]

    def form(self, tower: str) -> str | None:
        """The form of a query tower of the active version; None of one that all versions share."""
        return self._forms.get((self.active.name, tower))

    def has_teacher(self, name: str) -> bool:
        """Whether a version has a teacher; where versions do not name their towers, all have the same."""
        towers = next((each.towers for each in self.served if each.name == name), None)
        return towers is None or towers.teacher is not None

    async def activate(self, version: Version) -> None:
        """Open another version on every searcher and encoder, then answer from it.

        It goes on when its request is cancelled: opening a large index may take longer than a proxy waits.
        """
        if self.catalog.state is None:
            raise conflict("no index can be activated here: set serve.state to a folder that all nodes reach")
        await asyncio.shield(asyncio.create_task(self._change_to(version)))

    async def follow(self) -> None:
        """Change to the version that another gateway has activated; try again what could not be read."""
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
            await self._open(version)  # searchers of a live index open the current version only
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
        """Take in what the searchers hold of a version; whether its documents are in a store apart."""
        calls = [searcher.describe.remote(version.name) for searcher in self._searchers]
        described = await asyncio.gather(*calls)
        content: VersionContent = reduce(VersionContent.join, described)
        if content.held != content.layout.shards:  # a deployed replica holds a fixed range of shards
            raise ConfigError(
                f"index {version.uri} has {content.layout.shards} shards, the searchers hold {content.held}: "
                f"build it with index.shards={content.held}, or deploy the service with this index as its own"
            )
        self._contents[version.name] = content
        self.documents.shards_of_groups = [each.held for each in described]
        for name, tower in self._towers.items() if version.towers is not None else ():
            self._forms[version.name, name] = await tower.form.remote(version.name)
        if self.deltas is not None:
            await self.deltas.open(version.name)
        return content.documents_apart


# --- deltas -----------------------------------------------------------------------------------------------


class Deltas:
    """The deltas of the versions that a gateway serves; those of one model follow one log.

    Args:
        catalog: of the versions.
        group: number that an answer without the delta names as missing: the one after the groups of shards.
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
        """Read what was acknowledged by now."""
        try:
            for delta in [*self._deltas.values()]:
                await asyncio.to_thread(delta.refresh)
        except Exception:
            self.is_readable = False
            raise
        self.is_readable = True

    def of(self, name: str) -> Delta:
        """The delta of a version; RefusedError (503) where it is no longer kept."""
        if name not in self._deltas:
            raise unavailable(f"version {name} of the index is no longer kept: try again")
        return self._deltas[name]

    async def search(
        self, query: Query, left_s: float, groups: Callable[[Query, float], Awaitable[Answer]]
    ) -> Answer:
        """The candidates of the groups of shards and of the delta, all as of one record of the log."""
        moment = self.of(query.version).now()
        query = replace(query, record=moment.record)
        if not len(moment):
            return await groups(query, left_s)
        # A copy: the thread keeps what it computes in it, while the query is pickled for the groups.
        own = gather_in_time([self._batcher((moment, replace(query)))], deadline_s=left_s)
        of_groups, (of_delta,) = await asyncio.gather(groups(query, left_s), own)
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
