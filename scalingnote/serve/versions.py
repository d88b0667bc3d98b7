"""Index versions: which are served, and how the service changes from one to another without a failed request.

    catalog ─► open on every searcher ─► described ─► active

A :class:`Catalog` (or :class:`LiveCatalog`) remembers the active version and those kept for rolling back, for
all processes. :class:`Versions` is the state of one gateway. A request takes the active version when it
arrives and keeps it, so the change is one assignment: no request sees two versions.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.index.live import versions as live_versions
from scalingnote.index.shard import IndexLayout
from scalingnote.serve.access import conflict
from scalingnote.serve.concurrency import Handle, broadcast
from scalingnote.serve.delta import Deltas
from scalingnote.serve.document_stores import DocumentStores
from scalingnote.serve.live_pairs import LivePair, LivePairs, dim_of
from scalingnote.serve.pairs import PairedTowers, towers_of
from scalingnote.serve.telemetry import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import open_artifact

CATALOG_FILE = "serving.json"
OPEN_TIMEOUT_S = 600.0  # for all searchers to open a version; the catalog does not list it before
log = get_logger()


@dataclass(frozen=True)
class Version:
    """An index artifact, named by the beginning of its digest; of a live index, by its number."""

    name: str
    uri: str
    documents: int
    dim: int
    created: str
    towers: PairedTowers | None = None  # None: those of the version that is active before

    @classmethod
    def parse(cls, values: dict[str, Any]) -> "Version":
        """A version that a catalog's file lists; one of an earlier release without its towers."""
        towers = values.get("towers")
        return cls(**values | {"towers": towers and PairedTowers.parse(towers)})

    @classmethod
    def with_towers(cls, uri: str, active: PairedTowers | None = None) -> "Version":
        """The version at a URI and its :func:`~scalingnote.serve.pairs.towers_of`, beside those `active`.

        ArtifactError when there is no index, or one of its towers is missing.
        """
        return replace(cls.of(uri), towers=towers_of(open_artifact(uri, kind="index"), active))

    @classmethod
    def of(cls, uri: str) -> "Version":
        """The version at a URI; ArtifactError when there is no index."""
        index = open_artifact(uri, kind="index")
        layout = index.read_json("index.json")
        created = str(index.manifest.info["created"])
        return cls(index.digest[:12], index.uri, layout["documents"], layout["dim"], created)


def version_named(versions: Sequence[Version], name: str) -> Version:
    """The version of this name; SearchError when there is none."""
    for version in versions:
        if version.name == name:
            return version
    kept = ", ".join(version.name for version in versions)
    raise SearchError(f"no version {name!r}: kept are {kept}; to serve another index, send its uri")


# --- catalogs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Catalog:
    """``{state}/serving.json``: the active version and those kept, newest first; read by every process.

    The file is replaced as a whole, so a reader never sees a mixture. No index is opened here.
    """

    first: Version  # served as long as there is no file
    state: str | None = None  # folder or URI; None: no other version can be activated
    kept: int = 2
    pinned: tuple[Version, ...] = ()  # of arms that name an index: served whichever version is active
    own_towers: tuple[str, ...] = ()  # arms with a query tower of their own, which search the active index

    @property
    def towers(self) -> PairedTowers | None:
        """The towers of the first version; None: versions do not name theirs."""
        return self.first.towers

    def with_towers(self, towers: PairedTowers) -> "Catalog":
        """The same catalog with these towers of its first version."""
        return replace(self, first=replace(self.first, towers=towers))

    def read(self) -> tuple[Version, ...]:
        """The versions that are served now, the active one first."""
        activated = self._read_activated()
        names = {version.name for version in activated}
        return *activated, *(each for each in self.pinned if each.name not in names)

    def activate(self, version: Version) -> tuple[Version, ...]:
        """Make a version the active one, and keep up to `kept` versions, those active most recently.

        ConfigError without a `state`, or when the version is not :meth:`pair`.
        """
        if self.state is None:
            raise ConfigError("no index can be activated: set serve.state to a folder that all nodes reach")
        content = {"versions": [asdict(each) for each in self._after(self.pair(version))]}
        fs.write_bytes(fs.join(self.state, CATALOG_FILE), json.dumps(content, indent=1).encode())
        return self.read()

    def pair(self, version: Version) -> Version:
        """The version with its towers: its own, or those of the active one where its index names none.

        ConfigError if towers and index have different dimensions, or an arm would search the index of another
        model.
        """
        active = self.read()[0]
        if version.towers is None:
            version = replace(version, towers=active.towers)
        if version.towers == active.towers and version.dim != active.dim:
            raise ConfigError(
                f"index {version.name} has embeddings of dim {version.dim}, the query tower of "
                f"{active.dim}: not a pair"
            )
        if version.towers != active.towers:
            _require_no_own_towers(version, self.own_towers)
        return version

    def names_to_keep(self, version: Version) -> set[str]:
        """Names of the versions to hold while this one is opened: the served ones it will not displace."""
        return {each.name for each in (self.read()[0], *self._after(version), *self.pinned)}

    def _after(self, version: Version) -> tuple[Version, ...]:
        """The versions that are kept once this one is active."""
        others = (each for each in self._read_activated() if each.name != version.name)
        return (version, *others)[: self.kept]

    def previous(self) -> Version:
        """The version to roll back to; SearchError when none is kept."""
        activated = self._read_activated()
        if len(activated) < 2:
            raise SearchError("no earlier version is kept: there is nothing to roll back to")
        return activated[1]

    def _read_activated(self) -> tuple[Version, ...]:
        if self.state is None or not fs.exists(path := fs.join(self.state, CATALOG_FILE)):
            return (self.first,)
        content: dict[str, Any] = json.loads(fs.read_bytes(path))
        listed = (Version.parse(version) for version in content["versions"])
        return tuple(replace(each, towers=each.towers or self.first.towers) for each in listed)


