"""The artifacts of an application: found, opened and checked, before anything is started."""

import os
from dataclasses import dataclass, replace

from scalingnote import pipeline, stages
from scalingnote.encode import exports, query_encoder
from scalingnote.encode.config import Form
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.run_config import RunConfig
from scalingnote.serve.access import read_keys
from scalingnote.serve.replicas import QueryPathParts
from scalingnote.serve.service import ServedArm
from scalingnote.serve.versions import Catalog, LiveCatalog, Version
from scalingnote.serve.writer import DocumentPathParts
from scalingnote.serve_config import AppArgs, ServeConfig, merged
from scalingnote.storage.artifact import Artifact, open_artifact

TOWER_KINDS = ("query_encoder", "student", "dual_encoder")
GATEWAY_MAX_DOCUMENTS = 2_000_000  # of an index that a gateway searches itself, with searchers_in=auto


@dataclass(frozen=True)
class ServedArtifacts:
    """The artifacts and settings of an application, opened and checked."""

    index: Artifact
    arms: tuple[ServedArm, ...]  # with the parts of their query paths, not handles
    catalog: Catalog | LiveCatalog
    config: ServeConfig
    documents: DocumentPathParts | None = None  # of a live index
    address: str | None = None  # of the Ray cluster

    @property
    def groups(self) -> tuple[range, ...]:
        """The shards that each searcher deployment holds."""
        shards = int(self.index.read_json("index.json")["shards"])
        # The shards of a live index stay in one process: a search sees all of them at one moment.
        size = shards if self.config.live else self.config.shards_per_searcher
        return tuple(range(first, min(first + size, shards)) for first in range(0, shards, size))

    @property
    def gateway_searches(self) -> bool:
        """Whether the gateway itself searches."""
        if self.config.searchers_in != "auto":
            return self.config.searchers_in == "gateway"
        return self.config.gateway_replicas == 1 and self.index.counts["documents"] <= GATEWAY_MAX_DOCUMENTS

    @property
    def cpus(self) -> float:
        """CPU cores that all replicas together reserve."""
        config, replicas = self.config, self.config.gateway_replicas
        replicas += sum(not gateway_encodes(arm, config) for arm in self.arms) * config.encoder_replicas
        replicas += (not self.gateway_searches) * len(self.groups) * config.searcher_replicas
        replicas += config.live is not None
        cpus = replicas * config.cpus_per_replica
        if config.rerank is not None:
            cpus += config.rerank.replicas * config.rerank.cpus_per_replica
        if config.live is not None:
            cpus += config.live.encoders * config.live.cpus_per_encoder
        return cpus


def find(args: AppArgs) -> ServedArtifacts:
    """Open the artifacts of an application.

    Raises:
        ConfigError: settings and artifacts do not fit together.
        ArtifactError: there is no finished artifact of the kind.
    """
    if args.run_dir is None:
        assert args.index is not None  # validated by AppArgs
        assert args.query_tower is not None
        if args.serve.live is not None:
            raise ConfigError(
                "serve.live needs a run_dir: new documents are encoded by the towers and networks of the run"
            )
        index, tower = open_artifact(args.index, kind="index"), tower_at(args.query_tower)
        return _served(index, tower, QueryPathParts(_location(tower)), args.serve)
    run = pipeline.load_run(args.run_dir)
    config = merged(run.run_dir, run.serve, args.serve)
    index = pipeline.locate(run, "index")
    tower = pipeline.locate(run, "student" if run.distill else "dual_encoder")
    parts = QueryPathParts(_location(tower), features=config.features)
    if (terms := pipeline.query_terms(run)) is not None:
        parts = replace(parts, sparse=_location(terms))
    embeddings = pipeline.locate(run, "embeddings")
    if embeddings.names("query_fusion/"):
        planner = _location(pipeline.locate(run, "planner"))
        parts = replace(parts, fusion=_location(embeddings), planner=planner)
    served = _served(index, exports.find(tower, config.query_form, run.run_dir), parts, config)
    documents = None if config.live is None else _document_path(run, index)
    return replace(served, documents=documents, address=run.address)


def _served(index: Artifact, tower: Artifact, parts: QueryPathParts, config: ServeConfig) -> ServedArtifacts:
    read_keys(config.api_keys)  # an unreadable file is an error before anything is started
    version = Version.of(index.uri)
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
        path = replace(parts, tower=_location(arm_tower), form=config.query_form, cache=config.query_cache)
        path = path if arm.personalised else replace(path, fusion=None)
        pinned_name = None
        if arm.index is not None:
            pinned_name = arm_version.name
            pinned.append(arm_version)
        form = _form(arm_tower, config.query_form)
        arms.append(ServedArm(arm.name, path, form, path.fusion is not None, pinned_name))
    if config.live is None:
        catalog: Catalog | LiveCatalog = Catalog(version, config.state, config.versions_kept, tuple(pinned))
    elif pinned:
        raise ConfigError("serve.live has the writes of one index: no arm may name another index")
    else:
        if "://" in config.live.folder:
            raise ConfigError(f"serve.live.folder is {config.live.folder}: its logs are files, name a folder")
        catalog = LiveCatalog(os.path.abspath(config.live.folder), index.uri, version.dim)
    return ServedArtifacts(index, tuple(arms), catalog, config)


def _document_path(run: RunConfig, index: Artifact) -> DocumentPathParts:
    """The parts that encode new documents as the run encoded its own."""
    if run.cross_encoder is not None and run.distill is not None and not run.distill.document:
        raise ConfigError(
            "serve.live: the cross-encoder encoded the documents of this run, it cannot encode new ones"
        )
    by_student = "encode_student" in [stage.name for stage in stages.of(run)]
    return DocumentPathParts(
        towers=_location(pipeline.locate(run, "student" if by_student else "dual_encoder")),
        semantic_ids=_location(pipeline.locate(run, "semantic_ids")),
        embeddings=_location(pipeline.locate(run, "embeddings")),
        dataset=_location(pipeline.locate(run, "dataset")),
        snippet_chars=int(index.manifest.config["snippet_chars"]),
    )


def gateway_encodes(arm: ServedArm, config: ServeConfig) -> bool:
    """Whether the gateway encodes the queries of an arm itself."""
    if config.encoder_in != "auto":
        return config.encoder_in == "gateway"
    return arm.tower == "lookup"


def _form(tower: Artifact, form: Form) -> Form:
    """The form that a query tower is loaded in."""
    if form != "auto":
        return form
    return query_encoder.choose(query_encoder.forms(tower.directory("query")))


def _location(artifact: Artifact) -> tuple[str, str]:
    return artifact.uri, artifact.manifest.kind


def tower_at(uri: str) -> Artifact:
    """The artifact of a query tower; ConfigError when there is none of its kinds."""
    for kind in TOWER_KINDS:
        try:
            return open_artifact(uri, kind=kind)
        except ArtifactError as error:
            reason = error
    raise ConfigError(f"no query tower at {uri}, it would be one of {TOWER_KINDS}: {reason}")
