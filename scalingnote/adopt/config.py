"""Knobs of adopt: which published model, and what its files leave open."""

from pydantic import Field

from scalingnote.config import Config
from scalingnote.models.config import Pooling


class AdoptConfig(Config):
    """A published embedding model in place of stage I's training."""

    path: str = Field(
        description="hub id, folder or package:NAME, e.g. BAAI/bge-small-en-v1.5; of a pair, the documents'"
    )
    weights_sha256: str | None = Field(
        None, description="of model.safetensors at `path`; other weights are refused. null: any"
    )
    query_path: str | None = Field(
        None, description="of a pair of models, the queries'; null: one model reads both"
    )
    pooling: Pooling = Field(
        "auto", description="auto: as the model's files say; a plain folder needs a name"
    )
    normalise: bool | None = Field(None, description="embeddings of length 1; null: as the model's files say")
    query_prefix: str | None = Field(
        None, description="text before every query; null: the model's own prompt"
    )
    document_prefix: str | None = Field(None, description="text before every document; null: the model's own")
    query_max_length: int | None = Field(
        None, ge=2, description="tokens of a query; null: what the model reads"
    )
    document_max_length: int | None = Field(None, ge=2, description="tokens of a document; null: as above")