@dataclass(frozen=True)
class LiveCatalog:
    """The versions of a live index, from its own registers. They are named by their numbers.

    With a delta there may be two pairs of an index and its towers, each with a register: those that are
    filled are listed, and any of their versions may become the active one.
    """

    folder: str
    index: str  # URI of the index that it started from
    dim: int
    delta: bool = False  # whether writes lie beside the versions, which are then held as those of a Catalog
    towers: PairedTowers | None = None  # of that index; None: versions do not name theirs
    own_towers: tuple[str, ...] = ()  # arms with a query tower of their own, which search the active index

    @property
    def state(self) -> str:
        """The folder that remembers the active version."""
        return self.folder

    def with_towers(self, towers: PairedTowers) -> "LiveCatalog":
        """The same catalog with these towers of the index that it started from."""
        return replace(self, towers=towers)

    @property
    def pairs(self) -> LivePairs:
        """The pairs in the folder."""
        return LivePairs(self.folder, LivePair(self.index, towers=self.towers))

    def read(self) -> tuple[Version, ...]:
        """The versions that are kept, the current one of the active pair first."""
        if not self.delta:
            return self._versions(self.pairs.first)
        return tuple(version for pair in self.pairs.read() if pair.filled for version in self._versions(pair))

    def _versions(self, pair: LivePair) -> tuple[Version, ...]:
        folder = self.pairs.folder(pair)
        if not live_versions.register_exists(folder):
            live_versions.current(folder, pair.index, delta=self.delta)  # creates the registry
        listed = sorted(live_versions.listing(folder), key=lambda v: (not v.current, -v.number))
        dim = self.dim if pair.index == self.index else dim_of(pair.index)
        towers = None if self.towers is None else pair.named_towers()
        return tuple(
            Version(pair.version_name(v.number), v.uri, v.documents, dim, v.created, towers) for v in listed
        )

    def version_of(self, index: str) -> Version:
        """The current version of an index's pair; ConfigError where it lacks writes, or there is none."""
        pair = {each.index: each for each in self.pairs.read()}.get(index)
        if pair is None:
            raise ConfigError(
                f"{self.folder} takes no writes for {index}: `scalingnote migrate --to MODEL` adds a model "
                "where serve.live.keep_documents is set, and --finish ends the other one"
            )
        if not pair.filled:
            raise ConfigError(
                f"the delta of {index} does not have every write yet: the writer of the running service "
                "encodes them, and its log says how many are left; try again when it has done so"
            )
        return self._versions(pair)[0]

    def activate(self, version: Version) -> tuple[Version, ...]:
        """Make a kept version the current one; each of them has every write.

        ConfigError where an arm would search the index of another model.
        """
        served = self.read()
        kept = {each.name: each for each in served}.get(version.name)
        if kept is None or kept.uri != version.uri:
            raise SearchError(
                f"{version.uri} is no version of this live index, which changes only to versions that its "
                "compaction wrote, or whose writes `scalingnote migrate` has prepared: to serve another "
                "index, start an application of it with a live folder of its own"
            )
        if kept.towers != served[0].towers:
            _require_no_own_towers(kept, self.own_towers)
        folder, number = self.pairs.place(kept.name) if self.delta else (self.folder, int(kept.name))
        # Of a large index the searchers have just read all files, each its own.
        live_versions.activate(folder, number, checked=self.delta)
        if self.delta:
            self.pairs.activate(folder)
        return self.read()

    def names_to_keep(self, version: Version) -> set[str]:
        """Names of the versions to hold while this one is opened."""
        return {version.name, *(each.name for each in self.read())}

    def previous(self) -> Version:
        """The newest version that is not current; SearchError when none is kept."""
        others = self.read()[1:]
        if not others:
            raise SearchError("no other version is kept: there is nothing to roll back to")
        return others[0]


def _require_no_own_towers(version: Version, arms: Sequence[str]) -> None:
    """ConfigError where arms would search the index of another model than their towers'."""
    if arms:
        raise ConfigError(
            f"index {version.name} is of another model than the query towers of the arms "
            f"{', '.join(arms)} of serve.split: end the experiment first"
        )


# --- a gateway's view -------------------------------------------------------------------------------------


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
            self.deltas = Deltas(catalog.pairs, group=len(self._searchers))

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
            if isinstance(self.catalog, Catalog):
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
