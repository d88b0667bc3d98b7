"""Weights, gradients and moments sharded over ranks: torch's `fully_shard`, layer by layer.

    backbone            sharded: its embedding table and norms as one unit, each layer as another
    projections, tau    small: whole on every rank, their gradients averaged once a step

Nothing above a backbone is sharded, so a module's methods may be called directly: only backbones gather.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from scalingnote.models.precision import compute_dtype
from scalingnote.train.agreement import average_
from scalingnote.train.checkpoint import WHOLE
from scalingnote.train.config import Fsdp2, Schedule
from scalingnote.train.distributed import rank, world_size
from scalingnote.train.strategies import optimizer
from scalingnote.train.strategies.optimizer import local
from scalingnote.train.strategies.prepare import autocast, backbones, layers, prepare, surrogate, trainable


class Fsdp2Engine:
    """Shards in float32, gathered in the compute dtype, gradients reduced in float32.

    GradCache's chunks reduce their gradients one by one: shards add up, and no rank ever holds a whole
    gradient for longer than a layer's backward pass.
    """

    layout = WHOLE  # a checkpoint knows each shard's place, and is cut anew for other ranks

    def __init__(self, module: nn.Module, config: Fsdp2, *, schedule: Schedule, device: torch.device) -> None:
        self.module = prepare(module, schedule.memory)
        self._device, self._dtype = device, compute_dtype(schedule.precision, device)
        self._clip = schedule.optimizer.clip
        low = self._dtype if self._dtype != torch.float32 else None
        knobs: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (world_size(),)),
            "reshard_after_forward": config.reshard,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        }
        if config.offload and device.type != "cpu":
            knobs["offload_policy"] = CPUOffloadPolicy()
        for backbone in backbones(module):
            for layer in layers(backbone):
                fully_shard(layer, **knobs)
            fully_shard(backbone, **knobs)
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
        self._names = trainable(module)
        sharded = [p for p in self._names.values() if isinstance(p, DTensor)]
        self._whole = [p for p in self._names.values() if not isinstance(p, DTensor)]
        # Two groups: a fused step takes tensors of one kind.
        self._optimizer = optimizer.make([sharded, self._whole], schedule.optimizer, device=device)

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`~scalingnote.train.strategies.engine.Engine`, here and below."""
        with self.precision():
            loss, parts = self.module(batch)
        return loss, parts

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast; gathered weights have its dtype already."""
        return autocast(self._device, self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Shards are reduced on the way; what is whole follows."""
        loss.backward()
        self._average()

    def backward_from(self, embeddings: Tensor, gradients: Tensor, *, last: bool) -> None:
        """Shards are reduced with every chunk, what is whole after the last."""
        surrogate(embeddings, gradients).backward()
        if last:
            self._average()

    def step(self, lr: float) -> Tensor:
        """One AdamW step on this rank's shards."""
        gradients = [p.grad for p in self._names.values() if p.grad is not None]
        norm = self._norm(gradients)
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            own = local(gradient)
            own.mul_(factor.to(own.device))
        optimizer.set_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Parameters and moments, sharded where they are."""
        optimizer.begin(self._optimizer)
        weights = {name: value.detach() for name, value in self._names.items()}
        return weights | optimizer.named_state(self._optimizer, self._names)

    def restored(self, state: Mapping[str, Tensor]) -> None:
        """Nothing else depends on the tensors: the next forward pass gathers them anew."""
        optimizer.put_numbers(self._optimizer, self._names, state)

    def weights(self) -> dict[str, Tensor] | None:
        """Gathered one by one, so that no device holds more than one of them."""
        found = {}
        for name, value in self._names.items():
            whole = value.detach()
            if isinstance(whole, DTensor):
                whole = whole.to(self._device).full_tensor()  # type: ignore[attr-defined]
            if rank() == 0:
                found[name] = whole.to("cpu", torch.float32, copy=True)
        return found if rank() == 0 else None

    def _average(self) -> None:
        average_([p.grad for p in self._whole if p.grad is not None])

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """Norm over all ranks' shards and, counted once, what every rank holds."""
        squares = torch.zeros(2, device=self._device)
        for gradient in gradients:
            square = local(gradient).float().square().sum()
            squares[int(isinstance(gradient, DTensor))] += square.to(self._device)
        if world_size() > 1:
            dist.all_reduce(squares[1:])
        return squares.sum().sqrt()
