"""The application: a finished run, or an index and a query tower by URI, becomes a gateway and its replicas.

`scalingnote serve` calls :func:`run`; a Serve YAML names ``import_path: serve.app:build`` and gives the
fields of :class:`AppArgs` as its ``args``.
"""

import os
from dataclasses import dataclass, replace
from functools import reduce

from pydantic import Field, model_validator
from ray.serve import Application, deployment

from scalingnote import pipeline
from scalingnote.config import Config, merge, validate
from scalingnote.encode import exported, query_encoder
from scalingnote.encode.config import Form
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.index import shard
from scalingnote.search.config import ServeConfig
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact
from serve.catalog import Catalog, Version
from serve.door import read_keys
from serve.gateway import ArmParts, Gateway, SearcherParts
from serve.query_encoder import Parts, QueryEncoder
from serve.reranker import Reranker
from serve.searcher import IndexSearcher

TOWERS = ("query_encoder", "student", "dual_encoder")
SMALL = 2_000_000  # documents that a gateway holds beside its own work


class AppArgs(Config):
    """What to serve: a run directory, or an index and a query tower. Paths are seen from every node."""

    run_dir: str | None = Field(None, description="a finished run; its last config says which artifacts")
    index: str | None = Field(None, description="URI of an index artifact")
    query_tower: str | None = Field(
        None, description="URI of a student, dual_encoder or query_encoder artifact"
    )
    serve: ServeConfig = Field(ServeConfig(), description="knobs set here win over those of the run")

    @model_validator(mode="after")
    def _one_source(self) -> "AppArgs":
        given = (self.run_dir is not None, self.index is not None, self.query_tower is not None)
        if given not in {(True, False, False), (False, True, True)}:
            raise ValueError("give either run_dir, or index and query_tower together")
        return self


