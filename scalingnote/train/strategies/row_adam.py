"""Adam for lookup tables: a row moves in the steps that hold its token, and in no others.

Adam moves every row in every step, by moments that decay for long after the row's last gradient. The row of
a rare token would move ten times as far as its few gradients say. Here moments decay at a row's next
gradient, by as many steps as have passed, and the row is left alone in between.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

RATES = "row_rates"  # attribute of a parameter: [rows], factors of the learning rate


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
        state = self._begun(parameter)
        state["step"] += 1
        rows = (gradient if gradient.dim() == 1 else gradient.flatten(1).any(1)).nonzero()[:, 0]
        if not len(rows):
            return
        (first, second), step = group["betas"], float(state["step"])
        shape = (-1, *[1] * (parameter.dim() - 1))
        passed = (step - state["last"][rows]).reshape(shape)
        found = gradient[rows]
        mean = state["exp_avg"][rows] * first**passed + (1 - first) * found
        square = state["exp_avg_sq"][rows] * second**passed + (1 - second) * found * found
        state["exp_avg"][rows], state["exp_avg_sq"][rows], state["last"][rows] = mean, square, step
        moved = mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + group["eps"])
        rates = getattr(parameter, RATES, None)
        if rates is not None:
            moved *= rates.to(moved.device)[rows].reshape(shape)
        parameter[rows] -= group["lr"] * moved

    def _begun(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            state["last"] = torch.zeros(len(parameter), device=parameter.device)
        return state
