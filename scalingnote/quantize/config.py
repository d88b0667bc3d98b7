"""Knobs of the semantic IDs."""

from pydantic import Field, model_validator

from scalingnote.core.config import Config, Resources


class QuantizeConfig(Config):
    """How embeddings become semantic IDs by residual K-means."""

    levels: int = Field(6, ge=1, le=16, description="codes per document; ScalingNote uses 6")
    codes: int = Field(256, ge=2, le=65_536, description="K: codebook size of every level; more is finer")
    sample_documents: int = Field(
        100_000,
        ge=2,
        description="documents the codebooks are fitted on, drawn evenly; nine of ten of the corpus at most",
    )
    beam: int = Field(
        1, ge=1, le=64, description="partial code tuples kept while a document is coded; 1: the nearest codes"
    )
    codebooks: str | None = Field(
        None, description="an earlier semantic_ids artifact whose codebooks and IDs stay; null: fit"
    )
    refit_above: float = Field(
        1.1,
        gt=1,
        description="propose a refit when new documents leave over this much more than the fitted; "
        "the last of 6 levels takes off about a tenth, so above it they are described as by 5",
    )
    resources: Resources = Field(Resources(), description="actors that code the documents")

    @model_validator(mode="after")
    def _sample_fills_the_codebook(self) -> "QuantizeConfig":
        if self.sample_documents < self.codes:
            raise ValueError(
                f"sample_documents={self.sample_documents} cannot fit codes={self.codes}: raise the first or "
                "lower the second"
            )
        return self
