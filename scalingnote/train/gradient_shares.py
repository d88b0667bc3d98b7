"""Which of several losses the weights follow: the gradient of each beside that of their sum.

Losses that are added compete. One whose gradients are a hundred times as long as another's decides where the
optimizer goes, and the other stays at its first value although it would learn alone: LightRetriever's sparse
losses do that to its dense one where they have full weight from the first step. The values of the losses do
not show it; the cosine of the loss's gradient with the whole gradient does.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from scalingnote.log import get_logger
from scalingnote.models.batch import Batch
from scalingnote.train.collectives import mean_over_ranks
from scalingnote.train.config import GradCache
from scalingnote.train.engine import (
    Cacheable,
    Engine,
    cached_embeddings,
    keep_random_state,
    surrogate,
    trainable,
)

INTERVAL_STEPS, LOG_INTERVAL_S = 50, 60.0
ROWS = 8  # of each encoder whose gradients are taken; the losses are those of all rows
MOST_NUMBERS = 1 << 24  # in the gradients of one loss: 64 MB
ADAPTER = "lora_"  # in the names of peft's parameters
LEAST_COSINE = 0.1
LEAST_FALL = 0.01  # of a loss's value between the halves of an interval, below which it stands still
_ALL_ROWS = GradCache(query_rows=1 << 30, document_rows=1 << 30)


class GradientShare(NamedTuple):
    """Of one weighted loss."""

    norm: float
    cosine: float  # with the gradient of the sum of all


class GradientShares:
    """Measures the shares of a run every INTERVAL_STEPS, and warns of each loss that has none, once."""

    def __init__(self, engine: Engine, *, section: str, cache: GradCache | None) -> None:
        """`section` is the name of the stage in the log, `cache` the chunks of a step through GradCache."""
        self._engine, self._log, self._cache = engine, get_logger(section), cache or _ALL_ROWS
        self._possible = engine.whole and isinstance(engine.module, Cacheable)
        self._warned: set[str] = set()
        self._logged_at = -LOG_INTERVAL_S
        self._values: list[Mapping[str, float]] = []  # of the steps since the last measurement

    def measure(self, step: int, batch: Any) -> dict[str, GradientShare]:
        """Before the step is taken; empty where it is not due, and where there is one loss. Collective."""
        if step % INTERVAL_STEPS or not self._possible:
            return {}
        shares = gradient_shares(self._engine, batch, cache=self._cache)
        if shares and time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            shown = (f"{name} {share.norm:.2g} (cosine {share.cosine:.2f})" for name, share in shares.items())
            self._log.info("gradients at step %d: %s", step, ", ".join(shown))
        for name in standing_still(self._values):
            if name in shares and name not in self._warned and shares[name].cosine < LEAST_COSINE:
                self._warned.add(name)
                self._log.warning(
                    "step %d: the loss %s stands still at %.4g, and its gradient has a cosine of %.2f with "
                    "that of all losses: they are learnt in its place. Raise its weight, or let theirs grow "
                    "from 0 (train.sparse.ramp)",
                    *(step, name, self._values[-1][name], shares[name].cosine),
                )
        self._values.clear()
        return shares

    def note(self, values: Mapping[str, float]) -> None:
        """The values of the losses at a step."""
        if self._possible:
            self._values.append(values)


def standing_still(values: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of values whose mean over the second half is not below that over the first."""
    half = len(values) // 2
    if not half:
        return []
    means = [
        {name: sum(at[name] for at in part) / half for name in values[0]}
        for part in (values[:half], values[-half:])
    ]
    first, second = means
    return [name for name in first if second[name] > (1 - LEAST_FALL) * first[name] > 0]


def gradient_shares(engine: Engine, batch: Any, *, cache: GradCache) -> dict[str, GradientShare]:
    """The share of each weighted loss of a batch in the gradients of the adapters, or of all that learns.

    Gradients go through the first ROWS rows of each encoder; means over ranks. The random numbers that the
    step will draw are left as they are. Collective. Empty where fewer than two losses have a gradient.
    """
    module = cast(Cacheable, engine.module)
    parameters = measured(module)
    with keep_random_state():
        leaves = cached_embeddings(engine, module.inputs(batch), cache)
        with engine.precision():
            weighted, _ = module.weighted_losses(leaves, batch)
        weighted = {name: loss for name, loss in weighted.items() if loss.requires_grad}
        if len(weighted) < 2 or not parameters:
            return {}
        gradients = {}
        for name, loss in weighted.items():
            found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
            gradients[name] = _of_parameters(engine, batch, dict(zip(leaves, found, strict=True)), parameters)
    whole = [torch.stack(each).sum(0) for each in zip(*gradients.values(), strict=True)]
    length = _product(whole, whole).sqrt()
    norms = torch.stack([_product(own, own).sqrt() for own in gradients.values()])
    products = torch.stack([_product(own, whole) for own in gradients.values()])
    cosines = products / (norms * length).clamp(min=torch.finfo(torch.float32).tiny)
    norms, cosines = mean_over_ranks(torch.stack([norms, cosines]))
    pairs = zip(norms.tolist(), cosines.tolist(), strict=True)
    return {name: GradientShare(*pair) for name, pair in zip(gradients, pairs, strict=True)}


def measured(module: nn.Module) -> list[nn.Parameter]:
    """The adapters of a module or, without any, all that learns: as many as MOST_NUMBERS has room for."""
    learnt = trainable(module)
    adapters = {name: value for name, value in learnt.items() if ADAPTER in name}
    found, room = [], MOST_NUMBERS
    for value in (adapters or learnt).values():
        if value.numel() <= room:
            found.append(value)
            room -= value.numel()
    return found


def _of_parameters(
    engine: Engine, batch: Any, upstream: Mapping[str, Tensor | None], parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Gradients of parameters, from those of the embeddings of the first rows."""
    module = cast(Cacheable, engine.module)
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    for name, rows in module.inputs(batch).items():
        some = rows.rows(0, min(ROWS, len(rows))) if isinstance(rows, Batch) else None
        with engine.precision():
            embeddings = module.encode(name, some)
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
