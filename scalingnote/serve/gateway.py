"""The gateway deployment: the service and its parts, here or in replicas, with HTTP and gRPC before them."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from scalingnote.experiment.access_writer import AccessWriter
from scalingnote.serve import api, metrics
from scalingnote.serve.admission import Admission, read_keys
from scalingnote.serve.catalog import Catalog
from scalingnote.serve.flow import Called
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.here import Here
from scalingnote.serve.live_catalog import LiveCatalog
from scalingnote.serve.observer import Observer
from scalingnote.serve.query_encoder import Parts, QueryEncoder
from scalingnote.serve.searcher import IndexSearcher
from scalingnote.serve.service import Arm, Service, Writing
from scalingnote.serve.versions import Versions
from scalingnote.serve_config import ServeConfig

# New objects between two looks for cycles among them. A search makes some fifty and no cycle: at Python's own
# 700, looking takes one part in forty of it.
COLLECT_AFTER = 20_000


@dataclass(frozen=True)
class ArmParts:
    """An arm, and its query path: parts to load in the gateway itself, or a handle of replicas that did."""

    name: str
    tower: str
    encoder: Parts | DeploymentHandle[Any]
    personalised: bool = False
    version: str | None = None


@dataclass(frozen=True)
class SearcherParts:
    """The handle of each group of shards; None: the gateway holds all shards itself."""

    catalog: Catalog | LiveCatalog
    handles: tuple[DeploymentHandle[Any], ...] | None = None


@serve.deployment(max_ongoing_requests=1000)  # the door counts them; it says 503 before Serve would queue
@serve.ingress()
class Gateway(Servicer):
    """Ingress of the application. Its gRPC methods are those it inherits."""

    def __init__(
        self,
        arms: Sequence[ArmParts],
        searchers: SearcherParts,
        config: ServeConfig,
        reranker: DeploymentHandle[Any] | None = None,
        writing: Writing | None = None,
    ) -> None:
        gc.set_threshold(COLLECT_AFTER)
        self._measured = measured = metrics.Metrics()
        handles = _handles(searchers, config)
        service = Service(
            [Arm(a.name, _encoder(a.encoder), a.tower, a.personalised, a.version) for a in arms],
            handles,
            Versions(searchers.catalog, handles),
            config,
            reranker=reranker,
            writing=writing,
            recall=measured.recall,
        )
        replica = serve.get_replica_context().replica_id.unique_id
        log = None if config.access_log is None else AccessWriter(config.access_log, replica)
        admission = Admission(config.limits, read_keys(config.api_keys), is_open=config.open)
        super().__init__(service, admission, Observer(measured, log).done)
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve's hook: the HTTP side of this replica."""
        return api.build(
            self._service,
            self._config,
            admission=self._admission,
            metrics=metrics.scraped,
            done=self._done,
            look=self._look,
            in_serve=True,
        )

    def _look(self) -> None:
        active = self._service.versions.active
        self._measured.state(
            in_flight=self._admission.in_flight, version=active.name, documents=active.documents
        )


def _encoder(place: Parts | DeploymentHandle[Any]) -> Called:
    return Here(QueryEncoder(place)) if isinstance(place, Parts) else place


def _handles(searchers: SearcherParts, config: ServeConfig) -> Sequence[Called]:
    if searchers.handles is not None:
        return searchers.handles
    searcher = IndexSearcher(
        searchers.catalog,
        nprobe=config.nprobe,
        mapped=config.mapped,
        refresh_s=config.live.refresh_s if config.live else 0.1,
    )
    return [Here(searcher)]
