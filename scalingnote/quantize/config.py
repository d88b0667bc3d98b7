"""Knobs of the semantic IDs."""

from pydantic import Field, model_validator

from scalingnote.config import Config, Resources


class QuantizeConfig(Config):
    """How embeddings become semantic IDs by residual K-means."""

    levels: int = Field(6, ge=1, le=16, description="codes per document; ScalingNote uses 6")
    codes: int = Field(256, ge=2, le=65_536, description="K: codebook size of every level; more is finer")
    sample_documents: int = Field(
        100_000, ge=2, description="documents the codebooks are fitted on, drawn evenly from the corpus"
    )
    iterations: int = Field(10, ge=1, description="K-means passes over the sample, per level")
    seed: int = Field(0, ge=0, description="of the sample and of the initial centroids")
    resources: Resources = Field(Resources(), description="actors that code the documents")

    @model_validator(mode="after")
    def _sample_fills_the_codebook(self) -> "QuantizeConfig":
        if self.sample_documents < self.codes:
            raise ValueError(
                f"sample_documents={self.sample_documents} cannot fit codes={self.codes}: "
                "raise the first or lower the second"
            )
        return self
