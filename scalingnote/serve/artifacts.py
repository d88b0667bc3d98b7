"""The artifacts of an application: found, opened and checked, before anything is started."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.model_files import local_folder
from scalingnote.encode import exports, query_encoder
from scalingnote.encode.config import Form
from scalingnote.index.live import versions as live_versions
from scalingnote.index.shard import open_layout
from scalingnote.models.published_model import Similarity, similarity_of
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import AppArgs, ServeConfig, merge_sections
from scalingnote.search.backend import DatabaseSearcher
from scalingnote.serve import towers
from scalingnote.serve.access import read_keys
from scalingnote.serve.deployed import ServedArm
from scalingnote.serve.encoders import QueryPathParts
from scalingnote.serve.live_pairs import DocumentPathParts
from scalingnote.serve.pairs import PairedTowers, location_of, towers_of
from scalingnote.serve.towers import Location
from scalingnote.serve.versions import Catalog, LiveCatalog, Version
from scalingnote.storage.artifact import Artifact, open_artifact

TOWER_KINDS = ("query_encoder", "student", "dual_encoder")
GATEWAY_MAX_DOCUMENTS = 2_000_000  # of an index that a gateway searches itself, by default


@dataclass(frozen=True)
class ServedArtifacts:
    """The artifacts and settings of an application, opened and checked."""

    index: Artifact
    arms: tuple[ServedArm, ...]  # with the parts of their query paths, not handles
    catalog: Catalog | LiveCatalog
    config: ServeConfig
    documents: DocumentPathParts | None = None  # of a live index
    address: str | None = None  # of the Ray cluster
    name: str = "scalingnote"  # of the model, for clients of embeddings
    document_tower: Location | None = None  # for the same
    teacher: QueryPathParts | None = None  # where there is escalation

    @property
    def shards(self) -> range:
        """Numbers of all shards."""
        return range(int(self.index.read_json("index.json")["shards"]))

    @property
    def similarity(self) -> Similarity:
        """How the index compares queries and documents."""
        return open_layout(self.index).similarity

    @property
    def groups(self) -> tuple[range, ...]:
        """The shards that each searcher deployment holds."""
        shards = len(self.shards)
        # The shards of a live index stay in one process: a search sees all of them at one moment. A database
        # has all of them.
        live = self.config.live
        whole = (live is not None and not live.delta) or self.config.search.backend != "own"
        size = shards if whole else self.config.shards_per_searcher
        return tuple(range(first, min(first + size, shards)) for first in range(0, shards, size))

    @property
    def gateway_searches(self) -> bool:
        """Whether the gateway itself searches."""
        if (replicas := self.config.deployment("searcher").replicas) is not None:
            return replicas == 0
        if self.config.search.backend != "own":
            return True  # a searcher of its own would only pass calls on
        is_small = self.index.counts["documents"] <= GATEWAY_MAX_DOCUMENTS
        return is_small and self.config.replicas("gateway") == 1


@dataclass(frozen=True)
class ServedTower:
    """A model that is served without an index: either of its sides, or both."""

    name: str
    query: ServedArm | None  # with the parts of its query path, not a handle
    document: Location | None  # None: it has none, or it is not served
    config: ServeConfig
    similarity: Similarity = "cosine"  # of its embeddings
    address: str | None = None  # of the Ray cluster


def find(args: AppArgs) -> ServedArtifacts | ServedTower:
    """Open the artifacts of an application.

    Raises:
        ConfigError: settings and artifacts do not fit together.
        ArtifactError: there is no finished artifact of the kind.
    """
    if args.model is not None:
        return _served_tower(args.model, args.serve)
    if args.run_dir is None:
        assert args.index is not None  # validated by AppArgs
        assert args.query_tower is not None
        if args.serve.live is not None:
            raise ConfigError(
                "serve.live needs a run_dir: new documents are encoded by the towers and networks of the run"
            )
        index, tower = open_artifact(args.index, kind="index"), tower_at(args.query_tower)
        document_tower = None
        if args.document_tower is not None and args.serve.deployment("document_tower").replicas:
            document_tower = location_of(tower_at(args.document_tower))
        towers = PairedTowers(location_of(tower), document=document_tower)
        served = _serve_index(index, tower, QueryPathParts(location_of(tower)), args.serve, towers)
        return replace(_with_teacher(served, None), document_tower=document_tower)
    return of_run(pipeline.load_run(args.run_dir), args.serve)


def of_run(run: RunConfig, serve: ServeConfig) -> ServedArtifacts:
    """Open the artifacts of a run, as :func:`find`; what `serve` sets wins over the run's own section."""
    config = merge_sections(run.run_dir, run.serve, serve)
    index = pipeline.locate(run, "index")
    tower = pipeline.locate(run, "student" if run.distill else "dual_encoder")
    parts = QueryPathParts(location_of(tower), features=config.features)
    if (terms := pipeline.query_terms(run)) is not None:
        parts = replace(parts, sparse=location_of(terms))
    embeddings = pipeline.locate(run, "embeddings")
    if embeddings.names("query_fusion/"):
        planner = location_of(pipeline.locate(run, "planner"))
        parts = replace(parts, fusion=location_of(embeddings), planner=planner)
    towers = towers_of(index)
    assert towers is not None  # of a run's index, which was built for the run's query tower
    exported = exports.find(tower, config.query_form, run.run_dir)
    served = _serve_index(index, exported, parts, config, towers)
    with_documents = config.deployment("document_tower").replicas
    return replace(
        _with_teacher(served, run),
        documents=None if config.live is None else _document_path(run, index),
        address=run.address,
        name=Path(run.run_dir).name,
        document_tower=location_of(pipeline.document_tower(run)) if with_documents else None,
    )


