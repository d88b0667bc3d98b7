"""Settings of BM25 as sparse vectors."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config


class BM25Config(Config):
    """Term weights of documents by BM25 (Lucene's variant), for hybrid search with embeddings."""

    k1: float = Field(1.2, ge=0, description="term saturation; Lucene's default")
    b: float = Field(0.75, ge=0, le=1, description="length normalisation; Lucene's default")
    max_vocabulary: int = Field(
        1_000_000,
        ge=1,
        le=1 << 24,
        description="number of words to index, the most frequent ones; each takes about 100 bytes of memory "
        "in every query encoder; rarer words are not found",
    )
    analyzer: Literal[2] = Field(
        2, description="version of the rule that splits texts into words; another one is another artifact"
    )
    query_terms: int = Field(512, ge=1, description="maximum terms of a query; later ones are ignored")
