"""Settings of fusion: the features of documents and queries, the losses, the training."""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.core.config import Config
from scalingnote.encode.config import Fleet
from scalingnote.train.config import Optimizer, Schedule


class Feature(Config):
    """A column of the documents or users.

    categorical   one of many values (brand, country): an embedding per frequent value, one for all others
    numeric       a number, a date or a time: its rank, scaled to [-1, 1]
    bucketed      a number as one of 16 ranges of equal frequency (price bands), with an embedding per range
    vector        a vector from another model (for example of an image), scaled to length 1
    """

    kind: Literal["categorical", "numeric", "bucketed", "vector"] = Field(description="how it is read")
    column: str = Field(description="numbers of a category are read as text; texts of a number as ISO dates")
    dim: int | None = Field(None, ge=1, description="length of a vector")

    @model_validator(mode="after")
    def _has_dim(self) -> "Feature":
        if (self.kind == "vector") != (self.dim is not None):
            raise ValueError(f"{self.column}: set dim, the length, of a vector and of no other feature")
        return self


class DocumentSide(Config):
    """Features that are merged into a document's embedding, in addition to its semantic ID."""

    id_buckets: int = Field(
        65_536,
        ge=0,
        description="rows of the table of hashed ids, for properties of a document that its content does not "
        "show; documents of one bucket share a row; 0: no table",
    )
    features: tuple[Feature, ...] = Field((), description="columns of the dataset's documents")


class QuerySide(Config):
    """Features that are merged into a query's embedding, in addition to its 8 most important words."""

    profile: tuple[Feature, ...] = Field((), description="columns of the dataset's users")
    history: int = Field(
        20,
        ge=1,
        description="last clicked documents of a user that are read, by their semantic IDs, weighted by "
        "similarity to the query",
    )
    crosses: tuple[str, ...] = Field(
        (), description="columns of categorical or bucketed profile features, each crossed with the query"
    )

    @model_validator(mode="after")
    def _crosses_exist(self) -> "QuerySide":
        discrete = {f.column for f in self.profile if f.kind in ("categorical", "bucketed")}
        if unknown := sorted(set(self.crosses) - discrete):
            raise ValueError(
                f"crosses name {unknown}, but the categorical and bucketed features of the profile are "
                f"{sorted(discrete)}: name some of these"
            )
        return self


class FusionLosses(Config):
    """Settings of the losses: clicked documents against those of the batch, and against skipped ones."""

    temperature: float = Field(0.05, gt=0, lt=1, description="tau")
    skipped: int = Field(
        4, ge=1, description="documents per click that were shown in the same session and not clicked"
    )
    matryoshka: tuple[int, ...] = Field(
        (16, 32, 64, 128),
        min_length=1,
        description="prefix lengths; those above the embeddings' dimension are ignored, which is added",
    )


class FuseConfig(Schedule):
    """Settings of the fusion of documents and queries with their features; the towers do not change."""

    document: DocumentSide = DocumentSide()
    query: QuerySide = QuerySide()
    losses: FusionLosses = FusionLosses()
    hide: float = Field(
        0.1, ge=0, lt=1, description="probability that training treats a feature of a row as missing"
    )
    optimizer: Optimizer = Optimizer(peak_lr=1e-3)
    global_batch: int = Field(256, ge=2, description="clicks per step over all ranks")
    epochs: float = Field(3.0, ge=0, description="passes over the clicks; 0 leaves all embeddings unchanged")
    parts: int = Field(16, ge=1, description="buckets of users; a task holds the impressions of one bucket")
    writers: Fleet = Field(Fleet(), description="actors that encode queries and fuse documents")

    @model_validator(mode="after")
    def _can_fuse(self) -> "FuseConfig":
        if self.memory.grad_cache or self.memory.gradient_checkpointing:
            raise ValueError(
                "fusion networks are small: leave memory.grad_cache and gradient_checkpointing off"
            )
        return self
