"""Knobs of encoding: of documents, of the teacher's queries, and of the form a query tower takes to serve."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config, Resources

View = Literal["title", "content", "summary"]
Form = Literal["auto", "torch", "compiled", "onnx", "onnx_int8", "lookup"]


class Fleet(Resources):
    """Where encoding runs, and what that costs."""

    readers: int = Field(
        0,
        ge=0,
        description="tasks of a CPU each that read and tokenise ahead of the workers, and as many that write "
        "behind them, so that GPUs never wait; 0: workers do it themselves, which is right on CPUs",
    )
    parts_per_wave: int = Field(
        4096, ge=1, description="parts of one Ray Data execution; when it breaks, the next takes the rest"
    )
    price_per_hour: float = Field(
        0.0, ge=0, description="of a worker, in any currency; progress tells the cost"
    )


class EncodeConfig(Config):
    """Documents through the document tower."""

    base: str | None = Field(
        None,
        description="URI of earlier embeddings by the same towers: documents that are still the same are "
        "copied from there, and the table `changes` tells which were added, changed or deleted",
    )
    views: tuple[View, ...] = Field(("summary",), description="embeddings to store; summary is indexed")
    dtype: Literal["float32", "float16"] = Field("float16", description="stored precision")
    top_k: int = Field(
        256, ge=1, description="terms kept per document, the largest, where the tower has a sparse head"
    )
    token_budget: int = Field(
        8192, ge=16, description="most tokens of a forward pass; a CPU takes 1,024 at most"
    )
    resources: Fleet = Fleet()


class TeacherConfig(Config):
    """Training queries and pseudo-queries through the teacher, once; the student never sees the teacher."""

    rows_per_part: int = Field(8192, ge=1, description="queries per committed part")
    token_budget: int = Field(
        8192, ge=16, description="most tokens of a forward pass; a CPU takes 1,024 at most"
    )
    beside: Literal["positive", "nothing"] = Field(
        "positive", description="what a cross-encoder reads a query beside; other teachers read it alone"
    )
    resources: Fleet = Fleet()


class ExportConfig(Config):
    """A query tower as a graph that needs no torch."""

    form: Literal["onnx", "onnx_int8"] = Field(
        "onnx_int8", description="onnx_int8: a quarter of the size, and faster on a CPU by a multiple"
    )
