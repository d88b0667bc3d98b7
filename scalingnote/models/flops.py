"""Parameters and floating-point operations of transformers, computed from the sizes in their configs.

    config.json, a scratch backbone or a published name ─► Shape ─► parameters
    Shape, tokens, LoRA, recomputation ─► Work of a training step

No model is built and torch is not imported, so computing the size of a 7B model takes microseconds. Parameter
counts are exact. A multiply-add counts as two operations. Only matrix products count: norms, activations and
softmax are less than 1% of them. Recomputation that only saves memory is counted separately, so that
utilisation can be reported without it (MFU) or with it (HFU).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from scalingnote.core.errors import ConfigError
from scalingnote.models.config import Lora, Pretrained, Scratch

PLACEHOLDER_TOKENS = 3  # added to the vocabulary of a backbone from scratch
# Sizes in config.json of published models; models tuned to instructions have the same ones.
PUBLISHED_SETTINGS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("published_shapes.json").read_text(encoding="utf-8")
)
_DECODERS = {"qwen2", "qwen3", "llama", "mistral"}
_ENCODERS = {"bert", "mpnet", "roberta", "xlm-roberta"}


@dataclass(frozen=True)
class Shape:
    """The sizes of a transformer without a head."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    causal: bool = True
    gated: bool = True  # three feed-forward matrices (SwiGLU), not two
    qkv_bias: bool = False
    other_bias: tuple[bool, bool] = (False, False)  # of attention's output and of the feed-forward part
    qk_norm: bool = False
    layer_norm: bool = False  # LayerNorm has a bias, RMSNorm none
    positions: int = 0  # rows of a learned position table
    token_types: int = 0
    distance_buckets: int = 0  # of MPNet's attention bias, which depends on distance; one for all layers

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    def matrices(self) -> list[tuple[int, int, bool]]:
        """Return the linear maps of one layer: input width, output width, whether the map has a bias."""
        query, kv = self.query_width, self.kv_width
        out_bias, ff_bias = self.other_bias
        attention = [(self.hidden, width, self.qkv_bias) for width in (query, kv, kv)]
        wider = (self.hidden, self.intermediate, ff_bias)
        narrower = (self.intermediate, self.hidden, ff_bias)
        feed_forward = [wider, wider, narrower] if self.gated else [wider, narrower]
        return [*attention, (query, self.hidden, out_bias), *feed_forward]

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        return sum(wide * out for wide, out, _ in self.matrices())

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer: weights, biases, norms."""
        biases = sum(out for _, out, bias in self.matrices() if bias)
        norms = 2 * self._norm + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_weights + biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token, position and token type tables."""
        return (self.vocabulary + self.positions + self.token_types) * self.hidden

    @property
    def non_embedding_parameters(self) -> int:
        """Parameters without those of the tables, the N of scaling laws."""
        biases = self.distance_buckets * self.heads
        last_norm = self._norm  # one norm before or after all layers
        return self.layers * self.layer_parameters + last_norm + biases

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding_parameters + self.non_embedding_parameters

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.layer_norm else 1)


def adapter_parameters(shape: Shape, lora: Lora) -> int:
    """Return the LoRA parameters of one tower."""
    per_layer = sum(lora.rank * (wide + out) + (out if lora.dora else 0) for wide, out, _ in shape.matrices())
    return shape.layers * per_layer


def backbone_shape(backbone: Pretrained | Scratch) -> Shape:
    """Return the shape of a tower's backbone without downloading it.

    The config of a pretrained backbone is read from its folder, else from Hugging Face's cache, else from
    published_shapes.json. Raise ConfigError if it is in none of them or the architecture is not supported.
    """
    if isinstance(backbone, Pretrained):
        shape = _pretrained_shape(backbone.path)
        return replace(shape, layers=backbone.layers) if backbone.layers else shape
    settings = {
        "model_type": backbone.architecture,
        "num_hidden_layers": backbone.layers,
        "hidden_size": backbone.hidden,
        "num_attention_heads": backbone.heads,
        "intermediate_size": backbone.intermediate,
        "vocab_size": backbone.vocabulary + PLACEHOLDER_TOKENS,
        "max_position_embeddings": backbone.max_positions,
        "type_vocab_size": 2,
    }
    return settings_shape(settings, source="backbone")


def model_shape(model: Any) -> Shape | None:
    """Return the shape of a loaded transformer; None if its architecture is not supported."""
    try:
        return settings_shape(model.config.to_dict(), source=type(model).__name__)
    except ConfigError:
        return None


