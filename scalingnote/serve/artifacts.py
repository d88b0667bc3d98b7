"""The artifacts of an application. They are found, opened and checked before anything is started."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.model_files import local_folder
from scalingnote.encode import query_encoder
from scalingnote.encode.config import Form
from scalingnote.index.live import versions as live_versions
from scalingnote.index.shard import open_layout
from scalingnote.models.published_model import Similarity, similarity_of
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import AppArgs, LiveServe, ServeConfig, merge_sections
from scalingnote.search.backend import DatabaseSearcher
from scalingnote.serve import towers
from scalingnote.serve.access import read_keys
from scalingnote.serve.catalog import Catalog, PairedTowers, Version, location_of, towers_of
from scalingnote.serve.deployed import ServedArm
from scalingnote.serve.encoders import QueryPathParts
from scalingnote.serve.live_catalog import DocumentPathParts, LiveCatalog, LivePair
from scalingnote.serve.tower_versions import query_path
from scalingnote.serve.towers import Location
from scalingnote.storage.artifact import Artifact, open_artifact

TOWER_KINDS = ("query_encoder", "student", "dual_encoder")
GATEWAY_MAX_DOCUMENTS = 2_000_000  # largest index that a gateway searches itself, by default


@dataclass(frozen=True)
class ServedArtifacts:
    """The artifacts and settings of an application, opened and checked."""

    index: Artifact
    arms: tuple[ServedArm, ...]  # with the parts of their query paths, not handles
    catalog: Catalog | LiveCatalog
    config: ServeConfig
    embeds_documents: bool = False  # whether the document towers of the versions serve clients of embeddings
    address: str | None = None  # of the Ray cluster
    name: str = "scalingnote"  # of the model, for clients of embeddings

    @property
    def shards(self) -> range:
        """Numbers of all shards."""
        return range(int(self.index.read_json("index.json")["shards"]))

    @property
    def similarity(self) -> Similarity:
        """The similarity by which the index compares queries and documents."""
        return open_layout(self.index).similarity

    @property
    def groups(self) -> tuple[range, ...]:
        """The shards that each searcher deployment holds."""
        shards = len(self.shards)
        # One process holds all shards of a live index, so that a search sees all of them at one moment. A
        # database has all shards.
        live = self.config.live
        undivided = (live is not None and not live.delta) or self.config.search.backend != "own"
        size = shards if undivided else self.config.shards_per_searcher
        return tuple(range(first, min(first + size, shards)) for first in range(0, shards, size))

    @property
    def gateway_searches(self) -> bool:
        """Whether the gateway itself searches."""
        if (replicas := self.config.deployment("searcher").replicas) is not None:
            return replicas == 0
        if self.config.search.backend != "own":
            return True  # a separate searcher would only forward calls to the database
        is_small = self.index.counts["documents"] <= GATEWAY_MAX_DOCUMENTS
        return is_small and self.config.replicas("gateway") == 1


@dataclass(frozen=True)
class ServedTower:
    """A model that is served without an index: one of its sides, or both."""

    name: str
    query: ServedArm | None  # with the parts of its query path, not a handle
    document: Location | None  # None: the model has no document side, or it is not served
    config: ServeConfig
    similarity: Similarity = "cosine"  # of its embeddings
    address: str | None = None  # of the Ray cluster


def find(args: AppArgs) -> ServedArtifacts | ServedTower:
    """Open the artifacts of an application.

    Raises:
        ConfigError: settings and artifacts do not fit together.
        ArtifactError: there is no finished artifact of this kind.
    """
    config = args.serve
    if args.model is not None:
        return _served_tower(args.model, config)
    if args.run_dir is not None:
        return of_run(pipeline.load_run(args.run_dir), config)
    assert args.index is not None  # validated by AppArgs
    assert args.query_tower is not None
    if config.live is not None:
        raise ConfigError(
            "serve.live needs a run_dir: new documents are encoded by the towers and networks of the run"
        )
    index, tower = open_artifact(args.index, kind="index"), tower_at(args.query_tower)
    document = None
    if args.document_tower is not None and config.deployment("document_tower").replicas:
        document = location_of(tower_at(args.document_tower))
    served = _serve_index(index, PairedTowers(location_of(tower), document=document), config, None)
    return replace(served, embeds_documents=document is not None)


def of_run(run: RunConfig, serve: ServeConfig) -> ServedArtifacts:
    """Open the artifacts of a run, like :func:`find`; options set in `serve` override those of the run."""
    config = merge_sections(run.run_dir, run.serve, serve)
    index = pipeline.locate(run, "index")
    towers = towers_of(index)
    assert towers is not None  # the index of a run was built for the query tower of the run
    embeds_documents = bool(config.deployment("document_tower").replicas)
    if embeds_documents:
        pipeline.document_tower(run)  # raises an error if there is none
    return replace(
        _serve_index(index, towers, config, run),
        embeds_documents=embeds_documents,
        address=run.address,
        name=Path(run.run_dir).name,
    )


def _served_tower(model: str, config: ServeConfig) -> ServedTower:
    """Check the folder of a model, and return its towers with the settings."""
    for name in ("grpc_port", "live", "access_log"):
        if getattr(config, name) is not None:
            raise ConfigError(f"serve.{name} needs an index: a model by itself has embeddings over HTTP")
    if config.search.backend != "own":
        raise ConfigError("serve.search needs an index: a model by itself has embeddings over HTTP")
    read_keys(config.api_keys)
    folder = local_folder(model).absolute()
    sides, name = towers.sides(folder), _model_name(model, folder)
    arm = None
    if "query" in sides:
        location = (str(sides["query"]), towers.FOLDER)
        parts = QueryPathParts(location, form=config.query_form, cache=config.query_cache)
        arm = ServedArm(name, parts, _form(sides["query"], config.query_form), personalised=False)
    document = None
    if "document" in sides and config.deployment("document_tower").replicas != 0:
        document = (str(sides["document"]), towers.FOLDER)
    if arm is None and document is None:
        raise ConfigError(
            f"{model} reads only documents: set serve.deployments.document_tower.num_replicas to 1 or more"
        )
    return ServedTower(name, arm, document, config, similarity_of(sides.get("document", folder)))


def _model_name(model: str, folder: Path) -> str:
    """Return the name of a model for clients: the hub id or package, or the name of the folder.

    A folder in the cache of the hub is named by a commit, so its name is the hub id, too.
    """
    if not Path(model).is_dir():
        return model
    cached = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    hub_id = cached.removeprefix("models--")
    return hub_id.replace("--", "/") if hub_id != cached else folder.name


def _serve_index(
    index: Artifact, towers: PairedTowers, config: ServeConfig, run: RunConfig | None
) -> ServedArtifacts:
    read_keys(config.api_keys)  # raises an error for an unreadable file before anything is started
    version = Version.of(index.uri)
    _check_database(version, config)
    towers = replace(towers, teacher=_teacher(config, run, version.dim) or towers.teacher)
    settings = QueryPathParts(
        towers.query, form=config.query_form, cache=config.query_cache, features=config.features
    )
    arms: list[ServedArm] = []
    pinned_versions: list[Version] = []
    for arm in config.split.arms:
        path = query_path(towers, settings, personal=arm.personalised)
        if arm.query_tower is not None:
            path = replace(path, tower=location_of(tower_at(arm.query_tower)))
        arm_version = version if arm.index is None else Version.of(arm.index)
        if arm.index is not None:
            pinned_versions.append(arm_version)
        uri, kind = path.tower
        tower = open_artifact(uri, kind=kind)
        dim = tower.read_json("query/tower.json")["dim"]
        if dim != arm_version.dim:
            raise ConfigError(
                f"the index has embeddings of dim {arm_version.dim}, the query tower of {dim}: not a pair"
            )
        form, pinned_name = _form(tower.directory("query"), config.query_form), arm.index and arm_version.name
        follows = arm.query_tower is None and arm.index is None
        arms.append(ServedArm(arm.name, path, form, path.fusion is not None, pinned_name, follows))
    own_arms = tuple(arm.name for arm in config.split.arms if arm.query_tower and not arm.index)
    if config.live is None:
        version = replace(version, towers=towers)
        catalog: Catalog | LiveCatalog = Catalog(
            version, config.state, config.versions_kept, tuple(pinned_versions), own_arms
        )
    else:
        if pinned_versions:
            raise ConfigError("serve.live has the writes of one index: no arm may name another index")
        assert run is not None
        catalog = _live_catalog(index, towers, config.live, run, own_arms)
    return ServedArtifacts(index, tuple(arms), catalog, config)


def _live_catalog(
    index: Artifact, towers: PairedTowers, live: LiveServe, run: RunConfig, own_arms: tuple[str, ...]
) -> LiveCatalog:
    if "://" in live.folder:
        raise ConfigError(f"serve.live.folder is {live.folder}: its logs are files, name a folder")
    folder = os.path.abspath(live.folder)
    if live_versions.register_exists(folder):
        live_versions.current(folder, delta=live.delta)  # raises an error if the folder is of the other kind
    documents = DocumentPathParts(  # they encode new documents like those of the run
        towers=location_of(pipeline.document_tower(run)),
        semantic_ids=location_of(pipeline.locate(run, "semantic_ids")),
        embeddings=location_of(pipeline.locate(run, "embeddings")),
        dataset=location_of(pipeline.locate(run, "dataset")),
        snippet_chars=int(index.manifest.config["snippet_chars"]),
        bm25_terms=None if run.bm25 is None else location_of(pipeline.locate(run, "bm25_terms")),
    )
    return LiveCatalog(folder, LivePair(index.uri, documents, towers), live.delta, own_arms)


def _teacher(config: ServeConfig, run: RunConfig | None, dim: int) -> Location | None:
    """Return the teacher that encodes uncertain queries, None if `serve.escalation` is not set.

    ConfigError if its embeddings do not have the dimension of the index.
    """
    escalation = config.escalation
    if escalation is None:
        return None
    if escalation.teacher is not None:
        tower = tower_at(escalation.teacher)
    elif run is not None:
        tower = pipeline.teacher(run)
    else:
        raise ConfigError(
            "serve.escalation needs a run_dir, or the URI of a tower in serve.escalation.teacher"
        )
    teacher_dim = tower.read_json("query/tower.json")["dim"]
    if teacher_dim != dim:
        raise ConfigError(
            f"serve.escalation: the index has embeddings of dim {dim}, the teacher of {teacher_dim}"
        )
    return location_of(tower)


def _check_database(version: Version, config: ServeConfig) -> None:
    """Raise ConfigError if `serve.search` names a database that does not hold the documents of the index."""
    search = config.search
    if search.backend != "own":
        name = search.collection_of(version.name)
        searcher = DatabaseSearcher.open(version.uri, search, collection=name, timeout_s=config.deadline_s)
        searcher.close()  # a local database has one user, which is to be the replica


def gateway_encodes(arm: ServedArm, config: ServeConfig) -> bool:
    """Return whether the gateway encodes the queries of an arm itself."""
    replicas = config.deployment("encoder").replicas
    return arm.tower == "lookup" if replicas is None else replicas == 0


def _form(folder: Path, form: Form) -> Form:
    """Choose the form in which a query tower is loaded."""
    return query_encoder.choose(query_encoder.forms(folder)) if form == "auto" else form


def tower_at(uri: str) -> Artifact:
    """Open the artifact of a tower; ConfigError if there is none of TOWER_KINDS."""
    for kind in TOWER_KINDS:
        try:
            return open_artifact(uri, kind=kind)
        except ArtifactError as error:
            reason = error
    raise ConfigError(f"no query tower at {uri}, it would be one of {TOWER_KINDS}: {reason}")
