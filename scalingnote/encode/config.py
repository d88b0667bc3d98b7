"""Knobs of encoding; the same for documents and for the teacher's queries."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config, Resources

View = Literal["title", "content", "summary"]


class EncodeConfig(Config):
    """Documents through the document tower."""

    views: tuple[View, ...] = Field(("summary",), description="embeddings to store; summary is indexed")
    dtype: Literal["float32", "float16"] = Field("float16", description="stored precision")
    token_budget: int = Field(8192, ge=16, description="padded tokens per forward pass")
    resources: Resources = Resources()


class TeacherConfig(Config):
    """Training queries through stage I's query tower, once; the student never sees the teacher itself."""

    rows_per_part: int = Field(8192, ge=1, description="queries per committed part")
    token_budget: int = Field(8192, ge=16, description="padded tokens per forward pass")
    resources: Resources = Resources()
