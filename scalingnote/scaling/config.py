"""What an estimate assumes of the hardware and the data, where the run's config does not say."""

from typing import Literal

from pydantic import Field

from scalingnote.config import Config

GpuName = Literal["H200", "H100", "A100", "L40S"]


class Assumptions(Config):
    """One GPU per training worker, all of a kind."""

    gpu: GpuName = Field("H100", description="kind of GPU")
    mfu: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the GPU's peak that is reached, repeated passes counted as work",
    )
    network: float = Field(
        400.0, gt=0, description="GB/s in and out of a node of 8 GPUs; 400 is eight cards of 400 Gb/s"
    )
    rows: int | None = Field(None, ge=1, description="training rows; null: steps and days are left out")
    negatives: int = Field(1, ge=0, description="hard negatives of a row")
    query_tokens: float | None = Field(None, gt=0, description="mean length; null: max_length of the tower")
    document_tokens: float | None = Field(
        None, gt=0, description="mean length; null: max_length of the tower"
    )
