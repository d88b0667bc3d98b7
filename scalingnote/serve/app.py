"""The Serve application: a finished run, or an index and a query tower by URI, as a gateway and its replicas.

`scalingnote serve` calls :func:`bind`. A Serve YAML names
``import_path: scalingnote.serve.app:build`` and gives the fields of :class:`AppArgs` as its ``args``.
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
from scalingnote.serve.concurrency import Handle, LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.document_encoder import DocumentEncoder
from scalingnote.serve.embeddings import EmbeddingService
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts, Reranker
from scalingnote.serve.fan_out import Aggregator, is_hedged, sizes
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.serve.running_settings import RUNNING_SETTINGS, RunningSettings
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import Metrics, RequestObserver, get_logger, scrape
from scalingnote.serve.tower_versions import TowerPart, TowerVersions
from scalingnote.serve.towers import DocumentTower
from scalingnote.serve.versions import Catalog, LiveCatalog
from scalingnote.serve.writer import Writer

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

    def __init__(self, config: ServeConfig, deployed: Deployed) -> None:
        gc.set_threshold(GC_THRESHOLD)
        self._config, self._metrics = config, Metrics()
        self._settings = RunningSettings(config, "gateway")
        parts = (*(arm.encoder for arm in deployed.arms), *deployed.searchers)
        self._own_parts = [each for each in parts if isinstance(each, LocalHandle)]
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

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: take the settings that may change while this runs."""
        config = self._settings.take(user_config)
        self._admission.limits = config.limits
        self._service.take_settings(config, refused=self._settings.refused)
        for part in self._own_parts:
            if isinstance(part.target, ArmEncoder | TowerVersions):
                await part.target.reconfigure({"query_cache": config.query_cache})

    async def check_health(self) -> None:
        """Serve's question: an error where an encoder or the searcher of this process does not work."""
        await asyncio.gather(*(part.target.check_health() for part in self._own_parts))

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
        deployed: an arm's encoder is a handle, or the parts to load in this process; without searchers this
            process holds all shards.
        config: of the service.
    """

    def __init__(self, deployed: Deployed, config: ServeConfig) -> None:
        assert deployed.catalog is not None
        searchers = deployed.searchers or [_local_searcher(deployed.catalog, config)]
        deployed = replace(_with_encoders(deployed), searchers=searchers).read_again()
        _Ingress.__init__(self, config, deployed)
        service = Service(deployed.by_version(), config, on_recall=self._metrics.observe_recall)
        Servicer.__init__(self, service, self._admission, self._observer)


@serve.deployment
@serve.ingress()
class TowerGateway(_Ingress):
    """Ingress of a model that is served without an index; its query side, if it has one, is the only arm."""

    def __init__(self, deployed: Deployed, config: ServeConfig) -> None:
        deployed = _with_encoders(deployed).read_again()
        super().__init__(config, deployed)
        self._service = EmbeddingService(deployed, config)


def _with_encoders(deployed: Deployed) -> Deployed:
    """The same parts, with the encoders that this process is to load."""
    arms = [replace(arm, encoder=_encoder(arm, deployed.catalog)) for arm in deployed.arms]
    return replace(deployed, arms=arms)


def _encoder(arm: ServedArm, catalog: Catalog | LiveCatalog | None) -> Handle:
    encoder: QueryPathParts | Handle = arm.encoder
    if not isinstance(encoder, QueryPathParts):
        return encoder
    if arm.follows and catalog is not None and catalog.towers is not None:
        return LocalHandle(TowerVersions(catalog, "query", encoder))
    return LocalHandle(ArmEncoder(encoder))


def _local_searcher(catalog: Catalog | LiveCatalog, config: ServeConfig) -> LocalHandle:
    return LocalHandle(IndexSearcher(catalog, **_searcher_settings(config)))


def _searcher_settings(config: ServeConfig) -> dict[str, Any]:
    """Settings of an index searcher, in the gateway or in replicas."""
    return {"mapped": config.mapped, "search": config.search, "timeout_s": config.deadline_s}


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
    searchers = _searchers(served)
    deployed = Deployed(
        [_arm(arm, config, served.catalog) for arm in served.arms],
        served.catalog,
        searchers,
        _aggregators(searchers, config),
        documents=_tower(DocumentTower, "document", config, served.document_tower, served.catalog),
        reranker=_reranker(config),
        teacher=_tower(ArmEncoder, "teacher", config, served.teacher, served.catalog),
        name=served.name,
        similarity=served.similarity,
    )
    gateway = _replicas(Gateway, config, "gateway", memory=memory)
    application: Application = gateway.bind(_with_writer(deployed, served), config)
    return application


def _bind_tower(served: ServedTower) -> Application:
    config = served.config
    deployed = Deployed(
        [] if served.query is None else [_arm(served.query, config)],
        documents=_optional(DocumentTower, config, "document_tower", served.document),
        reranker=_reranker(config),
        name=served.name,
        similarity=served.similarity,
    )
    application: Application = _replicas(TowerGateway, config, "gateway").bind(deployed, config)
    return application


def _arm(arm: ServedArm, config: ServeConfig, catalog: Catalog | LiveCatalog | None = None) -> ServedArm:
    """An arm whose queries the gateway encodes, or with a deployment that does."""
    if gateway_encodes(arm, config):
        return arm
    name = f"QueryEncoder-{arm.name}"
    if arm.follows:
        encoder = _replicas(TowerVersions, config, "encoder", name=name).bind(catalog, "query", arm.encoder)
    else:
        encoder = _replicas(ArmEncoder, config, "encoder", name=name).bind(arm.encoder)
    return replace(arm, encoder=encoder)


def _tower(
    cls: Any, part: TowerPart, config: ServeConfig, argument: Any, catalog: Catalog | LiveCatalog
) -> Any:
    """A deployment of a tower beside the arms: that of every version, or the only one."""
    if argument is None:
        return None
    deployment_part: ServicePart = "teacher" if part == "teacher" else "document_tower"
    name = {"teacher": "QueryTeacher", "document": "DocumentTower"}[part]
    if catalog.towers is not None:
        return _replicas(TowerVersions, config, deployment_part, name=name).bind(catalog, part)
    return _replicas(cls, config, deployment_part, name=name).bind(argument)


def _searchers(served: ServedArtifacts) -> list[Any]:
    """A deployment for each group of shards; none if the gateway searches."""
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
    """A deployment for each set of groups; none for few groups."""
    return [
        _replicas(Aggregator, config, "aggregator", name=f"Aggregator-{number:03d}").bind(
            [searchers[group] for group in groups], groups, is_hedged(config)
        )
        for number, groups in enumerate(sizes(len(searchers), config))
    ]


def _with_writer(deployed: Deployed, served: ServedArtifacts) -> Deployed:
    """The same parts, with those that write if the index is live."""
    config, live, catalog = served.config, served.config.live, served.catalog
    if live is None:
        return deployed
    assert isinstance(catalog, LiveCatalog)
    assert served.documents is not None
    first = replace(catalog.pairs.first, documents=served.documents)
    pairs = replace(catalog.pairs, first=first)
    encoder = _replicas(DocumentEncoder, config, "document_encoder", ongoing=MAX_UNBATCHED)
    encoder = encoder.bind(pairs, live.keep_documents)
    # One replica: it holds the claim on the logs, and the next one has to wait for it to end. With a delta it
    # does not hold the index.
    held = range(0) if live.delta else served.shards
    memory = placement.index_memory(served.index, held, config, part="writer")
    writer = _replicas(Writer, config, "writer", memory=memory)
    return replace(
        deployed,
        document_encoder=encoder,
        writer=writer.bind(pairs, live, live.delta, encoder),
    )


def _optional(cls: Any, config: ServeConfig, part: ServicePart, argument: Any, **options: Any) -> Any:
    """A deployment of a part with its only argument; None if there is no argument, and so no such part."""
    return None if argument is None else _replicas(cls, config, part, **options).bind(argument)


def _reranker(config: ServeConfig) -> Any:
    return _optional(Reranker, config, "reranker", config.rerank, ongoing=MAX_UNBATCHED)


def _replicas(
    cls: Any,
    config: ServeConfig,
    part: ServicePart,
    *,
    memory: int = 0,
    ongoing: int = MAX_ONGOING_REQUESTS,
    **named: str,
) -> Any:
    """A deployment of a class, or of a deployment with other options."""
    deployed: Any = cls if isinstance(cls, Deployment) else deployment(cls)
    return deployed.options(
        max_ongoing_requests=ongoing,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        # An empty one: without any, Serve would not take back what a file gave and no longer gives.
        user_config={} if part in RUNNING_SETTINGS else None,
        **placement.options(config, part, memory=memory),
        **named,
    )
