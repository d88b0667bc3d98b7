"""From hidden states to embeddings: pooling, projections, dense layers, normalisation.

    pool         flat [tokens, hidden], lengths [rows] -> [rows, hidden]
    Projection   pooled [..., hidden] -> [..., dim], of the towers that are built here
    Head         pooled [..., hidden] -> dense layers, activations, normalisation -> [..., dim], of a
                 published model

All results are computed in float32, for any format of the weights, because losses compare small differences.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from scalingnote.core.errors import ConfigError
from scalingnote.core.model_files import read_json
from scalingnote.models.config import Pretrained, TokenWiseConfig, TowerConfig
from scalingnote.models.published_model import MODES, HeadStep


def pool(
    states: Float[Tensor, "tokens hidden"], lengths: Int[Tensor, " rows"], mode: str
) -> Float[Tensor, "rows hidden"]:
    """Pool the states of each row, like sentence-transformers' Pooling; sums are in float32.

    Rows are concatenated without padding; `mode` is a key of
    :data:`scalingnote.models.published_model.MODES`.
    """
    ends = lengths.cumsum(0)
    if mode == "last":
        return states[ends - 1].float()
    if mode == "cls":
        return states[ends - lengths].float()
    if mode != "mean":
        raise ConfigError(f"pooling {mode!r} is not supported: use one of {', '.join(MODES)}")
    if states.is_cuda:  # index_add is not deterministic there
        total = torch.segment_reduce(states.float(), "sum", lengths=lengths)
    else:  # six times as fast as segment_reduce (8,192 tokens of 384, one thread)
        row = torch.arange(len(lengths)).repeat_interleave(lengths)
        total = torch.zeros(len(lengths), states.shape[1], dtype=torch.float32).index_add(
            0, row, states.float()
        )
    return total / lengths.clamp(min=1)[:, None]


class Projection(nn.Linear):
    """The linear map W from pooled states to embeddings, without bias (ScalingNote, Eq. 3, 4, 14).

    The forward pass casts the weight, not the caller, because ZeRO-3 gathers the weight only for this pass.
    """

    def __init__(self, hidden: int, dim: int, *, bias: bool = False) -> None:
        super().__init__(hidden, dim, bias=bias)
        self.dim = dim

    def forward(self, states: Float[Tensor, "... hidden"]) -> Float[Tensor, "... dim"]:
        """Return float32 embeddings; autocast would round them to half precision."""
        with torch.autocast(states.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(states.float(), self.weight.float(), bias)

    def draw(self, seed: int) -> None:
        """Draw the weight from N(0, 1 / hidden); it depends only on `seed`, not on other layers."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.weight.normal_(0.0, self.in_features**-0.5, generator=generator)

    def start(self, config: TowerConfig | TokenWiseConfig, *, seed: int) -> None:
        """Set the weight that training of a tower starts from.

        "auto" starts from the identity if a pretrained backbone is as wide as the embeddings, because a
        random matrix would lose the meaning of its states. "none" is an identity that is not trained: states
        are embeddings, as in LightRetriever.

        Raises:
            ConfigError: the projection is "none", but embeddings are not as wide as states.
        """
        start, pretrained = config.projection, isinstance(config.backbone, Pretrained)
        square = self.in_features == self.out_features
        if start == "none" and not square:
            raise ConfigError(
                f"projection=none needs embeddings as wide as the backbone's states: set train.dim to "
                f"{self.in_features}, found {self.out_features}"
            )
        if start == "none" or (start == "auto" and pretrained and square):
            nn.init.eye_(self.weight)
            self.requires_grad_(start != "none")
        else:
            self.draw(seed)


# Activations without parameters, by the last part of the dotted name in a Dense module's config.
_ACTIVATIONS = {
    name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU")
}


class Dense(Projection):
    """A Dense module of sentence-transformers: a linear layer and an activation."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Make a layer from a module's config.json; raise ConfigError if its activation is not supported."""
        super().__init__(settings["in_features"], settings["out_features"], bias=settings.get("bias", True))
        name = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
        if not name.startswith("torch.nn.") or name.rpartition(".")[2] not in _ACTIVATIONS:
            raise ConfigError(
                f"a dense layer's activation is {name}, not one of torch.nn's {', '.join(_ACTIVATIONS)}"
            )
        self.activation: nn.Module = _ACTIVATIONS[name.rpartition(".")[2]]()
        self.settings = settings

    def forward(self, states: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Return float32 embeddings of pooled states."""
        return self.activation(super().forward(states))  # type: ignore[no-any-return]


class Normalise(nn.Module):
    """L2 normalisation of embeddings."""

    def forward(self, states: Float[Tensor, "... dim"]) -> Float[Tensor, "... dim"]:
        """Divide each row by its length."""
        return F.normalize(states, dim=-1)


class Head(nn.Sequential):
    """The dense layers and normalisations of a published model, in their order."""

    def __init__(self, layers: Sequence[nn.Module], *, hidden: int, keep: int | None = None) -> None:
        """Make a head for pooled states of width `hidden` that keeps the first `keep` dimensions, or all."""
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
        """Return float32 embeddings."""
        with torch.autocast(pooled.device.type, enabled=False):
            return super().forward(pooled.float())[..., : self.keep]  # type: ignore[no-any-return,no-untyped-call]


def read_head(steps: Sequence[HeadStep], *, hidden: int, keep: int | None = None) -> Head:
    """Read the head of a published model.

    Raise ConfigError if files of a dense layer are missing or do not match.
    """
    return Head([_read_layer(step) for step in steps], hidden=hidden, keep=keep)


def _read_layer(step: HeadStep) -> nn.Module:
    if step is None:
        return Normalise()
    path, settings = step / "model.safetensors", read_json(step / "config.json")
    if settings is None or not path.exists():
        missing = Path("config.json" if settings is None else path).name
        raise ConfigError(
            f"{step} is a dense layer without {missing}: fetch the model again, or convert its weights to "
            "safetensors, no other format is read"
        )
    dense = Dense(settings)
    weights = {name.removeprefix("linear."): value for name, value in load_file(path).items()}
    try:
        dense.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not hold the weights of its config.json: {error}") from None
    return dense
