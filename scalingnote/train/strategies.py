"""Strategies, each an engine: weights unsharded on every rank (DDP), or sharded by FSDP2 or DeepSpeed's ZeRO.

DeepSpeed is a late import: it is slow, and only ZeroEngine needs it. Its use here differs from the usual one:

- The module is built unsharded and then partitioned; `zero.Init` and transformers 5 do not work together.
- The process group is ours or Ray's. On CPUs the environment must have DS_ACCELERATOR=cpu from the start.
- DeepSpeed's own checkpoints are pickles. We store the float32 partitions and moments of each rank as
  tensors, which are the complete state; they fit the number of ranks that wrote them.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from scalingnote.core.errors import ConfigError
from scalingnote.models.tower import Tower
from scalingnote.models.weights import FrozenLinear, lower_frozen
from scalingnote.train.config import DeepSpeed, Fsdp2, Schedule
from scalingnote.train.engine import (
    CLIP_NORM,
    Engine,
    backbones,
    initialize_state,
    layers,
    make_optimizer,
    named_state,
    rank,
    restore_scalars,
    set_learning_rate,
    surrogate,
    trainable,
    world_size,
)


def build(module: nn.Module, *, schedule: Schedule, device: torch.device) -> Engine:
    """Distribute `module` over the ranks by the schedule's strategy.

    Raises:
        ConfigError: a package is missing.
    """
    strategy = schedule.strategy_for(sum(p.numel() for p in trainable(module).values()))
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if not isinstance(strategy, Fsdp2 | DeepSpeed):
        return DdpEngine(module, schedule=schedule, device=device)
    if not dist.is_initialized():  # sharding needs a process group, even of one process
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if isinstance(strategy, Fsdp2):
        return Fsdp2Engine(module, strategy, schedule=schedule, device=device)
    return ZeroEngine(module, strategy, schedule=schedule, device=device)


class DdpEngine(Engine):
    """Engine with all weights on every rank, the trained ones in float32; gradients are averaged.

    One process runs plain PyTorch.
    """

    whole = True

    def __init__(self, module: nn.Module, *, schedule: Schedule, device: torch.device) -> None:
        super().__init__(module, schedule=schedule, device=device)
        lower_frozen(module, self._dtype)  # first, or twice the bytes would be copied to a GPU
        module.to(device)
        self._optimize(schedule.optimizer)
        # GradCache runs many backward passes a step without the wrapper: it averages once, at the end.
        if world_size() > 1 and schedule.memory.grad_cache is None:
            # The wrapper averages gradients while they are computed.
            self._forward = DistributedDataParallel(
                module, forward_sync_buffers=False, gradient_as_bucket_view=True
            )


class Fsdp2Engine(Engine):
    """Engine with weights, gradients and moments sharded over ranks: torch's `fully_shard`, layer by layer.

        backbone            sharded: its embedding table and norms as one unit, each layer as another
        projections, tau    small: unsharded on every rank, their gradients averaged once a step

    Shards of trained weights are float32; weights are gathered in the compute dtype, and gradients are
    reduced in float32. No module above a backbone is sharded, so a module's methods may be called directly:
    only backbones gather. A checkpoint stores the position of each shard, so a different number of ranks can
    read it.

    GradCache's chunks reduce their gradients one by one: shards add up, and no rank ever holds an unsharded
    gradient for longer than a layer's backward pass.
    """

    def __init__(self, module: nn.Module, config: Fsdp2, *, schedule: Schedule, device: torch.device) -> None:
        super().__init__(module, schedule=schedule, device=device)
        low = self._dtype if self._dtype != torch.float32 else None
        lower_frozen(module, self._dtype)
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (world_size(),)),
            "reshard_after_forward": config.reshard,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
        }
        if config.offload and device.type != "cpu":
            options["offload_policy"] = CPUOffloadPolicy()
        for backbone in backbones(module):
            for layer in layers(backbone):
                fully_shard(layer, **options)
            fully_shard(backbone, **options)
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)
        self._optimize(schedule.optimizer)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass: shards are reduced in it, unsharded parameters after it."""
        loss.backward()
        self._average()

    def _clip_gradients(self) -> Tensor:
        """Clip by the norm over all ranks' shards and, counted once, the unsharded gradients."""
        squares = torch.zeros(2, device=self.device)  # sums for unsharded gradients and for shards
        gradients: list[Tensor] = []  # this rank's parts
        for gradient in (p.grad for p in self._names.values() if p.grad is not None):
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            squares[int(isinstance(gradient, DTensor))] += local.float().square().sum().to(self.device)
            gradients.append(local)
        if world_size() > 1:
            dist.all_reduce(squares[1:])
        norm = squares.sum().sqrt()
        factor = (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0)
        for local in gradients:
            local.mul_(factor.to(local.device))
        return norm


