"""GradCache: the step of a large batch in the memory of a small one.

    rows -> chunks -> embeddings, no graph -> loss -> gradients of embeddings -> chunks again, with a graph

The loss sees the embeddings of the whole batch; only the towers are run piece by piece, twice. Gradients are
those of a plain backward pass over the same chunks, dropout included. (Gao et al., 2021, Scaling deep
contrastive learning batch size under memory limited setup.)
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalingnote.models.batch import Batch
from scalingnote.train.config import GradCache
from scalingnote.train.distributed import world_size


@runtime_checkable
class Cacheable(Protocol):
    """A module whose loss depends on its parameters through embeddings alone.

    Its forward pass is ``loss({name: encode(name, rows) for name, rows in inputs(batch).items()}, batch)``.
    """

    def inputs(self, batch: Any) -> dict[str, Batch | None]:
        """This rank's rows by the name of what encodes them; None where that needs no rows."""
        ...

    def encode(self, name: str, rows: Batch | None) -> Tensor:
        """Embeddings of some rows [rows, views, dim], in float32; what needs no rows gives one."""
        ...

    def loss(self, embeddings: dict[str, Tensor], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's loss (its mean over ranks is the global loss) and its parts.

        It reads no parameter: what the loss learns has a name in `inputs`, or it would get no gradient.
        """
        ...


@runtime_checkable
class Chunked(Protocol):
    """What is asked here of an :class:`~scalingnote.train.strategies.engine.Engine`."""

    module: nn.Module

    def precision(self) -> AbstractContextManager[Any]:
        """The autocast that the module runs under."""
        ...

    def backward_from(self, embeddings: Tensor, gradients: Tensor, *, last: bool) -> None:
        """Backward of one chunk; by the end of the `last` one all gradients are averaged over ranks."""
        ...


def cached_backward(engine: Chunked, batch: Any, *, config: GradCache) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward of one step through the module of `engine`; returns loss and parts.

    Ranks run equally many chunks: those with fewer rows encode one of theirs again, with gradient 0, since
    sharded weights are gathered by all ranks together.
    """
    module = cast(Cacheable, engine.module)
    chunks = _chunks(module.inputs(batch), config)
    states, pieces = [], []
    # Autocast remembers weights it has cast: left and entered again between the passes, or the second would
    # find the first one's, which have no graph.
    with torch.no_grad(), engine.precision():
        for chunk in chunks:
            states.append(_Randomness())
            pieces.append(module.encode(chunk.name, chunk.rows).float())
    leaves = {
        name: torch.cat([p for p, c in zip(pieces, chunks, strict=True) if c.name == name and not c.spare])
        for name in dict.fromkeys(chunk.name for chunk in chunks)
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    with engine.precision():
        loss, parts = module.loss(leaves, batch)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for chunk, state in zip(chunks, states, strict=True):
        with state.replayed(), engine.precision():
            embeddings = module.encode(chunk.name, chunk.rows)
        gradient = gradients[chunk.name][chunk.start : chunk.stop]
        if chunk.spare:
            gradient = torch.zeros_like(gradient)
        engine.backward_from(embeddings, gradient, last=chunk is chunks[-1])
    return loss.detach(), parts


@dataclass(frozen=True, eq=False)
class _Chunk:
    name: str
    rows: Batch | None
    start: int
    stop: int
    spare: bool = False


def _chunks(inputs: dict[str, Batch | None], config: GradCache) -> list[_Chunk]:
    sizes = {"query": config.query_rows, "document": config.document_rows, "pair": config.document_rows}
    chunks = []
    for (name, rows), rounds in zip(inputs.items(), _rounds(inputs, sizes), strict=True):
        if rows is None:
            chunks.append(_Chunk(name, None, 0, 1))
            continue
        for start in range(0, rounds * sizes[name], sizes[name]):
            if start < len(rows):
                stop = min(start + sizes[name], len(rows))
                chunks.append(_Chunk(name, rows.rows(start, stop), start, stop))
            else:
                chunks.append(_Chunk(name, rows.rows(0, 1), 0, 1, spare=True))
    return chunks


def _rounds(inputs: dict[str, Batch | None], sizes: dict[str, int]) -> list[int]:
    """Chunks of each input, as many as the rank with most rows needs."""
    counts = [1 if rows is None else -(-len(rows) // sizes[name]) for name, rows in inputs.items()]
    if world_size() == 1:
        return counts
    device = next(rows.ids.device for rows in inputs.values() if rows is not None)
    most = torch.tensor(counts, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return cast(list[int], most.tolist())


class _Randomness:
    """The state of the generators that dropout draws from, taken when made."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw once more what was drawn from here on; afterwards the generators stand where they stood."""
        with torch.random.fork_rng([torch.cuda.current_device()] if self._cuda is not None else []):
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda)
            yield
