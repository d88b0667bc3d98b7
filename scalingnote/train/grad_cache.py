"""Gradients through embeddings that are computed first: GradCache, and shares of losses in the gradient.

GradCache runs the step of a large batch in the memory of a small one. The losses read the embeddings of the
entire batch; only the encoders run chunk by chunk, twice:

    rows -> chunks -> embeddings, no graph -> loss -> gradients of embeddings -> chunks again, with a graph

Gradients equal those of a plain backward pass over the same chunks, dropout included. (Gao et al., 2021,
Scaling deep contrastive learning batch size under memory limited setup.)

Losses that are added compete. If the gradients of one loss are a hundred times as long as those of another,
the optimizer follows the first, and the second keeps its initial value although it would decrease by itself:
the sparse losses of LightRetriever have this effect on its dense loss if they have full weight from the first
step. The values of the losses do not show it; the cosine of the gradient of a loss with the total gradient
does.
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
GRADIENT_ROWS = 8  # rows of each encoder with gradients; the losses are those of all rows
MAX_GRADIENT_NUMBERS = 1 << 24  # in the gradients of one loss: 64 MB
ADAPTER = "lora_"  # in the names of peft's parameters
MIN_GRADIENT_COSINE = 0.1
MIN_FALL = 0.01  # relative fall of a loss between the halves of an interval; below it, the loss stands still
_ALL_ROWS = GradCache(query_rows=1 << 30, document_rows=1 << 30)
RandomState = tuple[Tensor, Tensor | None]  # of the generators of the CPU and, if it exists, of the GPU


def cached_backward(engine: Engine, batch: Any, *, config: GradCache) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward pass of one step of `engine`'s :class:`Objective`; return loss and parts."""
    module = cast(Objective, engine.module)
    encode = CachedEncoder(engine, config)
    # Autocast caches the weights that it has cast. It is left and entered again between the passes, or the
    # second pass would use the cached weights of the first, which have no graph.
    with engine.precision():
        weighted, parts = module.losses(batch, encode)
        loss = total(weighted)
    leaves = encode.leaves
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for chunk in encode.chunks:
        with _replay(chunk.state), engine.precision():
            embeddings = module.encode(chunk.name, chunk.rows)
        chunk_gradients = [gradients[name][chunk.start : chunk.stop] for name in embeddings]
        if chunk.spare:
            chunk_gradients = [torch.zeros_like(gradient) for gradient in chunk_gradients]
        engine.backward_from(list(embeddings.values()), chunk_gradients, last=chunk is encode.chunks[-1])
    return loss.detach(), {name: part.detach() for name, part in parts.items()}


class CachedEncoder:
    """Encoder of rows, chunk by chunk without a graph, in place of :meth:`Objective.encode`. Collective.

    All ranks run the same number of chunks: ranks with fewer rows encode one of their rows again, with
    gradient 0, because all ranks together gather sharded weights.
    """

    def __init__(self, engine: Engine, config: GradCache) -> None:
        self._module, self._config = cast(Objective, engine.module), config
        self.inputs: dict[str, Batch] = {}
        self.leaves: dict[str, Tensor] = {}
        """Embeddings by name; they require gradients."""
        self.chunks: list[_Chunk] = []

    def __call__(self, name: str, rows: Batch) -> dict[str, Tensor]:
        """Encode rows; return their embeddings by name, as the module does."""
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
    if world_size() > 1:  # the number that the rank with most rows needs
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
    for start in range(0, int(count) * size, size):
        spare = start >= len(rows)
        first, stop = (0, 1) if spare else (start, min(start + size, len(rows)))
        yield _Chunk(name, rows.rows(first, stop), first, stop, spare, _random_state())


