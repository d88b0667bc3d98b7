"""What a published model does with its pooled states: dense layers and normalisation, in order.

    pooled [rows, width] -> dense [rows, out], activation -> ... -> normalised -> the first `keep` dimensions

In float32 whatever the weights are held in, like :class:`scalingnote.models.projection.Projection`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.errors import ConfigError
from scalingnote.models.native import Step

# Activations without parameters, by the last part of the name that a Dense module's config gives.
_ACTIVATIONS = {
    name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU")
}


class Dense(nn.Linear):
    """A linear layer, an activation, and where the model has one a residual connection."""

    def __init__(self, settings: dict[str, Any], *, residual: bool = False) -> None:
        """`settings` are a Dense module's config.json; ConfigError for an activation that is not known."""
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
        """Embeddings of pooled states."""
        bias = None if self.bias is None else self.bias.float()
        found: Tensor = self.activation(F.linear(states.float(), self.weight.float(), bias))
        if self.settings.get("use_residual"):
            found = found + (states if self.residual is None else self.residual(states))
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Weights by the names of a Dense module's file."""
        names = {"weight": "linear.weight", "bias": "linear.bias", "residual.weight": "residual.weight"}
        return {names[name]: value.detach().contiguous() for name, value in self.state_dict().items()}


class Normalise(nn.Module):
    """Embeddings of length 1."""

    def forward(self, states: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Each row divided by its length."""
        return F.normalize(states, dim=-1)


class Head(nn.Sequential):
    """Dense layers and normalisations of a published model, in their order."""

    def __init__(self, layers: Sequence[nn.Module], *, hidden: int, keep: int | None = None) -> None:
        """`hidden` is the width of a pooled state; `keep` truncates embeddings to their first dimensions."""
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
        """Embeddings in float32. Callers switch autocast off, which would round them all the same."""
        found = pooled.float()
        for layer in self:
            found = layer(found)
        return found if self.keep is None else found[..., : self.keep]


def read(steps: Sequence[Step], *, hidden: int, keep: int | None = None) -> Head:
    """The head of a published model, its weights read from safetensors.

    ConfigError when a dense layer's files are missing or do not fit each other.
    """
    return Head([_layer(step) for step in steps], hidden=hidden, keep=keep)


def drawn(hidden: int, dim: int, *, seed: int) -> Dense:
    """A new projection without bias, its weights drawn from `seed` alone."""
    settings = {
        "in_features": hidden,
        "out_features": dim,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    made = Dense(settings)
    with torch.no_grad():
        made.weight.normal_(0.0, hidden**-0.5, generator=torch.Generator().manual_seed(seed))
    return made


def _layer(step: Step) -> nn.Module:
    if step.folder is None:
        return Normalise()
    path = step.folder / "model.safetensors"
    try:
        settings = json.loads((step.folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{step.folder} is a dense layer without {Path(error.filename or path).name}: weights are read "
            "from safetensors only, so fetch the model anew, or convert it"
        ) from None
    made = Dense(settings, residual="residual.weight" in weights)
    names = {name.removeprefix("linear."): value for name, value in weights.items()}
    try:
        made.load_state_dict(names)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not hold the weights of its config.json: {error}") from None
    return made