def settings_shape(settings: Mapping[str, Any], *, source: str) -> Shape:
    """Return the shape that the content of a Hugging Face ``config.json`` describes.

    Raise ConfigError, with the `source`, if a number is missing or the architecture is not supported.
    """
    kind = settings.get("model_type")
    try:
        heads = settings["num_attention_heads"]
        size: dict[str, Any] = {
            "layers": settings["num_hidden_layers"],
            "hidden": settings["hidden_size"],
            "heads": heads,
            "kv_heads": settings.get("num_key_value_heads") or heads,
            "head_dim": settings.get("head_dim") or settings["hidden_size"] // heads,
            "intermediate": settings["intermediate_size"],
            "vocabulary": settings["vocab_size"],
        }
        if kind in _ENCODERS:
            return Shape(
                **size | {"kv_heads": heads, "head_dim": settings["hidden_size"] // heads},
                causal=False,
                gated=False,
                qkv_bias=True,
                other_bias=(True, True),
                layer_norm=True,
                positions=settings["max_position_embeddings"],
                token_types=0 if kind == "mpnet" else settings["type_vocab_size"],
                distance_buckets=settings.get("relative_attention_num_buckets", 0),
            )
    except KeyError as error:
        raise ConfigError(f"{source}: no {error} in the model's config") from None
    if kind not in _DECODERS:
        supported = ", ".join(sorted(_DECODERS | _ENCODERS))
        raise ConfigError(f"{source}: the shape of {kind!r} is not known, only those of {supported}")
    attention_bias = bool(settings.get("attention_bias"))
    return Shape(
        **size,
        qkv_bias=kind == "qwen2" or attention_bias,
        other_bias=(attention_bias, bool(settings.get("mlp_bias"))),
        qk_norm=kind == "qwen3",
    )


def _pretrained_shape(path: str) -> Shape:
    file = Path(path) / "config.json"
    if not file.is_file() and not Path(path).is_absolute() and path.count("/") == 1:
        cached = try_to_load_from_cache(path, "config.json")
        file = Path(cached) if isinstance(cached, str) else file
    if file.is_file():
        try:
            return settings_shape(json.loads(file.read_text(encoding="utf-8")), source=str(file))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file} is not JSON: {error}") from None
    if published := PUBLISHED_SETTINGS.get(path.removesuffix("-Instruct")):
        return settings_shape(published, source=path)
    raise ConfigError(
        f"the shape of {path!r} is not known without its config.json: `hf download {path} config.json` once, "
        "or pass a folder that holds one (a dry run reads no other file of it); known offline: "
        + ", ".join(sorted(PUBLISHED_SETTINGS))
    )


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a training step, or of a part of it."""

    forward: float
    backward: float
    again: float = 0.0  # forward passes repeated by gradient checkpointing and GradCache

    def __add__(self, other: "Work") -> "Work":
        return Work(self.forward + other.forward, self.backward + other.backward, self.again + other.again)

    def times(self, count: int) -> "Work":
        """Return `count` times the work."""
        return Work(count * self.forward, count * self.backward, count * self.again)

    @property
    def model(self) -> float:
        """Operations that the gradient needs: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def total(self) -> float:
        """Operations that the hardware does: the numerator of HFU."""
        return self.model + self.again


def forward(shape: Shape, *, tokens: float) -> float:
    """Return the operations of all layers for one row of `tokens` tokens."""
    return _linear(shape, tokens) + _attention(shape, tokens)


def of_rows(shape: Shape | None, lengths: Sequence[int]) -> float:
    """Return the operations of all layers for rows of these lengths; 0 for an unknown shape."""
    if shape is None:
        return 0.0
    of_length = {length: forward(shape, tokens=float(length)) for length in set(lengths)}
    return sum((of_length[length] for length in lengths), 0.0)


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
    """Return the work of training on one row of `tokens` tokens.

    `pooled` states are projected to `dim`. With `lora` only adapters are trained, with `checkpointing` layers
    are recomputed in the backward pass, with `grad_cache` the row is encoded twice.
    """
    linear, attention = _linear(shape, tokens), _attention(shape, tokens)
    adapters = 2 * tokens * adapter_parameters(shape, lora) if lora else 0.0
    projection = 2.0 * pooled * shape.hidden * dim
    once = linear + attention + adapters + projection
    # Each product has two gradients. A frozen matrix needs only that of its input; attention has two inputs.
    backward = (1 if lora else 2) * linear + 2 * (attention + adapters + projection)
    # Recomputation stops at the last tensor that is needed: the last product of a decoder layer is not.
    last = 2.0 * tokens * shape.layers * shape.intermediate * shape.hidden if shape.causal else 0.0
    recomputed = linear + attention + adapters - last if checkpointing else 0.0
    return Work(once, backward, recomputed + (once if grad_cache else 0.0))


def loss(*, rows: int, columns: int, views: int, prefixes: tuple[int, ...], bidirectional: bool) -> Work:
    """Return the work of the scores of a global batch of `rows` queries.

    `columns` is the number of candidates that a query adds: its positive and its negatives. `views` is the
    number of embeddings of a document, `prefixes` are the Matryoshka dimensions. If `bidirectional`,
    positives are also scored against all queries.
    """
    pairs = rows * rows * (columns + (1 if bidirectional else 0))
    once = 2.0 * views * sum(prefixes) * pairs
    return Work(once, 2 * once)


def _linear(shape: Shape, tokens: float) -> float:
    return 2.0 * tokens * shape.layers * shape.layer_weights


def _attention(shape: Shape, tokens: float) -> float:
    """Return the operations of scores and weighted values; a causal model needs half of both products."""
    full = 4.0 * tokens * tokens * shape.layers * shape.query_width
    return full / 2 if shape.causal else full