def _with_teacher(served: ServedArtifacts, run: RunConfig | None) -> ServedArtifacts:
    """The same artifacts with the teacher that uncertain queries escalate to: one of the first version."""
    teacher, catalog = _teacher(served, run), served.catalog
    if teacher is not None and catalog.towers is not None:
        catalog = catalog.with_towers(replace(catalog.towers, teacher=teacher.tower))
    return replace(served, catalog=catalog, teacher=teacher)


def _served_tower(model: str, config: ServeConfig) -> ServedTower:
    """A model's folder, checked."""
    for name in ("grpc_port", "live", "access_log"):
        if getattr(config, name) is not None:
            raise ConfigError(f"serve.{name} needs an index: a model alone has embeddings over HTTP")
    if config.search.backend != "own":
        raise ConfigError("serve.search needs an index: a model alone has embeddings over HTTP")
    read_keys(config.api_keys)
    folder = local_folder(model).absolute()
    found, name = towers.sides(folder), _model_name(model, folder)
    arm = None
    if "query" in found:
        location = (str(found["query"]), towers.FOLDER)
        parts = QueryPathParts(location, form=config.query_form, cache=config.query_cache)
        arm = ServedArm(name, parts, _form(found["query"], config.query_form), personalised=False)
    document = None
    if "document" in found and config.deployment("document_tower").replicas != 0:
        document = (str(found["document"]), towers.FOLDER)
    if arm is None and document is None:
        raise ConfigError(
            f"{model} reads documents only: set serve.deployments.document_tower.num_replicas to 1 or more"
        )
    return ServedTower(name, arm, document, config, similarity_of(found.get("document", folder)))


def _model_name(model: str, folder: Path) -> str:
    """The name of a model for clients: the hub id or package as it was given, or the folder's own name.

    A folder in the hub's cache is named by a commit: there the hub id is the name, too.
    """
    if not Path(model).is_dir():
        return model
    cached = folder.parents[1].name if folder.parent.name == "snapshots" else ""
    hub_id = cached.removeprefix("models--")
    return hub_id.replace("--", "/") if hub_id != cached else folder.name


