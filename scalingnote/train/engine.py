"""Engine: a module, its optimizer and their distribution over ranks, behind one interface for the loop.

The losses are such that the *mean over ranks* of the ranks' gradients is the gradient of one process that
holds the whole batch (see :mod:`scalingnote.train.collectives`). Every engine takes that mean exactly once.

GradCache is the step of a large batch in the memory of a small one. The loss sees the embeddings of the whole
batch; only the towers run chunk by chunk, twice:

    rows -> chunks -> embeddings, no graph -> loss -> gradients of embeddings -> chunks again, with a graph

Gradients equal those of a plain backward pass over the same chunks, dropout included. (Gao et al., 2021,
Scaling deep contrastive learning batch size under memory limited setup.)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from scalingnote.errors import ConfigError
from scalingnote.models.batch import Batch
from scalingnote.models.cross_encoder import CrossEncoder
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.tower import Tower
from scalingnote.models.weights import compute_dtype
from scalingnote.train.collectives import world_size
from scalingnote.train.config import GradCache, Memory, Optimizer, Schedule

WHOLE = "whole"  # the layout of states that any number of ranks can read


class Engine:
    """One optimizer step is ``loss, parts = engine(batch); engine.backward(loss); engine.step(lr)``.

    Collective: every rank makes the same calls in the same order. This class holds what engines with a torch
    optimizer over named parameters have in common; a subclass sets `_names` and `_optimizer`.
    """

    module: nn.Module
    """The caller's own module. Its methods may be called directly, under :meth:`precision`."""
    whole: bool = False
    """Whether every rank holds all parameters, so that one rank's gradients of them can be taken alone."""
    layout: str = WHOLE
    """How :meth:`state` is divided. States of one layout are compatible for any number of ranks."""
    _names: dict[str, nn.Parameter]
    _optimizer: torch.optim.Optimizer

    def __init__(self, module: nn.Module, *, schedule: Schedule, device: torch.device) -> None:
        self.module = apply_memory_settings(module, schedule.memory)
        self._device, self._dtype = device, compute_dtype(schedule.precision, device)
        self._clip = schedule.optimizer.clip

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's loss and its parts, in the configured precision."""
        with self.precision():
            loss, parts = self.module(batch)
        return loss, parts

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast that :meth:`__call__` runs under."""
        return autocast(self._device, self._dtype)

    def backward(self, loss: Tensor) -> None:
        """The only backward pass of a plain step."""
        loss.backward()

    def backward_from(self, embeddings: Sequence[Tensor], gradients: Sequence[Tensor], *, last: bool) -> None:
        """Backward pass of one GradCache chunk, from the gradients of its embeddings.

        Gradients add up over chunks, and are averaged over ranks by the end of the `last` one.
        """
        surrogate(embeddings, gradients).backward()
        if last:
            self._average()

    def step(self, lr: float) -> Tensor:
        """Clip, step, clear the gradients; returns their global norm before clipping."""
        norm = self._clip_gradients()
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint must hold, by name; this rank's shards, alive: read or fill them in place."""
        initialize_state(self._optimizer)
        weights = {name: value.detach() for name, value in self._names.items()}
        return weights | named_state(self._optimizer, self._names)

    def restored(self, state: Mapping[str, Tensor]) -> None:
        """Must be called after the tensors of :meth:`state` were filled from a checkpoint."""
        restore_scalars(self._optimizer, self._names, state)

    def weights(self) -> dict[str, Tensor] | None:
        """Trained parameters, whole, in float32, on the CPU of rank 0; None on other ranks."""
        raise NotImplementedError

    def _average(self) -> None:
        """Average over ranks the gradients that no backward pass has averaged."""
        raise NotImplementedError

    def _clip_gradients(self) -> Tensor:
        """Clip to the configured global norm; returns the norm before."""
        raise NotImplementedError


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the result of :meth:`Engine.weights` into a new module of the same kind."""
    # Not strict: frozen parameters have no weights here, and those that two towers share have a name in each.
    unknown = module.load_state_dict(dict(weights), strict=False).unexpected_keys
    assert not unknown, f"weights of another module: {unknown[:4]}"


def apply_memory_settings(module: nn.Module, memory: Memory) -> nn.Module:
    """Switch on gradient checkpointing and compilation where `memory` asks for them, in place."""
    if memory.gradient_checkpointing:
        for model in module.modules():
            if isinstance(model, PreTrainedModel):
                # The reentrant kind cannot see a model that is used twice in one step.
                model.activation_checkpointing_enable({"use_reentrant": False})
                model.config.use_cache = False
    if memory.compile:
        for backbone in backbones(module):
            for layer in layers(backbone):
                # Layers are alike: one compilation serves all. Lengths differ from batch to batch.
                layer.compile(dynamic=True)
    return module


def backbones(module: nn.Module) -> list[nn.Module]:
    """The transformers inside, each once, though two towers may share one."""
    kinds = Tower | TokenWise | CrossEncoder
    towers = [tower for tower in module.modules() if isinstance(tower, kinds)]
    return list({id(tower.backbone): tower.backbone for tower in towers}.values())


def layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers of a transformer: the members of its outermost lists of modules."""
    if isinstance(backbone, nn.ModuleList):
        return list(backbone)
    return [layer for child in backbone.children() for layer in layers(child)]


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that learn, each once, by name. Frozen ones are rebuilt from config, never stored."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Matrix products in `dtype`; nothing changes for float32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def surrogate(embeddings: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """A scalar whose gradients with regard to `embeddings` are `gradients`."""
    products = [(one.float() * grad).sum() for one, grad in zip(embeddings, gradients, strict=True)]
    return torch.stack(products).sum()


# --- optimizers: AdamW with float32 or 8-bit moments, or RowAdam -------------------------------------------


def make_optimizer(
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


class RowAdam(torch.optim.Optimizer):
    """Adam over rows (the first dimension) that have a gradient, for lookup tables; of a vector, over values.

    A row changes only in steps whose batch contains its token. Adam changes every row in every step, by
    moments that decay slowly after the row's last gradient, so the row of a rare token would move ten times
    too far. Here the moments of a row decay at its next gradient, by the number of steps since the last one.

    An attribute `row_rates` [rows] of a parameter holds factors of its learning rate.
    """

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
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["last"] = torch.zeros(len(parameter), device=parameter.device)
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
        rates = getattr(parameter, "row_rates", None)
        if rates is not None:
            moved *= rates.to(moved.device)[rows].reshape(shape)
        parameter[rows] -= group["lr"] * moved


# --- GradCache ---------------------------------------------------------------------------------------------


class Cacheable(nn.Module):
    """A module whose loss depends on its parameters through named embeddings alone.

    A parameter that the loss needs (a learnt temperature) is one of these embeddings, made from no rows: the
    loss itself reads no parameter, or that would get no gradient.
    """

    def forward(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of this rank (its mean over ranks is the global loss) and its parts, for the log."""
        embeddings: dict[str, Tensor] = {}
        for name, rows in self.inputs(batch).items():
            embeddings |= self.encode(name, rows)
        return self.loss(embeddings, batch)

    def inputs(self, batch: Any) -> dict[str, Batch | None]:
        """This rank's rows by the name of the encoder that reads them; None where it needs no rows."""
        raise NotImplementedError

    def encode(self, name: str, rows: Batch | None) -> dict[str, Tensor]:
        """Named embeddings of some rows, each [rows, ...], in float32; without rows, of one row."""
        raise NotImplementedError

    def loss(self, embeddings: dict[str, Tensor], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's loss and its parts without their weights, from the embeddings of all its rows."""
        weighted, parts = self.weighted_losses(embeddings, batch)
        return total(weighted), {name: part.detach() for name, part in parts.items()}

    def weighted_losses(
        self, embeddings: dict[str, Tensor], batch: Any
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The losses whose sum is :meth:`loss`, each times its weight; and what the log shows of them."""
        raise NotImplementedError


def total(losses: Mapping[str, Tensor]) -> Tensor:
    """Their sum."""
    first, *others = losses.values()
    return sum(others, start=first)


def cached_backward(engine: Engine, batch: Any, *, config: GradCache) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward pass of one step through the module of `engine`; returns loss and parts.

    The module is :class:`Cacheable`. Ranks run equally many chunks: those with fewer rows encode one of
    theirs again, with gradient 0, since sharded weights are gathered by all ranks together.
    """
    module = cast(Cacheable, engine.module)
    chunks = _chunks(module.inputs(batch), config)
    leaves, states = _leaves(engine, chunks)
    with engine.precision():
        loss, parts = module.loss(leaves, batch)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for chunk, state in zip(chunks, states, strict=True):
        with _replay(*state), engine.precision():
            embeddings = module.encode(chunk.name, chunk.rows)
        own = [gradients[name][chunk.start : chunk.stop] for name in embeddings]
        if chunk.spare:
            own = [torch.zeros_like(gradient) for gradient in own]
        engine.backward_from(list(embeddings.values()), own, last=chunk is chunks[-1])
    return loss.detach(), parts


def cached_embeddings(
    engine: Engine, inputs: dict[str, Batch | None], config: GradCache
) -> dict[str, Tensor]:
    """Embeddings of a batch by name, made chunk by chunk without a graph; they want gradients. Collective."""
    return _leaves(engine, _chunks(inputs, config))[0]


@contextmanager
def keep_random_state() -> Iterator[None]:
    """Afterwards the generators that dropout draws from are in the state they had before."""
    with _replay(*_random_state()):
        yield


def _leaves(
    engine: Engine, chunks: "Sequence[_Chunk]"
) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor | None]]]:
    """Embeddings of chunks, joined, and the state of the random generators before each."""
    module = cast(Cacheable, engine.module)
    states = []
    pieces: dict[str, list[Tensor]] = {}
    # Autocast caches the weights that it has cast. It is left and entered again between the passes, or the
    # second pass would use those of the first, which have no graph.
    with torch.no_grad(), engine.precision():
        for chunk in chunks:
            states.append(_random_state())
            for name, piece in module.encode(chunk.name, chunk.rows).items():
                if not chunk.spare:
                    pieces.setdefault(name, []).append(piece.float())
    return {name: torch.cat(parts).requires_grad_() for name, parts in pieces.items()}, states


