"""Backbones: any Hugging Face model, or a small model from scratch with random weights.

A backbone consists of a transformer without a language-model head, its tokenizer, and whether attention is
causal.
"""

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.models.batch import first_position
from scalingnote.models.config import Pretrained, Reading, Scratch
from scalingnote.models.prompt import PLACEHOLDERS, SpecialTokens, add_flagged_tokens, lowercase
from scalingnote.models.published_model import Role
from scalingnote.models.sparse_head import HeadTransform, SparseHead
from scalingnote.models.weights import cast_parameters, load_adapter, read_in

log = get_logger("models")
logging.disable_progress_bar()  # one bar per small file would hide our own progress lines

_OPTIONAL_FILE = {"_raise_exceptions_for_missing_entries": False}
# Names of the layer stack in families that use neither "layers" nor "encoder.layer".
_LAYER_STACKS = {"distilbert": "transformer.layer", "gpt2": "h"}
# Parts of the head of masked language models, by family: dense layer, norm, output layer, and the field of
# the config that names the activation; without a field it is gelu.
_ROBERTA_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "")
_MASKED_HEADS = {
    "bert": (
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.decoder",
        "hidden_act",
    ),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), _ROBERTA_HEAD),
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector", "activation"),
    "modernbert": ("head.dense", "head.norm", "decoder", "classifier_activation"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", ""),
}
_NORM_PARTS = (("weight", "weight"), ("weight", "gamma"), ("bias", "bias"), ("bias", "beta"))
_EPSILONS = ("norm_eps", "layer_norm_eps")  # fields of a config; DistilBERT's has none
_LOGGED: set[tuple[str, str]] = set()  # changes of tokenizers; a folder is read several times and logged once
_SCRATCH_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]


@dataclass
class Backbone:
    """A transformer and its tokenizer."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerFast
    causal: bool

    @property
    def hidden(self) -> int:
        """Width of a hidden state."""
        return int(_text_config(self.model.config).hidden_size)

    @property
    def max_positions(self) -> int | None:
        """Longest input in tokens; None if the architecture has no such bound."""
        bound = getattr(_text_config(self.model.config), "max_position_embeddings", None)
        return None if bound is None else int(bound) - first_position(self.model)

    @property
    def special(self) -> SpecialTokens:
        """Ids around text: encoders use [CLS] and [SEP], decoders the end-of-sequence token.

        Some tokenizers of decoders begin every text with a token (those of Llama and Gemma do). The decoder
        was trained with it, so it is added here too. :func:`read_as` turns this on for other tokenizers.
        """
        tokenizer = self.tokenizer
        if self.causal:
            end, first = tokenizer.eos_token_id, tokenizer.bos_token_id
            if tokenizer("a").input_ids[:1] != [first]:
                first = None
        else:
            end, first = tokenizer.sep_token_id, tokenizer.cls_token_id
        pad = tokenizer.pad_token_id
        return SpecialTokens(pad=pad if pad is not None else (end or 0), end=end, first=first)

    def token_end(self) -> int:
        """Return the token that follows each token in a tower that reads every token by itself.

        Raise ConfigError if there is none.
        """
        end = self.special.end
        if not self.causal or end is None:
            raise ConfigError(
                "a tower that reads every token by itself needs a causal backbone with an end-of-sequence "
                "token: choose a decoder"
            )
        return end

    def check_length(self, tokens: int, *, role: Role) -> None:
        """Raise ConfigError if the tower of a role reads more tokens than the backbone has positions."""
        if self.max_positions is not None and tokens > self.max_positions:
            raise ConfigError(
                f"the {role} tower has max_length={tokens}, but its backbone reads {self.max_positions} "
                "tokens: lower it"
            )

    @property
    def raw_tokenizer(self) -> Tokenizer:
        """The Rust tokenizer, without the Python wrapper's cost per call."""
        return self.tokenizer.backend_tokenizer


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> str:
    """Train byte-level BPE on `texts`; equal texts give equal tokenizer JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("_", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=_SCRATCH_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def build(config: Pretrained | Scratch, *, tokenizer_json: str | None, seed: int) -> Backbone:
    """Build a backbone that is ready to train, with the placeholders in its vocabulary.

    New weights and new token embeddings depend only on `seed`. Raise ConfigError if a pretrained path is not
    a model, or if a model from scratch has no tokenizer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        match config:
            case Scratch():
                if tokenizer_json is None:
                    raise ConfigError("a scratch backbone needs a tokenizer trained on the corpus")
                backbone = _from_scratch(config, tokenizer_json)
            case Pretrained():
                backbone = load(config.path, layers=config.layers)
        read_as(backbone, config)
        new = [token for token in PLACEHOLDERS if token not in backbone.tokenizer.get_vocab()]
        backbone.tokenizer.add_special_tokens({"additional_special_tokens": list(PLACEHOLDERS)})
        grow(backbone.model, len(backbone.tokenizer))
        if isinstance(config, Pretrained):
            _start_placeholders(backbone, new)
    return backbone


