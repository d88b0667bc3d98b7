"""Optimizers: AdamW with float32 or 8-bit moments, and RowAdam; and their state as named tensors.

RowAdam is for lookup tables: it updates a row only in steps whose batch contains its token. Adam updates
every row in every step, by moments that decay slowly after the row's last gradient, so the row of a rare
token would move ten times too far. Here the moments of a row decay at its next gradient, by the number of
steps since the last one, and the row does not change in between.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.train.config import Optimizer

ROW_RATES = "row_rates"  # attribute of a parameter: [rows], factors of the learning rate


def make(
    groups: Iterable[Sequence[Tensor]], settings: Optimizer, *, device: torch.device
) -> torch.optim.Optimizer:
    """An optimizer over groups of parameters. ConfigError when 8-bit moments are not available."""
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
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            "optimizer.kind=adamw_8bit needs bitsandbytes: pip install bitsandbytes, or choose adamw"
        ) from None
    return AdamW8bit(filled, **knobs)  # type: ignore[no-any-return]


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state, as its first step would, by a step of length 0 on zero gradients."""
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
    """State of the parameters in `names`, as ``{name}.{moment}``; after :func:`initialize_state`."""
    return {
        f"{name}.{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for name, parameter in names.items()
        for key, value in optimizer.state[parameter].items()
    }


def restore_scalars(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> None:
    """Copy plain numbers of a filled :func:`named_state` back: bitsandbytes counts its steps in one."""
    for name, parameter in names.items():
        own = optimizer.state[parameter]
        for key, value in own.items():
            if not isinstance(value, Tensor):
                own[key] = type(value)(state[f"{name}.{key}"].item())


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    part = tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    assert isinstance(part, (Tensor, nn.Parameter))
    return part


class RowAdam(torch.optim.Optimizer):
    """Adam over rows (the first dimension) that have a gradient. Of a vector, every value is a row."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """`groups` as torch's optimizers take them."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the rows that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self._row_state(parameter)
        state["step"] += 1
        rows = (gradient if gradient.dim() == 1 else gradient.flatten(1).any(1)).nonzero()[:, 0]
        if not len(rows):
            return
        (first, second), step = group["betas"], float(state["step"])
        shape = (-1, *[1] * (parameter.dim() - 1))
        passed = (step - state["last"][rows]).reshape(shape)
        own = gradient[rows]
        mean = state["exp_avg"][rows] * first**passed + (1 - first) * own
        square = state["exp_avg_sq"][rows] * second**passed + (1 - second) * own * own
        state["exp_avg"][rows], state["exp_avg_sq"][rows], state["last"][rows] = mean, square, step
        moved = mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + group["eps"])
        rates = getattr(parameter, ROW_RATES, None)
        if rates is not None:
            moved *= rates.to(moved.device)[rows].reshape(shape)
        parameter[rows] -= group["lr"] * moved

    def _row_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            state["last"] = torch.zeros(len(parameter), device=parameter.device)
        return state
