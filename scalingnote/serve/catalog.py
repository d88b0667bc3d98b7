"""Versions of a service: an index and the towers that encode for it; which of them are kept, which is active.

    index artifact ─manifest─► query tower, terms, fusion, teacher, document tower ┐
    index artifact ─► dimension, documents ────────────────────────────────────────┴► Version ─► Catalog

An index is built for one query tower, and its manifest names it. So a version of the catalog is both, and a
change from one version to another may be a change of the model: gateways load the towers with the shards, see
:mod:`scalingnote.serve.tower_versions`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from scalingnote.core.errors import ArtifactError, ConfigError, SearchError
from scalingnote.index.shard import open_layout
from scalingnote.serve.towers import Location
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import MANIFEST, Artifact, open_artifact

CATALOG_FILE = "serving.json"


# --- the towers of an index -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairedTowers:
    """Where the artifacts lie that encode for an index: its queries, and more where there is more."""

    query: Location
    sparse: Location | None = None  # the artifact with ``sparse_query/``
    fusion: Location | None = None  # the artifact with ``query_fusion/``
    planner: Location | None = None
    teacher: Location | None = None  # for the queries that `serve.escalation` chooses
    document: Location | None = None  # for clients of embeddings


def towers_of(index: Artifact, active: PairedTowers | None = None) -> PairedTowers | None:
    """The towers that an index was built for, as its manifest names them; None where it names none.

    They lie where they were built, or, where the run's folder was moved, beside the index. Where not all of
    them do, `active` are the ones if the index names their query tower and terms.

    Raises:
        ArtifactError: one of them is missing there, or is another one by now.
    """
    try:
        return _named_towers(index)
    except ArtifactError:
        if active is None or not _is_built_for(index, active):
            raise
        return active


def _named_towers(index: Artifact) -> PairedTowers | None:
    student = _parent(index, "student")
    tower = student or _parent(index, "dual_encoder")
    if tower is None:
        return None
    embeddings = encoded = _parent(index, "embeddings")
    assert embeddings is not None  # every index is made of some
    fused = bool(embeddings.names("query_fusion/"))
    if fused:  # fusion reads the embeddings that a tower computed, and writes new ones
        encoded = _parent(embeddings, "embeddings")
    assert encoded is not None
    own, dual_encoder = _parent(encoded, "student"), _parent(encoded, "dual_encoder")
    has_terms = open_layout(index).sparse
    escalates = student is not None and own is None and not fused
    return PairedTowers(
        query=location_of(tower),
        sparse=_optional(_parent(index, "bm25_terms") or dual_encoder) if has_terms else None,
        fusion=location_of(embeddings) if fused else None,
        planner=_optional(_parent(embeddings, "planner")) if fused else None,
        teacher=_optional(dual_encoder) if escalates else None,
        document=_optional(own or dual_encoder),
    )


def _is_built_for(index: Artifact, active: PairedTowers) -> bool:
    """Whether an index names the query tower and the terms that are active."""
    named = index.manifest.parents
    asked = {named[kind]["digest"] for kind in ("student", "dual_encoder", "bm25_terms") if kind in named}
    known = set[str]()
    for location in filter(None, (active.query, active.sparse)):
        found = open_artifact(location[0], kind=location[1])
        # A tower that was exported names the one that it was exported from.
        known |= {found.digest, *(parent["digest"] for parent in found.manifest.parents.values())}
    return asked <= known


def _parent(artifact: Artifact, kind: str) -> Artifact | None:
    """The artifact of this kind that another one was made of; None if there was none."""
    named = artifact.manifest.parents.get(kind)
    if named is None:
        return None
    beside = fs.join(run_of(artifact.uri), *named["uri"].rsplit("/", 2)[-2:])
    for uri in dict.fromkeys((named["uri"], beside)):
        if fs.exists(fs.join(uri, MANIFEST)):
            found = open_artifact(uri, kind=kind)
            if found.digest == named["digest"]:
                return found
    raise ArtifactError(
        f"{artifact.uri} was made of the {kind} {named['digest'][:12]}, which is neither at {named['uri']} "
        f"nor at {beside}: copy it to one of these places"
    )


def run_of(uri: str) -> str:
    """The folder of the run that an artifact lies in: ``{run_dir}/{stage}/{fingerprint}``."""
    return uri.rstrip("/").rsplit("/", 2)[0]


def location_of(artifact: Artifact) -> Location:
    """Where an artifact lies, and its kind."""
    return artifact.uri, artifact.manifest.kind


def _optional(artifact: Artifact | None) -> Location | None:
    return None if artifact is None else location_of(artifact)


# --- versions ---------------------------------------------------------------------------------------------


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
    def of(cls, uri: str) -> "Version":
        """The version at a URI; ArtifactError when there is no index."""
        index = open_artifact(uri, kind="index")
        layout = index.read_json("index.json")
        created = str(index.manifest.info["created"])
        return cls(index.digest[:12], index.uri, layout["documents"], layout["dim"], created)

    @classmethod
    def with_towers(cls, uri: str, active: PairedTowers | None = None) -> "Version":
        """The version at a URI and its :func:`towers_of`, beside those `active`.

        ArtifactError when there is no index, or one of its towers is missing.
        """
        return replace(cls.of(uri), towers=towers_of(open_artifact(uri, kind="index"), active))


def version_named(versions: Sequence[Version], name: str) -> Version:
    """The version of this name; SearchError when there is none."""
    for version in versions:
        if version.name == name:
            return version
    kept = ", ".join(version.name for version in versions)
    raise SearchError(f"no version {name!r}: kept are {kept}; to serve another index, send its uri")


def require_no_own_towers(version: Version, arms: Sequence[str]) -> None:
    """ConfigError where arms would search the index of another model than their towers'."""
    if arms:
        raise ConfigError(
            f"index {version.name} is of another model than the query towers of the arms "
            f"{', '.join(arms)} of serve.split: end the experiment first"
        )


