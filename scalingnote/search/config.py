"""Settings of what searches: the index itself, or a vector database that holds the same documents."""

import os
from typing import Literal

from pydantic import Field, field_validator, model_validator

from scalingnote.core.config import Config


class SearchConfig(Config):
    """The engine behind the service's searches."""

    backend: Literal["own", "qdrant", "milvus"] = Field(
        "own",
        description="own: the index; else a database that `scalingnote export vectors` filled from the run",
    )
    url: str | None = Field(
        None,
        description="of the database; a folder of Qdrant's local mode or a file NAME.db of Milvus Lite, "
        "which one process opens",
    )
    collection: str = Field(
        "scalingnote", description="of the database; {version} in it stands for the name of the index version"
    )
    ef: int | None = Field(
        None,
        ge=1,
        description="candidates that the database's graph keeps for a query: hnsw_ef of Qdrant, ef of "
        "Milvus; None: as the database is configured",
    )

    @field_validator("url")
    @classmethod
    def _absolute(cls, url: str | None) -> str | None:
        """Replicas have other working directories than the command."""
        return url if url is None or "://" in url else os.path.abspath(url)

    @model_validator(mode="after")
    def _consistent(self) -> "SearchConfig":
        if self.backend != "own" and self.url is None:
            raise ValueError(f"backend {self.backend} needs a url: of its server, or a path on this machine")
        if self.backend == "own" and (self.url is not None or self.ef is not None):
            raise ValueError("url and ef are of a database: set backend to qdrant or milvus")
        return self

    @property
    def is_local(self) -> bool:
        """Whether the database is files that one process opens."""
        return self.url is not None and "://" not in self.url

    def collection_of(self, version: str) -> str:
        """The collection of an index version."""
        return self.collection.replace("{version}", version)
