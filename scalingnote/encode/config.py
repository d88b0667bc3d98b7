"""Settings of encoding: documents, queries of the teacher, BM25 terms, and exports of query towers."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from scalingnote.core.config import Config, ElasticResources
from scalingnote.core.words import Language

View = Literal["title", "content", "summary"]
EngineName = Literal["own", "sentence-transformers", "vllm"]
Form = Literal["auto", "torch", "compiled", "onnx", "onnx_int8", "lookup"]


class Fleet(ElasticResources):
    """Workers that encode."""

    min_workers: int | None = Field(
        None,
        ge=1,
        description="start with at least this number, and add more when nodes join, up to `workers`; null: "
        "all workers, or all that there is room for if workers is null",
    )
    max_failed_parts: int = Field(
        0,
        ge=0,
        description="parts that may be left out, with the reason, because they fail on every worker; if more "
        "parts fail, the run ends with an error after all others are finished",
    )
    readers: int = Field(
        0,
        ge=0,
        description="tasks of one CPU that read and tokenise for the workers, and the same number that write "
        "their results, so that GPUs do not wait; 0: workers do it themselves, which is best on CPUs",
    )


class EncodeConfig(Config):
    """Settings of the encoding of documents by the document tower."""

    base: str | None = Field(
        None,
        description="URI of earlier embeddings by the same towers: unchanged documents are copied from it, "
        "and the table `changes` lists the added, changed and deleted ones",
    )
    engine: EngineName = Field(
        "own",
        description="engine that runs the document tower; all except own compute only the indexed view and "
        "no terms, and vllm needs its package in the workers' image",
    )
    views: tuple[View, ...] = Field(("summary",), description="embeddings to store; summary is indexed")
    dtype: Literal["float32", "float16"] = Field("float16", description="stored precision")
    top_k: int = Field(
        256, ge=1, description="terms of largest weight stored per document, if the tower has a sparse head"
    )
    token_budget: int = Field(
        8192, ge=16, description="maximum tokens of a forward pass; at most 1,024 on a CPU"
    )
    resources: Fleet = Fleet()

    @model_validator(mode="after")
    def _engine_gives_the_views(self) -> "EncodeConfig":
        if self.engine != "own" and len(self.views) > 1:
            raise ValueError(
                f"engine {self.engine} computes one view of a document: set engine to own, or one view"
            )
        return self


class IngestConfig(Config):
    """Settings of the encoding of new documents."""

    resources: Fleet = Fleet()


class TeacherConfig(Config):
    """Settings of the teacher's encoding of training queries and pseudo-queries, for distillation."""

    token_budget: int = Field(
        8192, ge=16, description="maximum tokens of a forward pass; at most 1,024 on a CPU"
    )
    tokens: bool = Field(
        True,
        description="embed each token of the vocabulary, too, as initial rows of lookup students; false "
        "saves that pass if the student is not a table",
    )
    resources: Fleet = Fleet()


class BM25Config(Config):
    """Settings of BM25 term weights of documents (Lucene's variant), for hybrid search with embeddings."""

    k1: float = Field(1.2, ge=0, description="term saturation; Lucene's default")
    b: float = Field(0.75, ge=0, le=1, description="length normalisation; Lucene's default")
    language: Language | Literal["auto"] = Field(
        "auto",
        description="language of documents and queries: their words become stems (Snowball), without stop "
        "words; none: words as they are written; auto: the language with at least 15 stop words among the 50 "
        "most frequent words of a sample, else none",
    )
    analyzer: Literal[3] = Field(
        3, description="version of the rule that splits texts into words; each version has its own artifacts"
    )


class EndpointConfig(Config):
    """Settings of an embedding model behind HTTP, the teacher and the encoder of documents."""

    url: str = Field(
        description="base URL (https://api.openai.com/v1), or the URL of /v1/embeddings or of TEI's /embed"
    )
    model: str = Field(description="name of the model at the endpoint; TEI serves one model and ignores it")
    query_prefix: str = Field("", description="text before every query")
    document_prefix: str = Field("", description="text before every document")
    query_fields: dict[str, Any] = Field(
        {}, description="added to the body of requests for queries: {input_type: query, dimensions: 512}"
    )
    document_fields: dict[str, Any] = Field({}, description="the same for documents")
    batch_texts: int | None = Field(
        None, ge=1, le=2048, description="maximum texts of a request; null: 256, or 32 for TEI"
    )
    batch_tokens: int = Field(
        50_000, ge=1, description="maximum tokens of a request, estimated; a longer text is sent by itself"
    )
    concurrency: int = Field(8, ge=1, le=256, description="requests at once")
    max_requests: int | None = Field(
        None,
        ge=1,
        description="maximum requests of a run, which fails before the first one if it needs "
        "more; null: no limit",
    )
    timeout_s: float = Field(60.0, gt=0, description="seconds until a request is sent again")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is not an http(s) URL: set http://HOST:PORT/v1 or https://HOST/v1")
        return url.rstrip("/")

    @property
    def is_tei(self) -> bool:
        """Whether requests and answers have the form of TEI; otherwise they have OpenAI's."""
        return self.url.endswith("/embed")

    @property
    def address(self) -> str:
        """URL of requests."""
        if self.is_tei or self.url.endswith("/embeddings"):
            return self.url
        return f"{self.url}/embeddings" if self.url.endswith("/v1") else f"{self.url}/v1/embeddings"


class ExportConfig(Config):
    """Settings of the export of a query tower as an ONNX graph, which runs without torch."""

    form: Literal["onnx", "onnx_int8"] = Field(
        "onnx_int8", description="onnx_int8: a quarter of the size, and several times as fast on a CPU"
    )
