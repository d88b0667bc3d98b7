"""The shape of a transformer: the few numbers its parameters, arithmetic and memory follow from.

    config.json, a scratch backbone or a known name -> Shape -> its matrices -> parameters

Nothing is built and no torch is loaded, so a 7B model is sized in microseconds. Counts are exact.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from scalingnote.errors import ConfigError
from scalingnote.models.config import Lora, Pretrained, Scratch

PLACEHOLDER_TOKENS = 3  # what a tower from scratch adds to its vocabulary


@dataclass(frozen=True)
class Shape:
    """A transformer without a head, as towers use it."""

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
    other_bias: tuple[bool, bool] = (False, False)  # of attention's output, of the feed-forward part
    qk_norm: bool = False
    layer_norm: bool = False  # LayerNorm has a bias, RMSNorm none
    positions: int = 0  # rows of a learned position table
    token_types: int = 0

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    def matrices(self) -> dict[str, tuple[int, int, bool]]:
        """The linear maps of one layer, by name: width in, width out, whether there is a bias."""
        h, q, kv, i = self.hidden, self.query_width, self.kv_width, self.intermediate
        out_bias, ff_bias = self.other_bias
        if not self.gated:
            return {
                "attention.self.query": (h, q, self.qkv_bias),
                "attention.self.key": (h, kv, self.qkv_bias),
                "attention.self.value": (h, kv, self.qkv_bias),
                "attention.output.dense": (q, h, out_bias),
                "intermediate.dense": (h, i, ff_bias),
                "output.dense": (i, h, ff_bias),
            }
        return {
            "self_attn.q_proj": (h, q, self.qkv_bias),
            "self_attn.k_proj": (h, kv, self.qkv_bias),
            "self_attn.v_proj": (h, kv, self.qkv_bias),
            "self_attn.o_proj": (q, h, out_bias),
            "mlp.gate_proj": (h, i, ff_bias),
            "mlp.up_proj": (h, i, ff_bias),
            "mlp.down_proj": (i, h, ff_bias),
        }

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that every token is multiplied with."""
        return sum(wide * out for wide, out, _ in self.matrices().values())

    @property
    def layer_parameters(self) -> int:
        """All parameters of one layer: weights, biases, norms."""
        biases = sum(out for _, out, bias in self.matrices().values() if bias)
        norms = 2 * self._norm + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_weights + biases + norms

    @property
    def embedding_parameters(self) -> int:
        """Rows of the token, position and token type tables."""
        return (self.vocabulary + self.positions + self.token_types) * self.hidden

    @property
    def non_embedding_parameters(self) -> int:
        """Parameters outside the tables: what papers plot scaling laws over."""
        return self.layers * self.layer_parameters + self._norm  # the norm after, or before, all layers

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.embedding_parameters + self.non_embedding_parameters

    @property
    def _norm(self) -> int:
        return self.hidden * (2 if self.layer_norm else 1)


def adapter_parameters(shape: Shape, lora: Lora) -> int:
    """Parameters of the LoRA adapters of one tower; ConfigError when `targets` names no layer."""
    per_layer = 0
    for name, (wide, out, _) in shape.matrices().items():
        if lora.targets == "all-linear" or any(f".{name}".endswith(f".{end}") for end in lora.targets):
            per_layer += lora.rank * (wide + out) + (out if lora.dora else 0)
    if not per_layer:
        names = ", ".join(name.rpartition(".")[2] for name in shape.matrices())
        raise ConfigError(f"lora.targets {list(lora.targets)} names no layer; there are {names}")
    return shape.layers * per_layer


def of_backbone(backbone: Pretrained | Scratch) -> Shape:
    """Shape of a tower's backbone, without downloading it; ConfigError when it cannot be known so."""
    if isinstance(backbone, Scratch):
        return _scratch(backbone)
    shape = _pretrained(backbone.path)
    return replace(shape, layers=backbone.layers) if backbone.layers else shape


def of_model(model: Any) -> Shape | None:
    """Shape of a transformer that is loaded, as deep as it is; None where its architecture is not known."""
    try:
        return of_settings(model.config.to_dict(), source=type(model).__name__)
    except ConfigError:
        return None