# --- the catalog ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CatalogFile:
    """The content of CATALOG_FILE."""

    versions: tuple[Version, ...]


_FILE = TypeAdapter(_CatalogFile)


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

    def read(self) -> tuple[Version, ...]:
        """The versions that are served now, the active one first."""
        activated = self._read_activated()
        names = {version.name for version in activated}
        return *activated, *(each for each in self.pinned if each.name not in names)

    def version_of(self, index: str) -> Version:
        """The version of the index at a URI, with the towers that it names; errors as of :class:`Version`."""
        return Version.with_towers(index)

    def activate(self, version: Version) -> tuple[Version, ...]:
        """Make a version the active one, and keep up to `kept` versions, those active most recently.

        ConfigError without a `state`, or when the version is not :meth:`pair`.
        """
        if self.state is None:
            raise ConfigError("no index can be activated: set serve.state to a folder that all nodes reach")
        content = _CatalogFile(self._after(self.pair(version)))
        fs.write_bytes(fs.join(self.state, CATALOG_FILE), _FILE.dump_json(content, indent=1))
        return self.read()

    def pair(self, version: Version) -> Version:
        """The version with its towers: its own, or those of the active one where its index names none.

        ConfigError if towers and index have different dimensions, or an arm would search the index of another
        model.
        """
        active = self.read()[0]
        if version.towers is None:
            version = replace(version, towers=active.towers)
        if version.towers != active.towers:
            require_no_own_towers(version, self.own_towers)
        elif version.dim != active.dim:
            raise ConfigError(
                f"index {version.name} has embeddings of dim {version.dim}, the query tower of "
                f"{active.dim}: not a pair"
            )
        return version

    def names_to_keep(self, version: Version) -> set[str]:
        """Names of the versions to hold while this one is opened: the served ones it will not displace."""
        return {each.name for each in (self.read()[0], *self._after(version), *self.pinned)}

    def previous(self) -> Version:
        """The version to roll back to; SearchError when none is kept."""
        activated = self._read_activated()
        if len(activated) < 2:
            raise SearchError("no earlier version is kept: there is nothing to roll back to")
        return activated[1]

    def _after(self, version: Version) -> tuple[Version, ...]:
        """The versions that are kept once this one is active."""
        others = (each for each in self._read_activated() if each.name != version.name)
        return (version, *others)[: self.kept]

    def _read_activated(self) -> tuple[Version, ...]:
        if self.state is None or not fs.exists(path := fs.join(self.state, CATALOG_FILE)):
            return (self.first,)
        listed = _FILE.validate_json(fs.read_bytes(path)).versions
        # An earlier release did not list towers.
        return tuple(replace(each, towers=each.towers or self.first.towers) for each in listed)
