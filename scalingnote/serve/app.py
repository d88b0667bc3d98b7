"""The Serve application: a finished run, or an index and a query tower by URI, as a gateway and its replicas.

`scalingnote serve` calls :func:`find` and :func:`bind`. A Serve YAML names
``import_path: scalingnote.serve.app:build`` and gives the fields of :class:`AppArgs` as its ``args``.
"""

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment, deployment
from ray.serve.handle import DeploymentHandle

from scalingnote import pipeline, stages
from scalingnote.encode import exports, query_encoder
from scalingnote.encode.config import Form
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.experiment.access_log import AccessWriter
from scalingnote.run_config import RunConfig
from scalingnote.serve import api, settings
from scalingnote.serve.access import Admission, read_keys
from scalingnote.serve.concurrency import Handle, LocalHandle
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.replicas import ArmEncoder, IndexSearcher, QueryPathParts, Reranker
from scalingnote.serve.service import ServedArm, Service
from scalingnote.serve.settings import AppArgs
from scalingnote.serve.telemetry import Metrics, RequestObserver, scrape
from scalingnote.serve.versions import Catalog, LiveCatalog, Version, Versions
from scalingnote.serve.writer import DocumentEncoder, DocumentPathParts, WriteHandles, Writer
from scalingnote.serve_config import ServeConfig
from scalingnote.storage.artifact import Artifact, open_artifact

TOWER_KINDS = ("query_encoder", "student", "dual_encoder")
MAX_ONGOING_REQUESTS = 1000  # of a replica: calls wait in its batcher, not in Serve's queue
GATEWAY_MAX_DOCUMENTS = 2_000_000  # of an index that a gateway searches itself, with searchers_in=auto

# Allocations between two runs of the garbage collector. A search allocates some fifty containers and no
# cycle: at Python's default of 700, the collector takes 1/40 of it.
GC_THRESHOLD = 20_000


# --- the gateway -------------------------------------------------------------------------------------------


