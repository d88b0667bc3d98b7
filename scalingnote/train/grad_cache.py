"""GradCache: the step of a large batch in the memory of a small one.

    rows -> chunks -> embeddings, no graph -> loss -> gradients of embeddings -> chunks again, with a graph

The loss sees the embeddings of the whole batch; only the towers run chunk by chunk, twice. Gradients equal
those of a plain backward pass over the same chunks, dropout included. (Gao et al., 2021, Scaling deep
contrastive learning batch size under memory limited setup.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scalingnote.models.batch import Batch
from scalingnote.train.collectives import world_size
from scalingnote.train.config import GradCache
from scalingnote.train.engine import Engine


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
        """This rank's loss and its parts, from the embeddings of all its rows."""
        raise NotImplementedError


def cached_backward(engine: Engine, batch: Any, *, config: GradCache) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward pass of one step through the module of `engine`; returns loss and parts.

    Ranks run equally many chunks: those with fewer rows encode one of theirs again, with gradient 0, since
    sharded weights are gathered by all ranks together.

    Args:
        engine: its `module` is :class:`Cacheable`.
        batch: this rank's rows.
        config: rows of a chunk.
    """
    module = cast(Cacheable, engine.module)
    chunks = _chunks(module.inputs(batch), config)
    states: list[_RandomState] = []
    pieces: dict[str, list[Tensor]] = {}
    # Autocast caches the weights that it has cast. It is left and entered again between the passes, or the
    # second pass would use those of the first, which have no graph.
    with torch.no_grad(), engine.precision():
        for chunk in chunks:
            states.append(_RandomState())
            for name, piece in module.encode(chunk.name, chunk.rows).items():
                if not chunk.spare:
                    pieces.setdefault(name, []).append(piece.float())
    leaves = {name: torch.cat(parts).requires_grad_() for name, parts in pieces.items()}
    with engine.precision():
        loss, parts = module.loss(leaves, batch)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for chunk, state in zip(chunks, states, strict=True):
        with state.replayed(), engine.precision():
            embeddings = module.encode(chunk.name, chunk.rows)
        own = [gradients[name][chunk.start : chunk.stop] for name in embeddings]
        if chunk.spare:
            own = [torch.zeros_like(gradient) for gradient in own]
        engine.backward_from(list(embeddings.values()), own, last=chunk is chunks[-1])
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
    """Number of chunks of each input that the rank with most rows needs."""
    counts = [1 if rows is None else -(-len(rows) // sizes[name]) for name, rows in inputs.items()]
    if world_size() == 1:
        return counts
    device = next(rows.ids.device for rows in inputs.values() if rows is not None)
    largest = torch.tensor(counts, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return cast(list[int], largest.tolist())


class _RandomState:
    """The state of the random generators that dropout draws from, at the time it is created."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw the same numbers again; afterwards the generators are in the state they had before."""
        with torch.random.fork_rng([torch.cuda.current_device()] if self._cuda is not None else []):
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda)
            yield
