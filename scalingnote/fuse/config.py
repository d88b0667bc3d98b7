"""Knobs of fusion: the features, how each is encoded, and the networks that merge them."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from scalingnote.config import Config
from scalingnote.encode.config import Fleet
from scalingnote.train.config import Optimizer, Schedule

# --- features, as columns of the documents or of the users ------------------------------------------------


class Categorical(Config):
    """A value out of many (brand, country): an embedding for each frequent value, one for all others."""

    kind: Literal["categorical"] = "categorical"
    column: str = Field(description="of the documents or users; numbers are read as their text")
    max_values: int = Field(10_000, ge=1, description="most frequent values, which have an embedding each")
    min_count: int = Field(2, ge=1, description="rows that a value needs for its own embedding")
    width: int = Field(16, ge=1, description="of an embedding")


class Numeric(Config):
    """A number, a date or a time, scaled to about [-1, 1]."""

    kind: Literal["numeric"] = "numeric"
    column: str = Field(description="of the documents or users; a text is read as an ISO date")
    normalise: Literal["quantile", "standard", "log"] = Field(
        "quantile",
        description="quantile: its rank; standard: minus the mean, over the standard deviation; log: that "
        "of the logarithm",
    )


class Bucketed(Config):
    """A number as one of several ranges of equal frequency (price bands), with an embedding each."""

    kind: Literal["bucketed"] = "bucketed"
    column: str = Field(description="of the documents or users; a text is read as an ISO date")
    buckets: int = Field(16, ge=2)
    width: int = Field(16, ge=1, description="of an embedding")


class Vector(Config):
    """A vector from another model (of an image, say)."""

    kind: Literal["vector"] = "vector"
    column: str = Field(description="of the documents or users; lists of `dim` numbers")
    dim: int = Field(ge=1)
    normalise: Literal["unit", "none"] = Field("unit", description="unit: to length 1")


Feature = Annotated[Categorical | Numeric | Bucketed | Vector, Field(discriminator="kind")]


# --- networks ---------------------------------------------------------------------------------------------


class Mlp(Config):
    """A multilayer perceptron."""

    kind: Literal["mlp"] = "mlp"
    hidden: tuple[int, ...] = Field((256,), min_length=1, description="widths of the hidden layers")


class Cross(Config):
    """Explicit products of features, then layers (DCN-V2, Wang et al. 2021)."""

    kind: Literal["cross"] = "cross"
    layers: int = Field(2, ge=1, description="each raises the degree of the products by one")
    rank: int = Field(64, ge=1, description="of each layer's matrix")
    hidden: tuple[int, ...] = Field((256,), min_length=1, description="widths of the layers after them")


Network = Annotated[Mlp | Cross, Field(discriminator="kind")]


# --- the two sides ----------------------------------------------------------------------------------------


class HashedIds(Config):
    """An embedding of the document's hashed id, for properties that its content does not show."""

    buckets: int = Field(65_536, ge=1, description="rows of the table; documents of one bucket share a row")
    width: int = Field(16, ge=1)


class DocumentSide(Config):
    """Features that are merged into a document's embedding."""

    semantic_ids: bool = Field(True, description="embeddings of its codes, initialised by the centroids")
    ids: HashedIds | None = HashedIds()
    features: tuple[Feature, ...] = Field((), description="columns of the dataset's documents")
    network: Network = Mlp()


class PlannerTerms(Config):
    """The planner's terms of a query: words weighted by importance, and statistics of the importances."""

    words: int = Field(8, ge=1, description="most important words that are read of a query")
    buckets: int = Field(16_384, ge=1, description="rows of the table of hashed words")
    width: int = Field(16, ge=1)


class History(Config):
    """The semantic IDs of the documents that a user clicked last."""

    last: int = Field(20, ge=1, description="documents")
    pool: Literal["attention", "mean"] = Field(
        "attention", description="attention: documents similar to the query have a higher weight"
    )


class QuerySide(Config):
    """Features that are merged into a query's embedding."""

    planner: PlannerTerms | None = PlannerTerms()
    profile: tuple[Feature, ...] = Field((), description="columns of the dataset's users")
    history: History | None = History()
    crosses: tuple[str, ...] = Field(
        (), description="columns of categorical or bucketed profile features, each crossed with the query"
    )
    cross_buckets: int = Field(
        65_536, ge=1, description="rows of the table that hashes of (word, column, value) share"
    )
    cross_width: int = Field(16, ge=1, description="width of an embedding in that table")
    network: Network = Mlp()

    @model_validator(mode="after")
    def _crosses_exist(self) -> "QuerySide":
        discrete = {f.column for f in self.profile if isinstance(f, Categorical | Bucketed)}
        if unknown := sorted(set(self.crosses) - discrete):
            raise ValueError(
                f"crosses name {unknown}, but the categorical and bucketed features of the profile are "
                f"{sorted(discrete)}"
            )
        if self.crosses and self.planner is None:
            raise ValueError("crosses need the planner's most important word: set planner, or remove them")
        return self


class FusionLosses(Config):
    """Losses of clicked documents against those of the batch, and against those that the user skipped."""

    temperature: float = Field(0.05, gt=0, lt=1, description="tau")
    log_q: bool = Field(
        True,
        description="subtract the log of a document's sampling probability from its scores; without it "
        "popular documents are pushed away (Yi et al. 2019)",
    )
    skipped: int = Field(
        4,
        ge=0,
        description="documents per click that were shown in the same session and not clicked; 0: none",
    )
    skipped_weight: float = Field(
        1.0, ge=0, description="of the softmax over the click and the skipped documents"
    )
    matryoshka: tuple[int, ...] = Field(
        (16, 32, 64, 128),
        min_length=1,
        description="prefix lengths; larger ones than the embeddings' dimension are ignored, it is added",
    )

    @property
    def group(self) -> int:
        """Documents of a training row: the clicked one and the skipped ones."""
        return 1 + (self.skipped if self.skipped_weight else 0)


class FuseConfig(Schedule):
    """Documents and queries with their features; the towers stay as they are."""

    document: DocumentSide = DocumentSide()
    query: QuerySide = QuerySide()
    losses: FusionLosses = FusionLosses()
    hide: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="probability that training hides a feature of a row, as if it were missing",
    )
    optimizer: Optimizer = Optimizer(peak_lr=1e-3)
    global_batch: int = Field(256, ge=2, description="clicks per step over all ranks")
    epochs: float = Field(
        3.0, ge=0, description="passes over the clicks; 0 leaves all embeddings as they are"
    )
    parts: int = Field(16, ge=1, description="buckets of users; a task holds the impressions of one bucket")
    writers: Fleet = Field(Fleet(), description="actors that encode queries and fuse documents")

    @model_validator(mode="after")
    def _has_features(self) -> "FuseConfig":
        side, query = self.document, self.query
        if not (
            side.semantic_ids or side.ids or side.features or query.planner or query.profile or query.history
        ):
            raise ValueError("nothing to fuse: name a feature of documents or queries, or set fuse to null")
        for name, columns in (("document.features", side.features), ("query.profile", query.profile)):
            names = [feature.column for feature in columns]
            if len({(feature.column, feature.kind) for feature in columns}) < len(names):
                raise ValueError(f"{name} reads a column twice in the same way: {sorted(names)}")
        if self.memory.grad_cache or self.memory.gradient_checkpointing or self.memory.compile:
            raise ValueError(
                "fusion networks are small: leave memory.grad_cache, gradient_checkpointing and compile off"
            )
        return self