# Admission refuses requests with 503 before Serve would queue them.
@serve.deployment(max_ongoing_requests=1000)
@serve.ingress()
class Gateway(Servicer):
    """Ingress of the application. Its gRPC methods are inherited, its HTTP side is built by Serve's hook.

    Args:
        arms: an arm's encoder is a handle, or the parts to load in this process.
        catalog: of the index versions.
        searchers: one for each group of shards; none: this process holds all shards.
        config: of the service.
        reranker: None: no re-ranking.
        writing: None: the index is read only.
    """

    def __init__(
        self,
        arms: Sequence[ServedArm],
        catalog: Catalog | LiveCatalog,
        searchers: Sequence[DeploymentHandle[Any]],
        config: ServeConfig,
        reranker: DeploymentHandle[Any] | None = None,
        writing: WriteHandles | None = None,
    ) -> None:
        gc.set_threshold(GC_THRESHOLD)
        self._config, self._metrics = config, Metrics()
        handles: list[Handle] = [*searchers] if searchers else [_local_searcher(catalog, config)]
        service = Service(
            [replace(arm, encoder=_encoder(arm.encoder)) for arm in arms],
            handles,
            Versions(catalog, handles),
            config,
            reranker=reranker,
            writing=writing,
            on_recall=self._metrics.observe_recall,
        )
        replica = serve.get_replica_context().replica_id.unique_id
        log = None if config.access_log is None else AccessWriter(config.access_log, replica)
        admission = Admission(config.limits, read_keys(config.api_keys), is_open=config.open)
        super().__init__(service, admission, RequestObserver(self._metrics, log))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the HTTP side of this replica."""
        return api.build(
            self._service,
            self._config,
            admission=self._admission,
            scrape=scrape,
            on_done=self._on_done,
            on_poll=self._set_gauges,
            in_serve=True,
        )

    def _set_gauges(self) -> None:
        active = self._service.versions.active
        self._metrics.set_state(
            in_flight=self._admission.in_flight, version=active.name, documents=active.documents
        )


def _encoder(encoder: QueryPathParts | DeploymentHandle[Any]) -> Handle:
    return LocalHandle(ArmEncoder(encoder)) if isinstance(encoder, QueryPathParts) else encoder


def _local_searcher(catalog: Catalog | LiveCatalog, config: ServeConfig) -> LocalHandle:
    refresh_s = config.live.refresh_s if config.live else 0.1
    return LocalHandle(
        IndexSearcher(catalog, nprobe=config.nprobe, mapped=config.mapped, refresh_s=refresh_s)
    )


# --- the application ---------------------------------------------------------------------------------------


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
        replicas += sum(not _gateway_encodes(arm, config) for arm in self.arms) * config.encoder_replicas
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
        index, tower = open_artifact(args.index, kind="index"), _tower(args.query_tower)
        return _served(index, tower, QueryPathParts(_location(tower)), args.serve)
    run = settings.run_of(args.run_dir)
    config = settings.merged(run, args)
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
        arm_tower = tower if arm.query_tower is None else _tower(arm.query_tower)
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


def build(args: AppArgs) -> Application:
    """The Serve application of some arguments, for ``import_path`` in a Serve YAML."""
    return bind(find(args))


def bind(served: ServedArtifacts) -> Application:
    """The application: the gateway, and deployments of the parts that it does not run itself."""
    config = served.config
    arms = [arm if _gateway_encodes(arm, config) else _in_replicas(arm, config) for arm in served.arms]
    gateway = _replicas(Gateway, num_replicas=config.gateway_replicas, ray_actor_options=_actor(config))
    application: Application = gateway.bind(
        arms, served.catalog, _searchers(served), config, _reranker(config), _writing(served)
    )
    return application


def _searchers(served: ServedArtifacts) -> list[Any]:
    """A deployment for each group of shards; none where the gateway searches."""
    config = served.config
    if served.gateway_searches:
        return []
    return [
        _replicas(
            IndexSearcher,
            name=f"IndexSearcher-{group:03d}",
            num_replicas=config.searcher_replicas,
            ray_actor_options=_actor(config),
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ).bind(
            served.catalog,
            shards=shards,
            nprobe=config.nprobe,
            mapped=config.mapped,
            refresh_s=config.live.refresh_s if config.live else 0.1,
        )
        for group, shards in enumerate(served.groups)
    ]


def _writing(served: ServedArtifacts) -> WriteHandles | None:
    live = served.config.live
    if live is None:
        return None
    assert isinstance(served.catalog, LiveCatalog)
    assert served.documents is not None
    options = {"num_cpus": live.cpus_per_encoder, "num_gpus": live.gpus_per_encoder}
    encoder = _replicas(DocumentEncoder, num_replicas=live.encoders, ray_actor_options=options)
    # One replica: it holds the claim on the logs, and the next one has to wait for it to end.
    writer = _replicas(
        Writer,
        num_replicas=1,
        ray_actor_options=_actor(served.config),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
    )
    folder, index = served.catalog.folder, served.catalog.index
    return WriteHandles(encoder.bind(served.documents), writer.bind(folder, index, live), live.deadline_s)


def _replicas(cls: Any, **options: Any) -> Any:
    """A deployment of a class, or of a deployment with other options."""
    deployed: Any = cls if isinstance(cls, Deployment) else deployment(cls)
    return deployed.options(**options)


def _actor(config: ServeConfig) -> dict[str, float]:
    return {"num_cpus": config.cpus_per_replica}


def _in_replicas(arm: ServedArm, config: ServeConfig) -> ServedArm:
    encoder = _replicas(
        ArmEncoder,
        name=f"QueryEncoder-{arm.name}",
        num_replicas=config.encoder_replicas,
        ray_actor_options=_actor(config),
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
    )
    return replace(arm, encoder=encoder.bind(arm.encoder))


def _gateway_encodes(arm: ServedArm, config: ServeConfig) -> bool:
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


def _tower(uri: str) -> Artifact:
    for kind in TOWER_KINDS:
        try:
            return open_artifact(uri, kind=kind)
        except ArtifactError as error:
            reason = error
    raise ConfigError(f"no query tower at {uri}, it would be one of {TOWER_KINDS}: {reason}")


def _reranker(config: ServeConfig) -> DeploymentHandle[Any] | None:
    rerank = config.rerank
    if rerank is None:
        return None
    options = {"num_cpus": rerank.cpus_per_replica, "num_gpus": rerank.gpus_per_replica}
    replicas = _replicas(Reranker, num_replicas=rerank.replicas, ray_actor_options=options)
    handle: DeploymentHandle[Any] = replicas.bind(rerank.model)
    return handle