@dataclass(frozen=True)
class Served:
    """What :class:`AppArgs` name, found and checked."""

    index: Artifact
    arms: tuple[ArmParts, ...]  # with the parts of their query paths
    catalog: Catalog
    config: ServeConfig
    address: str | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many shards each group has."""
        shards = int(self.index.read_json("index.json")["shards"])
        each = self.config.shards_per_searcher
        return tuple(len(range(first, min(first + each, shards))) for first in range(0, shards, each))

    @property
    def searchers_here(self) -> bool:
        """Whether the gateway itself searches."""
        if self.config.searchers_in != "auto":
            return self.config.searchers_in == "gateway"
        return self.config.gateway_replicas == 1 and self.index.counts["documents"] <= SMALL

    @property
    def cpus(self) -> float:
        """CPU cores that all replicas together reserve."""
        config, replicas = self.config, self.config.gateway_replicas
        replicas += sum(not _encodes_here(arm, config) for arm in self.arms) * config.encoder_replicas
        replicas += (not self.searchers_here) * len(self.sizes) * config.searcher_replicas
        rerank = config.rerank
        return replicas * config.cpus_per_replica + (
            rerank.replicas * rerank.cpus_per_replica if rerank is not None else 0
        )


def find(args: AppArgs) -> Served:
    """Open the artifacts that `args` name; ConfigError or ArtifactError says what is amiss with them."""
    if args.run_dir is None:
        assert args.index is not None  # AppArgs saw to it
        assert args.query_tower is not None
        index, tower = open_artifact(args.index, kind="index"), _tower(args.query_tower)
        parts = Parts(_place(tower), args.serve.query_form, args.serve.query_cache)
        return _served(index, tower, parts, args.serve, None)
    # Replicas have working directories of their own.
    place = args.run_dir if "://" in args.run_dir else os.path.abspath(args.run_dir)
    run = pipeline.load_run(place)
    knobs = [
        {"state": fs.join(place, "serve")},
        *(s.model_dump(exclude_unset=True) for s in (run.serve, args.serve)),
    ]
    config = validate(ServeConfig, reduce(merge, knobs), source="serve")
    index = pipeline.locate(run, "index")
    tower = pipeline.locate(run, "student" if run.distill else "dual_encoder")
    form = exported.find(tower, config.query_form, place)
    parts = Parts(_place(form), config.query_form, config.query_cache)
    if shard.open_layout(index).sparse:
        parts = replace(parts, sparse=_place(pipeline.locate(run, "dual_encoder")))
    embeddings = pipeline.locate(run, "embeddings")
    if config.personalised and embeddings.names("query_fusion/"):
        planner = _place(pipeline.locate(run, "planner"))
        parts = replace(parts, fusion=_place(embeddings), planner=planner, features=config.features)
    return _served(index, form, parts, config, run.address)


def _served(
    index: Artifact, tower: Artifact, parts: Parts, config: ServeConfig, address: str | None
) -> Served:
    dims = (index.read_json("index.json")["dim"], tower.read_json("query/tower.json")["dim"])
    if dims[0] != dims[1]:
        raise ConfigError(
            f"the index has embeddings of dim {dims[0]}, the query tower of {dims[1]}: not a pair"
        )
    read_keys(config.api_keys)  # before anything is started
    arm = ArmParts("default", _form(tower, config.query_form), parts, parts.fusion is not None)
    catalog = Catalog(Version.of(index.uri), config.state, config.versions_kept)
    return Served(index, (arm,), catalog, config, address)


def build(args: AppArgs) -> Application:
    """The Serve application: a gateway, and what it does not do itself as deployments of their own."""
    return bind(find(args))


def bind(served: Served) -> Application:
    """The application of what was found."""
    config = served.config
    actor = {"num_cpus": config.cpus_per_replica}
    gateway = Gateway.options(num_replicas=config.gateway_replicas, ray_actor_options=actor)
    arms = [arm if _encodes_here(arm, config) else _in_replicas(arm, config) for arm in served.arms]
    handles = None
    if not served.searchers_here:
        first = [sum(served.sizes[:group]) for group in range(len(served.sizes))]
        handles = tuple(
            deployment(IndexSearcher)
            .options(
                name=f"IndexSearcher-{group:03d}",
                num_replicas=config.searcher_replicas,
                ray_actor_options=actor,
            )
            .bind(
                served.catalog,
                shards=range(first[group], first[group] + size),
                nprobe=config.nprobe,
            )
            for group, size in enumerate(served.sizes)
        )
    searchers = SearcherParts(served.catalog, served.sizes, handles)
    return gateway.bind(arms, searchers, config, _reranker(config))


def _in_replicas(arm: ArmParts, config: ServeConfig) -> ArmParts:
    encoder = deployment(QueryEncoder).options(
        name=f"QueryEncoder-{arm.name}",
        num_replicas=config.encoder_replicas,
        ray_actor_options={"num_cpus": config.cpus_per_replica},
    )
    return replace(arm, encoder=encoder.bind(arm.encoder))


def _encodes_here(arm: ArmParts, config: ServeConfig) -> bool:
    """Whether the gateway itself encodes the queries of an arm."""
    if config.encoder_in != "auto":
        return config.encoder_in == "gateway"
    return arm.tower == "lookup"


def _form(tower: Artifact, form: Form) -> Form:
    """The form that a query tower is loaded in."""
    there = query_encoder.forms(tower.directory("query"))
    return query_encoder.choose(there) if form == "auto" else form


def _place(artifact: Artifact) -> tuple[str, str]:
    return artifact.uri, artifact.manifest.kind


def _tower(uri: str) -> Artifact:
    for kind in TOWERS:
        try:
            return open_artifact(uri, kind=kind)
        except ArtifactError as error:
            reason = error
    raise ConfigError(f"no query tower at {uri}, it would be one of {TOWERS}: {reason}")


def _reranker(config: ServeConfig) -> Application | None:
    rerank = config.rerank
    if rerank is None:
        return None
    options = {"num_cpus": rerank.cpus_per_replica, "num_gpus": rerank.gpus_per_replica}
    replicas = deployment(Reranker).options(num_replicas=rerank.replicas, ray_actor_options=options)
    return replicas.bind(rerank.model)
