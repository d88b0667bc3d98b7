"""Knobs of stage II, query-based knowledge distillation (ScalingNote, Eq. 13-15 and appendix A)."""

from pydantic import Field

from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.train.config import Optimizer, Schedule


class DistillConfig(Schedule):
    """A student query tower learns the teacher's query embeddings; no document is read."""

    student: TowerConfig = TowerConfig(backbone=Scratch(architecture="bert"), max_length=32)
    inherit_tokens: bool = Field(
        True,
        description="a student from scratch starts with the teacher's tokenizer and token embeddings, "
        "whatever its own `vocabulary` says; "
        "false: it learns a tokenizer of its own from the training queries",
    )
    cosine_weight: float = Field(1.0, ge=0, description="lambda of Eq. 15")
    optimizer: Optimizer = Optimizer(peak_lr=1e-3)
    global_batch: int = Field(512, ge=2, description="queries per step over all ranks; 40,000 in the paper")
    epochs: float = Field(10.0, ge=0, description="passes over the queries; 100 in the paper")
