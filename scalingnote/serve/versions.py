"""Which version of the index requests are answered from, as this gateway knows it, and how it goes over.

    catalog ─► open on every searcher ─► described ─► active

A request takes the active version when it comes in and keeps it, so going over is one assignment: no request
sees two versions, and none fails for it.
"""

import asyncio
from collections.abc import Sequence
from functools import reduce

from scalingnote.errors import ConfigError
from scalingnote.serve.catalog import Catalog, Serving, Version
from scalingnote.serve.flow import Called
from scalingnote.serve.here import everywhere
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.log import get_logger
from scalingnote.serve.refusals import conflict
from scalingnote.serve.searcher import OPENING_S, Described

log = get_logger()


class Versions:
    """The versions that are open; :meth:`start` before anything else."""

    def __init__(self, catalog: Catalog | LiveCatalog, searchers: Sequence[Called]) -> None:
        self._catalog, self._searchers = catalog, list(searchers)
        self._going_over = asyncio.Lock()
        self._known: dict[str, Described] = {}

    async def start(self) -> None:
        """Learn what is served."""
        serving = await asyncio.to_thread(self._catalog.read)
        for version in serving.versions:
            await self._learn(version)
        self.serving: Serving = serving

    @property
    def active(self) -> Version:
        """The version that new requests are answered from."""
        return self.serving.active

    def known(self, name: str) -> Described:
        """What can be asked of an open version."""
        return self._known[name]

    def named(self, name: str) -> Version:
        """One that is kept; SearchError when there is none of that name."""
        return self._catalog.read().named(name)

    def previous(self) -> Version:
        """The one to roll back to; SearchError when none is kept."""
        return self._catalog.previous()

    async def activate(self, version: Version) -> None:
        """Answer from another version: open it everywhere, then go over.

        It goes on when its request is cut off: to open a large index may take longer than a proxy waits.
        """
        if self._catalog.state is None:
            raise conflict("no index can be activated here: set serve.state to a folder that all nodes reach")
        await asyncio.shield(asyncio.create_task(self._go_over(version)))

    async def follow(self) -> None:
        """Go over to what another gateway has activated, if it has."""
        serving = await asyncio.to_thread(self._catalog.read)
        if serving.active.name != self.active.name:
            async with self._going_over:
                await self._open(serving.active)
                self.serving = serving

    async def _go_over(self, version: Version) -> None:
        async with self._going_over:
            await self._open(version)
            self.serving = await asyncio.to_thread(self._catalog.activate, version)
            await self._open(version)  # of a live index only the current version can be opened
            log.info("index version %s is active", version.name)

    async def _open(self, version: Version) -> None:
        loading = [everywhere(searcher, "load", version) for searcher in self._searchers]
        async with asyncio.timeout(OPENING_S):
            await asyncio.gather(*loading)
            await self._learn(version)

    async def _learn(self, version: Version) -> None:
        asked = [searcher.describe.remote(version.name) for searcher in self._searchers]
        known = reduce(Described.joined, await asyncio.gather(*asked))
        if known.held != known.layout.shards:  # which shards a replica holds is settled when it is deployed
            raise ConfigError(
                f"index {version.uri} has {known.layout.shards} shards, the searchers hold {known.held}: "
                f"build it with index.shards={known.held}, or deploy the service with this index as its own"
            )
        self._known[version.name] = known
