"""Term weights of documents: what each token of the vocabulary says about one (LightRetriever, 2.3).

    hidden   [tokens, hidden]     states of all rows, laid end to end
    places   [rows, longest]      which of them stand in a row; -1 is none
    logits   project to the vocabulary, then the maximum over a row: fused, piece by piece
    weights  [rows, vocabulary]   log(1 + relu(logit)), non-negative

The maximum comes before the other two, which never fall (Eq. 12 of its appendix A.5), so nothing is ever as
large as tokens x vocabulary.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

# A piece of logits has at most so many numbers: 32 MB in float32.
BUDGET = 1 << 23
_TOKENS, _POSITIONS = 2048, 256  # of a piece: enough for a matrix product at full speed
_COLUMNS = 16_384  # of the vocabulary at once, in the backward pass


class SparseHead(nn.Module):
    """States to term weights by a language-model head: one of its own, or the input table's rows."""

    def __init__(self, own: Float[Tensor, "vocabulary hidden"] | None) -> None:
        super().__init__()
        self.own: nn.Linear | None = None
        if own is not None:
            self.own = nn.Linear(own.shape[1], own.shape[0], bias=False, device="meta")
            self.own.weight = nn.Parameter(own)

    def forward(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        places: Int[Tensor, "rows longest"],
        table: nn.Parameter,
    ) -> Float[Tensor, "rows vocabulary"]:
        """Term weights of rows; a row without places has none. `table` is the head where it has no own."""
        weight = _whole(table if self.own is None else self.own.weight)
        return torch.log1p(torch.relu(project_then_max(hidden, places, weight)))


def project_then_max(
    hidden: Float[Tensor, "tokens hidden"],
    places: Int[Tensor, "rows longest"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, " vocabulary"] | None = None,
    *,
    budget: int = BUDGET,
) -> Float[Tensor, "rows vocabulary"]:
    """The maximum of each logit over a row's places, in float32 at least; -inf where a row has none.

    Of equal logits the first place's is the maximum, and alone gets the gradient.
    """
    out: Tensor = _ProjectThenMax.apply(hidden, places, weight, bias, budget)  # type: ignore[no-untyped-call]
    return out


def strongest(
    weights: Float[Tensor, "rows vocabulary"], k: int
) -> tuple[Int[Tensor, "rows k"], Float[Tensor, "rows k"]]:
    """The k terms of largest weight of each row, and their weights; some of those may be 0."""
    found = weights.topk(min(k, weights.shape[1]), dim=1)
    return found.indices, found.values


class _ProjectThenMax(torch.autograd.Function):
    """Keeps which place won, 2 or 4 bytes a term; the backward pass is two products with a sparse matrix."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, places: Tensor, weight: Tensor, bias: Tensor | None, budget: int
    ) -> Tensor:
        device = hidden.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        (rows, longest), vocabulary = places.shape, len(weight)
        best = torch.full((rows, vocabulary), -torch.inf, dtype=wide, device=hidden.device)
        small = torch.int16 if longest <= torch.iinfo(torch.int16).max else torch.int32
        winner = torch.zeros((rows, vocabulary), dtype=small, device=hidden.device)
        span = min(longest, _POSITIONS)
        height = max(_TOKENS // span, 1)
        width = max(budget // (height * span), 1)
        for left in range(0, vocabulary, width):
            part = slice(left, left + width)
            columns = weight[part].to(low).T
            for top in range(0, rows, height):
                for first in range(0, longest, span):
                    chosen = places[top : top + height, first : first + span]
                    logits = hidden[chosen.clamp(min=0)].to(low) @ columns
                    if bias is not None:
                        logits += bias[part].to(low)
                    logits.masked_fill_((chosen < 0)[:, :, None], -torch.inf)
                    values, at = logits.max(dim=1)
                    block = (slice(top, top + height), part)
                    better = values > best[block]
                    best[block] = torch.where(better, values.to(wide), best[block])
                    winner[block] = torch.where(better, (at + first).to(small), winner[block])
        ctx.save_for_backward(hidden, places, weight, winner)
        ctx.biased = bias is not None
        return best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, places, weight, winner = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(grad.dtype)
            to_hidden = torch.zeros_like(states) if of_hidden else None
            to_weight = torch.zeros(weight.shape, dtype=grad.dtype, device=grad.device) if of_weight else None
            for left in range(0, len(weight), _COLUMNS):
                part = slice(left, left + _COLUMNS)
                piece = grad[:, part]
                row, column = piece.nonzero(as_tuple=True)
                token = places[row, winner[:, part][row, column].long()]
                kept = token >= 0
                row, column, token = row[kept], column[kept], token[kept]
                # Adding up rows of [terms, hidden] by index_add_ was 14 times slower (two cores).
                shares = torch.sparse_coo_tensor(
                    torch.stack([token, column]),
                    piece[row, column],
                    (len(states), piece.shape[1]),
                    check_invariants=False,
                )
                if to_hidden is not None:
                    to_hidden += torch.sparse.mm(shares, weight[part].to(grad.dtype))
                if to_weight is not None:
                    to_weight[part] = torch.sparse.mm(shares.t(), states)
        return (
            None if to_hidden is None else to_hidden.to(hidden.dtype),
            None,
            None if to_weight is None else to_weight.to(weight.dtype),
            grad.sum(0) if ctx.biased else None,
            None,
        )


def _whole(weight: Tensor) -> Tensor:
    """A weight that fsdp2 holds in shards, gathered; its gradient is averaged over ranks like the others."""
    if isinstance(weight, DTensor):
        whole: Tensor = weight.full_tensor(grad_placements=[Partial("avg")])
        return whole
    return weight
