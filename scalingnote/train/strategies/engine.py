"""Engine: a module, its optimizer and the way both are spread over ranks, as the training loop sees them.

Our losses are such that the *mean over ranks* of the ranks' gradients is the gradient of one process that
holds the whole batch (see :mod:`scalingnote.train.distributed`). Every engine takes that mean exactly once.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalingnote.train.config import Ddp, DeepSpeed, Fsdp2, Schedule


@runtime_checkable
class Engine(Protocol):
    """One optimizer step is ``loss, parts = engine(batch); engine.backward(loss); engine.step(lr)``.

    Collective: every rank makes the same calls in the same order.
    """

    module: nn.Module
    """The caller's own module. Its methods may be called directly, under :meth:`precision`."""
    layout: str
    """How :meth:`state` is cut. States of one layout fit each other, whatever the number of ranks."""

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's loss and its parts, in the precision asked for."""
        ...

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast that :meth:`__call__` runs under."""
        ...

    def backward(self, loss: Tensor) -> None:
        """The only backward pass of a plain step."""
        ...

    def backward_from(self, embeddings: Tensor, gradients: Tensor, *, last: bool) -> None:
        """Backward of one of GradCache's chunks from the gradients of its embeddings.

        Gradients add up over chunks, and are averaged over ranks by the end of the `last` one.
        """
        ...

    def step(self, lr: float) -> Tensor:
        """Clip, step, forget the gradients; returns their global norm before clipping."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint must hold, by name; this rank's shards, alive: read or fill them in place."""
        ...

    def restored(self, state: Mapping[str, Tensor]) -> None:
        """To be called when the tensors that :meth:`state` gave were filled from a checkpoint."""
        ...

    def weights(self) -> dict[str, Tensor] | None:
        """Trained parameters, whole, in float32, on the CPU of rank 0; None on other ranks."""
        ...


def build(module: nn.Module, *, schedule: Schedule, device: torch.device) -> Engine:
    """Spread `module` over the ranks as the schedule says. ConfigError when a package is missing for it."""
    strategy = schedule.strategy
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Late, so that nobody waits for the imports of a strategy that is not used.
    match strategy:
        case Ddp():
            from scalingnote.train.strategies.ddp import DdpEngine

            return DdpEngine(module, schedule=schedule, device=device)
        case Fsdp2():
            from scalingnote.train.strategies.fsdp2 import Fsdp2Engine

            _join()
            return Fsdp2Engine(module, strategy, schedule=schedule, device=device)
        case DeepSpeed():
            from scalingnote.train.strategies.zero import ZeroEngine

            _join()
            return ZeroEngine(module, strategy, schedule=schedule, device=device)


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put what :meth:`Engine.weights` gave into a freshly built module of the same kind."""
    # Not strict: what is frozen has no weights here, and what two towers share has a name in each.
    unknown = module.load_state_dict(dict(weights), strict=False).unexpected_keys
    assert not unknown, f"weights of another module: {unknown[:4]}"


def _join() -> None:
    """Sharding needs a process group, also where a process is alone."""
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
