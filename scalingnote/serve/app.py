"""The Serve application: a finished run, or an index and a query tower by URI, as a gateway and its replicas.

`scalingnote serve` calls :func:`bind`. A Serve YAML names
``import_path: scalingnote.serve.app:build`` and gives the fields of :class:`AppArgs` as its ``args``.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment, deployment
from ray.serve.handle import DeploymentHandle

from scalingnote.experiment.access_log import AccessWriter
from scalingnote.models.published_model import Similarity
from scalingnote.serve import api, placement
from scalingnote.serve.access import Admission, read_keys
from scalingnote.serve.artifacts import ServedArtifacts, ServedTower, find, gateway_encodes
from scalingnote.serve.concurrency import Handle, LocalHandle
from scalingnote.serve.embeddings import Embeddings
from scalingnote.serve.fan_out import Aggregator, hedged, sizes
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.replicas import ArmEncoder, IndexSearcher, QueryPathParts, Reranker
from scalingnote.serve.service import ServedArm, Service
from scalingnote.serve.telemetry import Metrics, RequestObserver, get_logger, scrape
from scalingnote.serve.towers import DocumentTower, Location
from scalingnote.serve.versions import Catalog, LiveCatalog, Versions
from scalingnote.serve.writer import DocumentEncoder, WriteHandles, Writer
from scalingnote.serve_config import AppArgs, Part, ServeConfig

MAX_ONGOING_REQUESTS = 1000  # of a replica: calls wait in its batcher, or the gateway's admission refuses
MAX_UNBATCHED = 5  # of a replica without batches: the others wait in Serve's queue
HEALTH_CHECK_PERIOD_S = 2.0  # a dead replica is replaced after the next check: Ray Serve's own is every 10 s

# Allocations between two runs of the garbage collector. A search allocates some fifty containers and no
# cycle: at Python's default of 700, the collector takes 1/40 of it.
GC_THRESHOLD = 20_000
log = get_logger()


# --- the gateway -------------------------------------------------------------------------------------------


class _Ingress:
    """A replica that answers HTTP: its admission, its metrics, and the application that Serve asks it for."""

    _service: Any  # Service, or Embeddings of a model that is served alone

    def __init__(self, config: ServeConfig) -> None:
        gc.set_threshold(GC_THRESHOLD)
        self._config, self._metrics = config, Metrics()
        keys = read_keys(config.api_keys)
        self._admission = Admission(config.limits, keys, is_open=config.allow_unauthenticated)
        replica = serve.get_replica_context().replica_id.unique_id
        log = None if config.access_log is None else AccessWriter(config.access_log, replica)
        self._observer = RequestObserver(self._metrics, log)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the HTTP side of this replica."""
        return api.build(
            self._service,
            self._config,
            admission=self._admission,
            scrape=scrape,
            on_done=self._observer,
            on_poll=self._set_gauges,
            in_serve=True,
        )

    def _set_gauges(self) -> None:
        self._metrics.set_in_flight(self._admission.in_flight)
        if isinstance(self._service, Service):
            active = self._service.versions.active
            self._metrics.set_version(active.name, active.documents)


@serve.deployment
@serve.ingress()
class Gateway(_Ingress, Servicer):
    """Ingress of the application, for HTTP and gRPC.

    Args:
        arms: an arm's encoder is a handle, or the parts to load in this process.
        catalog: of the index versions.
        searchers: one for each group of shards; none: this process holds all shards.

    The others are those of :class:`~scalingnote.serve.service.Service`.
    """

    def __init__(
        self,
        arms: Sequence[ServedArm],
        catalog: Catalog | LiveCatalog,
        searchers: Sequence[DeploymentHandle[Any]],
        config: ServeConfig,
        reranker: DeploymentHandle[Any] | None = None,
        writing: WriteHandles | None = None,
        name: str = "scalingnote",
        documents: DeploymentHandle[Any] | None = None,
        aggregators: Sequence[DeploymentHandle[Any]] = (),
        teacher: DeploymentHandle[Any] | None = None,
        similarity: Similarity = "cosine",
    ) -> None:
        _Ingress.__init__(self, config)
        handles: list[Handle] = [*searchers] if searchers else [_local_searcher(catalog, config)]
        service = Service(
            [replace(arm, encoder=_encoder(arm.encoder)) for arm in arms],
            handles,
            Versions(catalog, handles),
            config,
            reranker=reranker,
            writing=writing,
            on_recall=self._metrics.observe_recall,
            name=name,
            documents=documents,
            aggregators=aggregators,
            teacher=teacher,
            similarity=similarity,
        )
        Servicer.__init__(self, service, self._admission, self._observer)


