"""ZeRO through DeepSpeed: sharded moments (stage 1), gradients too (2), weights too (3).

DeepSpeed is a late import: it is slow, and only this file needs it. What differs from its usual use:

- The module is built whole and then partitioned; `zero.Init` and transformers 5 do not go together.
- The process group is ours or Ray's. On CPUs the environment must say DS_ACCELERATOR=cpu from the start.
- Its own checkpoints are pickles. We store the float32 partitions and moments of each rank as tensors, which
  is the whole state; they fit the number of ranks that wrote them.
"""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.models.precision import compute_dtype
from scalingnote.train.config import DeepSpeed, Schedule
from scalingnote.train.distributed import rank, world_size
from scalingnote.train.strategies import optimizer
from scalingnote.train.strategies.prepare import autocast, prepare, surrogate, tied_heads, trainable


class ZeroEngine:
    """A DeepSpeed engine behind our protocol.

    GradCache's chunks reach it as gradient accumulation: stage 1 reduces gradients once a step, stages 2
    and 3 with every chunk, into this rank's partition.
    """

    def __init__(
        self, module: nn.Module, config: DeepSpeed, *, schedule: Schedule, device: torch.device
    ) -> None:
        deepspeed = _import(device)
        self.module = prepare(module, schedule.memory)
        self.layout = f"zero-{config.stage} on {world_size()} ranks"
        self._stage, self._device = config.stage, device
        self._dtype = compute_dtype(schedule.precision, device)
        self._names = trainable(module)
        self._cached = schedule.memory.grad_cache is not None
        state_device = torch.device("cpu") if config.offload_optimizer else device

        def make(parameters: Any) -> torch.optim.Optimizer:
            return optimizer.make([list(parameters)], schedule.optimizer, device=state_device)

        if config.stage == 3:
            # Read by a module that does not own it: to be gathered there too.
            for head, table in tied_heads(module):
                deepspeed.zero.register_external_parameter(head, table)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own use of torch's older names
            self._engine = deepspeed.initialize(
                model=_Entry(module, self.precision),
                model_parameters=list(self._names.values()),
                optimizer=make,
                config=_settings(config, schedule, low=self._dtype != torch.float32),
                dist_init_required=False,
            )[0]

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """See :class:`~scalingnote.train.strategies.engine.Engine`, here and below."""
        loss, parts = self._engine(lambda: self.module(batch))
        return loss, parts

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast; weights have its dtype already."""
        return autocast(self._device, self._dtype)

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages on the way or at the end, as the stage has it."""
        self._engine.backward(loss)

    def backward_from(self, embeddings: Tensor, gradients: Tensor, *, last: bool) -> None:
        """Gradients add up until :meth:`step`, whichever parameters a chunk has reached."""
        # Through the engine, so that its hooks see the output they wait for.
        self._engine.backward(self._engine(lambda: surrogate(embeddings, gradients)))

    def step(self, lr: float) -> Tensor:
        """One AdamW step on this rank's partition; DeepSpeed clips."""
        optimizer.set_rate(self._engine.optimizer, lr)
        self._engine.step()
        if self._cached:
            self._forget_gradients()
        return torch.as_tensor(self._engine.get_global_grad_norm(), device=self._device)

    def state(self) -> dict[str, Tensor]:
        """This rank's float32 partitions and their moments."""
        names = {f"rank-{rank()}.{number}": part for number, part in enumerate(self._partitions())}
        weights = {name: part.detach() for name, part in names.items()}
        zero = self._engine.optimizer
        if self._stage == 3:  # its AdamW knows its parameters only while it steps
            zero._set_fp32_optimizer_param_groups()
        optimizer.begin(zero.optimizer)
        if self._stage == 3:
            zero._clear_fp32_optimizer_param_groups()
        return weights | optimizer.named_state(zero.optimizer, names)

    def restored(self, state: Mapping[str, Tensor]) -> None:
        """Weights in the compute dtype follow from the partitions."""
        names = {f"rank-{rank()}.{number}": part for number, part in enumerate(self._partitions())}
        zero = self._engine.optimizer
        optimizer.put_numbers(zero.optimizer, names, state)
        if self._stage < 3:
            zero.update_lp_params()
            return
        for own, low in zip(self._partitions(), zero.fp16_partitioned_groups_flat, strict=True):
            low.data.copy_(own.data)
        if zero.persistent_parameters:  # small ones, whole on every rank
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def weights(self) -> dict[str, Tensor] | None:
        """Gathered one by one from the float32 partitions."""
        full = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param
        found = {}
        for name, parameter in self._names.items():
            whole = full(parameter)
            if rank() == 0:
                found[name] = whole.detach().reshape(_shape(parameter)).float().cpu().clone()
        return found if rank() == 0 else None

    def _forget_gradients(self) -> None:
        """DeepSpeed overwrites old gradients in the first backward pass of a step and adds in the others.

        Parameters that only a later chunk reaches would find those of the step before.
        """
        zero = self._engine.optimizer
        buffers = [getattr(zero, "grad_partitions_flat_buffer", None)]
        buffers += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        for buffer in buffers:
            if buffer is not None:
                buffer.zero_()

    def _partitions(self) -> list[Tensor]:
        """Stages 1 and 2 share an optimizer class, but stage 1 in bfloat16 has one of its own."""
        zero = self._engine.optimizer
        names = (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        )
        return list(next(getattr(zero, name) for name in names if hasattr(zero, name)))


class _Entry(nn.Module):
    """What DeepSpeed takes for the model: it runs any piece of work on the module, under our autocast.

    DeepSpeed switches off an autocast around it, so ours must begin inside.
    """

    def __init__(self, module: nn.Module, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module, self._precision = module, precision

    def forward(self, work: Callable[[], Any]) -> Any:
        with self._precision():
            return work()


def _import(device: torch.device) -> Any:
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
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # launchers set it, Ray among them
    if device.type == "cpu":
        # Else it would ask compilers which of its kernels they can build, and compile one: a faster
        # all-reduce between processes of a machine. Nothing here needs any of them.
        deepspeed.ops.__compatible_ops__ = {}
    return deepspeed


def _settings(config: DeepSpeed, schedule: Schedule, *, low: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": config.stage}
    if config.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if config.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_batch_size": schedule.global_batch - schedule.global_batch % world_size(),
        "train_micro_batch_size_per_gpu": schedule.global_batch // world_size(),
        "gradient_accumulation_steps": 1,
        # GradCache: a step ends when step() is called, after however many backward passes.
        "managed_gradient_accumulation": schedule.memory.grad_cache is None,
        "gradient_clipping": schedule.optimizer.clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW is as fast and needs no compiler
        "bf16": {"enabled": low},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 1 << 62,
    }


def _shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))
