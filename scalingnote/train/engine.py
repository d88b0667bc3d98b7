"""Engine: a module with losses, its optimizer and their distribution over ranks, behind one interface.

Each rank computes the loss of its *own* queries against the documents of *all* ranks. In the backward pass
the gradients that all ranks have for one rank's embeddings are summed and returned to it. The *mean over
ranks* of the ranks' gradients, which every engine takes exactly once, is then the gradient of one process
that holds the entire batch, without a correction factor (tested for 1 to 4 ranks). All ranks have the same
number of rows, so a mean over ranks of means is the mean over all rows. Weights of rows are factors within
that mean. The mean is divided by the number of rows, not by the sum of the weights, so weights need no
exchange.
"""

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from scalingnote.core.errors import ConfigError
from scalingnote.models.batch import Batch
from scalingnote.models.cross_encoder import CrossEncoder
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import Tower
from scalingnote.models.weights import compute_dtype
from scalingnote.train.config import Optimizer, Schedule

WHOLE = "whole"  # the layout of states that any number of ranks can read
BETAS, EPS, CLIP_NORM = (
    (0.9, 0.999),
    1e-8,
    1.0,
)  # for Adam's moments and root; for the norm of the global gradient
Encode = Callable[[str, Batch], dict[str, Tensor]]  # name of a tower and rows -> embeddings [rows, ...]
WeightedLosses = tuple[dict[str, Tensor], dict[str, Tensor]]  # each times its weight; values for the log


class Objective(nn.Module):
    """Encoders and losses as one module: a step trains it, plainly or through GradCache.

    The losses depend on the parameters only through embeddings.
    """

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of this rank (its mean over ranks is the global loss), and its parts to log."""
        weighted, parts = self.losses(batch, self.encode)
        return total(weighted), {name: part.detach() for name, part in parts.items()}

    def losses(self, batch: Any, encode: Encode) -> WeightedLosses:
        """Compute the weighted losses of this rank, which are summed for training, and their parts.

        `encode` converts rows to embeddings.
        """
        raise NotImplementedError

    def encode(self, name: str, rows: Batch) -> dict[str, Tensor]:
        """Encode rows by the encoder `name`; return named embeddings, each [rows, ...], in float32."""
        raise NotImplementedError


def total(losses: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the losses."""
    first, *others = losses.values()
    return sum(others, start=first)


