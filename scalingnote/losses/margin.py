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
) -> Float[Tensor, ""]:
    """Mean of max(0, margin - s(q, d+) + s(q, d-)) over queries and their hard negatives (Eq. 9).

    All inputs are unit vectors.
    """
    right = (queries * positives).sum(-1, keepdim=True)
    wrong = torch.einsum("qd,qnd->qn", queries, negatives)
    return torch.relu(margin - right + wrong).mean()
