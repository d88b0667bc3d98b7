"""Versions of a service (an index and the towers that encode for it), and the catalog of the kept ones.

    index artifact ─manifest─► query tower, terms, fusion, teacher, document tower ┐
    index artifact ─► dimension, documents ────────────────────────────────────────┴► Version ─► Catalog

An index is built for one query tower, which its manifest records. So a version of the catalog is both, and a
change from one version to another may be a change of the model. Gateways load the towers with the shards, see
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
    """Locations of the artifacts that encode for an index: its query tower, and others if there are any."""

    query: Location
    sparse: Location | None = None  # the artifact with ``sparse_query/``
    fusion: Location | None = None  # the artifact with ``query_fusion/``
    planner: Location | None = None
    teacher: Location | None = None  # for the queries that `serve.escalation` chooses
    document: Location | None = None  # for clients of embeddings


def towers_of(index: Artifact, active: PairedTowers | None = None) -> PairedTowers | None:
    """Return the towers that an index was built for, which its manifest records; None if it records none.

    They are where they were built, or, if the folder of the run was moved, next to the index. If one of them
    is at neither place, `active` is returned, provided that the index records its query tower and terms.

    Raises:
        ArtifactError: a tower is missing or was replaced, and `active` does not fit.
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
    embeddings = tower_embeddings = _parent(index, "embeddings")
    assert embeddings is not None  # every index is built from embeddings
    is_fused = bool(embeddings.names("query_fusion/"))
    if is_fused:  # fusion reads the embeddings that a tower computed, and writes new ones
        tower_embeddings = _parent(embeddings, "embeddings")
    assert tower_embeddings is not None
    doc_student = _parent(tower_embeddings, "student")
    dual_encoder = _parent(tower_embeddings, "dual_encoder")
    has_terms = open_layout(index).sparse
    escalates = student is not None and doc_student is None and not is_fused
    return PairedTowers(
        query=location_of(tower),
        sparse=_optional(_parent(index, "bm25_terms") or dual_encoder) if has_terms else None,
        fusion=location_of(embeddings) if is_fused else None,
        planner=_optional(_parent(embeddings, "planner")) if is_fused else None,
        teacher=_optional(dual_encoder) if escalates else None,
        document=_optional(doc_student or dual_encoder),
    )


def _is_built_for(index: Artifact, active: PairedTowers) -> bool:
    """Return whether the manifest of an index records the query tower and the terms that are active."""
    parents = index.manifest.parents
    kinds = ("student", "dual_encoder", "bm25_terms")
    needed = {parents[kind]["digest"] for kind in kinds if kind in parents}
    known = set[str]()
    for location in filter(None, (active.query, active.sparse)):
        artifact = open_artifact(location[0], kind=location[1])
        # An exported tower records the tower that it was exported from.
        known |= {artifact.digest, *(parent["digest"] for parent in artifact.manifest.parents.values())}
    return needed <= known


def _parent(artifact: Artifact, kind: str) -> Artifact | None:
    """Open the artifact of this kind that another one was built from; None if there is none."""
    record = artifact.manifest.parents.get(kind)
    if record is None:
        return None
    moved_uri = fs.join(run_of(artifact.uri), *record["uri"].rsplit("/", 2)[-2:])
    for uri in dict.fromkeys((record["uri"], moved_uri)):
        if fs.exists(fs.join(uri, MANIFEST)):
            parent = open_artifact(uri, kind=kind)
            if parent.digest == record["digest"]:
                return parent
    raise ArtifactError(
        f"{artifact.uri} was made of the {kind} {record['digest'][:12]}, which is neither at {record['uri']} "
        f"nor at {moved_uri}: copy it to one of these places"
    )


def run_of(uri: str) -> str:
    """Return the folder of the run of an artifact, which is in ``{run_dir}/{stage}/{fingerprint}``."""
    return uri.rstrip("/").rsplit("/", 2)[0]


def location_of(artifact: Artifact) -> Location:
    """Return the URI and the kind of an artifact."""
    return artifact.uri, artifact.manifest.kind


def _optional(artifact: Artifact | None) -> Location | None:
    return None if artifact is None else location_of(artifact)