class Engine:
    """Training of one module: ``loss, parts = engine(batch); engine.backward(loss); engine.step(lr)``.

    Collective: every rank makes the same calls in the same order. This class holds the common part of engines
    with a torch optimizer over named parameters; a subclass calls :meth:`_optimize`.
    """

    module: nn.Module
    """The module of the caller. Its methods may be called directly, under :meth:`precision`."""
    whole: bool = False
    """Whether every rank holds all parameters, so that one rank can compute their gradients by itself."""
    layout: str = WHOLE
    """How :meth:`state` is divided. States of the layout WHOLE are compatible for any number of ranks."""
    _names: dict[str, nn.Parameter]  # all trained parameters
    _whole: list[nn.Parameter]  # those of them that every rank holds unsharded
    _optimizer: torch.optim.Optimizer

    def __init__(self, module: nn.Module, *, schedule: Schedule, device: torch.device) -> None:
        self.module = module
        if schedule.memory.gradient_checkpointing:
            for model in module.modules():
                if isinstance(model, PreTrainedModel):
                    # The reentrant kind does not support a model that is used twice in one step.
                    model.activation_checkpointing_enable({"use_reentrant": False})
                    model.config.use_cache = False
        self.device, self._dtype = device, compute_dtype(schedule.precision, device)
        self._forward: nn.Module = module

    def _optimize(self, settings: Optimizer) -> None:
        """Build the optimizer of the parameters, which must be on their final device."""
        self._names = trainable(self.module)
        sharded = [p for p in self._names.values() if isinstance(p, DTensor)]
        self._whole = [p for p in self._names.values() if not isinstance(p, DTensor)]
        # Two groups: a fused step takes tensors of one kind.
        self._optimizer = make_optimizer([sharded, self._whole], settings, device=self.device)

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of this rank and its parts, in the configured precision."""
        with self.precision():
            loss, parts = self._forward(batch)
        return loss, parts

    def precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context of :meth:`__call__`."""
        return autocast(self.device, self._dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the only backward pass of a plain step."""
        loss.backward()

    def backward_from(self, embeddings: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        """Run the backward pass of one GradCache chunk, from the gradients of its embeddings.

        Gradients add up over chunks; at the end of the `last` one they are averaged over ranks.
        """
        surrogate(embeddings, gradients).backward()
        if last:
            self._average()

    def step(self, lr: float) -> Tensor:
        """Clip the gradients, step and clear them; return their global norm before clipping."""
        norm = self._clip_gradients()
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return all tensors of a checkpoint by name: the live shards of this rank.

        The caller reads them or fills them in place.
        """
        initialize_state(self._optimizer)
        weights = {name: value.detach() for name, value in self._names.items()}
        return weights | named_state(self._optimizer, self._names)

    def after_restore(self, state: Mapping[str, Tensor]) -> None:
        """Complete a restore. Must be called after the tensors of :meth:`state` were filled."""
        restore_scalars(self._optimizer, self._names, state)

    def weights(self) -> dict[str, Tensor] | None:
        """Return the unsharded trained parameters, in float32, on the CPU of rank 0; None on other ranks."""
        weights = {}
        for name, value in self._names.items():
            full = value.detach()
            if isinstance(full, DTensor):  # one by one: a device never holds more than one of them
                full = full.to(self.device).full_tensor()  # type: ignore[attr-defined]
            if rank() == 0:
                weights[name] = full.to("cpu", torch.float32, copy=True)
        return weights if rank() == 0 else None

    def _average(self) -> None:
        """Average over ranks the gradients that no backward pass averages: of unsharded parameters."""
        average_([p.grad for p in self._whole if p.grad is not None])

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients to the global norm CLIP_NORM; return the norm before."""
        return nn.utils.clip_grad_norm_(self._names.values(), CLIP_NORM, foreach=True)


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the result of :meth:`Engine.weights` into a new module of the same kind."""
    # Not strict: frozen parameters have no weights here, and those that two towers share have two names.
    unknown = module.load_state_dict(dict(weights), strict=False).unexpected_keys
    assert not unknown, f"weights of another module: {unknown[:4]}"


def backbones(module: nn.Module) -> list[nn.Module]:
    """Return the transformers inside, each once, even if two towers share one."""
    kinds = Tower | TokenWise | CrossEncoder
    towers = [tower for tower in module.modules() if isinstance(tower, kinds)]
    return list({id(tower.backbone): tower.backbone for tower in towers}.values())


def layers(backbone: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer: the members of its outermost lists of modules."""
    if isinstance(backbone, nn.ModuleList):
        return list(backbone)
    return [layer for child in backbone.children() for layer in layers(child)]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, each once, by name.

    Frozen ones are rebuilt from the config, never stored.
    """
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return a context with matrix products in `dtype`; float32 changes nothing."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def surrogate(embeddings: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Compute a scalar that has `gradients` as its gradients with regard to `embeddings`."""
    products = [
        (embedding.float() * grad).sum() for embedding, grad in zip(embeddings, gradients, strict=True)
    ]
    return torch.stack(products).sum()


# --- optimizers: AdamW with float32 or 8-bit moments, or RowAdam -------------------------------------------


def make_optimizer(
    groups: Iterable[Sequence[Tensor]], settings: Optimizer, *, device: torch.device
) -> torch.optim.Optimizer:
    """Build an optimizer over groups of parameters.

    Raises:
        ConfigError: 8-bit moments are not available.
    """
    options: dict[str, Any] = {
        "lr": settings.peak_lr,
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": settings.weight_decay,
    }
    nonempty = [{"params": list(group)} for group in groups if group]
    if settings.kind == "row_adam":
        return RowAdam(nonempty, lr=settings.peak_lr)
    if settings.kind == "adamw":
        return torch.optim.AdamW(nonempty, fused=True, **options)
    if device.type != "cuda":
        raise ConfigError(f"optimizer.kind=adamw_8bit needs a GPU, found {device}: choose adamw")
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            "optimizer.kind=adamw_8bit needs bitsandbytes: pip install bitsandbytes, or choose adamw"
        ) from None
    return AdamW8bit(nonempty, **options)  # type: ignore[no-any-return]


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state like its first step, by a step of length 0 on zero gradients."""
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    rate = optimizer.param_groups[0]["lr"]  # of all groups
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    set_learning_rate(optimizer, rate)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of the parameters in `names`, as ``{name}.{moment}``; see :func:`initialize_state`."""
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
        moments = optimizer.state[parameter]
        for key, value in moments.items():
            if not isinstance(value, Tensor):
                moments[key] = type(value)(state[f"{name}.{key}"].item())


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class RowAdam(torch.optim.Optimizer):
    """Adam over rows (the first dimension) with a gradient, for lookup tables; over the values of a vector.

    A row changes only in steps with its token in the batch. Adam changes every row in every step, by moments
    that decay slowly after the last gradient of the row, so the row of a rare token would move ten times too
    far. Here the moments of a row decay at its next gradient, by the number of steps since the previous one.

    The attribute `row_rates` [rows] of a parameter, if it has one, holds factors of its learning rate.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float) -> None:
        """Accept `groups` in the form of torch's optimizers."""
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move the rows that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["last"] = torch.zeros(len(parameter), device=parameter.device)
        state["step"] += 1
        rows = (gradient if gradient.dim() == 1 else gradient.flatten(1).any(1)).nonzero()[:, 0]
        if not len(rows):
            return
        (first, second), step = BETAS, float(state["step"])
        shape = (-1, *[1] * (parameter.dim() - 1))
        steps_since = (step - state["last"][rows]).reshape(shape)
        row_gradient = gradient[rows]
        mean = state["exp_avg"][rows] * first**steps_since + (1 - first) * row_gradient
        square = state["exp_avg_sq"][rows] * second**steps_since + (1 - second) * row_gradient * row_gradient
        state["exp_avg"][rows], state["exp_avg_sq"][rows], state["last"][rows] = mean, square, step
        delta = mean / (1 - first**step) / ((square / (1 - second**step)).sqrt() + EPS)
        rates = getattr(parameter, "row_rates", None)
        if rates is not None:
            delta *= rates.to(delta.device)[rows].reshape(shape)
        parameter[rows] -= group["lr"] * delta


# --- collectives ------------------------------------------------------------------------------------------

# 64 MiB of float32: large enough for bandwidth, and a copy that is small in comparison with a model.
_BUCKET_ELEMENTS = 1 << 24


def world_size() -> int:
    """Return the number of training processes; 1 outside of torch.distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among them; 0 outside of torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather(tensor: Shaped[Tensor, "rows ..."]) -> Shaped[Tensor, "all ..."]:
    """Gather the rows of all ranks, in rank order, with gradients; all ranks must pass the same shape."""
    if world_size() == 1:
        return tensor
    gathered: Tensor = _Gather.apply(tensor)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(len(tensor) * world_size(), *tensor.shape[1:])
        dist.all_gather_single(gathered, tensor.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        summed = grad.new_empty(len(grad) // world_size(), *grad.shape[1:])
        dist.reduce_scatter_single(summed, grad.contiguous())
        return summed


def mean_over_ranks(values: Tensor) -> Tensor:
    """Compute the mean of `values` over ranks, equal on all of them.

    The mean is not finite if the value of one rank is not.
    """
    if world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total / world_size()


def average_(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over ranks, in place. Every rank passes the same list."""
    if world_size() == 1:
        return
    bucket: list[Tensor] = []
    for position, tensor in enumerate(tensors):
        bucket.append(tensor)
        last = position + 1 == len(tensors)
        full = sum(part.numel() for part in bucket) >= _BUCKET_ELEMENTS
        if last or full or tensors[position + 1].dtype != tensor.dtype:
            _average_bucket_(bucket)
            bucket = []


def _average_bucket_(bucket: list[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    flat /= world_size()
    parts = flat.split([tensor.numel() for tensor in bucket])
    torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])


def broadcast_numbers(numbers: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return rank 0's values of `numbers` on every rank.

    Machines round differently, and ranks with different values could decide differently when to stop, and
    hang.
    """
    if world_size() == 1:
        return numbers
    values = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    dist.broadcast(values, src=0)
    return dict(zip(numbers, values.tolist(), strict=True))


def join_process_group(rank: int, world: int, store: str, backend: str, timeout_s: float) -> None:
    """Connect the `world` ranks of one machine without a port that the network reaches.

    Ray Train's own process group uses torch's TCP store, which listens on every interface and requires no
    token. Here ranks connect through the file `store`, which does not exist yet and which only this user can
    read. Gloo and NCCL listen on loopback, unless the user has set an interface for them. `timeout_s` is the
    timeout of every collective.
    """
    loopback = _loopback_interface()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    # Without the =, NCCL uses every interface with a name that begins with this one.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def _loopback_interface() -> str:
    """Find the name of the interface of 127.0.0.1: lo, or on macOS lo0."""
    for name, addresses in psutil.net_if_addrs().items():
        if any((address.family, address.address) == (socket.AF_INET, "127.0.0.1") for address in addresses):
            return name
    return "lo"