@serve.deployment
@serve.ingress()
class TowerGateway(_Ingress):
    """Ingress of a model that is served without an index.

    Args:
        name: of the model.
        query: a handle of its query side, or the parts to load in this process; None: it has none.

    The others are those of :class:`~scalingnote.serve.embeddings.Embeddings`.
    """

    def __init__(
        self,
        name: str,
        query: QueryPathParts | DeploymentHandle[Any] | None,
        documents: DeploymentHandle[Any] | None,
        config: ServeConfig,
        reranker: DeploymentHandle[Any] | None = None,
        similarity: Similarity = "cosine",
    ) -> None:
        super().__init__(config)
        queries = {} if query is None else {name: _encoder(query)}
        self._service = Embeddings(name, queries, documents, config, reranker=reranker, similarity=similarity)


def _encoder(encoder: QueryPathParts | DeploymentHandle[Any]) -> Handle:
    return LocalHandle(ArmEncoder(encoder)) if isinstance(encoder, QueryPathParts) else encoder


def _local_searcher(catalog: Catalog | LiveCatalog, config: ServeConfig) -> LocalHandle:
    return LocalHandle(IndexSearcher(catalog, **_searcher_settings(config)))


def _searcher_settings(config: ServeConfig) -> dict[str, Any]:
    """Settings of an index searcher, in the gateway or in replicas."""
    return {
        "nprobe": config.nprobe,
        "mapped": config.mapped,
        "refresh_s": config.live.refresh_s if config.live else 0.1,
        "search": config.search,
        "timeout_s": config.deadline_s,
    }


# --- the application ---------------------------------------------------------------------------------------


def build(args: AppArgs) -> Application:
    """The Serve application of some arguments, for ``import_path`` in a Serve YAML.

    What no node of the cluster could run is a warning: nodes may be on their way.
    """
    application = bind(find(args))
    for problem in placement.problems(application, ray.nodes()) if ray.is_initialized() else ():
        log.warning("%s", problem)
    return application


def bind(served: ServedArtifacts | ServedTower) -> Application:
    """The application: the gateway, and deployments of the parts that it does not run itself."""
    if isinstance(served, ServedTower):
        return _bind_tower(served)
    config, memory = served.config, 0
    if served.gateway_searches:
        memory = placement.index_memory(served.index, served.shards, config, part="gateway")
    arms = [arm if gateway_encodes(arm, config) else _in_replicas(arm, config) for arm in served.arms]
    gateway = _replicas(
        Gateway, config, "gateway", config.gateway_replicas, config.cpus_per_replica, memory=memory
    )
    searchers = _searchers(served)
    application: Application = gateway.bind(
        arms,
        served.catalog,
        searchers,
        config,
        _reranker(config),
        _writing(served),
        served.name,
        _documents(served.document_tower, config.document_replicas or 0, config),
        _aggregators(searchers, config),
        _teacher(served),
        served.similarity,
    )
    return application


def _bind_tower(served: ServedTower) -> Application:
    config, arm = served.config, served.query
    if arm is not None and not gateway_encodes(arm, config):
        arm = _in_replicas(arm, config)
    gateway = _replicas(TowerGateway, config, "gateway", config.gateway_replicas, config.cpus_per_replica)
    documents = _documents(served.document, served.document_replicas, config)
    application: Application = gateway.bind(
        served.name, arm and arm.encoder, documents, config, _reranker(config), served.similarity
    )
    return application


