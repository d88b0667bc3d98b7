"""Settings of an index, of live updates and of search; `nlist`, `nprobe`, `m` and `nbits` as in faiss."""

import os
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scalingnote.core.config import Config, Resources

MAX_LISTS = 1 << 20
Refine = Literal["none", "sq8", "flat"]
REFINE_HELP = (
    "vectors kept to rescore candidates: codes alone cap recall@10 at about 0.8 at any nprobe; 8-bit "
    "scalars (dim bytes per document) lift it to 0.98, floats (4*dim) make scores exact"
)
# Content is kept as a snippet only; the others name columns of a shard's own, or of the log of a live index.
RESERVED_COLUMNS = ("content", "snippet", "semantic_id", "vector", "terms", "impacts")


class FastScan(Config):
    """4-bit product quantization scanned in CPU registers: the fastest per document scanned."""

    kind: Literal["ivfpq_fast_scan"] = "ivfpq_fast_scan"
    m: int | None = Field(
        None,
        ge=1,
        description="sub-quantizers, divides dim; None: one per 2 dimensions (64 at 128: 32 bytes)",
    )
    refine: Refine = Field("sq8", description=REFINE_HELP)


class IVFPQ(Config):
    """Product quantization with tables in memory: finer codes than fast scan's, slower to scan."""

    kind: Literal["ivfpq"] = "ivfpq"
    m: int | None = Field(
        None, ge=1, description="sub-quantizers, divides dim; None: one per 4 dimensions (32 at 128)"
    )
    nbits: int = Field(8, ge=1, le=8, description="bits per sub-quantizer: m*nbits/8 bytes per document")
    refine: Refine = Field("sq8", description=REFINE_HELP)


class ScalarQuantized(Config):
    """A byte per dimension: near exact, and no codebook that could grow stale."""

    kind: Literal["ivf_sq8"] = "ivf_sq8"


class RaBitQ(Config):
    """A bit per dimension around each centroid (Gao & Long, 2024): no codebook, for documents that drift."""

    kind: Literal["ivf_rabitq"] = "ivf_rabitq"
    refine: Refine = Field("sq8", description=REFINE_HELP)


class Flat(Config):
    """Every document compared with every query: exact, for small corpora and as the reference."""

    kind: Literal["flat"] = "flat"


Family = Annotated[FastScan | IVFPQ | ScalarQuantized | RaBitQ | Flat, Field(discriminator="kind")]


class Tuning(Config):
    """How `nprobe` and `refine_factor` are found: the cheapest that reach a recall on real queries."""

    recall: float = Field(0.95, gt=0, le=1, description="share of the exact k best documents to be found")
    k: int = Field(100, ge=1, description="results per query that the recall is measured on")


class IndexConfig(Config):
    """How embeddings become shards of an index."""

    shards: int | None = Field(
        None,
        ge=1,
        description="disjoint slices of the corpus, each filled by one task and searched on its own; None: "
        "at least 2, of at most 4 GiB of vectors, terms and documents each",
    )
    family: Family = Field(FastScan(), description="how a document's vector is stored and scanned")
    nlist: int | None = Field(
        None,
        ge=1,
        le=MAX_LISTS,
        description="inverted lists; None: 4*sqrt(documents), at least 39 training documents each",
    )
    nprobe: int | None = Field(None, ge=1, description="inverted lists searched; None: tuned")
    refine_factor: int | None = Field(
        None, ge=1, description="candidates rescored per requested result; None: tuned"
    )
    tuning: Tuning = Tuning()
    filters: tuple[str, ...] = Field(
        ("topic",),
        description="columns of the documents that a search may filter by: text, numbers, yes or no",
    )
    terms: int | None = Field(
        None,
        ge=1,
        description="strongest terms of a document that are indexed, where documents have some; None: all",
    )
    train_documents: int = Field(
        4_000_000,
        ge=1,
        description="most documents the quantizers are trained on, drawn evenly from the corpus: 39 a list, "
        "at least 200,000",
    )
    snippet_chars: int = Field(240, ge=0, description="opening of the content kept for the result list")
    resources: Resources = Field(Resources(), description="tasks that fill the shards")

    @model_validator(mode="after")
    def _filters_are_of_the_documents(self) -> "IndexConfig":
        if taken := [name for name in self.filters if name in RESERVED_COLUMNS]:
            raise ValueError(
                f"filters name {taken[0]!r}, which an index does not keep or uses itself, as "
                f"{', '.join(RESERVED_COLUMNS)}: rename this column of the documents, or leave it out"
            )
        return self


class LiveConfig(Config):
    """How an index accepts writes, and when compaction writes a new version."""

    compact_at: float | None = Field(
        None,
        gt=0,
        description="compact in the background once rows written or gone since the version are this share of "
        "its rows; None: only when asked to",
    )
    retrain_at: float = Field(
        0.5,
        gt=0,
        description="train centroids and codebooks again once documents written since are this share of the "
        "index: each write pays for a bounded number of trainings",
    )
    keep_versions: int = Field(
        2, ge=1, description="previous versions, with their logs, that can be made current again"
    )
    keep_documents: bool = Field(
        False,
        description="keep all records of the log, with the documents whole, as they were sent: a change of "
        "the model (scalingnote migrate) encodes them again",
    )


LIVE_DEFAULTS = LiveConfig()


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
