"""Backbones: any Hugging Face model, or a small one of a known architecture with random weights.

Both end as the same thing: a transformer without a language-model head, its tokenizer, and whether a
token sees only what stands before it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.utils.logging import disable_progress_bar

from scalingnote.errors import ConfigError
from scalingnote.models.config import Pretrained, Scratch
from scalingnote.models.prompt import PLACEHOLDERS, SpecialTokens

disable_progress_bar()  # one bar per small file would drown our own progress lines

_SCRATCH_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]


@dataclass
class Backbone:
    """A transformer and what is needed to feed it."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerFast
    causal: bool

    @property
    def hidden(self) -> int:
        """Width of a hidden state."""
        return int(_text_config(self.model.config).hidden_size)

    @property
    def max_positions(self) -> int | None:
        """Longest input in tokens, where the architecture has such a bound."""
        return getattr(_text_config(self.model.config), "max_position_embeddings", None)

    @property
    def special(self) -> SpecialTokens:
        """Ids put around text: encoders use [CLS] and [SEP], decoders the end-of-sequence token."""
        tokenizer = self.tokenizer
        end = tokenizer.eos_token_id if self.causal else tokenizer.sep_token_id
        pad = tokenizer.pad_token_id
        return SpecialTokens(
            pad=pad if pad is not None else (end or 0),
            end=end,
            first=None if self.causal else tokenizer.cls_token_id,
        )

    @property
    def raw_tokenizer(self) -> Tokenizer:
        """The Rust tokenizer, without the Python wrapper's cost per call."""
        return self.tokenizer.backend_tokenizer


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> str:
    """Byte-level BPE learnt from `texts`, as tokenizer JSON; the same texts give the same JSON."""
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
    """A backbone ready to train, with the placeholders in its vocabulary.

    ConfigError when a pretrained path is not a model, or a scratch one comes without its tokenizer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # new weights and new token embeddings are drawn from this alone
        match config:
            case Scratch():
                if tokenizer_json is None:
                    raise ConfigError("a scratch backbone needs a tokenizer trained on the corpus")
                backbone = _from_scratch(config, tokenizer_json)
            case Pretrained():
                backbone = load(config.path)
                if config.layers is not None:
                    _keep_layers(backbone.model, config.layers)
        backbone.tokenizer.add_special_tokens({"additional_special_tokens": list(PLACEHOLDERS)})
        if len(backbone.tokenizer) > backbone.model.get_input_embeddings().num_embeddings:  # type: ignore[operator]
            backbone.model.resize_token_embeddings(len(backbone.tokenizer), mean_resizing=False)  # type: ignore[operator]
    return backbone


def load(path: str | Path) -> Backbone:
    """A backbone from a hub id or a folder; any head the checkpoint carries is left out."""
    try:
        settings = AutoConfig.from_pretrained(path)
        kwargs: dict[str, Any] = {"add_pooling_layer": False} if settings.model_type == "bert" else {}
        model = AutoModel.from_pretrained(path, config=settings, dtype=torch.float32, **kwargs)
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a backbone from {str(path)!r}: {error}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{str(path)!r} has no fast tokenizer (tokenizer.json): convert it first")
    return Backbone(model, tokenizer, causal=is_causal(settings))


def is_causal(settings: Any) -> bool:
    """An architecture that transformers gives a masked-language-model head reads both ways."""
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
            # The default, 0.02, is made for a width of 768 and more. In a narrow model it leaves all
            # [CLS] states alike, and in-batch softmax has nothing to pull apart: TwinBERT's R@50 on
            # medquad was 0.23 instead of 0.95.
            initializer_range=config.hidden**-0.5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **size,
        )
        model = AutoModel.from_config(settings, dtype=torch.float32, add_pooling_layer=False)
    return Backbone(model, tokenizer, causal=causal)


def _keep_layers(model: nn.Module, layers: int) -> None:
    stack: Any = model.get_submodule("encoder.layer" if hasattr(model, "encoder") else "layers")
    if layers > len(stack):
        raise ConfigError(f"layers={layers}, but the backbone has {len(stack)}")
    del stack[layers:]
    _text_config(model.config).num_hidden_layers = layers


def _text_config(settings: Any) -> Any:
    return settings.get_text_config() if hasattr(settings, "get_text_config") else settings
