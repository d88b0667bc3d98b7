"""All-gather that keeps gradients, so that every rank's negatives train every rank's towers.

Each rank computes the loss of its *own* queries against *everybody's* documents. In the backward pass
the gradients all ranks hold for one rank's embeddings are summed and handed back to it; data-parallel
averaging then gives exactly the gradient of one process that holds the whole batch, with no factor to
correct (tested for 1 to 4 ranks).
"""

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


def gather(tensor: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "all ..."]:
    """Rows of all ranks, in rank order, with gradients. Every rank must bring the same shape."""
    if world_size() == 1:
        return tensor
    gathered: Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]