def _serve_index(
    index: Artifact, tower: Artifact, parts: QueryPathParts, config: ServeConfig, towers: PairedTowers
) -> ServedArtifacts:
    read_keys(config.api_keys)  # an unreadable file is an error before anything is started
    version = replace(Version.of(index.uri), towers=towers)
    _check_database(version, config)
    arms: list[ServedArm] = []
    pinned: list[Version] = []
    for arm in config.split.arms:
        arm_tower = tower if arm.query_tower is None else tower_at(arm.query_tower)
        dim = arm_tower.read_json("query/tower.json")["dim"]
        arm_version = version if arm.index is None else Version.of(arm.index)
        if dim != arm_version.dim:
            raise ConfigError(
                f"the index has embeddings of dim {arm_version.dim}, the query tower of {dim}: not a pair"
            )
        path = replace(parts, tower=location_of(arm_tower), form=config.query_form, cache=config.query_cache)
        path = path if arm.personalised else replace(path, fusion=None)
        pinned_name = None
        if arm.index is not None:
            pinned_name = arm_version.name
            pinned.append(arm_version)
        form = _form(arm_tower.directory("query"), config.query_form)
        by_version = config.live is None or config.live.delta
        follows = by_version and arm.query_tower is None and arm.index is None
        arms.append(ServedArm(arm.name, path, form, path.fusion is not None, pinned_name, follows))
    own = tuple(arm.name for arm in config.split.arms if arm.query_tower and not arm.index)
    if config.live is None:
        catalog: Catalog | LiveCatalog = Catalog(
            version, config.state, config.versions_kept, tuple(pinned), own
        )
    elif pinned:
        raise ConfigError("serve.live has the writes of one index: no arm may name another index")
    else:
        if "://" in config.live.folder:
            raise ConfigError(f"serve.live.folder is {config.live.folder}: its logs are files, name a folder")
        folder = os.path.abspath(config.live.folder)
        if live_versions.register_exists(
            folder
        ):  # one of the other kind is an error before anything is started
            live_versions.current(folder, delta=config.live.delta)
        known = towers if config.live.delta else None
        catalog = LiveCatalog(folder, index.uri, version.dim, config.live.delta, known, own)
    return ServedArtifacts(index, tuple(arms), catalog, config)


def _teacher(served: ServedArtifacts, run: RunConfig | None) -> QueryPathParts | None:
    """The query side of the teacher that uncertain queries escalate to."""
    escalation = served.config.escalation
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
    dim, wanted = tower.read_json("query/tower.json")["dim"], Version.of(served.index.uri).dim
    if dim != wanted:
        raise ConfigError(f"serve.escalation: the index has embeddings of dim {wanted}, the teacher of {dim}")
    return QueryPathParts(location_of(tower))


def _check_database(version: Version, config: ServeConfig) -> None:
    """ConfigError where a database is to be searched that does not hold the documents of the index."""
    search = config.search
    if search.backend != "own":
        name = search.collection_of(version.name)
        found = DatabaseSearcher.open(version.uri, search, collection=name, timeout_s=config.deadline_s)
        found.close()  # of a local path the replica is the only user


def _document_path(run: RunConfig, index: Artifact) -> DocumentPathParts:
    """The parts that encode new documents as the run encoded its own."""
    return DocumentPathParts(
        towers=location_of(pipeline.document_tower(run)),
        semantic_ids=location_of(pipeline.locate(run, "semantic_ids")),
        embeddings=location_of(pipeline.locate(run, "embeddings")),
        dataset=location_of(pipeline.locate(run, "dataset")),
        snippet_chars=int(index.manifest.config["snippet_chars"]),
        bm25_terms=None if run.bm25 is None else location_of(pipeline.locate(run, "bm25_terms")),
    )


def gateway_encodes(arm: ServedArm, config: ServeConfig) -> bool:
    """Whether the gateway encodes the queries of an arm itself."""
    replicas = config.deployment("encoder").replicas
    return arm.tower == "lookup" if replicas is None else replicas == 0


def _form(folder: Path, form: Form) -> Form:
    """The form that a query tower is loaded in."""
    return query_encoder.choose(query_encoder.forms(folder)) if form == "auto" else form


def tower_at(uri: str) -> Artifact:
    """The artifact of a tower; ConfigError when there is none of its kinds."""
    for kind in TOWER_KINDS:
        try:
            return open_artifact(uri, kind=kind)
        except ArtifactError as error:
            reason = error
    raise ConfigError(f"no query tower at {uri}, it would be one of {TOWER_KINDS}: {reason}")
