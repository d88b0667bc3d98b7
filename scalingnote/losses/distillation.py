"""Distillation losses: the student's query embedding against the teacher's."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def qkd(
    teacher: Float[Tensor, "queries dim"],
    student: Float[Tensor, "queries dim"],
    *,
    cosine_weight: float,
) -> Float[Tensor, ""]:
    """Query-based knowledge distillation (ScalingNote, Eq. 15): mean of ||q - q'||^2 - lambda cos(q, q').

    Neither side is normalised: the squared distance also carries the magnitude.
    """
    distance = (teacher - student).pow(2).sum(-1)
    return (distance - cosine_weight * F.cosine_similarity(teacher, student, dim=-1)).mean()
