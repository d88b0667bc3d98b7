"""The Serve application: a finished run, or an index and a query tower by URI, as a gateway and its replicas.

`scalingnote serve` calls :func:`bind`. A Serve YAML names
``import_path: scalingnote.serve.app:build`` and gives the fields of :class:`AppArgs` as its ``args``.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment, deployment
from ray.serve.handle import DeploymentHandle

from scalingnote.experiment.access_log import AccessWriter
from scalingnote.serve import api
from scalingnote.serve.access import Admission, read_keys
from scalingnote.serve.artifacts import ServedArtifacts, ServedTower, find, gateway_encodes
from scalingnote.serve.concurrency import Handle, LocalHandle
from scalingnote.serve.embeddings import Embeddings
from scalingnote.serve.fan_out import Aggregator, hedged, sizes
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.replicas import ArmEncoder, IndexSearcher, QueryPathParts, Reranker
from scalingnote.serve.service import ServedArm, Service
from scalingnote.serve.telemetry import Metrics, RequestObserver, scrape
from scalingnote.serve.towers import DocumentTower, Location
from scalingnote.serve.versions import Catalog, LiveCatalog, Versions
from scalingnote.serve.writer import DocumentEncoder, WriteHandles, Writer
from scalingnote.serve_config import AppArgs, ServeConfig

MAX_ONGOING_REQUESTS = 1000  # of a replica: calls wait in its batcher, not in Serve's queue

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
        name: of the model, for clients of embeddings.
        documents: the document tower, for the same; None: it is not served.
        aggregators: of the searchers, where there are many groups.
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
            name=name,
            documents=documents,
            aggregators=aggregators,
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


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress()
class TowerGateway:
    """Ingress of a model that is served without an index.

    Args:
        name: of the model.
        query: a handle of its query side, or the parts to load in this process; None: it has none.
        documents: a handle of its document side; None: it is not served.
        config: of the service.
        reranker: None: no re-ranking.
    """

    def __init__(
        self,
        name: str,
        query: QueryPathParts | DeploymentHandle[Any] | None,
        documents: DeploymentHandle[Any] | None,
        config: ServeConfig,
        reranker: DeploymentHandle[Any] | None = None,
    ) -> None:
        queries = {} if query is None else {name: _encoder(query)}
        self._embeddings = Embeddings(name, queries, documents, config, reranker=reranker)
        self._config, self._metrics = config, Metrics()
        self._admission = Admission(config.limits, read_keys(config.api_keys), is_open=config.open)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the HTTP side of this replica."""
        return api.build(
            self._embeddings,
            self._config,
            admission=self._admission,
            scrape=scrape,
            on_done=RequestObserver(self._metrics),
            on_poll=lambda: self._metrics.set_in_flight(self._admission.in_flight),
            in_serve=True,
        )


def _encoder(encoder: QueryPathParts | DeploymentHandle[Any]) -> Handle:
    return LocalHandle(ArmEncoder(encoder)) if isinstance(encoder, QueryPathParts) else encoder


def _local_searcher(catalog: Catalog | LiveCatalog, config: ServeConfig) -> LocalHandle:
    refresh_s = config.live.refresh_s if config.live else 0.1
    return LocalHandle(
        IndexSearcher(
            catalog,
            nprobe=config.nprobe,
            mapped=config.mapped,
            refresh_s=refresh_s,
            search=config.search,
            timeout_s=config.deadline_s,
        )
    )


# --- the application ---------------------------------------------------------------------------------------


def build(args: AppArgs) -> Application:
    """The Serve application of some arguments, for ``import_path`` in a Serve YAML."""
    return bind(find(args))


def bind(served: ServedArtifacts | ServedTower) -> Application:
    """The application: the gateway, and deployments of the parts that it does not run itself."""
    if isinstance(served, ServedTower):
        return _bind_tower(served)
    config = served.config
    arms = [arm if gateway_encodes(arm, config) else _in_replicas(arm, config) for arm in served.arms]
    gateway = _replicas(Gateway, num_replicas=config.gateway_replicas, ray_actor_options=_actor(config))
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
    )
    return application


def _bind_tower(served: ServedTower) -> Application:
    config, arm = served.config, served.query
    if arm is not None and not gateway_encodes(arm, config):
        arm = _in_replicas(arm, config)
    gateway = _replicas(TowerGateway, num_replicas=config.gateway_replicas, ray_actor_options=_actor(config))
    documents = _documents(served.document, served.document_replicas, config)
    application: Application = gateway.bind(
        served.name, None if arm is None else arm.encoder, documents, config, _reranker(config)
    )
    return application


def _documents(tower: Location | None, replicas: int, config: ServeConfig) -> DeploymentHandle[Any] | None:
    """A deployment of the document tower; None where it is not served."""
    if tower is None or not replicas:
        return None
    deployed = _replicas(
        DocumentTower,
        num_replicas=replicas,
        ray_actor_options={**_actor(config), "num_gpus": config.gpus_per_document_replica},
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
    )
    handle: DeploymentHandle[Any] = deployed.bind(tower)
    return handle


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
            search=config.search,
            timeout_s=config.deadline_s,
        )
        for group, shards in enumerate(served.groups)
    ]


def _aggregators(searchers: Sequence[Any], config: ServeConfig) -> list[Any]:
    """A deployment for each set of groups, with as many replicas as a searcher has; none for few groups."""
    return [
        _replicas(
            Aggregator,
            name=f"Aggregator-{number:03d}",
            num_replicas=config.searcher_replicas,
            ray_actor_options=_actor(config),
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ).bind([searchers[group] for group in groups], groups, hedged(config))
        for number, groups in enumerate(sizes(len(searchers), config.fanout))
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


def _reranker(config: ServeConfig) -> DeploymentHandle[Any] | None:
    rerank = config.rerank
    if rerank is None:
        return None
    options = {"num_cpus": rerank.cpus_per_replica, "num_gpus": rerank.gpus_per_replica}
    replicas = _replicas(Reranker, num_replicas=rerank.replicas, ray_actor_options=options)
    handle: DeploymentHandle[Any] = replicas.bind(rerank.model)
    return handle
