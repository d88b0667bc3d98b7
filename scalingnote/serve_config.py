"""Knobs of the service, read by `scalingnote serve` and by Serve YAML files."""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.config import Config
from scalingnote.encode.config import Form
from scalingnote.experiment.config import TrafficSplit
from scalingnote.index.config import LiveConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
Place = Literal["auto", "gateway", "replicas"]


class LiveServe(LiveConfig):
    """Documents are written while they are searched (see :mod:`scalingnote.index.live_index`)."""

    folder: str = Field(description="of the logs and versions; local, or shared by all nodes with searchers")
    refresh_s: float = Field(0.1, gt=0, description="interval at which searchers read new writes")
    deadline_s: float = Field(60.0, gt=0, description="of a request that writes: documents are encoded in it")
    encoders: int = Field(1, ge=1, description="replicas that encode new documents")
    cpus_per_encoder: float = Field(0.1, ge=0, description="CPU cores Ray reserves for each")
    gpus_per_encoder: float = Field(0.0, ge=0, description="GPUs Ray reserves for each")


class Rerank(Config):
    """A cross-encoder that re-ranks the best results of requests that ask for it."""

    model: str = Field(description="a sentence-transformers cross-encoder: folder or hub id")
    most: int = Field(100, ge=1, le=1000, description="results a request may have re-ranked")
    replicas: int = Field(1, ge=1)
    cpus_per_replica: float = Field(0.1, ge=0, description="CPU cores Ray reserves for each")
    gpus_per_replica: float = Field(0.0, ge=0, description="GPUs Ray reserves for each")


class Limits(Config):
    """Limits of a client's requests; larger ones are refused, with the reason and when to try again."""

    max_k: int = Field(100, ge=1, le=1000, description="largest k")
    max_query_chars: int = Field(1000, ge=1, description="longest query")
    max_batch: int = Field(256, ge=1, description="most queries or documents in one request")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest body")
    in_flight: int = Field(128, ge=1, description="requests a gateway replica works on at once; more get 503")
    rate: float | None = Field(None, gt=0, description="requests a second of one client; more get 429")
    burst: int = Field(50, ge=1, description="requests a client may send at once before `rate` counts")


class ServeConfig(Config):
    """One URL: gateway, query encoders and searchers on Ray Serve."""

    host: str = Field("127.0.0.1", description="interface; loopback unless you mean to be reached")
    port: int = Field(8000, ge=0, le=65535)
    grpc_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="gRPC beside HTTP; it listens on every interface, independently of `host`. None: no gRPC",
    )
    api_keys: str | None = Field(
        None, description="file with one API key a line; needed where host is not loopback, unless open"
    )
    open: bool = Field(
        False, description="serve beyond loopback without API keys: a proxy in front authenticates"
    )
    ingress: Literal["auto", "haproxy", "python"] = Field(
        "auto",
        description="auto: HAProxy where there are API keys or the service is open, as replicas then listen "
        "on all interfaces; else Serve's own proxy",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="web pages of these origins (https://shop.example) may call this service; (): none"
    )
    nprobe: int | None = Field(None, ge=1, description="inverted lists searched; None: the index's own")
    deadline_s: float = Field(2.0, gt=0, description="of a request; slower shards are left out of the answer")
    query_form: Form = Field(
        "auto", description="of the query tower; auto: what `scalingnote export` made, else the tower itself"
    )
    query_cache: int = Field(0, ge=0, description="embeddings kept by each encoder replica, for head queries")
    limits: Limits = Limits()
    encoder_in: Place = Field(
        "auto", description="auto: a lookup tower in the gateway, transformers in replicas of their own"
    )
    searchers_in: Place = Field(
        "auto",
        description="auto: in the gateway if it is the only one and the index is small, else in replicas",
    )
    shards_per_searcher: int = Field(4, ge=1, description="shards that one searcher process holds")
    mapped: bool = Field(
        False,
        description="leave the vectors that an index keeps in its files: for more documents than memory; "
        "each shard is then scanned by itself",
    )
    gateway_replicas: int = Field(1, ge=1)
    encoder_replicas: int = Field(1, ge=1)
    searcher_replicas: int = Field(1, ge=1, description="replicas of each group of shards")
    cpus_per_replica: float = Field(0.1, ge=0, description="CPU cores Ray reserves for each replica")
    state: str | None = Field(
        None, description="folder or URI that remembers the active index version; None: {run_dir}/serve"
    )
    versions_kept: int = Field(2, ge=1, description="index versions held open: for rolling back at once")
    live: LiveServe | None = Field(None, description="take writes; null: the index is read only")
    features: str = Field(
        "sqlite:features.db", description="store of users' features: sqlite:PATH or redis://HOST:PORT/DB"
    )
    rerank: Rerank | None = Field(None, description="null: no re-ranking")
    canary: float = Field(
        0.0, ge=0, le=1, description="share of queries searched again exactly, to measure recall"
    )
    split: TrafficSplit = Field(TrafficSplit(), description="arms that the traffic is split between")
    access_log: str | None = Field(None, description="local folder for access logs; null: none")

    @model_validator(mode="after")
    def _consistent(self) -> "ServeConfig":
        reached = f"host {self.host}" if self.host not in LOOPBACK else "grpc_port" if self.grpc_port else ""
        if reached and self.api_keys is None and not self.open:
            raise ValueError(
                f"{reached} can be reached from other machines: name a file of keys in api_keys, or set open"
            )
        if self.mapped and self.live is not None:
            raise ValueError("mapped is for an index that is read only: a live index adds vectors")
        return self
