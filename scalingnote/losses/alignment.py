"""A cheap query learns how a dear one ranks the same candidates."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def align(
    queries: Float[Tensor, "queries dim"],
    candidates: Float[Tensor, "docs dim"],
    *,
    teacher: Float[Tensor, "queries docs"],
    temperature: float | Float[Tensor, ""],
    weights: Float[Tensor, " queries"],
) -> Float[Tensor, ""]:
    """Mean of KL(teacher || softmax of the queries' cosines) over queries (LightRetriever, Eq. 5).

    `teacher` is the logarithm of what it gives each candidate; it gets no gradient.
    """
    scaled = queries / temperature
    loss: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        scaled, candidates, teacher.detach(), weights.to(queries.dtype) / len(queries)
    )
    return loss


def align_scores(
    scores: Float[Tensor, "queries docs"],
    *,
    teacher: Float[Tensor, "queries docs"],
    weights: Float[Tensor, " queries"],
) -> Float[Tensor, ""]:
    """The same for scores, already over their temperature, that are no products of embeddings."""
    target = teacher.detach()
    losses = (target.exp() * (target - scores.log_softmax(1))).sum(1)
    return (losses * weights).mean()


class _Divergence(torch.autograd.Function):
    """Like the cross entropy of the contrastive loss, it keeps gradients of its narrow inputs alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        log_shares = (rows @ columns.T).log_softmax(1)
        shares = target.exp()
        loss = weights @ (shares * (target - log_shares)).sum(1)
        if any(ctx.needs_input_grad):
            errors = log_shares.exp_().sub_(shares)
            errors *= weights[:, None]
            ctx.save_for_backward(errors @ columns, errors.T @ rows)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, of_columns = ctx.saved_tensors
        return grad * of_rows, grad * of_columns, None, None
