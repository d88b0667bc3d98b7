"""The application: a finished run, or an index and a query tower by URI, becomes a gateway and its replicas.

`scalingnote serve` calls :func:`run`; a Serve YAML names ``import_path: scalingnote.serve.app:build`` and
gives the fields of :class:`AppArgs` as its ``args``.
"""

import os
from dataclasses import dataclass, replace
from typing import Any

from ray.serve import Application, Deployment, deployment
from ray.serve.handle import DeploymentHandle

from scalingnote import pipeline, stages
from scalingnote.encode import exported, query_encoder
from scalingnote.encode.config import Form
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.run_config import RunConfig
from scalingnote.serve import settings
from scalingnote.serve.admission import read_keys
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.gateway import ArmParts, Gateway, SearcherParts
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.query_encoder import Parts, QueryEncoder
from scalingnote.serve.reranker import Reranker
from scalingnote.serve.searcher import IndexSearcher
from scalingnote.serve.service import Writing
from scalingnote.serve.settings import AppArgs
from scalingnote.serve.writer import DocumentEncoder, DocumentParts, Writer
from scalingnote.serve_config import ServeConfig
from scalingnote.storage.artifact import Artifact, open_artifact

TOWERS = ("query_encoder", "student", "dual_encoder")
ONGOING = 1000  # calls of a replica at once: they wait in batches, not in Serve's queue
SMALL = 2_000_000  # documents that a gateway holds beside its own work


@dataclass(frozen=True)
class Served:
    """What :class:`AppArgs` name, found and checked."""

    index: Artifact
    arms: tuple[ArmParts, ...]  # with the parts of their query paths
    catalog: Catalog | LiveCatalog
    config: ServeConfig
    documents: DocumentParts | None = None  # where documents are written
    address: str | None = None

    @property
    def groups(self) -> tuple[range, ...]:
        """The shards that a searcher of its own holds, group by group."""
        shards = int(self.index.read_json("index.json")["shards"])
        # Those of a live index stay together: a search of theirs is one of a single moment.
        each = shards if self.config.live else self.config.shards_per_searcher
        return tuple(range(first, min(first + each, shards)) for first in range(0, shards, each))

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
        replicas += (not self.searchers_here) * len(self.groups) * config.searcher_replicas
        replicas += config.live is not None
        cpus = replicas * config.cpus_per_replica
        if config.rerank is not None:
            cpus += config.rerank.replicas * config.rerank.cpus_per_replica
        if config.live is not None:
            cpus += config.live.encoders * config.live.cpus_per_encoder
        return cpus


def find(args: AppArgs) -> Served:
    """Open the artifacts that `args` name; ConfigError or ArtifactError says what is amiss with them."""
    if args.run_dir is None:
        assert args.index is not None  # AppArgs saw to it
        assert args.query_tower is not None
        if args.serve.live is not None:
            raise ConfigError(
                "serve.live needs a run_dir: new documents are encoded as the run encoded its own"
            )
        index, tower = open_artifact(args.index, kind="index"), _tower(args.query_tower)
        return _served(index, tower, Parts(_place(tower)), args.serve)
    run = settings.run_of(args.run_dir)
    place = run.run_dir
    config = settings.merged(run, args)
    index = pipeline.locate(run, "index")
    tower = pipeline.locate(run, "student" if run.distill else "dual_encoder")
    parts = Parts(_place(tower), features=config.features)
    if (terms := pipeline.query_terms(run)) is not None:
        parts = replace(parts, sparse=_place(terms))
    embeddings = pipeline.locate(run, "embeddings")
    if embeddings.names("query_fusion/"):
        planner = _place(pipeline.locate(run, "planner"))
        parts = replace(parts, fusion=_place(embeddings), planner=planner)
    served = _served(index, exported.find(tower, config.query_form, place), parts, config)
    documents = None if config.live is None else _document_parts(run, index)
    return replace(served, documents=documents, address=run.address)


def _served(index: Artifact, tower: Artifact, parts: Parts, config: ServeConfig) -> Served:
    read_keys(config.api_keys)  # before anything is started
    version = Version.of(index.uri)
    arms, pinned = [], []
    for arm in config.split.arms:
        own = tower if arm.query_tower is None else _tower(arm.query_tower)
        dim = own.read_json("query/tower.json")["dim"]
        searched = version if arm.index is None else Version.of(arm.index)
        if dim != searched.dim:
            raise ConfigError(
                f"the index has embeddings of dim {searched.dim}, the query tower of {dim}: not a pair"
            )
        path = replace(parts, tower=_place(own), form=config.query_form, cache=config.query_cache)
        path = path if arm.personalised else replace(path, fusion=None)
        named = None if arm.index is None else searched.name
        form = _form(own, config.query_form)
        arms.append(ArmParts(arm.name, form, path, path.fusion is not None, named))
        pinned += [] if arm.index is None else [searched]
    if config.live is None:
        catalog: Catalog | LiveCatalog = Catalog(version, config.state, config.versions_kept, tuple(pinned))
    elif pinned:
        raise ConfigError("serve.live has the writes of one index: arms of other indexes cannot be beside it")
    else:
        if "://" in config.live.folder:
            raise ConfigError(f"serve.live.folder is {config.live.folder}: logs are files, name a folder")
        catalog = LiveCatalog(os.path.abspath(config.live.folder), index.uri, version.dim)
    return Served(index, tuple(arms), catalog, config)