# --- versions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Version:
    """An index artifact, named by the beginning of its digest; in a live index, by its number."""

    name: str
    uri: str
    documents: int
    dim: int
    created: str
    towers: PairedTowers | None = None  # None: those of the version that was active before

    @classmethod
    def of(cls, uri: str) -> "Version":
        """Return the version at a URI; ArtifactError if there is no index."""
        index = open_artifact(uri, kind="index")
        layout = index.read_json("index.json")
        created = str(index.manifest.info["created"])
        return cls(index.digest[:12], index.uri, layout["documents"], layout["dim"], created)

    @classmethod
    def with_towers(cls, uri: str, active: PairedTowers | None = None) -> "Version":
        """Return the version at a URI with its :func:`towers_of`, which may be those `active`.

        ArtifactError if there is no index, or one of its towers is missing.
        """
        return replace(cls.of(uri), towers=towers_of(open_artifact(uri, kind="index"), active))


def version_named(versions: Sequence[Version], name: str) -> Version:
    """Return the version with this name; SearchError if there is none."""
    for version in versions:
        if version.name == name:
            return version
    names = ", ".join(version.name for version in versions)
    raise SearchError(f"no version {name!r}: kept are {names}; to serve another index, send its uri")


def require_no_own_towers(version: Version, arms: Sequence[str]) -> None:
    """Raise ConfigError if arms have query towers of another model than the index of a version."""
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
    """``{state}/serving.json``: the active version and the kept ones, newest first. Every process reads it.

    The file is replaced atomically, so a reader never sees a part of it. No index is opened here.
    """

    first: Version  # served as long as there is no file
    state: str | None = None  # folder or URI; None: no other version can be activated
    kept: int = 2
    pinned: tuple[Version, ...] = ()  # of arms that name an index: always served
    own_towers: tuple[str, ...] = ()  # arms with a separate query tower that search the active index

    def read(self) -> tuple[Version, ...]:
        """Return the versions that are served now, the active one first."""
        versions = self._read_activated()
        names = {version.name for version in versions}
        return *versions, *(each for each in self.pinned if each.name not in names)

    def version_of(self, index: str) -> Version:
        """Return the version of the index at a URI, with the towers that its manifest records.

        ArtifactError if there is no index, or one of its towers is missing.
        """
        return Version.with_towers(index)

    def activate(self, version: Version) -> tuple[Version, ...]:
        """Make a version the active one, and keep the up to `kept` versions that were active most recently.

        ConfigError without a `state`, or as in :meth:`pair`.
        """
        if self.state is None:
            raise ConfigError("no index can be activated: set serve.state to a folder that all nodes reach")
        content = _CatalogFile(self._after(self.pair(version)))
        fs.write_bytes(fs.join(self.state, CATALOG_FILE), _FILE.dump_json(content, indent=1))
        return self.read()

    def pair(self, version: Version) -> Version:
        """Return the version with its towers, or with those of the active one if its index records none.

        ConfigError if towers and index have different dimensions, or if an arm would search the index of
        another model.
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
        """Return the names of the versions to hold while this one is opened.

        These are the served versions that are still kept when this one is active.
        """
        return {each.name for each in (self.read()[0], *self._after(version), *self.pinned)}

    def previous(self) -> Version:
        """Return the version to roll back to; SearchError if none is kept."""
        versions = self._read_activated()
        if len(versions) < 2:
            raise SearchError("no earlier version is kept: there is nothing to roll back to")
        return versions[1]

    def _after(self, version: Version) -> tuple[Version, ...]:
        """Return the versions that are kept when this one is active."""
        others = (each for each in self._read_activated() if each.name != version.name)
        return (version, *others)[: self.kept]

    def _read_activated(self) -> tuple[Version, ...]:
        if self.state is None or not fs.exists(path := fs.join(self.state, CATALOG_FILE)):
            return (self.first,)
        versions = _FILE.validate_json(fs.read_bytes(path)).versions
        # An earlier release did not write towers.
        return tuple(replace(each, towers=each.towers or self.first.towers) for each in versions)
