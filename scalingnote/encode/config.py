"""Settings of encoding: documents, new ones, the teacher's queries, and exports of query towers."""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.config import Config, ElasticResources

View = Literal["title", "content", "summary"]
EngineName = Literal["own", "sentence-transformers", "vllm"]
Form = Literal["auto", "torch", "compiled", "onnx", "onnx_int8", "lookup"]


class Fleet(ElasticResources):
    """Workers that encode, and their price."""

    min_workers: int | None = Field(
        None,
        ge=1,
        description="start with at least this many, and take more as nodes join, up to `workers`; null: all, "
        "or as many as there is room for if workers is null",
    )
    max_failed_parts: int = Field(
        0,
        ge=0,
        description="parts that may be left out, with their reason, because they fail wherever they are "
        "encoded; if more do, the run ends with an error when all others are done",
    )
    readers: int = Field(
        0,
        ge=0,
        description="tasks of one CPU that read and tokenise ahead of the workers, and as many that write "
        "behind them, so that GPUs do not wait; 0: workers do it themselves, which is best on CPUs",
    )
    price_per_hour: float = Field(
        0.0, ge=0, description="of a worker, in any currency; progress lines show the cost"
    )


class EncodeConfig(Config):
    """Encoding of documents by the document tower."""

    base: str | None = Field(
        None,
        description="URI of earlier embeddings by the same towers: unchanged documents are copied from "
        "there, and the table `changes` lists which were added, changed or deleted",
    )
    engine: EngineName = Field(
        "own",
        description="what runs the document tower; all but own give the indexed view alone and no terms, and "
        "vllm needs its package in the workers' image",
    )
    views: tuple[View, ...] = Field(("summary",), description="embeddings to store; summary is indexed")
    dtype: Literal["float32", "float16"] = Field("float16", description="stored precision")
    top_k: int = Field(
        256, ge=1, description="terms stored per document, of largest weight, if the tower has a sparse head"
    )
    token_budget: int = Field(
        8192, ge=16, description="maximum tokens of a forward pass; at most 1,024 on a CPU"
    )
    resources: Fleet = Fleet()

    @model_validator(mode="after")
    def _engine_gives_the_views(self) -> "EncodeConfig":
        if self.engine != "own" and len(self.views) > 1:
            raise ValueError(
                f"engine {self.engine} gives one view of a document: set engine to own, or one view"
            )
        return self


class IngestConfig(Config):
    """How new documents are encoded."""

    token_budget: int = Field(8192, ge=16, description="padded tokens per forward pass")
    resources: Fleet = Fleet()


class TeacherConfig(Config):
    """Encoding of training queries and pseudo-queries by the teacher, which distillation does not load."""

    rows_per_part: int = Field(8192, ge=1, description="queries per part")
    token_budget: int = Field(
        8192, ge=16, description="maximum tokens of a forward pass; at most 1,024 on a CPU"
    )
    beside: Literal["positive", "nothing"] = Field(
        "positive", description="text that a cross-encoder reads with a query; other teachers read it alone"
    )
    tokens: bool = Field(
        True,
        description="embed each token of the vocabulary, too, for lookup students to start from; false saves "
        "that pass where the student is none",
    )
    resources: Fleet = Fleet()


class ExportConfig(Config):
    """Export of a query tower as an ONNX graph, which runs without torch."""

    form: Literal["onnx", "onnx_int8"] = Field(
        "onnx_int8", description="onnx_int8: a quarter of the size, and several times as fast on a CPU"
    )
