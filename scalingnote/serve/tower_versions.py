"""The towers of every kept version of the index. They are loaded before a change and released after it.

    catalog ─► TowerVersions, in the gateway or in replicas ◄─ VersionHandle.at(version) ─ a request

A request reads its version once and passes it to encoder and searchers. So no query is searched in the index
of another tower, and a request that arrived before a change is answered by the pair that it began with.
"""

import asyncio
import time
from dataclasses import replace
from typing import Any, Literal

from scalingnote.encode import exports
from scalingnote.run.service_config import ServeConfig
from scalingnote.serve.catalog import Catalog, PairedTowers, Version, location_of, run_of, version_named
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts
from scalingnote.serve.index_searcher import RELEASE_AFTER_S
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.running_settings import RunningSettings
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import DocumentTower, Location, Refused, TextTower
from scalingnote.storage.artifact import open_artifact

TowerPart = Literal["query", "teacher", "document"]
log = get_logger()


class TowerVersions:
    """One of the towers of every version that the catalog keeps. Versions with the same tower share it.

    The first call that names a version opens its tower, if it is not open yet.

    Args:
        catalog: of the versions.
        part: which of their towers.
        settings: of query paths; its artifacts are replaced by those of a version.
    """

    def __init__(
        self, catalog: Catalog | LiveCatalog, part: TowerPart, settings: QueryPathParts | None = None
    ) -> None:
        self._catalog, self._part, self._settings = catalog, part, settings
        self._cache = 0 if settings is None else settings.cache
        self._running = RunningSettings(ServeConfig(query_cache=self._cache), "encoder")
        self._opening = asyncio.Lock()
        self._releasing: asyncio.Task[None] | None = None
        self._named_at: dict[str, float] = {}  # version -> time of its latest call, in time.monotonic()
        self._opened: dict[QueryPathParts | Location, TextTower] = {}
        # The key of the opened tower of a version, by its name; None: it has no such tower.
        self._held: dict[str, QueryPathParts | Location | None] = {}
        for version in catalog.read():
            self._hold(version)

    async def call(self, version: str, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the tower of a version and return its answer; refused if it has no such tower."""
        tower = await self._require(version)
        if tower is None:
            return Refused(f"version {version} of the index has no {self._part} tower")
        return await getattr(tower, method)(*args, **options)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply the settings that may change while this runs, also to later towers. Ray Serve calls this."""
        self._cache = self._running.take(user_config).query_cache
        for tower in self._opened.values():
            self._resize_cache(tower)

    async def check_health(self) -> None:
        """Raise an error if a tower does not encode or its thread hangs. Ray Serve calls this."""
        await asyncio.gather(*(tower.check_health() for tower in self._opened.values()))

    async def form(self, version: str) -> str:
        """Return the form of the query tower of a version."""
        tower = await self._require(version)
        return tower.form if isinstance(tower, ArmEncoder) else ""

    async def load(self, version: Version) -> None:
        """Release towers of versions that are not kept when this one is active, then open its towers.

        A tower that was called seconds ago is released some seconds later, because gateways change one after
        the other.
        """
        async with self._opening:
            await self._release(version)
            if version.name not in self._held:
                await asyncio.to_thread(self._hold, version)
        if self._releasing is not None:
            self._releasing.cancel()
        self._releasing = asyncio.create_task(self._release_later(version))

    async def ping(self) -> bool:
        """Return whether the tower of the active version answers."""
        active = (await asyncio.to_thread(self._catalog.read))[0].name
        key = self._held.get(active)
        return key is None or await self._opened[key].ping()

    async def _release(self, version: Version) -> None:
        needed = await asyncio.to_thread(self._catalog.names_to_keep, version)
        since = time.monotonic() - RELEASE_AFTER_S
        self._named_at = {name: at for name, at in self._named_at.items() if at > since}
        kept_names = needed | self._named_at.keys()
        self._held = {name: key for name, key in self._held.items() if name in kept_names}
        used_keys = {*self._held.values()}
        self._opened = {key: tower for key, tower in self._opened.items() if key in used_keys}

    async def _release_later(self, version: Version) -> None:
        await asyncio.sleep(2 * RELEASE_AFTER_S)
        async with self._opening:
            await self._release(version)

    async def _require(self, name: str) -> TextTower | None:
        self._named_at[name] = time.monotonic()
        if name not in self._held:
            await self.load(version_named(await asyncio.to_thread(self._catalog.read), name))
        key = self._held[name]
        return None if key is None else self._opened[key]

    def _hold(self, version: Version) -> None:
        if version.towers is None:  # the version of an arm that names its index, and has a separate encoder
            return
        key = self._choose(version.towers)
        if key is not None and key not in self._opened:
            log.info("opening the %s tower of index version %s", self._part, version.name)
            self._opened[key] = ArmEncoder(key) if isinstance(key, QueryPathParts) else DocumentTower(key)
            self._resize_cache(self._opened[key])
        self._held[version.name] = key

    def _resize_cache(self, tower: TextTower) -> None:
        if isinstance(tower, ArmEncoder):
            tower.resize_cache(self._cache)

    def _choose(self, towers: PairedTowers) -> QueryPathParts | Location | None:
        """Return the key of the tower to open for a version; None: it has no such tower."""
        if self._part == "document":
            return towers.document
        if self._part == "teacher":
            return None if towers.teacher is None else QueryPathParts(towers.teacher)
        assert self._settings is not None
        return query_path(towers, self._settings, personal=self._settings.fusion is not None)


def query_path(towers: PairedTowers, settings: QueryPathParts, *, personal: bool) -> QueryPathParts:
    """Return the query path of the towers of an index, with the query tower or the exported form of it.

    Args:
        towers: of an index.
        settings: of the path; the artifacts in it are replaced.
        personal: whether queries are fused with features of their user, if the towers support this.
    """
    uri, kind = towers.query
    if kind != exports.KIND:
        uri, kind = location_of(exports.find(open_artifact(uri, kind=kind), settings.form, run_of(uri)))
    return replace(
        settings,
        tower=(uri, kind),
        sparse=towers.sparse,
        fusion=towers.fusion if personal else None,
        planner=towers.planner if personal else None,
    )
