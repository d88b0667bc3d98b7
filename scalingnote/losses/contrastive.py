"""In-batch contrastive loss with candidates that must not count as negatives left out."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def info_nce(
    queries: Float[Tensor, "queries dim"],
    candidates: Float[Tensor, "docs dim"],
    *,
    positives: Int[Tensor, " queries"],
    ignore: Bool[Tensor, "queries docs"],
    temperature: float,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean cross entropy of each query's positive against all candidates (ScalingNote, Eq. 5).

    Both sides are unit vectors, so the score is the cosine. `positives[i]` is the column of query i's
    positive; `ignore` marks candidates left out of a row's denominator (the positive never is).
    Eq. 6 is the same with the sides exchanged. `weights` multiply the rows' losses before the mean.
    """
    scores = queries @ candidates.T / temperature
    keep = torch.zeros_like(ignore).scatter_(1, positives[:, None], True)
    scores = scores.masked_fill(ignore & ~keep, -torch.inf)
    losses = F.cross_entropy(scores, positives, reduction="none")
    return (losses if weights is None else losses * weights).mean()
