"""From hidden states to embeddings: pooling, projections and a published model's layers.

    pooling      flat [tokens, hidden], lengths [rows]    -> [rows, width]
    Projection   [..., hidden]                            -> [..., dim]        W, no bias
    Head         pooled [rows, width] -> dense layers, activations, normalisation -> [rows, dim]
    RowAttention rows [lines, tokens, dim]                -> the same, of a lookup table

All results are computed in float32, for any format of the weights.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from numpy import ndarray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.errors import ConfigError
from scalingnote.models.config import Start
from scalingnote.models.published_model import Step


class Projection(nn.Linear):
    """The linear map W without bias from pooled states to embeddings (ScalingNote, Eq. 3, 4, 14).

    The result is float32 for any format of the weight, because losses compare small differences. The
    weight is cast in this forward pass and not by the caller: ZeRO-3 gathers it for this pass only.
    """

    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__(hidden, dim, bias=False)

    def forward(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... dim"]:
        """Return float32 embeddings. Callers disable autocast, which would round them to half precision."""
        return F.linear(states.float(), self.weight.float())


def start_projection(layer: Projection, start: Start, *, pretrained: bool, seed: int) -> None:
    """Set the weight that training starts from, in place.

    The states of a pretrained backbone have a meaning, which a random square matrix would lose: they start as
    they are. "none" is the identity, which learns nothing: states are embeddings, as LightRetriever's are.

    Raises:
        ConfigError: `start` is "none", and embeddings are not as wide as states.
    """
    square = layer.in_features == layer.out_features
    if start == "none" and not square:
        raise ConfigError(
            f"projection=none needs embeddings as wide as the backbone's states: set train.dim to "
            f"{layer.in_features}, found {layer.out_features}"
        )
    if start == "none" or (start == "auto" and pretrained and square):
        nn.init.eye_(layer.weight)
        layer.requires_grad_(start != "none")
    else:
        draw_weights(layer, seed)


def draw_weights(layer: nn.Linear, seed: int) -> None:
    """Draw the weight from N(0, 1 / in_features) with `seed` alone, so that other layers have no effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.normal_(0.0, layer.in_features**-0.5, generator=generator)


def pool(
    states: Float[Tensor, "tokens hidden"],
    lengths: Int[Tensor, " rows"],
    modes: Sequence[str],
    *,
    skip: int = 0,
) -> Float[Tensor, "rows width"]:
    """Pool the states of each row, as sentence-transformers' Pooling does; sums are in float32.

    Args:
        states: hidden states of all rows end to end, without padding.
        lengths: number of tokens of each row.
        modes: names of :data:`scalingnote.models.published_model.MODES`. Results of several modes are
            concatenated: width = modes x hidden.
        skip: tokens at the start of each row, those of its prefix, that all modes but "last" ignore.
    """
    ends = lengths.cumsum(0)
    starts = ends - lengths
    first, last = states[starts + torch.where(lengths > skip, skip, 0)].float(), states[ends - 1].float()
    if set(modes) <= {"cls", "last"}:
        return torch.cat([last if mode == "last" else first for mode in modes], dim=1)
    row = torch.arange(len(lengths), device=states.device).repeat_interleave(lengths)
    position = torch.arange(len(states), device=states.device) - starts[row]
    states, counts = states.float(), lengths
    if skip:
        kept = position >= skip
        states, row, position = states[kept], row[kept], position[kept]
        counts = (lengths - skip).clamp(min=0)
    divisors = counts.clamp(min=1)[:, None]
    pooled = []
    for mode in modes:
        match mode:
            case "last":
                pooled.append(last)
            case "cls":
                pooled.append(first)
            case "mean":
                pooled.append(_row_sums(states, row, counts) / divisors)
            case "mean_sqrt_length":
                pooled.append(_row_sums(states, row, counts) / divisors.sqrt())
            case "weighted_mean":  # weights are positions, counted from 1
                weights = (position + 1).float()[:, None]
                total = _row_sums(weights, row, counts).clamp(min=1e-9)
                pooled.append(_row_sums(states * weights, row, counts) / total)
            case "max":
                pooled.append(torch.segment_reduce(states, "max", lengths=counts))
            case _:
                raise ValueError(f"unknown pooling mode {mode!r}")
    return torch.cat(pooled, dim=1)


def _row_sums(
    values: Float[Tensor, "tokens width"], row: Int[Tensor, " tokens"], lengths: Int[Tensor, " rows"]
) -> Float[Tensor, "rows width"]:
    if values.is_cuda:  # index_add is not deterministic there
        return torch.segment_reduce(values, "sum", lengths=lengths)
    # Six times as fast as segment_reduce on a CPU (8,192 tokens of 384, one thread).
    return torch.zeros(len(lengths), values.shape[1]).index_add(0, row, values)


# Activations without parameters, by the last part of the dotted name in a Dense module's config.
_ACTIVATIONS = {
    name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU")
}


