"""Knobs of stage I; the defaults of the losses are ScalingNote's, section 4.2 and appendix A."""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.config import Config, Resources
from scalingnote.models.config import TowerConfig


class Optimizer(Config):
    """AdamW with linear warm-up and linear decay to zero."""

    peak_lr: float = Field(3e-4, gt=0, description="3e-6 for a 7B backbone (appendix A)")
    warmup: float = Field(0.1, ge=0, lt=1, description="share of the steps")
    weight_decay: float = Field(1e-3, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip: float = Field(1.0, gt=0, description="largest global gradient norm")


class Losses(Config):
    """L = L_con + alpha * L_hard, on every view and every Matryoshka prefix (Eq. 5-12)."""

    temperature: float = Field(0.05, gt=0, lt=1, description="tau; not given in the paper")
    denominator: Literal["positives_only", "positives_and_negatives"] = Field(
        "positives_and_negatives",
        description="whether a query's softmax also sees the gathered hard negatives",
    )
    margin: float = Field(0.2, ge=0)
    alpha: float = Field(0.5, ge=0, description="weight of the margin loss")
    matryoshka: tuple[int, ...] = Field((16, 32, 64, 128), description="prefix lengths, all weighted")
    matryoshka_weights: tuple[float, ...] | None = Field(None, description="w^m; None means all 1")


class Schedule(Config):
    """How long and how carefully to train; what both stages have in common."""

    optimizer: Optimizer = Optimizer()
    global_batch: int = Field(
        128, ge=2, description="rows per step over all ranks; 480 and 40,000 in the paper"
    )
    epochs: float = Field(1.0, ge=0, description="passes over the rows; 0 leaves the weights untrained")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the hardware multiplies it faster, else float32"
    )
    checkpoint_every: int = Field(200, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1)
    max_failures: int = Field(2, ge=0, description="restarts of the worker group before giving up")
    seed: int = 0
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _divides(self) -> "Schedule":
        if self.global_batch % self.resources.workers:
            raise ValueError(
                f"global_batch {self.global_batch} does not divide over {self.resources.workers} workers"
            )
        return self


class TrainConfig(Schedule):
    """Stage I: both towers, trained together."""

    query: TowerConfig = TowerConfig(max_length=32)
    document: TowerConfig = TowerConfig(max_length=96)
    dim: int = Field(128, ge=2, description="embedding width after the projection")
    losses: Losses = Losses()

    @model_validator(mode="after")
    def _fits(self) -> "TrainConfig":
        losses = self.losses
        if max(losses.matryoshka) > self.dim:
            raise ValueError(f"matryoshka prefix {max(losses.matryoshka)} exceeds dim {self.dim}")
        if losses.matryoshka_weights and len(losses.matryoshka_weights) != len(losses.matryoshka):
            raise ValueError("matryoshka_weights needs one weight per prefix")
        return self