def _document_parts(run: RunConfig, index: Artifact) -> DocumentParts:
    """What encodes new documents as a run has encoded its own."""
    if run.cross_encoder is not None and run.distill is not None and not run.distill.document:
        raise ConfigError(
            "serve.live: documents of this run were read by a cross-encoder, nobody encodes new ones"
        )
    own = "encode_student" in [stage.name for stage in stages.of(run)]
    return DocumentParts(
        towers=_place(pipeline.locate(run, "student" if own else "dual_encoder")),
        semantic_ids=_place(pipeline.locate(run, "semantic_ids")),
        embeddings=_place(pipeline.locate(run, "embeddings")),
        dataset=_place(pipeline.locate(run, "dataset")),
        snippet_chars=int(index.manifest.config["snippet_chars"]),
    )


def build(args: AppArgs) -> Application:
    """The Serve application: a gateway, and what it does not do itself as deployments of their own."""
    return bind(find(args))


def bind(served: Served) -> Application:
    """The application of what was found."""
    config = served.config
    arms = [arm if _encodes_here(arm, config) else _in_replicas(arm, config) for arm in served.arms]
    gateway = _replicas(Gateway, num_replicas=config.gateway_replicas, ray_actor_options=_actor(config))
    application: Application = gateway.bind(
        arms, _searchers(served), config, _reranker(config), _writing(served)
    )
    return application


def _searchers(served: Served) -> SearcherParts:
    config, handles = served.config, None
    if not served.searchers_here:
        handles = tuple(
            _replicas(
                IndexSearcher,
                name=f"IndexSearcher-{group:03d}",
                num_replicas=config.searcher_replicas,
                ray_actor_options=_actor(config),
                max_ongoing_requests=ONGOING,
            ).bind(
                served.catalog,
                shards=shards,
                nprobe=config.nprobe,
                mapped=config.mapped,
                refresh_s=config.live.refresh_s if config.live else 0.1,
            )
            for group, shards in enumerate(served.groups)
        )
    return SearcherParts(served.catalog, handles)


def _writing(served: Served) -> Writing | None:
    live = served.config.live
    if live is None:
        return None
    assert isinstance(served.catalog, LiveCatalog)
    assert served.documents is not None
    options = {"num_cpus": live.cpus_per_encoder, "num_gpus": live.gpus_per_encoder}
    encoder = _replicas(DocumentEncoder, num_replicas=live.encoders, ray_actor_options=options)
    # One, and the next not before this one is gone: it holds the claim on the logs.
    writer = _replicas(
        Writer, num_replicas=1, ray_actor_options=_actor(served.config), max_ongoing_requests=ONGOING
    )
    folder, index = served.catalog.folder, served.catalog.index
    return Writing(encoder.bind(served.documents), writer.bind(folder, index, live), live.deadline_s)


def _replicas(of: Any, **options: Any) -> Any:
    """A deployment of a class, or one with these options; what it binds comes to others as a handle."""
    made: Any = of if isinstance(of, Deployment) else deployment(of)
    return made.options(**options)


def _actor(config: ServeConfig) -> dict[str, float]:
    return {"num_cpus": config.cpus_per_replica}


def _in_replicas(arm: ArmParts, config: ServeConfig) -> ArmParts:
    encoder = _replicas(
        QueryEncoder,
        name=f"QueryEncoder-{arm.name}",
        num_replicas=config.encoder_replicas,
        ray_actor_options=_actor(config),
        max_ongoing_requests=ONGOING,
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


def _reranker(config: ServeConfig) -> DeploymentHandle[Any] | None:
    rerank = config.rerank
    if rerank is None:
        return None
    options = {"num_cpus": rerank.cpus_per_replica, "num_gpus": rerank.gpus_per_replica}
    replicas = _replicas(Reranker, num_replicas=rerank.replicas, ray_actor_options=options)
    handle: DeploymentHandle[Any] = replicas.bind(rerank.model)
    return handle
