"""Every rank holds all weights; gradients are averaged. In one process this is plain PyTorch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scalingnote.models.adapters import lower_frozen
from scalingnote.models.precision import compute_dtype
from scalingnote.train.agreement import average_
from scalingnote.train.checkpoint import WHOLE
from scalingnote.train.config import Schedule
from scalingnote.train.distributed import rank, world_size
from scalingnote.train.strategies import optimizer
from scalingnote.train.strategies.prepare import autocast, prepare, surrogate, trainable


class DdpEngine:
    """Weights that learn in float32 on every rank; matrix products in bfloat16 where asked for."""

    layout = WHOLE

    def __init__(self, module: nn.Module, *, schedule: Schedule, device: torch.device) -> None:
        self.module = prepare(module.to(device), schedule.memory)
        self._device, self._dtype = device, compute_dtype(schedule.precision, device)
        if self._dtype != torch.float32:
            lower_frozen(module, self._dtype)
        self._clip = schedule.optimizer.clip
        self._names = trainable(self.module)
        self._optimizer = optimizer.make([list(self._names.values())], schedule.optimizer, device=device)
        self._wrapped: nn.Module = self.module
        # GradCache runs many backward passes a step, past the wrapper: it averages once, after the last.
        if world_size() > 1 and schedule.memory.grad_cache is None:
            self._wrapped = DistributedDataParallel(
                self.module, forward_sync_buffers=False, gradient_as_bucket_view=True
            )

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`~scalingnote.train.strategies.engine.Engine`, here and below."""
        with self.precision():
            loss, parts = self._wrapped(batch)
        return loss, parts

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast."""
        return autocast(self._device, self._dtype)

    def backward(self, loss: Tensor) -> None:
        """The wrapper averages while gradients come in."""
        loss.backward()

    def backward_from(self, embeddings: Tensor, gradients: Tensor, *, last: bool) -> None:
        """Gradients add up locally; the last chunk averages them."""
        self.backward(surrogate(embeddings, gradients))
        if last:
            average_([p.grad for p in self._names.values() if p.grad is not None])

    def step(self, lr: float) -> Tensor:
        """One AdamW step."""
        norm = nn.utils.clip_grad_norm_(self._names.values(), self._clip, foreach=True)
        optimizer.set_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Parameters and moments, the same on every rank."""
        optimizer.begin(self._optimizer)
        weights = {name: value.detach() for name, value in self._names.items()}
        return weights | optimizer.named_state(self._optimizer, self._names)

    def restored(self, state: Mapping[str, Tensor]) -> None:
        """Nothing else depends on the tensors."""
        optimizer.put_numbers(self._optimizer, self._names, state)

    def weights(self) -> dict[str, Tensor] | None:
        """Rank 0 has them all."""
        if rank() != 0:
            return None
        return {n: p.detach().to("cpu", torch.float32, copy=True) for n, p in self._names.items()}