def _documents(tower: Location | None, replicas: int, config: ServeConfig) -> Any:
    """A deployment of the document tower; None where it is not served."""
    if tower is None or not replicas:
        return None
    cpus, gpus = config.cpus_per_replica, config.gpus_per_document_replica
    return _replicas(DocumentTower, config, "document_tower", replicas, cpus, gpus).bind(tower)


def _searchers(served: ServedArtifacts) -> list[Any]:
    """A deployment for each group of shards; none where the gateway searches."""
    config = served.config
    if served.gateway_searches:
        return []
    return [
        _replicas(
            IndexSearcher,
            config,
            "searcher",
            config.searcher_replicas,
            config.cpus_per_replica,
            memory=placement.index_memory(served.index, shards, config, part="searcher"),
            name=f"IndexSearcher-{group:03d}",
        ).bind(served.catalog, shards=shards, **_searcher_settings(config))
        for group, shards in enumerate(served.groups)
    ]


def _aggregators(searchers: Sequence[Any], config: ServeConfig) -> list[Any]:
    """A deployment for each set of groups, with as many replicas as a searcher has; none for few groups."""
    return [
        _replicas(
            Aggregator,
            config,
            "aggregator",
            config.searcher_replicas,
            config.cpus_per_replica,
            name=f"Aggregator-{number:03d}",
        ).bind([searchers[group] for group in groups], groups, hedged(config))
        for number, groups in enumerate(sizes(len(searchers), config.fanout))
    ]


def _writing(served: ServedArtifacts) -> WriteHandles | None:
    config, live = served.config, served.config.live
    if live is None:
        return None
    assert isinstance(served.catalog, LiveCatalog)
    assert served.documents is not None
    cpus, gpus = live.cpus_per_encoder, live.gpus_per_encoder
    encoder = _replicas(
        DocumentEncoder, config, "document_encoder", live.encoders, cpus, gpus, ongoing=MAX_UNBATCHED
    )
    # One replica: it holds the claim on the logs, and the next one has to wait for it to end.
    memory = placement.index_memory(served.index, served.shards, config, part="writer")
    writer = _replicas(Writer, config, "writer", 1, config.cpus_per_replica, memory=memory)
    folder, index = served.catalog.folder, served.catalog.index
    return WriteHandles(encoder.bind(served.documents), writer.bind(folder, index, live), live.deadline_s)


def _in_replicas(arm: ServedArm, config: ServeConfig) -> ServedArm:
    encoder = _replicas(
        ArmEncoder,
        config,
        "encoder",
        config.encoder_replicas,
        config.cpus_per_replica,
        config.gpus_per_encoder_replica,
        name=f"QueryEncoder-{arm.name}",
    )
    return replace(arm, encoder=encoder.bind(arm.encoder))


def _teacher(served: ServedArtifacts) -> Any:
    """A deployment of the teacher; None where no query escalates."""
    config, escalation = served.config, served.config.escalation
    if escalation is None or served.teacher is None:
        return None
    cpus, gpus = escalation.cpus_per_replica, escalation.gpus_per_replica
    replicas = _replicas(ArmEncoder, config, "teacher", escalation.replicas, cpus, gpus, name="QueryTeacher")
    return replicas.bind(served.teacher, escalation.max_batch)


def _reranker(config: ServeConfig) -> Any:
    rerank = config.rerank
    if rerank is None:
        return None
    cpus, gpus = rerank.cpus_per_replica, rerank.gpus_per_replica
    replicas = _replicas(Reranker, config, "reranker", rerank.replicas, cpus, gpus, ongoing=MAX_UNBATCHED)
    return replicas.bind(rerank.model)


def _replicas(
    cls: Any,
    config: ServeConfig,
    part: Part,
    replicas: int,
    cpus: float,
    gpus: float = 0.0,
    *,
    memory: int = 0,
    ongoing: int = MAX_ONGOING_REQUESTS,
    **named: str,
) -> Any:
    """A deployment of a class, or of a deployment with other options."""
    deployed: Any = cls if isinstance(cls, Deployment) else deployment(cls)
    placed = placement.options(config, part, num_cpus=cpus, num_gpus=gpus, memory=memory)
    return deployed.options(
        num_replicas=replicas,
        max_ongoing_requests=ongoing,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        **placed,
        **named,
    )
