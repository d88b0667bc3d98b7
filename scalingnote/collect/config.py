"""Knobs of triplet collection: which evidence becomes training data, and how hard its negatives are."""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.config import Config, Resources


class CollectConfig(Config):
    """Click pairs and relevance pairs (ScalingNote, section 4.1), one-hop."""

    sources: tuple[Literal["click", "relevance"], ...] = Field(
        ("click", "relevance"), min_length=1, description="'click' needs a dataset with impressions"
    )
    num_negatives: int = Field(1, ge=1, description="hard negatives per triplet; 1 in the paper")
    min_clicks: int = Field(1, ge=1, description="clicks a document needs to be a query's positive")
    top_k: int = Field(10, ge=1, description="ranks up to K are dropped as likely false negatives")
    top_t: int = Field(50, ge=2, description="hard negatives are drawn from ranks K+1 to T")
    bm25_k1: float = Field(1.2, ge=0, description="ranking model of datasets without scores: saturation")
    bm25_b: float = Field(0.75, ge=0, le=1, description="and its length normalisation")
    validation_fraction: float = Field(0.1, ge=0, lt=1, description="share of the queries; 9:1 in the paper")
    parts: int = Field(8, ge=1, description="files of the artifact; a query lies in one of them, by hash")
    seed: int = Field(0, description="of the draws and of the validation split")
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _ranks_in_order(self) -> "CollectConfig":
        if self.top_t < self.top_k + self.num_negatives:
            raise ValueError(
                f"top_t={self.top_t} leaves fewer than num_negatives={self.num_negatives} ranks above "
                f"top_k={self.top_k}: raise top_t"
            )
        return self
