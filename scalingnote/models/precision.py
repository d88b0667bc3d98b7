"""Which number format the hardware multiplies fastest without losing the result."""

import functools
import os
import time
from typing import Literal, cast, get_args

import torch
from torch import nn

from scalingnote.errors import ConfigError

Precision = Literal["auto", "float32", "bfloat16"]
MIN_CPU_GAIN = 1.5  # of bfloat16 products over those of float32, for `auto` to choose them on a CPU


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """bfloat16 where asked for, or where `auto` finds matrix units for it; float32 otherwise.

    Of CPUs with AVX-512 BF16 and without AMX, some gain nothing and others encode three times as many texts a
    second, so `auto` measures. Where results are to be the same on all machines, SCALINGNOTE_PRECISION says
    what `auto` is.
    """
    if precision == "auto" and (said := os.environ.get("SCALINGNOTE_PRECISION")):
        if said not in get_args(Precision):
            raise ConfigError(f"SCALINGNOTE_PRECISION is {said!r}: give one of {get_args(Precision)}")
        precision = cast("Precision", said)
    if precision != "auto":
        return getattr(torch, precision)  # type: ignore[no-any-return]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = _cpu_gains()
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def _cpu_gains() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32; measured once, in a fifth of a second."""
    if torch.cpu._is_amx_tile_supported():
        return True
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    device = torch.device("cpu")
    half, full = (matmul_peak(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    return half > MIN_CPU_GAIN * full


def lower(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the parameters of `module` in `dtype`, in place; its buffers stay as they are, as in training.

    Rotary frequencies are buffers, and an angle is a frequency times a position: at a base of 10^6 and heads
    of 128, bfloat16 puts tokens 512 apart 0.6 radians off.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of large matrix products here: what a model can be compared with.

    The best of three; 0.1 s on a CPU's core.
    """
    size = 8192 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):  # the first one only warms up
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
