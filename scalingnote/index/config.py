"""Settings of an index, of live updates and of search; `nlist`, `nprobe`, `m`, `nbits` are terms of faiss."""

import os
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scalingnote.core.config import Config, Resources

MAX_LISTS = 1 << 20
Refine = Literal["none", "sq8", "flat"]
REFINE_HELP = (
    "vectors kept to rescore candidates: with codes only, recall@10 stays below about 0.8 at any nprobe; "
    "8-bit scalars (dim bytes per document) raise it to 0.98, floats (4*dim) make scores exact"
)
# Content is stored only as a snippet; shards or the log of a live index have columns with the other names.
RESERVED_COLUMNS = ("content", "snippet", "semantic_id", "vector", "terms", "impacts")


class FastScan(Config):
    """4-bit product quantization scanned in CPU registers: the fastest scan per document."""

    kind: Literal["ivfpq_fast_scan"] = "ivfpq_fast_scan"
    m: int | None = Field(
        None,
        ge=1,
        description="sub-quantizers, divides dim; None: one per 2 dimensions (64 at 128: 32 bytes)",
    )
    refine: Refine = Field("sq8", description=REFINE_HELP)


class IVFPQ(Config):
    """Product quantization with tables in memory: finer codes than those of fast scan, but a slower scan."""

    kind: Literal["ivfpq"] = "ivfpq"
    m: int | None = Field(
        None, ge=1, description="sub-quantizers, divides dim; None: one per 4 dimensions (32 at 128)"
    )
    nbits: int = Field(8, ge=1, le=8, description="bits per sub-quantizer: m*nbits/8 bytes per document")
    refine: Refine = Field("sq8", description=REFINE_HELP)


class ScalarQuantized(Config):
    """One byte per dimension: nearly exact scores, and no codebook that could become outdated."""

    kind: Literal["ivf_sq8"] = "ivf_sq8"


class RaBitQ(Config):
    """One bit per dimension around a centroid (Gao & Long, 2024): no codebook, for documents that drift."""

    kind: Literal["ivf_rabitq"] = "ivf_rabitq"
    refine: Refine = Field("sq8", description=REFINE_HELP)


class Flat(Config):
    """Comparison of every document with every query: exact, for small corpora and as the reference."""

    kind: Literal["flat"] = "flat"


Family = Annotated[FastScan | IVFPQ | ScalarQuantized | RaBitQ | Flat, Field(discriminator="kind")]


class Tuning(Config):
    """Target of tuning: the cheapest `nprobe` and `refine_factor` that reach a recall on real queries."""

    recall: float = Field(
        0.95, gt=0, le=1, description="share of the exact k best documents that a search must find"
    )
    k: int = Field(100, ge=1, description="number of results per query on which recall is measured")


class IndexConfig(Config):
    """Settings of the stage that builds shards of an index from embeddings."""

    shards: int | None = Field(
        None,
        ge=1,
        description="disjoint slices of the corpus, each filled by one task and searched separately; None: "
        "at least 2, each with at most 4 GiB of vectors, terms and documents",
    )
    family: Family = Field(FastScan(), description="method that stores and scans the vectors")
    nlist: int | None = Field(
        None,
        ge=1,
        le=MAX_LISTS,
        description="inverted lists; None: 4*sqrt(documents), with at least 39 training documents per list",
    )
    nprobe: int | None = Field(None, ge=1, description="inverted lists searched; None: tuned")
    refine_factor: int | None = Field(
        None, ge=1, description="candidates rescored per requested result; None: tuned"
    )
    tuning: Tuning = Tuning()
    filters: tuple[str, ...] = Field(
        ("topic",),
        description="columns of the documents by which a search may filter: text, numbers or booleans",
    )
    terms: int | None = Field(
        None,
        ge=1,
        description="strongest terms of a document that are indexed, if documents have terms; None: all",
    )
    train_documents: int = Field(
        4_000_000,
        ge=1,
        description="limit of the training documents of the quantizers, drawn evenly from the corpus: 39 per "
        "list, at least 200,000",
    )
    snippet_chars: int = Field(
        240, ge=0, description="characters of a document's content that the result list shows"
    )
    resources: Resources = Field(Resources(), description="resources of the tasks that fill the shards")

    @model_validator(mode="after")
    def _filters_are_of_the_documents(self) -> "IndexConfig":
        if reserved := [name for name in self.filters if name in RESERVED_COLUMNS]:
            raise ValueError(
                f"filters name {reserved[0]!r}; an index reserves {', '.join(RESERVED_COLUMNS)}: rename this "
                "column of the documents, or leave it out"
            )
        return self


class LiveConfig(Config):
    """Settings of writes to an index, and of the compactions that write a new version."""

    compact_at: float | None = Field(
        None,
        gt=0,
        description="compact in the background when the rows written or deleted since the version are this "
        "share of its rows; None: only on request",
    )
    retrain_at: float = Field(
        0.5,
        gt=0,
        description="train centroids and codebooks again when the documents written since the last training "
        "are this share of the index: each write pays for a bounded number of trainings",
    )
    keep_versions: int = Field(
        2, ge=1, description="previous versions that are kept with their logs, for a rollback"
    )
    keep_documents: bool = Field(
        False,
        description="keep all records of the log, with the complete documents of the requests: a change of "
        "the model (scalingnote migrate) encodes them again",
    )


LIVE_DEFAULTS = LiveConfig()


class SearchConfig(Config):
    """Settings of the engine that runs the searches of the service."""

    backend: Literal["own", "qdrant", "milvus"] = Field(
        "own",
        description="own: the index of the run; else a database that `scalingnote export vectors` filled "
        "from the run",
    )
    url: str | None = Field(
        None,
        description="address of the database; a folder of Qdrant's local mode or a file NAME.db of Milvus "
        "Lite, which only one process can open",
    )
    collection: str = Field(
        "scalingnote",
        description="collection in the database; {version} is replaced by the name of the index version",
    )
    ef: int | None = Field(
        None,
        ge=1,
        description="candidates that the graph of the database keeps for a query: hnsw_ef of Qdrant, ef of "
        "Milvus; None: the setting of the database",
    )

    @field_validator("url")
    @classmethod
    def _absolute(cls, url: str | None) -> str | None:
        """Make a path absolute, because replicas have other working directories than the command."""
        return url if url is None or "://" in url else os.path.abspath(url)

    @model_validator(mode="after")
    def _consistent(self) -> "SearchConfig":
        if self.backend != "own" and self.url is None:
            raise ValueError(
                f"backend {self.backend} needs a url: set that of its server, or a path on this machine"
            )
        if self.backend == "own" and (self.url is not None or self.ef is not None):
            raise ValueError("url and ef are settings of a database: set backend to qdrant or milvus")
        return self

    @property
    def is_local(self) -> bool:
        """Whether the database consists of files that only one process can open."""
        return self.url is not None and "://" not in self.url

    def collection_of(self, version: str) -> str:
        """Return the name of the collection of an index version."""
        return self.collection.replace("{version}", version)
