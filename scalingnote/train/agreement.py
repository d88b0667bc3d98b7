"""Means over ranks: what all of them then know alike, and act on alike."""

import torch
import torch.distributed as dist
from torch import Tensor

from scalingnote.train.distributed import world_size

# 64 MiB of float32: large enough for bandwidth, small enough to be copied without anybody noticing.
_BUCKET = 1 << 24


def mean_over_ranks(values: Tensor) -> Tensor:
    """The mean of `values` over ranks; not finite on all ranks where it is not finite on one."""
    if world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total / world_size()


def average_(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over ranks, in place. Every rank brings the same list."""
    if world_size() == 1:
        return
    waiting: list[Tensor] = []
    size = 0
    for position, tensor in enumerate(tensors):
        waiting.append(tensor)
        size += tensor.numel()
        last = position + 1 == len(tensors)
        if last or size >= _BUCKET or tensors[position + 1].dtype != tensor.dtype:
            _average_bucket_(waiting)
            waiting, size = [], 0


def _average_bucket_(bucket: list[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    flat /= world_size()
    parts = flat.split([tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])
