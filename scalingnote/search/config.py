"""Knobs of online search, read by `scalingnote serve` and the apps in serve/."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config
from scalingnote.encode.config import Form


class Joining(Config):
    """How dense and sparse candidates become one answer (see :mod:`scalingnote.hybrid`)."""

    kind: Literal["interpolation", "reciprocal_rank"] = "interpolation"
    dense_weight: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of dense scores, sparse ones have the rest; None: as the index was tuned, else 0.5",
    )
    candidates: int = Field(100, ge=1, le=1000, description="fetched by either side, at least k")
    k: int = Field(60, ge=0, description="of reciprocal ranks: 1 / (k + rank)")


class ServeConfig(Config):
    """One URL: gateway, query encoder and index shards on Ray Serve."""

    host: str = Field("127.0.0.1", description="interface; loopback unless you mean to be reached")
    port: int = Field(8000, ge=0, le=65535)
    nprobe: int | None = Field(None, ge=1, description="inverted lists searched; None: the index's own")
    deadline_s: float = Field(2.0, gt=0, description="a shard that is slower is left out, and said so")
    query_form: Form = Field(
        "auto", description="of the query tower; auto: what `scalingnote export` made, else the tower itself"
    )
    query_cache: int = Field(0, ge=0, description="embeddings kept by each encoder replica, for head queries")
    max_k: int = Field(100, ge=1, le=1000, description="largest k a request may ask for")
    max_query_chars: int = Field(1000, ge=1, description="longer queries are refused with 422")
    gateway_replicas: int = Field(1, ge=1)
    encoder_replicas: int = Field(1, ge=1)
    shard_replicas: int = Field(1, ge=1, description="replicas of each shard")
    cpus_per_replica: float = Field(0.1, ge=0, description="CPU cores Ray reserves for each replica")
