"""All-gather that keeps gradients, so that every rank's negatives train every rank's towers.

Each rank computes the loss of its *own* queries against *everybody's* documents. In the backward pass
the gradients all ranks hold for one rank's embeddings are summed and handed back to it; data-parallel
averaging then gives exactly the gradient of one process that holds the whole batch, with no factor to
correct (tested for 1 to 4 ranks).

Ranks may bring different numbers of rows. With N rows on W ranks, n of them here, the loss of a rank is its
mean times W n / N: the mean over ranks is then the mean over all rows, and its gradient the global one.
Weights of rows are factors within that mean, divided by the number of rows and not by their sum, so they
need no exchange.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor


def world_size() -> int:
    """Number of training processes; 1 outside of torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number."""
    return dist.get_rank() if dist.is_initialized() else 0


@dataclass(frozen=True)
class Shares:
    """Rows of a global batch that each rank brings, in rank order; at least one each."""

    rows: tuple[int, ...]

    @property
    def start(self) -> int:
        """Where this rank's rows stand among those of all ranks."""
        return sum(self.rows[: rank()])

    @property
    def own(self) -> int:
        """How many this rank brings."""
        return self.rows[rank()]

    @property
    def weight(self) -> float:
        """Factor of a mean over this rank's rows; 1 where all ranks bring the same."""
        return self.own * len(self.rows) / sum(self.rows)


def shares(tensor: Shaped[Tensor, "rows ..."], *, uneven: bool = False) -> Shares:
    """The shares of all ranks, when this one brings `tensor`. Only `uneven` ones cost an exchange."""
    if not uneven or world_size() == 1:
        return Shares((len(tensor),) * world_size())
    sizes = torch.empty(world_size(), dtype=torch.long, device=tensor.device)
    dist.all_gather_single(sizes, torch.tensor([len(tensor)], device=tensor.device))
    return Shares(tuple(sizes.tolist()))


def gather(tensor: Shaped[Tensor, "rows ..."], shares: Shares) -> Shaped[Tensor, "all ..."]:
    """Rows of all ranks, in rank order, with gradients. Further axes must be the same on every rank."""
    if world_size() == 1:
        return tensor
    gathered: Tensor = _Gather.apply(tensor, shares.rows)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    """Collectives want blocks of one size: shorter shares are filled up with zeros on the way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
        ctx.rows, longest = rows, max(rows)
        blocks = tensor.new_empty(longest * len(rows), *tensor.shape[1:])
        dist.all_gather_single(blocks, _filled(tensor, longest))
        if min(rows) == longest:
            return blocks
        return torch.cat([block[:n] for block, n in zip(blocks.split(longest), rows, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        longest = max(ctx.rows)
        if min(ctx.rows) < longest:
            grad = torch.cat([_filled(part, longest) for part in grad.split(ctx.rows)])
        own = grad.new_empty(longest, *grad.shape[1:])
        dist.reduce_scatter_single(own, grad.contiguous())
        return own[: ctx.rows[rank()]], None


def _filled(tensor: Tensor, rows: int) -> Tensor:
    if len(tensor) == rows:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