def _random_state() -> RandomState:
    """Return the state of the random generators that dropout draws from."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextmanager
def _replay(state: RandomState) -> Iterator[None]:
    """Draw the same numbers again; afterwards, restore the previous state of the generators."""
    cpu, cuda = state
    with torch.random.fork_rng([] if cuda is None else [torch.cuda.current_device()]):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        yield


# --- shares of losses in the gradient ----------------------------------------------------------------------


class GradientShares:
    """Measurement of shares every SHARE_INTERVAL_STEPS, with one warning for each loss that has none."""

    def __init__(self, engine: Engine, *, section: str, cache: GradCache | None) -> None:
        """Measure shares in the steps of `engine`.

        `section` is the name of the stage in the log, `cache` the chunks of a step through GradCache.
        """
        self._engine, self._log, self._cache = engine, get_logger(section), cache or _ALL_ROWS
        self._possible = engine.whole and isinstance(engine.module, Objective)
        self._warned: set[str] = set()
        self._logged_at = -SHARE_LOG_INTERVAL_S
        self._values: list[Mapping[str, float]] = []  # of the steps since the last measurement

    def measure(self, step: int, batch: Any) -> dict[str, float]:
        """Measure, if due, before the step: return ``gradient_norm/NAME`` and ``gradient_cosine/NAME``.

        Empty if there is only one loss. Collective.
        """
        if step % SHARE_INTERVAL_STEPS or not self._possible:
            return {}
        shares = gradient_shares(self._engine, batch, cache=self._cache)
        if shares and time.monotonic() - self._logged_at >= SHARE_LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            entries = (f"{name} {norm:.2g} (cosine {cosine:.2f})" for name, (norm, cosine) in shares.items())
            self._log.info("gradients at step %d: %s", step, ", ".join(entries))
        for name in standing_still(self._values):
            if name in shares and name not in self._warned and shares[name][1] < MIN_GRADIENT_COSINE:
                self._warned.add(name)
                self._log.warning(
                    "step %d: the loss %s stands still at %.4g, and its gradient has a cosine of %.2f with "
                    "that of all losses: the others are optimized in its place. Raise its weight, or let "
                    "their weights grow from 0 (train.sparse.ramp)",
                    step,
                    name,
                    self._values[-1][name],
                    shares[name][1],
                )
        self._values.clear()
        measured: dict[str, float] = {}
        for name, (norm, cosine) in shares.items():
            measured |= {f"gradient_norm/{name}": norm, f"gradient_cosine/{name}": cosine}
        return measured

    def note(self, values: Mapping[str, float]) -> None:
        """Record the values of the losses at a step."""
        if self._possible:
            self._values.append(values)


def standing_still(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of values with a mean over the second half that is not below that of the first."""
    half = len(values) // 2
    if not half:
        return []
    first, second = (
        {name: sum(at[name] for at in part) / half for name in values[0]}
        for part in (values[:half], values[-half:])
    )
    return [name for name in first if second[name] > (1 - MIN_FALL) * first[name] > 0]


def gradient_shares(engine: Engine, batch: Any, *, cache: GradCache) -> dict[str, tuple[float, float]]:
    """Compute the norm of the gradient of each weighted loss, and its cosine with the sum of gradients.

    They are the gradients of the adapters, or of all trained parameters, through the first GRADIENT_ROWS rows
    of each encoder; means over ranks. The state of the random generators is restored, so the step draws the
    same numbers. Collective. Empty if fewer than two losses have a gradient.
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
    summed = [torch.stack(by_loss).sum(0) for by_loss in zip(*gradients, strict=True)]
    length = _product(summed, summed).sqrt()
    norms = torch.stack([_product(gradient, gradient).sqrt() for gradient in gradients])
    products = torch.stack([_product(gradient, summed) for gradient in gradients])
    cosines = products / (norms * length).clamp(min=torch.finfo(torch.float32).tiny)
    norms, cosines = mean_over_ranks(torch.stack([norms, cosines]))
    pairs = zip(norms.tolist(), cosines.tolist(), strict=True)
    return dict(zip(weighted, pairs, strict=True))


def measured_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the adapters of a module, else all trained parameters: up to MAX_GRADIENT_NUMBERS."""
    trained = trainable(module)
    adapters = {name: value for name, value in trained.items() if ADAPTER in name}
    chosen, room = [], MAX_GRADIENT_NUMBERS
    for value in (adapters or trained).values():
        if value.numel() <= room:
            chosen.append(value)
            room -= value.numel()
    return chosen


def _of_parameters(
    engine: Engine, encode: CachedEncoder, loss: Tensor, parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Compute the gradients of a loss through the embeddings of the first rows."""
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
        with_gradient = [(value, grad[: len(value)]) for value, grad in pairs if grad is not None]
        if not with_gradient:
            continue
        values, grads = zip(*with_gradient, strict=True)
        gradients = torch.autograd.grad(surrogate(values, grads), parameters, allow_unused=True)
        for running_sum, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                running_sum += gradient
    return sums


def _product(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    return torch.stack([(factor * other).sum() for factor, other in zip(first, second, strict=True)]).sum()
