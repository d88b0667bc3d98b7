"""AdamW, whole or with 8-bit moments, or RowAdam; and its state as plain named tensors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.train.config import Optimizer
from scalingnote.train.strategies.row_adam import RowAdam


def make(
    groups: Iterable[Sequence[Tensor]], settings: Optimizer, *, device: torch.device
) -> torch.optim.Optimizer:
    """An optimizer over groups of parameters. ConfigError when 8-bit moments cannot be had here."""
    knobs: dict[str, Any] = {
        "lr": settings.peak_lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    filled = [{"params": list(group)} for group in groups if group]
    if settings.kind == "row_adam":
        return RowAdam(filled, lr=settings.peak_lr, betas=settings.betas, eps=settings.eps)
    if settings.kind == "adamw":
        return torch.optim.AdamW(filled, fused=True, **knobs)
    if device.type != "cuda":
        raise ConfigError(f"optimizer.kind=adamw_8bit needs a GPU, found {device}: choose adamw")
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            "optimizer.kind=adamw_8bit needs bitsandbytes: pip install bitsandbytes, or choose adamw"
        ) from None
    return AdamW8bit(filled, **knobs)  # type: ignore[no-any-return]


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state exist, as its first step would: a step of length 0 on zero gradients."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``{name}.{moment}`` -> tensor of the state of the parameters in `names`, which must have begun."""
    return {
        f"{name}.{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, parameter in names.items()
        for key, value in optimizer.state[parameter].items()
    }


def put_numbers(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """What a filled :func:`named_state` holds of plain numbers; bitsandbytes counts its steps in one."""
    for name, parameter in names.items():
        own = optimizer.state[parameter]
        for key, value in own.items():
            if not isinstance(value, Tensor):
                own[key] = type(value)(state[f"{name}.{key}"].item())


def set_rate(optimizer: Any, lr: float) -> None:
    """The learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    part = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    assert isinstance(part, (Tensor, nn.Parameter))
    return part
