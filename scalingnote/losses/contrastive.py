"""In-batch contrastive loss with candidates that must not count as negatives left out."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def info_nce(
    queries: Float[Tensor, "queries dim"],
    candidates: Float[Tensor, "docs dim"],
    *,
    positives: Int[Tensor, " queries"],
    temperature: float | Float[Tensor, ""],
    ignore: Bool[Tensor, "queries docs"] | None = None,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """Mean cross entropy of each query's positive against all candidates (ScalingNote, Eq. 5).

    Both sides are unit vectors, so the score is the cosine. `positives[i]` is the column of query i's
    positive; `ignore` marks candidates left out of a row's denominator (the positive never is).
    Eq. 6 is the same with the sides exchanged. `weights` multiply the rows' losses before the mean.
    """
    shares = torch.ones_like(queries[:, 0]) if weights is None else weights.to(queries.dtype)
    # Dividing the small side, and before anything is masked: -inf / temperature has no gradient.
    scaled = queries / temperature
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        scaled, candidates, positives, ignore, shares / len(queries)
    )
    return loss


def cross_entropy(
    scores: Float[Tensor, "queries docs"],
    *,
    positives: Int[Tensor, " queries"],
    ignore: Bool[Tensor, "queries docs"] | None = None,
    weights: Float[Tensor, " queries"] | None = None,
) -> Float[Tensor, ""]:
    """The same of scores, already over their temperature, that are no products of embeddings."""
    own = positives[:, None]
    if ignore is not None:
        scores = scores.masked_fill(ignore.scatter(1, own, False), -torch.inf)
    losses = -scores.log_softmax(1).gather(1, own).squeeze(1)
    return (losses if weights is None else losses * weights).mean()


class _CrossEntropy(torch.autograd.Function):
    """Weighted sum of the rows' cross entropies. What it keeps for the backward pass are the gradients of
    its two narrow inputs, never the scores between them: memory stays flat over views and prefixes.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor, positives: Tensor, ignore: Tensor | None, weights: Tensor
    ) -> Tensor:
        scores = rows @ columns.T
        own = positives[:, None]
        if ignore is not None:
            right = scores.gather(1, own)
            scores.masked_fill_(ignore, -torch.inf).scatter_(1, own, right)
        log_shares = scores.log_softmax(1)
        loss = -(weights @ log_shares.gather(1, own).squeeze(1))
        if any(ctx.needs_input_grad):
            # The softmax, less 1 at the positive.
            errors = log_shares.exp_().scatter_add_(1, own, -torch.ones_like(own, dtype=rows.dtype))
            errors *= weights[:, None]
            ctx.save_for_backward(errors @ columns, errors.T @ rows)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, of_columns = ctx.saved_tensors
        return grad * of_rows, grad * of_columns, None, None, None