@dataclass(frozen=True, eq=False)
class _Chunk:
    name: str
    rows: Batch | None
    start: int
    stop: int
    spare: bool = False


def _chunks(inputs: dict[str, Batch | None], config: GradCache) -> list[_Chunk]:
    sizes = {"query": config.query_rows, "document": config.document_rows, "pair": config.document_rows}
    counts = [1 if rows is None else -(-len(rows) // sizes[name]) for name, rows in inputs.items()]
    if world_size() > 1:  # as many as the rank with most rows needs
        device = next(rows.ids.device for rows in inputs.values() if rows is not None)
        largest = torch.tensor(counts, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        counts = largest.tolist()
    chunks = []
    for (name, rows), count in zip(inputs.items(), counts, strict=True):
        if rows is None:
            chunks.append(_Chunk(name, None, 0, 1))
            continue
        for start in range(0, count * sizes[name], sizes[name]):
            if start < len(rows):
                stop = min(start + sizes[name], len(rows))
                chunks.append(_Chunk(name, rows.rows(start, stop), start, stop))
            else:
                chunks.append(_Chunk(name, rows.rows(0, 1), 0, 1, spare=True))
    return chunks


def _random_state() -> tuple[Tensor, Tensor | None]:
    """The state of the random generators that dropout draws from, on the CPU and on a GPU if there is one."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextmanager
def _replay(cpu: Tensor, cuda: Tensor | None) -> Iterator[None]:
    """Draw the same numbers again; afterwards the generators are in the state they had before."""
    with torch.random.fork_rng([] if cuda is None else [torch.cuda.current_device()]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        yield
