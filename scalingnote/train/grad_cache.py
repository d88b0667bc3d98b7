"""Passes over a batch whose embeddings are made first: GradCache, and which of several losses weights follow.

GradCache is the step of a large batch in the memory of a small one. The losses see the embeddings of the
whole batch; only the encoders run chunk by chunk, twice:

    rows -> chunks -> embeddings, no graph -> loss -> gradients of embeddings -> chunks again, with a graph

Gradients equal those of a plain backward pass over the same chunks, dropout included. (Gao et al., 2021,
Scaling deep contrastive learning batch size under memory limited setup.)

Losses that are added compete. One whose gradients are a hundred times as long as another's decides where the
optimizer goes, and the other stays at its first value although it would learn by itself: LightRetriever's
sparse losses do that to its dense one if they have full weight from the first step. The values of the losses
do not show it; the cosine of the loss's gradient with the whole gradient does.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalingnote.core.log import get_logger
from scalingnote.models.batch import Batch
from scalingnote.train.config import GradCache
from scalingnote.train.engine import (
    Engine,
    Objective,
    mean_over_ranks,
    surrogate,
    total,
    trainable,
    world_size,
)

SHARE_INTERVAL_STEPS, SHARE_LOG_INTERVAL_S = 50, 60.0
GRADIENT_ROWS = 8  # of each encoder whose gradients are taken; the losses are those of all rows
MAX_GRADIENT_NUMBERS = 1 << 24  # in the gradients of one loss: 64 MB
ADAPTER = "lora_"  # in the names of peft's parameters
MIN_GRADIENT_COSINE = 0.1
MIN_FALL = 0.01  # of a loss's value between the halves of an interval, below which it stands still
_ALL_ROWS = GradCache(query_rows=1 << 30, document_rows=1 << 30)
RandomState = tuple[Tensor, Tensor | None]  # of the generators of the CPU and, if there is one, of the GPU


def cached_backward(engine: Engine, batch: Any, *, config: GradCache) -> tuple[Tensor, dict[str, Tensor]]:
    """One step of the :class:`Objective` of `engine`, forward and backward; returns its loss and parts."""
    module = cast(Objective, engine.module)
    encode = CachedEncoder(engine, config)
    # Autocast caches the weights that it has cast. It is left and entered again between the passes, or the
    # second pass would use those of the first, which have no graph.
    with engine.precision():
        weighted, parts = module.losses(batch, encode)
        loss = total(weighted)
    leaves = encode.leaves
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for chunk in encode.chunks:
        with _replay(chunk.state), engine.precision():
            embeddings = module.encode(chunk.name, chunk.rows)
        own = [gradients[name][chunk.start : chunk.stop] for name in embeddings]
        if chunk.spare:
            own = [torch.zeros_like(gradient) for gradient in own]
        engine.backward_from(list(embeddings.values()), own, last=chunk is encode.chunks[-1])
    return loss.detach(), {name: part.detach() for name, part in parts.items()}


class CachedEncoder:
    """Encodes rows chunk by chunk without a graph, in place of :meth:`Objective.encode`. Collective.

    Ranks run equally many chunks: those with fewer rows encode one of theirs again, with gradient 0, since
    sharded weights are gathered by all ranks together.
    """

    def __init__(self, engine: Engine, config: GradCache) -> None:
        self._module, self._config = cast(Objective, engine.module), config
        self.inputs: dict[str, Batch] = {}
        self.leaves: dict[str, Tensor] = {}
        """Embeddings by name; they want gradients."""
        self.chunks: list[_Chunk] = []

    def __call__(self, name: str, rows: Batch) -> dict[str, Tensor]:
        """Embeddings of rows by name, as the module gives them."""
        self.inputs[name] = rows
        pieces: dict[str, list[Tensor]] = {}
        size = self._config.query_rows if name == "query" else self._config.document_rows
        with torch.no_grad():
            for chunk in _chunks(name, rows, size=size):
                self.chunks.append(chunk)
                for key, piece in self._module.encode(name, chunk.rows).items():
                    if not chunk.spare:
                        pieces.setdefault(key, []).append(piece.float())
        leaves = {key: torch.cat(parts).requires_grad_() for key, parts in pieces.items()}
        self.leaves |= leaves
        return leaves


@dataclass(frozen=True, eq=False)
class _Chunk:
    name: str
    rows: Batch
    start: int
    stop: int
    spare: bool
    state: RandomState  # before the first pass


def _chunks(name: str, rows: Batch, *, size: int) -> Iterator[_Chunk]:
    count = torch.tensor(-(-len(rows) // size), device=rows.ids.device)
    if world_size() > 1:  # as many as the rank with most rows needs
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
    for start in range(0, int(count) * size, size):
        spare = start >= len(rows)
        first, stop = (0, 1) if spare else (start, min(start + size, len(rows)))
        yield _Chunk(name, rows.rows(first, stop), first, stop, spare, _random_state())


def _random_state() -> RandomState:
    """The state of the random generators that dropout draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextmanager
