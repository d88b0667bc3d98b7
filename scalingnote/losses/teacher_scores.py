"""Learning from a teacher's scores of a query's documents: its positive, then its hard negatives.

Rows that no teacher scored hold NaN. They add nothing, and the mean is still over all rows: a scored row
weighs the same whatever else is in its batch, or on its rank.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def kl(
    student: Float[Tensor, "queries group"],
    teacher: Float[Tensor, "queries group"],
    *,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean of KL(softmax(teacher) || softmax(student)) over queries; both are logits."""
    given, scored = _given(teacher)
    target = given.log_softmax(-1)
    losses = (target.exp() * (target - student.log_softmax(-1))).sum(-1)
    return _mean(losses, scored, weights)


def margin_mse(
    student: Float[Tensor, "queries group"],
    teacher: Float[Tensor, "queries group"],
    *,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean square of the difference of margins (s+ - s-) between student and teacher, over negatives."""
    given, scored = _given(teacher)
    error = (student[:, :1] - student[:, 1:]) - (given[:, :1] - given[:, 1:])
    return _mean(error.pow(2).mean(-1), scored, weights)


def scored_rows(teacher: Float[Tensor, "queries group"]) -> Bool[Tensor, " queries"]:
    """Rows with a score for every document."""
    return teacher.isfinite().all(-1)


def _given(teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Scores with zeros in rows that have none (NaN times 0 is NaN, in gradients too), and which have any."""
    scored = scored_rows(teacher)
    return torch.where(scored[:, None], teacher, 0.0), scored


def _mean(losses: Tensor, scored: Tensor, weights: Tensor | None) -> Tensor:
    kept = losses * scored
    return (kept if weights is None else kept * weights).mean()
