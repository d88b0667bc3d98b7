"""Bodies of requests and responses: every field has a type and bounds, and unknown fields are refused.

The value null for a field that may be left out means its default, because many clients send every field that
they have.

Functions check a request against the server's limits and its index. They refuse it by 422 and name the field.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StrictStr, StringConstraints, model_validator

from scalingnote.run.service_config import Limits
from scalingnote.serve.access import invalid

MAX_BATCH = 256  # queries, documents or ids in one request
MAX_RERANKED = 100  # results of one request
DocId = Annotated[StrictStr, StringConstraints(min_length=1, max_length=512)]
Name = Annotated[StrictStr, StringConstraints(min_length=1, max_length=128)]
Value = bool | int | FiniteFloat | Annotated[StrictStr, StringConstraints(max_length=512)]
K = Annotated[int, Field(ge=1, strict=True, description="number of results")]
DeadlineMs = Annotated[
    int | None,
    Field(ge=1, le=600_000, strict=True, description="for this request; null: the deadline of the server"),
]


NULL = {"type": "null"}  # in a JSON schema


def _with_null(schema: dict[str, Any]) -> None:
    """Mark every field with a default as nullable in a body's JSON schema."""
    optional = schema.get("properties", {}).keys() - set(schema.get("required", ()))
    for name in optional:
        field = schema["properties"][name]
        kinds = field.pop("anyOf", None)
        if kinds is None:
            labels = {key: field[key] for key in ("title", "description", "default") if key in field}
            kinds, field = [{key: value for key, value in field.items() if key not in labels}], labels
        schema["properties"][name] = {"anyOf": kinds if NULL in kinds else [*kinds, NULL], **field}


class Body(BaseModel):
    """A body of a request, or an object in one: null for a field with a default means the default."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_with_null)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        if not isinstance(body, dict) or None not in body.values():
            return body
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name not in optional}


class Range(Body):
    """Numbers from `min` to `max`, both included; either may be missing."""

    min: int | FiniteFloat | None = None
    max: int | FiniteFloat | None = None

    @model_validator(mode="after")
    def _bounded(self) -> "Range":
        if self.min is None and self.max is None:
            raise ValueError("a range has min, max or both")
        return self


FilterConditions = Annotated[
    dict[Name, Value | Annotated[list[Value], Field(min_length=1, max_length=1000)] | Range],
    Field(
        max_length=20,
        description="fields of /info, each with its condition: a value, a list of values, or a range",
    ),
]


class SearchRequest(Body):
    """The body of ``POST /search``: a text or a vector, and how to search."""

    query: StrictStr | None = Field(None, description="the query, in plain language")
    vector: Annotated[list[FiniteFloat], Field(min_length=1, max_length=8192)] | None = Field(
        None, description="an embedding in place of a text, with the dimension of the index"
    )
    k: K = 10
    filter: FilterConditions | None = None
    user_id: Name | None = Field(
        None, description="the user: for personal results, and for the same arm in all requests"
    )
    dense_weight: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = Field(
        None,
        description="weight of embeddings against terms, if documents have terms; 0: only documents with a "
        "term of the query; null: the weight of the index",
    )
    rerank: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="number of the best results that the cross-encoder re-ranks"
    )
    arm: Name | None = Field(None, description="an arm of /info; null: by the traffic split")
    nprobe: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="number of inverted lists that are searched"
    )
    explain: bool = Field(False, strict=True, description="whether each result has its scores and shard")
    deadline_ms: DeadlineMs = None

    @model_validator(mode="after")
    def _one_question(self) -> "SearchRequest":
        if (self.query is None) == (self.vector is None):
            raise ValueError("send either query or vector")
        return self


class SimilarRequest(Body):
    """The body of ``POST /similar``."""

    doc_id: DocId
    k: K = 10
    filter: FilterConditions | None = None
    arm: Name | None = None
    deadline_ms: DeadlineMs = None


class EncodeRequest(Body):
    """The body of ``POST /encode``."""

    queries: Annotated[list[StrictStr], Field(min_length=1)]
    user_id: Name | None = None
    arm: Name | None = None


class Document(Body):
    """A document to be written. Other fields are its features."""

    model_config = ConfigDict(extra="allow")

    doc_id: DocId
    title: StrictStr = ""
    topic: StrictStr = ""
    content: StrictStr = ""


class UpsertRequest(Body):
    """The body of ``POST /documents``. Each document replaces the one with its id, if there is one.

    A document is ``{"doc_id", "title", "topic", "content"}`` and the features of the data set. Invalid
    documents are rejected with the reason; the others are written.
    """

    documents: Annotated[list[dict[str, Any]], Field(min_length=1)]


class DeleteRequest(Body):
    """The body of ``POST /documents/delete``."""

    doc_ids: Annotated[list[DocId], Field(min_length=1)]


class GetRequest(Body):
    """The id of a document over gRPC. Over HTTP it is in the path."""

    doc_id: DocId


class ActivateRequest(Body):
    """The body of ``POST /admin/index/activate``: a kept version, or the URI of an index artifact."""

    version: Name | None = None
    uri: Annotated[StrictStr, StringConstraints(min_length=1, max_length=2048)] | None = None

    @model_validator(mode="after")
    def _one_index(self) -> "ActivateRequest":
        if (self.version is None) == (self.uri is None):
            raise ValueError("send either version or uri")
        return self


class Explained(BaseModel):
    """The parts of a score."""

    dense: float | None
    sparse: float | None
    rerank: float | None
    shard: int


class PassagePlace(BaseModel):
    """A passage of a document: its number, from 1, and its characters in the document's content."""

    number: int
    start: int
    end: int


