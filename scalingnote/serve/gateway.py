"""The gateway deployment: the service with its parts, local or in replicas, behind HTTP and gRPC."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from scalingnote.experiment.access_writer import AccessWriter
from scalingnote.serve import api
from scalingnote.serve.access import Admission, read_keys
from scalingnote.serve.concurrency import Handle, LocalHandle
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.query_encoder import ArmEncoder, QueryPathParts
from scalingnote.serve.searcher import IndexSearcher
from scalingnote.serve.service import ServedArm, Service
from scalingnote.serve.telemetry import Metrics, RequestObserver, scrape
from scalingnote.serve.versions import Catalog, LiveCatalog, Versions
from scalingnote.serve.writer import WriteHandles
from scalingnote.serve_config import ServeConfig

# Allocations between two runs of the garbage collector. A search allocates some fifty containers and no
# cycle: at Python's default of 700, the collector takes 1/40 of it.
GC_THRESHOLD = 20_000


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
