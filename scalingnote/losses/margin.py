"""Margin loss on hard negatives."""

import torch
from jaxtyping import Float
from torch import Tensor


def margin_loss(
    queries: Float[Tensor, "queries dim"],
    positives: Float[Tensor, "queries dim"],
    negatives: Float[Tensor, "queries negatives dim"],
    *,
    margin: float,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean of max(0, margin - s(q, d+) + s(q, d-)) over queries and their hard negatives (Eq. 9).

    All vectors are of length 1. `weights` multiply the queries' losses before the mean.
    """
    right = (queries * positives).sum(-1, keepdim=True)
    wrong = torch.einsum("qd,qnd->qn", queries, negatives)
    losses = torch.relu(margin - right + wrong)
    return (losses if weights is None else losses * weights[:, None]).mean()
