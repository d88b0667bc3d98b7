"""Operations of one training pair through both towers: what a FLOPs budget is divided by."""

from dataclasses import dataclass

from scalingnote.models import flops
from scalingnote.models.config import Lora
from scalingnote.models.flops import Shape, Work


@dataclass(frozen=True)
class Side:
    """What one tower reads of a training pair."""

    shape: Shape
    tokens: float  # of a row
    rows: int = 1  # 1 query; 1 positive and the hard negatives
    pooled: int = 1  # states of a row that become embeddings
    lora: Lora | None = None  # None: all weights learn


def of_pair(
    query: Side, document: Side, *, dim: int, checkpointing: bool = False, grad_cache: bool = False
) -> Work:
    """A query, its positive and its hard negatives, forward and backward; the loss left out."""
    work = Work(0.0, 0.0)
    for side in (query, document):
        of_row = flops.row(
            side.shape,
            tokens=side.tokens,
            pooled=side.pooled,
            dim=dim,
            lora=side.lora,
            checkpointing=checkpointing,
            grad_cache=grad_cache,
        )
        work += of_row.times(side.rows)
    return work


def per_parameter(query: Side, document: Side, *, dim: int, checkpointing: bool = False) -> float:
    """The k of budget = k·N·D: a pair's operations over N, the document tower's parameters outside tables."""
    work = of_pair(query, document, dim=dim, checkpointing=checkpointing)
    return work.total / document.shape.non_embedding_parameters