def _replay(state: RandomState) -> Iterator[None]:
    """Draw the same numbers again; afterwards the generators are in the state they had before."""
    cpu, cuda = state
    with torch.random.fork_rng([] if cuda is None else [torch.cuda.current_device()]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        yield


# --- shares of losses in the gradient ----------------------------------------------------------------------


class GradientShares:
    """Measures shares every SHARE_INTERVAL_STEPS of a run, and warns of each loss that has none, once."""

    def __init__(self, engine: Engine, *, section: str, cache: GradCache | None) -> None:
        """`section` is the name of the stage in the log, `cache` the chunks of a step through GradCache."""
        self._engine, self._log, self._cache = engine, get_logger(section), cache or _ALL_ROWS
        self._possible = engine.whole and isinstance(engine.module, Objective)
        self._warned: set[str] = set()
        self._logged_at = -SHARE_LOG_INTERVAL_S
        self._values: list[Mapping[str, float]] = []  # of the steps since the last measurement

    def measure(self, step: int, batch: Any) -> dict[str, float]:
        """Before the step is taken, if it is due: ``gradient_norm/NAME`` and ``gradient_cosine/NAME``.

        Empty if there is one loss only. Collective.
        """
        if step % SHARE_INTERVAL_STEPS or not self._possible:
            return {}
        shares = gradient_shares(self._engine, batch, cache=self._cache)
        if shares and time.monotonic() - self._logged_at >= SHARE_LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            shown = (f"{name} {norm:.2g} (cosine {cosine:.2f})" for name, (norm, cosine) in shares.items())
            self._log.info("gradients at step %d: %s", step, ", ".join(shown))
        for name in standing_still(self._values):
            if name in shares and name not in self._warned and shares[name][1] < MIN_GRADIENT_COSINE:
                self._warned.add(name)
                self._log.warning(
                    "step %d: the loss %s stands still at %.4g, and its gradient has a cosine of %.2f with "
                    "that of all losses: they are learnt in its place. Raise its weight, or let theirs grow "
                    "from 0 (train.sparse.ramp)",
                    step,
                    name,
                    self._values[-1][name],
                    shares[name][1],
                )
        self._values.clear()
        found: dict[str, float] = {}
        for name, (norm, cosine) in shares.items():
            found |= {f"gradient_norm/{name}": norm, f"gradient_cosine/{name}": cosine}
        return found

    def note(self, values: Mapping[str, float]) -> None:
        """The values of the losses at a step."""
        if self._possible:
            self._values.append(values)


def standing_still(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of values whose mean over the second half is not below that over the first."""
    half = len(values) // 2
    if not half:
        return []
    first, second = (
        {name: sum(at[name] for at in part) / half for name in values[0]}
        for part in (values[:half], values[-half:])
    )
    return [name for name in first if second[name] > (1 - MIN_FALL) * first[name] > 0]


def gradient_shares(engine: Engine, batch: Any, *, cache: GradCache) -> dict[str, tuple[float, float]]:
    """Of each weighted loss of a batch: the norm of its gradient, and its cosine with that of their sum.

    They are the gradients of the adapters, or of all that learns, through the first GRADIENT_ROWS rows of
    each encoder; means over ranks. The random numbers
    that the step will draw are left as they are. Collective. Empty if fewer than two losses have a gradient.
    """
    module = cast(Objective, engine.module)
    parameters = measured_parameters(module)
    with _replay(_random_state()):
        encode = CachedEncoder(engine, cache)
        with engine.precision():
            weighted, _ = module.losses(batch, encode)
        weighted = {name: loss for name, loss in weighted.items() if loss.requires_grad}
        if len(weighted) < 2 or not parameters:
            return {}
        gradients = [_of_parameters(engine, encode, loss, parameters) for loss in weighted.values()]
    whole = [torch.stack(each).sum(0) for each in zip(*gradients, strict=True)]
    length = _product(whole, whole).sqrt()
    norms = torch.stack([_product(own, own).sqrt() for own in gradients])
    products = torch.stack([_product(own, whole) for own in gradients])
    cosines = products / (norms * length).clamp(min=torch.finfo(torch.float32).tiny)
    norms, cosines = mean_over_ranks(torch.stack([norms, cosines]))
    pairs = zip(norms.tolist(), cosines.tolist(), strict=True)
    return dict(zip(weighted, pairs, strict=True))


def measured_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The adapters of a module or, without any, all that learns: up to MAX_GRADIENT_NUMBERS."""
    learnt = trainable(module)
    adapters = {name: value for name, value in learnt.items() if ADAPTER in name}
    chosen, room = [], MAX_GRADIENT_NUMBERS
    for value in (adapters or learnt).values():
        if value.numel() <= room:
            chosen.append(value)
            room -= value.numel()
    return chosen


def _of_parameters(
    engine: Engine, encode: CachedEncoder, loss: Tensor, parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Gradients of a loss through the embeddings of the first rows."""
    upstream = dict(
        zip(
            encode.leaves,
            torch.autograd.grad(loss, list(encode.leaves.values()), retain_graph=True, allow_unused=True),
            strict=True,
        )
    )
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    for name, rows in encode.inputs.items():
        with engine.precision():
            embeddings = cast(Objective, engine.module).encode(
                name, rows.rows(0, min(GRADIENT_ROWS, len(rows)))
            )
        pairs = [(value, upstream[key]) for key, value in embeddings.items()]
        known = [(value, grad[: len(value)]) for value, grad in pairs if grad is not None]
        if not known:
            continue
        values, grads = zip(*known, strict=True)
        found = torch.autograd.grad(surrogate(values, grads), parameters, allow_unused=True)
        for own, gradient in zip(sums, found, strict=True):
            if gradient is not None:
                own += gradient
    return sums


def _product(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([(one * other).sum() for one, other in zip(first, second, strict=True)]).sum()
