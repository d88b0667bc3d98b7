"""Distillation losses: what a student says against what its teacher says, embeddings or scores.

Every loss is a mean over queries; `weights` multiply the rows before it, and the mean is still over all rows.
One-hot labels (EmbedDistill, Eq. 9) need no file of their own: that is
:func:`scalingnote.losses.contrastive.info_nce`.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


def qkd(
    teacher: Float[Tensor, "queries dim"],
    student: Float[Tensor, "queries dim"],
    *,
    cosine_weight: float,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Query-based knowledge distillation (ScalingNote, Eq. 15): mean of ||q - q'||^2 - lambda cos(q, q').

    Neither side is normalised: the squared distance also carries the magnitude.
    """
    distance = (teacher - student).pow(2).sum(-1)
    return _mean(distance - cosine_weight * F.cosine_similarity(teacher, student, dim=-1), weights)


def cosine(
    teacher: Float[Tensor, "queries dim"],
    student: Float[Tensor, "queries dim"],
    *,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean of 1 - cos(t, s): half the squared distance of the unit vectors (LEAF, arXiv 2509.12539).

    The right loss where documents are searched by cosine: the length of a query changes no order.
    """
    return _mean(1 - F.cosine_similarity(teacher, student, dim=-1), weights)


def matching(
    teacher: Float[Tensor, "rows dim"],
    student: Float[Tensor, "rows dim"],
    *,
    weights: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, ""]:
    """Mean of ||t - s||, the norm itself and not its square (EmbedDistill, Eq. 7 of queries, 8 of documents).

    Its gradient has length 1 wherever the two differ: a query far off pulls no harder than one close by.
    """
    return _mean(torch.linalg.vector_norm(teacher - student, dim=-1), weights)


def softmax_scores(
    student: Float[Tensor, "queries docs"],
    teacher: Float[Tensor, "queries docs"],
    *,
    scored: Bool[Tensor, "queries docs"] | None = None,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean cross entropy of the student's softmax over a query's documents from the teacher's (Eq. 11).

    `scored` says which documents are candidates of a query; a query without any adds nothing.
    """
    if scored is None:
        scored = torch.ones_like(student, dtype=torch.bool)
    # Not -inf, which has no softmax where it stands alone: a query may lack candidates altogether.
    lowest = torch.finfo(student.dtype).min
    target = teacher.masked_fill(~scored, lowest).softmax(-1)
    shares = student.masked_fill(~scored, lowest).log_softmax(-1)
    return _mean(-(target * shares.masked_fill(~scored, 0.0)).sum(-1), weights)


def bce_scores(
    student: Float[Tensor, "queries docs"],
    teacher: Float[Tensor, "queries docs"],
    *,
    scored: Bool[Tensor, "queries docs"] | None = None,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over queries of the sum over documents of the binary cross entropy (Eq. 12)."""
    losses = F.binary_cross_entropy_with_logits(student, _given(teacher, scored).sigmoid(), reduction="none")
    return _mean(_sum(losses, scored), weights)


def mse_scores(
    student: Float[Tensor, "queries docs"],
    teacher: Float[Tensor, "queries docs"],
    *,
    scored: Bool[Tensor, "queries docs"] | None = None,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean over queries of the sum over documents of the squared difference (Eq. 13)."""
    return _mean(_sum((_given(teacher, scored) - student).pow(2), scored), weights)


SCORES: Mapping[Literal["softmax", "bce", "mse"], Callable[..., Float[Tensor, ""]]] = {
    "softmax": softmax_scores,
    "bce": bce_scores,
    "mse": mse_scores,
}


def _given(teacher: Tensor, scored: Tensor | None) -> Tensor:
    """Scores with zeros where there are none: they may be NaN, and NaN times 0 is NaN, in gradients too."""
    return teacher if scored is None else teacher.masked_fill(~scored, 0.0)


def _sum(losses: Tensor, scored: Tensor | None) -> Tensor:
    return (losses if scored is None else losses.masked_fill(~scored, 0.0)).sum(-1)


def _mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    return (losses if weights is None else losses * weights).mean()