def read_as(backbone: Backbone, config: Reading) -> None:
    """Set whether a backbone's tokenizer lower-cases texts and begins them with a token, as `config` states.

    Raise ConfigError if the config of an encoder sets `bos`: its texts begin with [CLS].
    """
    tokenizer, rust = backbone.tokenizer, backbone.raw_tokenizer
    if config.lowercase:
        lowercase(rust)
    if config.bos == "auto":
        return
    if not backbone.causal:
        raise ConfigError(
            f"bos={config.bos} is for decoders, an encoder's texts begin with [CLS]: leave it out"
        )
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    flags = {"add_bos_token": config.bos == "always"}
    tokenizer.init_kwargs.update(flags)  # saved, and applied when the tower is loaded
    add_flagged_tokens(rust, flags, first=tokenizer.bos_token, end=None, removes=True)


def grow(model: Any, tokens: int) -> None:
    """Add rows to the model's table, up to `tokens`; the caller sets their values."""
    if tokens > model.get_input_embeddings().num_embeddings:
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(tokens, mean_resizing=False)


def load(path: str | Path, *, layers: int | None = None, dtype: torch.dtype = torch.float32) -> Backbone:
    """Load a backbone, or its first `layers`, without the checkpoint's head.

    Args:
        path: a hub id or folder. If it is a peft adapter, its base model is loaded and the adapter is merged
            into it in float32.
        layers: number of layers to keep; None: all.
        dtype: dtype of the weights; buffers are float32. Weights are in memory in a wider format only while
            an adapter is merged, or if `dtype` would round a buffer (see :func:`read_in`).

    Raises:
        ConfigError: `path` is not a model, lacks weights, has fewer than `layers` layers, or has an
            architecture whose layers cannot be removed.
    """
    base, settings, tokenizer = _config_and_tokenizer(path)
    missing: set[str] = set()

    def read_model(dtype: torch.dtype) -> Any:
        model, report = AutoModel.from_pretrained(
            base,
            config=settings,
            dtype=dtype,
            use_safetensors=True,  # a pickle may contain code
            output_loading_info=True,
            **_pooler_arguments(settings),
        )
        missing.update(report["missing_keys"])
        return model

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no report on unused weights; missing ones are an error below
    try:
        model = read_in(torch.float32 if base != str(path) else dtype, read_model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a backbone from {base!r}: {error}") from None
    finally:
        logging.set_verbosity(verbosity)
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise ConfigError(f"{base!r} lacks {len(missing)} weights of its model: {some}...")
    if layers is not None:
        _keep_layers(model, layers)
    if base != str(path):
        grow(model, len(tokenizer))
        model = load_adapter(model, path)
    cast_parameters(model, dtype)
    causal = is_causal(settings)
    if not causal:
        # Attention modules of a causal family stay causal even if the config requests bidirectional ones.
        for module in model.modules():
            if getattr(module, "is_causal", False):
                module.is_causal = False
    return Backbone(model, tokenizer, causal=causal)


def shell(path: str | Path) -> Backbone:
    """Return the backbone at `path` without weights, in milliseconds: its tokenizer, sizes and causality."""
    _, settings, tokenizer = _config_and_tokenizer(path)
    tokenizer.add_special_tokens({"additional_special_tokens": list(PLACEHOLDERS)})
    with torch.device("meta"):
        model = AutoModel.from_config(settings, **_pooler_arguments(settings))
    return Backbone(model, tokenizer, causal=is_causal(settings))


def output_head(path: str) -> SparseHead:
    """Return the language-model head of the checkpoint at `path`, or its input table if it has no head."""
    base, settings, _ = _config_and_tokenizer(path)
    text = _text_config(settings)
    dense, norm, output, activation = _MASKED_HEADS.get(settings.model_type, ("", "", "lm_head", ""))
    tied = getattr(text, "tie_word_embeddings", True)
    weight = None if tied else _tensor(base, f"{output}.weight")
    names = [(f"dense.{part}", f"{dense}.{part}") for part in ("weight", "bias")]
    # In checkpoints converted from TensorFlow, the weight and bias of a norm are named gamma and beta.
    names += [(f"norm.{part}", f"{norm}.{name}") for part, name in _NORM_PARTS]
    parts = {ours: tensor for ours, name in names if dense and (tensor := _tensor(base, name)) is not None}
    if not {"dense.weight", "norm.weight"} <= parts.keys():
        return SparseHead(weight)
    transform = HeadTransform(
        parts,
        activation=getattr(text, activation) if activation else "gelu",
        eps=next((getattr(text, name) for name in _EPSILONS if hasattr(text, name)), 1e-12),
    )
    biases = (_tensor(base, f"{place}.bias") for place in (output, output.rpartition(".")[0]) if place)
    bias = next((bias for bias in biases if bias is not None), None)
    return SparseHead(weight, transform=transform, bias=bias)


def _tensor(base: str, name: str) -> Tensor | None:
    """Return a tensor of a checkpoint in float32; None if the checkpoint has no tensor of this name."""
    index = cached_file(base, "model.safetensors.index.json", **_OPTIONAL_FILE)
    files = json.loads(Path(index).read_text())["weight_map"] if index else {name: "model.safetensors"}
    path = cached_file(base, files[name], **_OPTIONAL_FILE) if name in files else None
    if path is None:
        return None
    with safe_open(path, "pt") as weights:
        return weights.get_tensor(name).float() if name in weights.keys() else None  # noqa: SIM118


def is_causal(settings: Any) -> bool:
    """Return whether attention is causal, by the config's own flag if it has one.

    Without a flag, architectures with a masked-language-model head in transformers are bidirectional.
    """
    text = _text_config(settings)
    both_ways = getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or getattr(text, "is_causal", None) is False:
        return False
    return bool(getattr(settings, "is_decoder", False)) or type(settings) not in MODEL_FOR_MASKED_LM_MAPPING


def _from_scratch(config: Scratch, tokenizer_json: str) -> Backbone:
    if config.hidden % config.heads:
        raise ConfigError(f"hidden {config.hidden} is not a multiple of heads {config.heads}")
    causal = config.architecture == "qwen2"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[EOS]",
    )
    size: dict[str, Any] = {
        "vocab_size": len(tokenizer.get_vocab().keys() | PLACEHOLDERS.keys()),
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.max_positions,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if causal:
        settings: Any = Qwen2Config(
            num_key_value_heads=config.heads,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            **size,
        )
        model = AutoModel.from_config(settings, dtype=torch.float32)
    else:
        settings = BertConfig(
            # The default, 0.02, suits widths of 768 and more. With it, all [CLS] states of a narrow model
            # are nearly equal and the in-batch softmax has no gradient: TwinBERT's R@50 on medquad was
            # 0.23 instead of 0.95.
            initializer_range=config.hidden**-0.5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **size,
        )
        model = AutoModel.from_config(settings, dtype=torch.float32, add_pooling_layer=False)
    return Backbone(model, tokenizer, causal=causal)


def _config_and_tokenizer(path: str | Path) -> tuple[str, Any, PreTrainedTokenizerFast]:
    """Return the path of the weights (of the base model for an adapter), their config and the tokenizer."""
    try:
        adapter = find_adapter_config_file(str(path))
        base = json.loads(Path(adapter).read_text())["base_model_name_or_path"] if adapter else str(path)
        settings = AutoConfig.from_pretrained(base, trust_remote_code=False)
        own_tokenizer = (
            adapter is None or cached_file(str(path), "tokenizer.json", **_OPTIONAL_FILE) is not None
        )
        tokenizer = _tokenizer(str(path) if own_tokenizer else base)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a backbone from {str(path)!r}: {error}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{str(path)!r} has no fast tokenizer (tokenizer.json): convert it first")
    return base, settings, tokenizer


def _tokenizer(path: str) -> Any:
    """Load the tokenizer at `path`; if its class is the generic fast tokenizer, read it from tokenizer.json.

    AutoTokenizer chooses the class by the model: in a Qwen2 folder it splits words like Qwen2's tokenizer and
    ignores tokenizer.json. A tokenizer trained with other splits then gives wrong tokens.
    """
    class_name = get_tokenizer_config(path).get("tokenizer_class")
    plain = class_name in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return as_flagged((PreTrainedTokenizerFast if plain else AutoTokenizer).from_pretrained(path), path)


def as_flagged(tokenizer: Any, path: str | Path) -> Any:
    """Make a tokenizer add the special tokens that tokenizer_config.json at `path` states, and return it."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        changes = add_flagged_tokens(
            tokenizer.backend_tokenizer,
            get_tokenizer_config(str(path)),
            first=tokenizer.bos_token,
            end=tokenizer.eos_token,
        )
        if changes and (str(path), changes) not in _LOGGED:
            _LOGGED.add((str(path), changes))
            log.info("%s: %s, as tokenizer_config.json states and tokenizer.json does not", path, changes)
    return tokenizer


def _start_placeholders(backbone: Backbone, tokens: Sequence[str]) -> None:
    """Copy the embedding of a token that a pretrained model is pooled at to the placeholders.

    In an encoder it is [CLS]: all-MiniLM-L6-v2 then has R@10 0.97 on medquad before any training, and 0.37
    with random placeholders. In a decoder it is the end token.
    """
    special = backbone.special
    source_id = special.end if backbone.causal else special.first
    if source_id is None or not tokens:
        return
    table: Tensor = backbone.model.get_input_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        table[backbone.tokenizer.convert_tokens_to_ids(list(tokens))] = table[source_id].clone()


def _pooler_arguments(settings: Any) -> dict[str, bool]:
    """Return the arguments that leave out the pooler, because its weights would get no gradients."""
    model_class: Any = MODEL_MAPPING.get(type(settings), None)
    optional = model_class is not None and "add_pooling_layer" in inspect.signature(model_class).parameters
    return {"add_pooling_layer": False} if optional else {}


def _keep_layers(model: nn.Module, layers: int) -> None:
    kind = str(model.config.model_type)  # type: ignore[union-attr]
    name = _LAYER_STACKS.get(kind, "encoder.layer" if hasattr(model, "encoder") else "layers")
    stack: Any = dict(model.named_modules()).get(name)
    if stack is None:
        raise ConfigError(f"layers of {kind} cannot be removed: leave backbone.layers out")
    if layers > len(stack):
        raise ConfigError(f"layers={layers}, but the backbone has {len(stack)}")
    del stack[layers:]
    settings = _text_config(model.config)
    settings.num_hidden_layers = layers
    kinds = getattr(settings, "layer_types", None)
    if kinds is not None:  # transformers does not save a config that lists more layers than the model has
        settings.layer_types = kinds[:layers]


def _text_config(settings: Any) -> Any:
    return settings.get_text_config() if hasattr(settings, "get_text_config") else settings
