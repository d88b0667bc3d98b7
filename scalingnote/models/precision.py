"""The number format of matrix products: bfloat16 if the hardware is faster with it, else float32."""

import functools
import os
import time
from typing import Literal, cast, get_args

import torch
from torch import nn

from scalingnote.errors import ConfigError

Precision = Literal["auto", "float32", "bfloat16"]
MEASURED_SIZE = 768  # of square matrices on a CPU
MIN_CPU_SPEEDUP = 1.5  # of bfloat16 products over float32, for `auto` to choose bfloat16 on a CPU


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype of products; `auto` is bfloat16 if the device has fast bfloat16 units, else float32.

    Of the CPUs with AVX-512 BF16 and without AMX, some gain nothing and others encode three times as many
    texts a second, so `auto` measures it. The environment variable SCALINGNOTE_PRECISION replaces `auto`, for
    equal results on different machines.
    """
    if precision == "auto" and (override := os.environ.get("SCALINGNOTE_PRECISION")):
        if override not in get_args(Precision):
            raise ConfigError(f"SCALINGNOTE_PRECISION is {override!r}: give one of {get_args(Precision)}")
        precision = cast("Precision", override)
    if precision != "auto":
        return getattr(torch, precision)  # type: ignore[no-any-return]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = _is_cpu_faster_in_bfloat16()
    return torch.bfloat16 if fast else torch.float32


@functools.cache
def _is_cpu_faster_in_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32; measured once, in a fifth of a second.

    Processor time is compared, and the formats take turns: on a busy machine, too, all processes that encode
    parts of one artifact must decide alike, and by the clock one in some did not.
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    best = dict.fromkeys((torch.bfloat16, torch.float32), float("inf"))
    factors = {dtype: torch.randn(MEASURED_SIZE, MEASURED_SIZE).to(dtype) for dtype in best}
    for _ in range(6):  # the first one only warms up
        for dtype, factor in factors.items():
            start = time.process_time()
            factor @ factor
            best[dtype] = min(best[dtype], time.process_time() - start)
    return best[torch.float32] > MIN_CPU_SPEEDUP * best[torch.bfloat16]


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of `module` to `dtype` in place, but not its buffers.

    Rotary frequencies are buffers, and an angle is a frequency times a position: at a base of 10^6 and heads
    of 128, bfloat16 frequencies are off by 0.6 radians between tokens 512 apart.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the floating-point operations a second of large matrix products, the best of three runs.

    It is the peak that a model's utilisation is compared with. Takes 0.1 s on one CPU core.
    """
    size = 8192 if device.type == "cuda" else MEASURED_SIZE
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):  # the first one only warms up
        start = time.perf_counter()
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
