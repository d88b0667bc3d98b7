"""Settings of adopt: the published model, and settings that its files leave open."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config
from scalingnote.models.config import Pooling


class AdoptConfig(Config):
    """A published embedding model instead of training by stage I."""

    path: str = Field(
        description="hub id, folder or package:NAME, as BAAI/bge-small-en-v1.5; of a pair, that of documents"
    )
    weights_sha256: str | None = Field(
        None, description="of model.safetensors at `path`; other weights are refused. null: any"
    )
    query_path: str | None = Field(
        None, description="of a pair of models, that of queries; null: one model encodes both"
    )
    pooling: Pooling = Field(
        "auto",
        description="auto: from the model's files; of a plain transformer, which has none, the last token of "
        "a decoder and the mean, or [CLS], of an encoder",
    )
    normalise: bool | None = Field(None, description="embeddings of length 1; null: from the model's files")
    similarity: Literal["cosine", "dot"] | None = Field(
        None,
        description="of a query and a document in search: cosine, or dot, the inner product of documents of "
        "their own length; null: the model's own (similarity_fn_name), which must be one that ranks as these",
    )
    query_prefix: str | None = Field(
        None, description="text before every query; null: the model's own prompt"
    )
    document_prefix: str | None = Field(None, description="text before every document; null: the model's own")
    query_max_length: int | None = Field(
        None, ge=2, description="maximum tokens of a query; null: the model's maximum"
    )
    document_max_length: int | None = Field(
        None, ge=2, description="maximum tokens of a document; null: as above"
    )
