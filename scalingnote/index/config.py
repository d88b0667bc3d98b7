"""Knobs of the index."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config, Resources


class IndexConfig(Config):
    """How embeddings become shards of an IVFPQ index; `nlist`, `nprobe`, `m` and `nbits` as in faiss."""

    shards: int = Field(2, ge=1, description="disjoint slices of the corpus, each searched on its own")
    nlist: int | None = Field(
        None, ge=1, description="inverted lists; None: 4*sqrt(documents), at least 39 training documents each"
    )
    m: int | None = Field(
        None, ge=1, description="sub-quantizers, divides dim; None: one per 4 dimensions (32 at 128)"
    )
    nbits: int = Field(8, ge=1, le=8, description="bits per sub-quantizer: m*nbits/8 bytes per document")
    refine: Literal["none", "sq8", "flat"] = Field(
        "sq8",
        description="vectors kept to re-rank candidates: PQ codes alone cap recall@10 at about 0.8, whatever "
        "nprobe; 8-bit scalars (dim bytes per document) lift it to 0.98, floats (4*dim) make scores exact",
    )
    refine_factor: int = Field(4, ge=1, description="candidates re-ranked per result asked for")
    nprobe: int = Field(16, ge=1, description="inverted lists searched, unless the search says otherwise")
    train_documents: int = Field(
        200_000, ge=1, description="documents the quantizers are trained on, drawn evenly from the corpus"
    )
    iterations: int = Field(10, ge=1, description="K-means passes over the inverted lists' centroids")
    snippet_chars: int = Field(240, ge=0, description="opening of the content kept for the result list")
    seed: int = Field(0, ge=0, description="of the sample and of the initial centroids")
    resources: Resources = Field(Resources(), description="tasks that fill the shards")