def of_settings(settings: Mapping[str, Any], *, source: str) -> Shape:
    """Shape by the values of a Hugging Face ``config.json``; ConfigError for an unknown architecture."""
    kind = settings.get("model_type")
    decoders = {"qwen2", "qwen3", "llama", "mistral"}
    encoders = {"bert", "roberta", "xlm-roberta"}
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
        if kind in encoders:
            return Shape(
                **size | {"kv_heads": heads, "head_dim": settings["hidden_size"] // heads},
                causal=False,
                gated=False,
                qkv_bias=True,
                other_bias=(True, True),
                layer_norm=True,
                positions=settings["max_position_embeddings"],
                token_types=settings["type_vocab_size"],
            )
    except KeyError as error:
        raise ConfigError(f"{source}: no {error} in the model's config") from None
    if kind not in decoders:
        known = ", ".join(sorted(decoders | encoders))
        raise ConfigError(f"{source}: the shape of {kind!r} is not known here, only {known}")
    attention_bias = bool(settings.get("attention_bias"))
    return Shape(
        **size,
        qkv_bias=kind == "qwen2" or attention_bias,
        other_bias=(attention_bias, bool(settings.get("mlp_bias"))),
        qk_norm=kind == "qwen3",
    )


def _scratch(backbone: Scratch) -> Shape:
    bert = backbone.architecture == "bert"
    return Shape(
        layers=backbone.layers,
        hidden=backbone.hidden,
        heads=backbone.heads,
        kv_heads=backbone.heads,
        head_dim=backbone.hidden // backbone.heads,
        intermediate=backbone.intermediate,
        vocabulary=backbone.vocabulary + PLACEHOLDER_TOKENS,
        causal=not bert,
        gated=not bert,
        qkv_bias=True,
        other_bias=(bert, bert),
        layer_norm=bert,
        positions=backbone.max_positions if bert else 0,
        token_types=2 if bert else 0,
    )


def _pretrained(path: str) -> Shape:
    """A folder, then Hugging Face's cache, then the published shapes."""
    file = Path(path) / "config.json"
    if not file.is_file() and not Path(path).is_absolute() and path.count("/") == 1:
        cached = try_to_load_from_cache(path, "config.json")
        file = Path(cached) if isinstance(cached, str) else file
    if file.is_file():
        try:
            return of_settings(json.loads(file.read_text(encoding="utf-8")), source=str(file))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file} is not JSON: {error}") from None
    if path in PUBLISHED:
        return PUBLISHED[path]
    known = ", ".join(sorted(name for name in PUBLISHED if not name.endswith("-Instruct")))
    raise ConfigError(
        f"the shape of {path!r} is not known without its config.json: `hf download {path} config.json` once, "
        f"or give a folder that holds one (a dry run reads nothing else of it); known offline: {known}"
    )


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> Shape:
    return Shape(layers, hidden, heads, kv_heads, hidden // heads, intermediate, vocabulary, qkv_bias=True)


def _bert(layers: int, hidden: int, heads: int, vocabulary: int) -> Shape:
    return Shape(
        layers,
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        vocabulary,
        causal=False,
        gated=False,
        qkv_bias=True,
        other_bias=(True, True),
        layer_norm=True,
        positions=512,
        token_types=2,
    )


_QWEN2_5 = {
    "0.5B": _qwen2(24, 896, 14, 2, 4864, 151_936),
    "1.5B": _qwen2(28, 1536, 12, 2, 8960, 151_936),
    "3B": _qwen2(36, 2048, 16, 2, 11_008, 151_936),
    "7B": _qwen2(28, 3584, 28, 4, 18_944, 152_064),
    "14B": _qwen2(48, 5120, 40, 8, 13_824, 152_064),
    "32B": _qwen2(64, 5120, 40, 8, 27_648, 152_064),
}
PUBLISHED: dict[str, Shape] = {
    **{f"Qwen/Qwen2.5-{size}": shape for size, shape in _QWEN2_5.items()},
    **{f"Qwen/Qwen2.5-{size}-Instruct": shape for size, shape in _QWEN2_5.items()},
    "google-bert/bert-base-uncased": _bert(12, 768, 12, 30_522),
    "google-bert/bert-base-chinese": _bert(12, 768, 12, 21_128),
}
