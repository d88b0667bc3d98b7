"""Margin loss on hard negatives."""

import torch
from jaxtyping import Float
from torch import Tensor


def margin_loss(
    cosines: Float[Tensor, "queries group"],
    *,
    margin: float,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean of max(0, margin - s(q, d+) + s(q, d-)) over queries and their hard negatives (Eq. 9).

    `cosines` are a query's with its positive, then with each of its at least one hard negatives.
    `weights` multiply the queries' losses before the mean.
    """
    right, wrong = cosines[:, :1], cosines[:, 1:]
    losses = torch.relu(margin - right + wrong)
    return (losses if weights is None else losses * weights[:, None]).mean()
