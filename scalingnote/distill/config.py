"""Knobs of stage II, query-based knowledge distillation (ScalingNote, Eq. 13-15 and appendix A)."""

from typing import Literal

from pydantic import Field, model_validator

from scalingnote.config import Config, Resources
from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.train.config import Optimizer


class DistillConfig(Config):
    """A student query tower learns the teacher's query embeddings; no document is read."""

    student: TowerConfig = TowerConfig(backbone=Scratch(architecture="bert"), max_length=32)
    cosine_weight: float = Field(1.0, ge=0, description="lambda of Eq. 15")
    optimizer: Optimizer = Optimizer(peak_lr=1e-3)
    global_batch: int = Field(512, ge=2, description="queries per step over all ranks; 40,000 in the paper")
    epochs: float = Field(10.0, ge=0, description="passes over the queries; 100 in the paper")
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_every: int = Field(500, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1)
    max_failures: int = Field(2, ge=0)
    seed: int = 0
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _fits(self) -> "DistillConfig":
        if self.global_batch % self.resources.workers:
            raise ValueError(
                f"global_batch {self.global_batch} does not divide over {self.resources.workers} workers"
            )
        return self
