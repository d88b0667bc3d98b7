"""Settings of ingestion."""

from pydantic import Field

from scalingnote.config import Config
from scalingnote.encode.config import Fleet


class IngestConfig(Config):
    """How new documents are encoded."""

    token_budget: int = Field(8192, ge=16, description="padded tokens per forward pass")
    resources: Fleet = Fleet()
