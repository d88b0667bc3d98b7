"""Arithmetic of a training step: floating-point operations of both towers and of the loss.

A multiplication with an addition counts as two. Only matrix products count; norms, activations and the
softmax are below a hundredth of them. What the graph is worked out for, and what is done anew only to save
memory, are kept apart: utilisation is told of the first (MFU) or of both (HFU).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scalingnote.models.config import Lora
from scalingnote.models.shape import Shape, adapter_parameters


@dataclass(frozen=True)
class Work:
    """Operations of one training step, or of a part of it."""

    forward: float
    backward: float
    again: float = 0.0  # forward passes repeated by gradient checkpointing and GradCache

    def __add__(self, other: "Work") -> "Work":
        return Work(self.forward + other.forward, self.backward + other.backward, self.again + other.again)

    def times(self, count: int) -> "Work":
        """So many of it."""
        return Work(count * self.forward, count * self.backward, count * self.again)

    @property
    def model(self) -> float:
        """What the gradient needs."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """What the hardware does."""
        return self.model + self.again


def forward(shape: Shape, *, tokens: float) -> float:
    """One row of `tokens` tokens through all layers."""
    return _linear(shape, tokens) + _attention(shape, tokens)


def of_rows(shape: Shape | None, lengths: Sequence[int]) -> float:
    """Rows of so many tokens through all layers; 0 for a shape that is not known."""
    if shape is None:
        return 0.0
    known = {length: forward(shape, tokens=float(length)) for length in set(lengths)}
    return sum((known[length] for length in lengths), 0.0)


def row(
    shape: Shape,
    *,
    tokens: float,
    pooled: int,
    dim: int,
    lora: Lora | None = None,
    checkpointing: bool = False,
    grad_cache: bool = False,
) -> Work:
    """One row through one tower: layers, then the projection of its `pooled` states to `dim` widths.

    A matrix costs as much again for its input's gradient and once more for its own; frozen ones under an
    adapter spare the latter. Attention has no weights, but two inputs to each product.
    """
    linear, attention = _linear(shape, tokens), _attention(shape, tokens)
    adapters = 2 * tokens * adapter_parameters(shape, lora) if lora else 0.0
    projection = 2.0 * pooled * shape.hidden * dim
    there = linear + attention + adapters + projection
    back = (1 if lora else 2) * linear + 2 * (attention + adapters + projection)
    # Recomputation stops at the last tensor that is needed: a decoder's layer ends in a product that is not.
    last = 2.0 * tokens * shape.layers * shape.intermediate * shape.hidden if shape.causal else 0.0
    layers = linear + attention + adapters - last
    return Work(there, back, (layers if checkpointing else 0.0) + (there if grad_cache else 0.0))


def loss(*, rows: int, columns: int, views: int, prefixes: tuple[int, ...], bidirectional: bool) -> Work:
    """Scores of a global batch: queries against all candidates, and positives against all queries."""
    pairs = rows * rows * (columns + (1 if bidirectional else 0))
    there = 2.0 * views * sum(prefixes) * pairs
    return Work(there, 2 * there)


def _linear(shape: Shape, tokens: float) -> float:
    return 2.0 * tokens * shape.layers * shape.layer_weights


def _attention(shape: Shape, tokens: float) -> float:
    """Scores and weighted values: two products, of which a causal model needs a half."""
    full = 4.0 * tokens * tokens * shape.layers * shape.query_width
    return full / 2 if shape.causal else full