class Hit(BaseModel):
    """One result: the document as the index shows it, with the fields that a filter may use."""

    model_config = ConfigDict(extra="allow")

    doc_id: str
    score: float = Field(description="higher is better")
    title: str
    topic: str
    snippet: str
    semantic_id: str
    passage: PassagePlace | None = Field(
        None, description="place of the best passage of the document; the snippet is its beginning"
    )
    explain: Explained | None = None


class Timings(BaseModel):
    """Milliseconds per step, measured in the gateway: calls between replicas are included."""

    encode: float
    search: float
    escalate: float = Field(description="the teacher's encoding, and the search with it")
    rerank: float
    total: float


class SearchResponse(BaseModel):
    """The answer of ``POST /search``. It is partial if ``shards_answered`` is less than ``shards``."""

    request_id: str
    results: list[Hit]
    arm: str
    index_version: str
    personalised: bool
    shards: int
    shards_answered: int
    missing_groups: list[int] = Field(
        description="numbers of the groups of shards that did not answer; the delta has the next number"
    )
    escalated: bool = Field(description="whether the teacher encoded the query")
    degraded: list[str] = Field(
        description="reasons why the answer is worse than usual: teacher_late, teacher_failed, teacher_busy, "
        "teacher_silent (results are those of the student), documents_unreadable (only ids and filter "
        "fields), not_reranked (the cross-encoder did not answer, or there were no documents)"
    )
    timings_ms: Timings


class EncodeResponse(BaseModel):
    """The answer of ``POST /encode``: unit embeddings, one per query."""

    embeddings: list[list[float]]
    dim: int
    arm: str


class Rejected(BaseModel):
    """A document that was not written, and the reason."""

    doc_id: str
    reason: str


class Written(BaseModel):
    """The answer of ``POST /documents``: the number of written documents, and the rejected ones."""

    written: int
    rejected: list[Rejected]
    cut_texts: int = Field(description="texts, or passages, that are longer than the model reads")
    lost_tokens: int = Field(description="tokens of these that were not read")


class Deleted(BaseModel):
    """The answer of a delete: the number of ids. An id that is not in the index is not an error."""

    deleted: int


class IndexVersion(BaseModel):
    """A version of the index that is open."""

    version: str
    uri: str
    documents: int = Field(description="rows of the index: passages, if documents are divided")
    created: str
    active: bool
    query_tower: str | None = Field(
        None, description="URI of the tower that encodes its queries; null: the only one of a live index"
    )


class IndexVersions(BaseModel):
    """The answer of ``/admin/index`` and of the requests below it."""

    active: str
    versions: list[IndexVersion]


class ArmInfo(BaseModel):
    """A query tower and an index that answer queries. A request may name it."""

    name: str
    tower: str
    personalised: bool


class Facet(BaseModel):
    """A value of a field, and the number of documents that have it."""

    value: str
    count: int


