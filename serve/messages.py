"""What goes in and out of the gateway over HTTP: the query of a client, the answer with its timings."""

from pydantic import BaseModel, ConfigDict, Field


class SearchRequest(BaseModel):
    """The body of ``POST /search``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    query: str = Field(description="what to look for, in plain language")
    k: int = Field(10, ge=1, strict=True, description="number of results")


class Hit(BaseModel):
    """One result: the document as the index shows it, and its score (higher is better)."""

    doc_id: str
    score: float
    title: str
    topic: str
    snippet: str
    semantic_id: str


class Timings(BaseModel):
    """Milliseconds per step, as the gateway saw them: calls between replicas are included."""

    encode: float
    search: float
    documents: float
    total: float


class SearchResponse(BaseModel):
    """The answer of ``POST /search``; it is partial when ``shards_answered`` is less than ``shards``."""

    results: list[Hit]
    timings_ms: Timings
    shards: int
    shards_answered: int


class Health(BaseModel):
    """The answer of ``GET /healthz``: how many of the replicas groups behind the gateway answer."""

    status: str = Field(description="ok; degraded: some shard is silent; down: no query can be answered")
    encoder_answers: bool
    shards: int
    shards_answered: int