class Dense(nn.Linear):
    """A Dense module of sentence-transformers: a linear layer, an activation, an optional residual."""

    def __init__(self, settings: dict[str, Any], *, residual: bool = False) -> None:
        """`settings` is the module's config.json; ConfigError if the activation is not supported."""
        super().__init__(settings["in_features"], settings["out_features"], bias=settings.get("bias", True))
        name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not name.startswith("torch.nn.") or name.rpartition(".")[2] not in _ACTIVATIONS:
            raise ConfigError(
                f"a dense layer's activation is {name}, which is none of torch.nn's {', '.join(_ACTIVATIONS)}"
            )
        self.activation: nn.Module = _ACTIVATIONS[name.rpartition(".")[2]]()
        self.settings = settings
        self.residual = nn.Linear(self.in_features, self.out_features, bias=False) if residual else None

    def forward(self, states: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Return float32 embeddings of pooled states."""
        bias = None if self.bias is None else self.bias.float()
        out: Tensor = self.activation(F.linear(states.float(), self.weight.float(), bias))
        if self.settings.get("use_residual"):
            out = out + (states if self.residual is None else self.residual(states))
        return out

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under the names of a Dense module's file."""
        names = {"weight": "linear.weight", "bias": "linear.bias", "residual.weight": "residual.weight"}
        return {names[name]: value.detach().contiguous() for name, value in self.state_dict().items()}


class Normalise(nn.Module):
    """L2 normalisation of embeddings."""

    def forward(self, states: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Divide each row by its length."""
        return F.normalize(states, dim=-1)


class Head(nn.Sequential):
    """The dense layers and normalisations of a published model, in its order."""

    def __init__(self, layers: Sequence[nn.Module], *, hidden: int, keep: int | None = None) -> None:
        """`hidden` is the width of pooled states; `keep` the number of leading dimensions kept, or None."""
        super().__init__(*layers)
        dense = [layer for layer in layers if isinstance(layer, Dense)]
        self.hidden, self.keep, self.dim = hidden, keep, dense[-1].out_features if dense else hidden
        if dense and dense[0].in_features != hidden:
            raise ConfigError(
                f"pooled states have {hidden} dimensions, but the model's dense layer reads "
                f"{dense[0].in_features}: leave pooling at auto, or set projection to none"
            )
        if keep is not None:
            self.dim = min(self.dim, keep)

    def forward(self, pooled: Float[Tensor, "... hidden"]) -> Float[Tensor, "... dim"]:
        """Return float32 embeddings. Callers disable autocast, which would round them to half precision."""
        out = pooled.float()
        for layer in self:
            out = layer(out)
        return out if self.keep is None else out[..., : self.keep]


def read_head(steps: Sequence[Step], *, hidden: int, keep: int | None = None) -> Head:
    """Read the head of a published model; ConfigError if a dense layer's files are missing or mismatched."""
    return Head([_read_layer(step) for step in steps], hidden=hidden, keep=keep)


def random_dense(hidden: int, dim: int, *, seed: int) -> Dense:
    """Return a dense layer without bias and activation, with random weights."""
    settings = {
        "in_features": hidden,
        "out_features": dim,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    dense = Dense(settings)
    draw_weights(dense, seed)
    return dense


def _read_layer(step: Step) -> nn.Module:
    if step.folder is None:
        return Normalise()
    path = step.folder / "model.safetensors"
    try:
        settings = json.loads((step.folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{step.folder} is a dense layer without {Path(error.filename or path).name}: weights are read "
            "from safetensors only, so fetch the model again, or convert it"
        ) from None
    dense = Dense(settings, residual="residual.weight" in weights)
    try:
        dense.load_state_dict({name.removeprefix("linear."): value for name, value in weights.items()})
    except RuntimeError as error:
        raise ConfigError(f"{path} does not hold the weights of its config.json: {error}") from None
    return dense


class RowAttention(nn.Module):
    """One head of attention over rows: rows + softmax(rows A rows^T / sqrt(dim)) rows B.

    A is the product of the query and key matrices, B of the value and output matrices; B starts at 0. The
    result depends on which tokens occur together, not on their order.
    """

    def __init__(self, dim: int, *, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.score, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        nn.init.zeros_(self.out.weight)

    def forward(
        self, rows: Float[Tensor, "lines tokens dim"], mask: Tensor
    ) -> Float[Tensor, "lines tokens dim"]:
        """Return the rows with attention added; `mask` is false at pads, which no token attends to."""
        scores = self.score(rows) @ rows.transpose(1, 2) / math.sqrt(rows.shape[-1])
        shares = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return rows + self.out(shares @ rows)  # type: ignore[no-any-return]

    def matrices(self) -> Float32[ndarray, "2 dim dim"]:
        """Return A and B, which rows are multiplied by from the right."""
        return np.stack([layer.weight.detach().cpu().numpy().T for layer in (self.score, self.out)])

    def copy(self, matrices: Float32[ndarray, "2 dim dim"]) -> None:
        """Copy the result of :meth:`matrices` of another head."""
        for layer, matrix in zip((self.score, self.out), matrices, strict=True):
            layer.weight.data.copy_(torch.from_numpy(matrix.T.copy()))
