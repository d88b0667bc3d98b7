"""The Serve application: a finished run, or an index and a query tower by URI, as a gateway and its replicas.

`scalingnote serve` calls :func:`bind`. A Serve YAML has ``import_path: scalingnote.serve.app:build``, and the
fields of :class:`AppArgs` as its ``args``.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application, Deployment, deployment

from scalingnote.run.service_config import AppArgs, ServeConfig, ServicePart
from scalingnote.serve import api, placement
from scalingnote.serve.access import Admission, read_keys
from scalingnote.serve.access_writer import AccessWriter
from scalingnote.serve.artifacts import ServedArtifacts, ServedTower, find, gateway_encodes
from scalingnote.serve.catalog import Catalog
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.embeddings import EmbeddingService
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts, Reranker
from scalingnote.serve.fan_out import Aggregator, is_hedged, sizes
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.running_settings import RUNNING_SETTINGS, RunningSettings
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import Metrics, RequestObserver, get_logger, scrape
from scalingnote.serve.tower_versions import TowerVersions
from scalingnote.serve.towers import DocumentTower
from scalingnote.serve.writer import Writer
from scalingnote.serve.writes import DocumentEncoder

MAX_ONGOING_REQUESTS = 1000  # of a replica: calls wait in its batcher, or the gateway refuses them
MAX_UNBATCHED = 5  # calls of a replica without batches: the others wait in Serve's queue
HEALTH_CHECK_PERIOD_S = 2.0  # a dead replica is replaced after the next check; Ray Serve's default is 10 s

# Allocations between two runs of the garbage collector. A search allocates about fifty containers and no
# cycle. At Python's default of 700, the collector takes 1/40 of the time of a search.
GC_THRESHOLD = 20_000
log = get_logger()


# --- the gateway -------------------------------------------------------------------------------------------


class _Ingress:
    """A replica that answers HTTP: its admission, its metrics, and the application that Serve calls."""

    _service: Any  # Service, or EmbeddingService of a model that is served without an index

    def __init__(self, config: ServeConfig, loaded: Deployed) -> None:
        gc.set_threshold(GC_THRESHOLD)
        self._config, self._metrics = config, Metrics()
        self._settings = RunningSettings(config, "gateway")
        parts = (*(arm.encoder for arm in loaded.arms), *loaded.searchers)
        self._own_parts = [each.target for each in parts if isinstance(each, LocalHandle)]
        keys = read_keys(config.api_keys)
        self._admission = Admission(config.limits, keys, is_open=config.allow_unauthenticated)
        replica = serve.get_replica_context().replica_id.unique_id
        log = None if config.access_log is None else AccessWriter(config.access_log, replica)
        self._observer = RequestObserver(self._metrics, log)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the HTTP side of this replica. Ray Serve calls this."""
        return api.build(
            self._service,
            self._config,
            admission=self._admission,
            scrape=scrape,
            on_done=self._observer,
            on_poll=self._set_gauges,
            in_serve=True,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply the settings that may change while this replica runs. Ray Serve calls this."""
        config = self._settings.take(user_config)
        self._admission.limits = config.limits
        self._service.take_settings(config, refused=self._settings.refused)
        for part in self._own_parts:
            if isinstance(part, ArmEncoder | TowerVersions):
                await part.reconfigure({"query_cache": config.query_cache})

    async def check_health(self) -> None:
        """Raise an error if an encoder or the searcher in this process fails. Ray Serve calls this."""
        await asyncio.gather(*(part.check_health() for part in self._own_parts))

    def _set_gauges(self) -> None:
        self._metrics.set_in_flight(self._admission.in_flight)
        if isinstance(self._service, Service):
            active = self._service.versions.active
            self._metrics.set_version(active.name, active.documents)


@serve.deployment
@serve.ingress()
class Gateway(_Ingress, Servicer):
    """Ingress of the application, for HTTP and gRPC. Its arguments are those of :func:`load_own_parts`."""

    def __init__(self, deployed: Deployed, config: ServeConfig) -> None:
        loaded = load_own_parts(deployed, config)
        _Ingress.__init__(self, config, loaded)
        service = Service(loaded.for_gateway(), config, on_recall=self._metrics.observe_recall)
        Servicer.__init__(self, service, self._admission, self._observer)


@serve.deployment
@serve.ingress()
class TowerGateway(_Ingress):
    """Ingress of a model that is served without an index. Its query side, if it has one, is the only arm."""

    def __init__(self, deployed: Deployed, config: ServeConfig) -> None:
        loaded = load_own_parts(deployed, config)
        super().__init__(config, loaded)
        self._service = EmbeddingService(loaded.for_gateway(), config)


def load_own_parts(deployed: Deployed, config: ServeConfig) -> Deployed:
    """Load the parts that this process runs itself, and return all parts.

    Args:
        deployed: the encoder of an arm is a handle, or the parts to load. If there is an index and no
            searcher, this process holds all shards.
        config: of the service.
    """
    catalog, searchers = deployed.catalog, deployed.searchers
    if catalog is not None and not searchers:
        searchers = [LocalHandle(IndexSearcher(catalog, **_searcher_settings(config)))]
    arms = []
    for arm in deployed.arms:
        if isinstance(arm.encoder, QueryPathParts):
            encoder, arguments = _encoder(arm, catalog)
            arm = replace(arm, encoder=LocalHandle(encoder(*arguments)))
        arms.append(arm)
    return replace(deployed, arms=arms, searchers=searchers)


def _encoder(
    arm: ServedArm, catalog: Catalog | LiveCatalog | None
) -> tuple[type[ArmEncoder | TowerVersions], tuple[Any, ...]]:
    """Return the class that encodes the queries of an arm, and its arguments."""
    return (TowerVersions, (catalog, "query", arm.encoder)) if arm.follows else (ArmEncoder, (arm.encoder,))


def _searcher_settings(config: ServeConfig) -> dict[str, Any]:
    """Return the settings of an index searcher, in the gateway or in replicas."""
    return {"mapped": config.mapped, "search": config.search, "timeout_s": config.deadline_s}


# --- the application ---------------------------------------------------------------------------------------


def build(args: AppArgs) -> Application:
    """Build the Serve application of some arguments, for ``import_path`` in a Serve YAML.

    A part that no node of the cluster can run is only a warning: nodes may still be added.
    """
    application = bind(find(args))
    for problem in placement.problems(application, ray.nodes()) if ray.is_initialized() else ():
        log.warning("%s", problem)
    return application


def bind(served: ServedArtifacts | ServedTower) -> Application:
    """Bind the application: the gateway, and deployments of the parts that it does not run itself."""
    if isinstance(served, ServedTower):
        return _bind_tower(served)
    config, catalog, memory = served.config, served.catalog, 0
    if served.gateway_searches:
        memory = placement.index_memory(served.index, served.shards, config, part="gateway")
    searchers = _searchers(served)
    documents = teacher = None
    if served.embeds_documents:
        documents = _replicas(TowerVersions, config, "document_tower", name="DocumentTower")
        documents = documents.bind(catalog, "document")
    if config.escalation is not None:
        teacher = _replicas(TowerVersions, config, "teacher", name="QueryTeacher").bind(catalog, "teacher")
    deployed = Deployed(
        [_arm(arm, config, catalog) for arm in served.arms],
        catalog,
        searchers,
        _aggregators(searchers, config),
        documents=documents,
        reranker=_reranker(config),
        teacher=teacher,
        name=served.name,
        similarity=served.similarity,
    )
    gateway = _replicas(Gateway, config, "gateway", memory=memory)
    application: Application = gateway.bind(_with_writer(deployed, served), config)
    return application


def _bind_tower(served: ServedTower) -> Application:
    config, documents = served.config, None
    if served.document is not None:
        documents = _replicas(DocumentTower, config, "document_tower").bind(served.document)
    deployed = Deployed(
        [] if served.query is None else [_arm(served.query, config)],
        documents=documents,
        reranker=_reranker(config),
        name=served.name,
        similarity=served.similarity,
    )
    application: Application = _replicas(TowerGateway, config, "gateway").bind(deployed, config)
    return application


def _arm(arm: ServedArm, config: ServeConfig, catalog: Catalog | LiveCatalog | None = None) -> ServedArm:
    """Return the arm unchanged if the gateway encodes its queries, else with the deployment that does."""
    if gateway_encodes(arm, config):
        return arm
    encoder, arguments = _encoder(arm, catalog)
    replicas = _replicas(encoder, config, "encoder", name=f"QueryEncoder-{arm.name}")
    return replace(arm, encoder=replicas.bind(*arguments))


def _searchers(served: ServedArtifacts) -> list[Any]:
    """Bind a deployment for each group of shards; none if the gateway searches."""
    config = served.config
    if served.gateway_searches:
        return []
    return [
        _replicas(
            IndexSearcher,
            config,
            "searcher",
            memory=placement.index_memory(served.index, shards, config, part="searcher"),
            name=f"IndexSearcher-{group:03d}",
        ).bind(served.catalog, shards=shards, shows_documents=True, **_searcher_settings(config))
        for group, shards in enumerate(served.groups)
    ]


def _aggregators(searchers: Sequence[Any], config: ServeConfig) -> list[Any]:
    """Bind a deployment for each set of groups; none for few groups."""
    return [
        _replicas(Aggregator, config, "aggregator", name=f"Aggregator-{number:03d}").bind(
            [searchers[group] for group in groups], groups, is_hedged(config)
        )
        for number, groups in enumerate(sizes(len(searchers), config))
    ]


def _with_writer(deployed: Deployed, served: ServedArtifacts) -> Deployed:
    """Return the parts, with the document encoder and the writer if the index is live."""
    config, live, catalog = served.config, served.config.live, served.catalog
    if live is None:
        return deployed
    encoder = _replicas(DocumentEncoder, config, "document_encoder", ongoing=MAX_UNBATCHED)
    encoder = encoder.bind(catalog, live.keep_documents)
    # There is one replica: it holds the claim on the logs, and the next one has to wait until it ends. With a
    # delta it does not hold the index.
    shards = range(0) if live.delta else served.shards
    memory = placement.index_memory(served.index, shards, config, part="writer")
    writer = _replicas(Writer, config, "writer", memory=memory).bind(catalog, live, encoder)
    return replace(deployed, document_encoder=encoder, writer=writer)


def _reranker(config: ServeConfig) -> Any:
    if config.rerank is None:
        return None
    return _replicas(Reranker, config, "reranker", ongoing=MAX_UNBATCHED).bind(config.rerank)


def _replicas(
    cls: Any,
    config: ServeConfig,
    part: ServicePart,
    *,
    memory: int = 0,
    ongoing: int = MAX_ONGOING_REQUESTS,
    **named: str,
) -> Any:
    """Return a deployment of a class, or the given deployment, with the options of a part."""
    replicas: Any = cls if isinstance(cls, Deployment) else deployment(cls)
    return replicas.options(
        max_ongoing_requests=ongoing,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        # Empty, not None: without it, Serve would keep settings that a file no longer has.
        user_config={} if part in RUNNING_SETTINGS else None,
        **placement.options(config, part, memory=memory),
        **named,
    )
