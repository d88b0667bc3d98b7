"""How the ranks of one machine meet without a port that the network reaches.

Ray Train has them meet at a store of torch's, which listens on every interface and asks for no token. A file
that only this user can read does the same. For what ranks send each other afterwards Gloo and NCCL listen on
an interface that they choose by the host's name: here on loopback.
"""

import os
import socket
from datetime import timedelta

import psutil
import torch.distributed as dist


def join(rank: int, world: int, store: str, backend: str, timeout_s: float) -> None:
    """Join the process group of `world` ranks, all of this machine, that meet at the new file `store`.

    An interface that the user has set for Gloo or NCCL is kept.
    """
    loopback = _loopback()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")  # = is for this one, not all that begin so
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def _loopback() -> str:
    """Name of the interface of 127.0.0.1: lo, or on macOS lo0."""
    for name, addresses in psutil.net_if_addrs().items():
        if any((one.family, one.address) == (socket.AF_INET, "127.0.0.1") for one in addresses):
            return name
    return "lo"