class ZeroEngine(Engine):
    """Engine with ZeRO through DeepSpeed: sharded moments (stage 1), gradients too (2), weights too (3).

    GradCache's chunks are gradient accumulation to DeepSpeed: stage 1 reduces gradients once a step, stages 2
    and 3 with every chunk, into this rank's partition.
    """

    def __init__(
        self, module: nn.Module, config: DeepSpeed, *, schedule: Schedule, device: torch.device
    ) -> None:
        if any(isinstance(layer, FrozenLinear) for layer in module.modules()):
            raise ConfigError(
                "strategy deepspeed casts all weights: lora.base int8 and nf4 need ddp or fsdp2"
            )
        deepspeed = _import_deepspeed(device)
        super().__init__(module, schedule=schedule, device=device)
        self.layout = f"zero-{config.stage} on {world_size()} ranks"
        self._stage = config.stage
        self._names = trainable(module)
        self._cached = schedule.memory.grad_cache is not None
        state_device = torch.device("cpu") if config.offload else device

        def make(parameters: Any) -> torch.optim.Optimizer:
            return make_optimizer([list(parameters)], schedule.optimizer, device=state_device)

        if config.stage == 3:
            # The head reads a table that belongs to another module: DeepSpeed must gather it there too.
            for head, table in _tied_heads(module):
                deepspeed.zero.register_external_parameter(head, table)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DeepSpeed uses older names of torch
            self._engine = deepspeed.initialize(
                model=_FunctionRunner(module, self.precision),
                model_parameters=list(self._names.values()),
                optimizer=make,
                config=_settings(config, schedule, low=self._dtype != torch.float32),
                dist_init_required=False,
            )[0]

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute loss and parts like the base class; the forward pass runs inside DeepSpeed."""
        loss, parts = self._engine(lambda: self.module(batch))
        return loss, parts

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; DeepSpeed averages during or after it, depending on the stage."""
        self._engine.backward(loss)

    def backward_from(self, embeddings: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        """Run the backward pass of a chunk; gradients of all parameters add up until :meth:`step`."""
        del last
        # Through the engine, because its hooks wait for the output.
        self._engine.backward(self._engine(lambda: surrogate(embeddings, gradients)))

    def step(self, lr: float) -> Tensor:
        """Step like the base class, on this rank's partition; DeepSpeed clips."""
        set_learning_rate(self._engine.optimizer, lr)
        self._engine.step()
        if self._cached:
            self._clear_gradients()
        return torch.as_tensor(self._engine.get_global_grad_norm(), device=self.device)

    def state(self) -> dict[str, Tensor]:
        """Return this rank's float32 partitions and their moments."""
        partitions, zero = self._partitions(), self._engine.optimizer
        weights = {name: part.detach() for name, part in partitions.items()}
        if self._stage == 3:  # its AdamW has its parameters only during a step
            zero._set_fp32_optimizer_param_groups()
        initialize_state(zero.optimizer)
        if self._stage == 3:
            zero._clear_fp32_optimizer_param_groups()
        return weights | named_state(zero.optimizer, partitions)

    def after_restore(self, state: Mapping[str, Tensor]) -> None:
        """Complete a restore: copy weights in the compute dtype from the partitions."""
        partitions, zero = self._partitions(), self._engine.optimizer
        restore_scalars(zero.optimizer, partitions, state)
        if self._stage < 3:
            zero.update_lp_params()
            return
        for partition, low in zip(partitions.values(), zero.fp16_partitioned_groups_flat, strict=True):
            low.data.copy_(partition.data)
        if zero.persistent_parameters:  # small ones, unsharded on every rank
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def weights(self) -> dict[str, Tensor] | None:
        """Return the weights like the base class, gathered one by one from the float32 partitions."""
        gather = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param
        weights = {}
        for name, parameter in self._names.items():
            full = gather(parameter)
            if rank() == 0:
                shape = getattr(parameter, "ds_shape", parameter.shape)
                weights[name] = full.detach().reshape(shape).float().cpu().clone()
        return weights if rank() == 0 else None

    def _clear_gradients(self) -> None:
        """Clear the gradient buffers.

        DeepSpeed overwrites old gradients in the first backward pass of a step and adds in the others.
        Parameters that only a later chunk uses would otherwise add to the gradients of the previous step.
        """
        zero = self._engine.optimizer
        buffers = [getattr(zero, "grad_partitions_flat_buffer", None)]
        buffers += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        for buffer in buffers:
            if buffer is not None:
                buffer.zero_()

    def _partitions(self) -> dict[str, Tensor]:
        """Return this rank's float32 partitions, by their names in a checkpoint."""
        zero = self._engine.optimizer
        # Of stage 3, of stages 1 and 2, and of stage 1 in bfloat16, which has a separate optimizer class.
        names = (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        )
        parts = next(getattr(zero, name) for name in names if hasattr(zero, name))
        return {f"rank-{rank()}.{number}": part for number, part in enumerate(parts)}


class _FunctionRunner(nn.Module):
    """The model that DeepSpeed receives: it runs any function of the module, under our autocast.

    DeepSpeed switches off an autocast context around it, so ours must begin inside.
    """

    def __init__(self, module: nn.Module, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module, self._precision = module, precision

    def forward(self, function: Callable[[], Any]) -> Any:
        with self._precision():
            return function()


def _import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu" and os.environ.get("DS_ACCELERATOR") != "cpu":
        raise ConfigError(
            "strategy deepspeed on CPUs needs the environment variable DS_ACCELERATOR=cpu before the process "
            f"starts, found {os.environ.get('DS_ACCELERATOR')!r}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ConfigError(
            f"strategy deepspeed needs its package ({error}): pip install 'scalingnote[gpu]', "
            "or choose strategy fsdp2"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # launchers set it, including Ray
    if device.type == "cpu":
        # Otherwise DeepSpeed checks which of its kernels the compilers can build, and compiles a faster
        # all-reduce between processes of a machine. Nothing here needs any of them.
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _settings(config: DeepSpeed, schedule: Schedule, *, low: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.stage}
    if config.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if config.stage == 3:
            zero["offload_param"] = zero["offload_optimizer"]
    return {
        "train_batch_size": schedule.global_batch - schedule.global_batch % world_size(),
        "train_micro_batch_size_per_gpu": schedule.global_batch // world_size(),
        "gradient_accumulation_steps": 1,
        # GradCache: a step ends when step() is called, after any number of backward passes.
        "managed_gradient_accumulation": schedule.memory.grad_cache is None,
        "gradient_clipping": CLIP_NORM,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW is as fast and needs no compiler
        "bf16": {"enabled": low},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 1 << 62,
    }


def _tied_heads(module: nn.Module) -> list[tuple[nn.Module, nn.Parameter]]:
    """Return sparse heads without their own weights, each with the input table that it reads instead."""
    towers = [tower for tower in module.modules() if isinstance(tower, Tower) and tower.sparse]
    return [(t.sparse, t.input_table) for t in towers if t.sparse is not None and t.sparse.own is None]
