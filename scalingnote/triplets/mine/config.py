"""Settings of hard-negative mining: ranking, rank window, and the bound on a negative's score."""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.core.config import Config, Resources


class MineConfig(Config):
    """Hard negatives by the last round's dual encoder, or by run files (ANCE, Xiong et al. 2021)."""

    runs: tuple[str, ...] = Field(
        (),
        description="TREC run files over the training queries (dense, BM25, hybrid); "
        "none: search with the last round's dual encoder. A finished stage is recognised by their paths",
    )
    runs_sha256: tuple[str, ...] = Field(
        (),
        description="checksums of the files in `runs`: other contents are refused. Without any, they are set "
        "when the stage starts, so that work on files with other contents is not resumed",
    )
    search: Literal["exact", "index"] = Field(
        "exact",
        description="compare every query with every document, or with those in the nearest lists of an "
        "inverted index of each shard: several times as fast for many queries, and misses about 1 % of them",
    )
    nprobe: int = Field(
        32, ge=1, description="lists of a shard's index that are searched; it has √(its documents) of them"
    )
    first_rank: int = Field(11, ge=1, description="ranks before it are dropped as likely false negatives")
    last_rank: int = Field(100, ge=1, description="negatives are drawn from ranks first_rank to last_rank")
    num_negatives: int = Field(1, ge=1, description="hard negatives per triplet")
    max_score_ratio: float | None = Field(
        0.95, gt=0, description="a negative scores at most this many times the positive's score; null: any"
    )
    max_documents: int | None = Field(
        None,
        ge=1,
        description="number of training documents to search, about, by a seeded hash; null: all. Positives "
        "are scored in any case",
    )
    token_budget: int = Field(8192, ge=64, description="padded tokens per forward pass")
    seed: int = Field(0, description="of the draws")
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _window_holds_enough(self) -> "MineConfig":
        if self.last_rank < self.first_rank + self.num_negatives - 1:
            raise ValueError(
                f"ranks {self.first_rank} to {self.last_rank} hold fewer than num_negatives="
                f"{self.num_negatives}: raise last_rank"
            )
        return self
