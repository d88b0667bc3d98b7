"""Settings of the semantic IDs."""

from pydantic import Field, model_validator

from scalingnote.core.config import Config, Resources


class QuantizeConfig(Config):
    """Settings of residual K-means, which makes semantic IDs of embeddings."""

    levels: int = Field(6, ge=1, le=16, description="codes per document; ScalingNote uses 6")
    codes: int = Field(256, ge=2, le=65_536, description="K: codebook size of every level; more is finer")
    sample_documents: int = Field(
        100_000,
        ge=2,
        description="documents that the codebooks are fitted on, drawn evenly; at most 9/10 of the corpus",
    )
    beam: int = Field(
        1, ge=1, le=64, description="partial code tuples kept while a document is coded; 1: the nearest code"
    )
    codebooks: str | None = Field(
        None, description="an earlier semantic_ids artifact whose codebooks and IDs are kept; null: fit"
    )
    refit_above: float = Field(
        1.1,
        gt=1,
        description="propose a refit when the residual energy of new documents is more than this multiple "
        "of the fitted documents' energy; the last of 6 levels removes about a tenth, so above 1.1 the codes "
        "describe new documents only as well as 5 levels describe the fitted ones",
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
