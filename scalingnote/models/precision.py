"""Which number format the hardware multiplies fastest without losing the result."""

from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """bfloat16 where asked for, or where `auto` finds matrix units for it; float32 otherwise.

    A CPU with AVX-512 BF16 but no AMX tiles gains nothing at tower sizes, so AMX is what `auto` asks for.
    """
    if precision != "auto":
        return getattr(torch, precision)  # type: ignore[no-any-return]
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast else torch.float32
