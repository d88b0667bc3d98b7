from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SearchRequest(_message.Message):
    __slots__ = ("query", "vector", "k", "filter", "user_id", "dense_weight", "rerank", "arm", "nprobe", "explain", "deadline_ms")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    DENSE_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    RERANK_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    NPROBE_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    query: str
    vector: _containers.RepeatedScalarFieldContainer[float]
    k: int
    filter: _struct_pb2.Struct
    user_id: str
    dense_weight: float
    rerank: int
    arm: str
    nprobe: int
    explain: bool
    deadline_ms: int
    def __init__(self, query: _Optional[str] = ..., vector: _Optional[_Iterable[float]] = ..., k: _Optional[int] = ..., filter: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., user_id: _Optional[str] = ..., dense_weight: _Optional[float] = ..., rerank: _Optional[int] = ..., arm: _Optional[str] = ..., nprobe: _Optional[int] = ..., explain: _Optional[bool] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class SimilarRequest(_message.Message):
    __slots__ = ("doc_id", "k", "filter", "arm", "deadline_ms")
    DOC_ID_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    doc_id: str
    k: int
    filter: _struct_pb2.Struct
    arm: str
    deadline_ms: int
    def __init__(self, doc_id: _Optional[str] = ..., k: _Optional[int] = ..., filter: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., arm: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Explained(_message.Message):
    __slots__ = ("dense", "sparse", "rerank", "shard")
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    RERANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    dense: float
    sparse: float
    rerank: float
    shard: int
    def __init__(self, dense: _Optional[float] = ..., sparse: _Optional[float] = ..., rerank: _Optional[float] = ..., shard: _Optional[int] = ...) -> None: ...

class PassagePlace(_message.Message):
    __slots__ = ("number", "start", "end")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: int
    end: int
    def __init__(self, number: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Hit(_message.Message):
    __slots__ = ("doc_id", "score", "title", "topic", "snippet", "semantic_id", "fields", "explain", "passage")
    DOC_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SNIPPET_FIELD_NUMBER: _ClassVar[int]
    SEMANTIC_ID_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    PASSAGE_FIELD_NUMBER: _ClassVar[int]
    doc_id: str
    score: float
    title: str
    topic: str
    snippet: str
    semantic_id: str
    fields: _struct_pb2.Struct
    explain: Explained
    passage: PassagePlace
    def __init__(self, doc_id: _Optional[str] = ..., score: _Optional[float] = ..., title: _Optional[str] = ..., topic: _Optional[str] = ..., snippet: _Optional[str] = ..., semantic_id: _Optional[str] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., explain: _Optional[_Union[Explained, _Mapping]] = ..., passage: _Optional[_Union[PassagePlace, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("encode", "search", "rerank", "total", "escalate")
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    RERANK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    ESCALATE_FIELD_NUMBER: _ClassVar[int]
    encode: float
    search: float
    rerank: float
    total: float
    escalate: float
    def __init__(self, encode: _Optional[float] = ..., search: _Optional[float] = ..., rerank: _Optional[float] = ..., total: _Optional[float] = ..., escalate: _Optional[float] = ...) -> None: ...

class SearchResponse(_message.Message):
    __slots__ = ("request_id", "results", "arm", "index_version", "personalised", "shards", "shards_answered", "timings_ms", "missing_groups", "escalated", "degraded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    INDEX_VERSION_FIELD_NUMBER: _ClassVar[int]
    PERSONALISED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_ANSWERED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    ESCALATED_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    results: _containers.RepeatedCompositeFieldContainer[Hit]
    arm: str
    index_version: str
    personalised: bool
    shards: int
    shards_answered: int
    timings_ms: Timings
    missing_groups: _containers.RepeatedScalarFieldContainer[int]
    escalated: bool
    degraded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., results: _Optional[_Iterable[_Union[Hit, _Mapping]]] = ..., arm: _Optional[str] = ..., index_version: _Optional[str] = ..., personalised: _Optional[bool] = ..., shards: _Optional[int] = ..., shards_answered: _Optional[int] = ..., timings_ms: _Optional[_Union[Timings, _Mapping]] = ..., missing_groups: _Optional[_Iterable[int]] = ..., escalated: _Optional[bool] = ..., degraded: _Optional[_Iterable[str]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("queries", "user_id", "arm")
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    USER_ID_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    queries: _containers.RepeatedScalarFieldContainer[str]
    user_id: str
    arm: str
    def __init__(self, queries: _Optional[_Iterable[str]] = ..., user_id: _Optional[str] = ..., arm: _Optional[str] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("embeddings", "dim", "arm")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    ARM_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    dim: int
    arm: str
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., dim: _Optional[int] = ..., arm: _Optional[str] = ...) -> None: ...

class Document(_message.Message):
    __slots__ = ("doc_id", "title", "topic", "content", "features")
    DOC_ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    doc_id: str
    title: str
    topic: str
    content: str
    features: _struct_pb2.Struct
    def __init__(self, doc_id: _Optional[str] = ..., title: _Optional[str] = ..., topic: _Optional[str] = ..., content: _Optional[str] = ..., features: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class UpsertRequest(_message.Message):
    __slots__ = ("documents",)
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    documents: _containers.RepeatedCompositeFieldContainer[Document]
    def __init__(self, documents: _Optional[_Iterable[_Union[Document, _Mapping]]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("doc_id", "reason")
    DOC_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    doc_id: str
    reason: str
    def __init__(self, doc_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("written", "rejected", "cut_texts", "lost_tokens")
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    CUT_TEXTS_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    written: int
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    cut_texts: int
    lost_tokens: int
    def __init__(self, written: _Optional[int] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., cut_texts: _Optional[int] = ..., lost_tokens: _Optional[int] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("doc_ids",)
    DOC_IDS_FIELD_NUMBER: _ClassVar[int]
    doc_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, doc_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Deleted(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("doc_id",)
    DOC_ID_FIELD_NUMBER: _ClassVar[int]
    doc_id: str
    def __init__(self, doc_id: _Optional[str] = ...) -> None: ...

class IndexedDocument(_message.Message):
    __slots__ = ("doc_id", "title", "topic", "snippet", "semantic_id", "fields")
    DOC_ID_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SNIPPET_FIELD_NUMBER: _ClassVar[int]
    SEMANTIC_ID_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    doc_id: str
    title: str
    topic: str
    snippet: str
    semantic_id: str
    fields: _struct_pb2.Struct
    def __init__(self, doc_id: _Optional[str] = ..., title: _Optional[str] = ..., topic: _Optional[str] = ..., snippet: _Optional[str] = ..., semantic_id: _Optional[str] = ..., fields: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...
