"""Matryoshka prefixes: every loss is computed on the first m dimensions, for each m."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def over_prefixes(
    loss: Callable[..., Float[Tensor, ""]],
    *embeddings: Float[Tensor, "..."],
    dims: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Float[Tensor, ""]:
    """Weighted sum of `loss` over prefixes, each re-normalised to unit length (Eq. 7 and 10).

    `embeddings` are passed to `loss` positionally after cutting their last axis; `weights` default to 1.
    """
    total = torch.zeros((), device=embeddings[0].device)
    for dim, weight in zip(dims, weights or [1.0] * len(dims), strict=True):
        cut = [F.normalize(embedding[..., :dim], dim=-1) for embedding in embeddings]
        total = total + weight * loss(*cut)
    return total