class TowerInfo(BaseModel):
    """The answer of ``GET /info`` of a model without an index. From `model_id` on, the fields are TEI's."""

    name: str
    version: str
    dim: int
    rerank: bool
    model_id: str
    model_dtype: str
    model_type: dict[str, dict[str, str]]
    max_concurrent_requests: int
    max_client_batch_size: int
    auto_truncate: bool


class Info(TowerInfo):
    """The answer of ``GET /info``: arms, fields and limits of the service."""

    documents: int = Field(description="of the index version when it was opened; not their passages")
    index_version: str
    shards: int
    arms: list[ArmInfo]
    fields: dict[str, Literal["text", "number", "boolean"]]
    facets: dict[str, list[Facet]]
    sparse: bool
    live: bool
    max_k: int
    max_query_chars: int


class Health(BaseModel):
    """The answer of ``GET /healthz``: whether the parts behind the gateway answer."""

    status: str = Field(
        description="ok: all answer; down: no query can be answered, because no shard answers, or no encoder "
        "of an arm that has traffic; degraded: otherwise"
    )
    encoder_answers: bool = Field(description="whether the encoder of every arm answers")
    shards: int
    shards_answered: int
    silent: list[str] = Field(
        [],
        description="parts that do not answer or cannot be read: encoder:ARM, teacher, aggregator:NUMBER, "
        "group:NUMBER, documents, delta; user_config: the latest settings of the gateway were refused",
    )


class Problem(BaseModel):
    """The reason why a request is refused."""

    code: str
    message: str
    field: str | None


class Refusal(BaseModel):
    """The body of every answer with a status other than 2xx."""

    error: Problem
    request_id: str


# --- checks of requests -----------------------------------------------------------------------------------


def index_filter(conditions: dict[str, Any] | None) -> dict[str, Any] | None:
    """Convert the filter of a request to the form of :mod:`scalingnote.index.filters`."""
    if conditions is None:
        return None
    return {
        name: condition.model_dump(exclude_none=True) if isinstance(condition, Range) else condition
        for name, condition in conditions.items()
    }


def rerank_depth(request: SearchRequest, *, served: bool) -> int:
    """Return the number of results to re-rank; 0: none. `served`: whether there is a cross-encoder."""
    if request.rerank is None:
        return 0
    if not served:
        raise invalid("this server does not re-rank: set serve.rerank", "rerank")
    if request.query is None:
        raise invalid("only results of a text can be re-ranked: send query", "rerank")
    if request.rerank > MAX_RERANKED:
        raise invalid(f"rerank is {request.rerank}: send up to {MAX_RERANKED}", "rerank")
    return request.rerank


def check_batch(rows: Sequence[object], field: str) -> None:
    """Raise RefusedError for more than MAX_BATCH queries, documents or ids in one request."""
    if len(rows) > MAX_BATCH:
        raise invalid(f"{len(rows)} at once: send up to {MAX_BATCH}", field)


def query_text(text: str, limits: Limits) -> str:
    """Strip the spaces around a query; RefusedError if it is empty or too long."""
    query = text.strip()
    if not query:
        raise invalid("query is empty: send some text", "query")
    if len(query) > limits.max_query_chars:
        raise invalid(
            f"query has {len(query)} characters, this server takes up to {limits.max_query_chars}", "query"
        )
    return query


def check_dense_weight(dense_weight: float | None, *, sparse: bool) -> None:
    """Raise RefusedError for a weight in a request to an index without terms (`sparse` is False)."""
    if dense_weight is not None and not sparse:
        raise invalid("dense_weight is given, but the documents of this index have no terms", "dense_weight")


def unit_vector(values: Sequence[float], dim: int) -> Float[ndarray, "1 dim"]:
    """Scale a client's vector to a unit embedding."""
    if len(values) != dim:
        raise invalid(f"vector has {len(values)} numbers, the index has embeddings of dim {dim}", "vector")
    row = np.asarray([values], np.float64)
    largest = np.abs(row).max()
    if not largest:
        raise invalid("vector is all zero: it has no direction", "vector")
    scaled = row / largest  # without this, the square of a large number would be infinite
    return np.asarray(scaled / np.linalg.norm(scaled), np.float32)
