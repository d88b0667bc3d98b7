"""A tiny Hugging Face folder, with random weights, of every family that the tests of towers use."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    BertConfig,
    CamembertConfig,
    ElectraConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

import tiny
from scalingnote.models import backbone, dual_encoder
from scalingnote.models.config import Pretrained, Scratch, TowerConfig
from scalingnote.models.tower import Tower

LEARNT = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
WINDOW = 8  # shorter than the documents below, so that a missing window changes results
DOCUMENTS = (
    ["torch stack", "numpy", "a title of more words", ""],
    ["torch function", "", "topic", "topic"],
    ["joins tensors along a new axis of them", "arrays", "words " * 6, ""],
)

_SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # wide, because attention would have little effect in such a narrow model
}
_GROUPED = {**_SIZE, "num_key_value_heads": 2}
_QWEN2_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
CAUSAL: dict[str, Any] = {
    "qwen2": lambda **k: Qwen2Config(**_GROUPED, **k),
    "qwen2-sliding": lambda **k: Qwen2Config(**_GROUPED, **_QWEN2_SLIDING, **k),
    "qwen3": lambda **k: Qwen3Config(**_GROUPED, head_dim=16, **k),
    "llama": lambda **k: LlamaConfig(**_GROUPED, **k),
    "mistral": lambda **k: MistralConfig(**_GROUPED, sliding_window=WINDOW, **k),
    "phi3": lambda **k: Phi3Config(**_GROUPED, **k),
    "gemma": lambda **k: GemmaConfig(**_GROUPED, head_dim=8, **k),
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BIDIRECTIONAL: dict[str, Any] = {
    "bert": lambda **k: BertConfig(**_SIZE, **_STILL, **k),
    "roberta": lambda **k: RobertaConfig(**_SIZE, **_STILL, **k),
    "xlm-roberta": lambda **k: XLMRobertaConfig(**_SIZE, **_STILL, **k),
    "camembert": lambda **k: CamembertConfig(**_SIZE, **_STILL, **k),
    "electra": lambda **k: ElectraConfig(**_SIZE, embedding_size=32, **_STILL, **k),
    "modernbert": lambda **k: ModernBertConfig(**_SIZE, local_attention=WINDOW, **k),
}
FAMILIES = CAUSAL | BIDIRECTIONAL
PADDED: dict[str, Any] = {"mpnet": lambda **k: MPNetConfig(**_SIZE, **_STILL, **k)}  # encoders, never packed
PAD_1 = ("roberta", "xlm-roberta", "camembert", "mpnet")  # their pad token is 1 and positions start after it


def tokenizer(*, padding_side: str = "right", pad: str | None = "[PAD]") -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(LEARNT),
        pad_token=pad,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[EOS]",
        padding_side=padding_side,
    )


def folder(
    path: Path,
    family: str,
    *,
    padding_side: str = "right",
    positions: int = 64,
    sizes: dict[str, int] | None = None,
    **saving: Any,
) -> Path:
    """Write a checkpoint of `family`, like a downloaded one; `sizes` replace those of its config."""
    saved_tokenizer = tokenizer(padding_side=padding_side)
    pad = 1 if family in PAD_1 else saved_tokenizer.pad_token_id
    special = {
        "pad_token_id": pad,
        "eos_token_id": saved_tokenizer.eos_token_id,
        "bos_token_id": saved_tokenizer.cls_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        settings = (FAMILIES | PADDED)[family](vocab_size=len(saved_tokenizer), **special)
        settings.max_position_embeddings = positions
        settings.update(sizes or {})
        model = AutoModel.from_config(settings)
    model.save_pretrained(path, **saving)
    saved_tokenizer.save_pretrained(path)
    return path


def tower_config(path: Path, *, role: str, **more: Any) -> TowerConfig:
    length = {"query": 16, "document": 40}[role]
    backbone = Pretrained(path=str(path))
    return TowerConfig(backbone=backbone, max_length=length, prompt=tiny.SHORT_PROMPT, **more)


def tower(path: Path, role: Any, *, dim: int = 16, seed: int = 0, sparse: bool = False, **more: Any) -> Tower:
    """Build a tower of a checkpoint, ready to train."""
    return _built(tower_config(path, role=role, **more), role, dim=dim, seed=seed, sparse=sparse)


def scratch_tower(backbone: Scratch, role: Any, *, sparse: bool = False, **more: Any) -> Tower:
    """Build a tower from scratch with the tokenizer LEARNT, ready to train."""
    config = tiny.query_tower(backbone) if role == "query" else tiny.document_tower(backbone)
    return _built(config.model_copy(update=more), role, dim=16, seed=0, sparse=sparse)


def _built(config: TowerConfig, role: Any, **more: Any) -> Tower:
    learnt = LEARNT if isinstance(config.backbone, Scratch) else None
    return dual_encoder.build_tower(config, role=role, tokenizer_json=learnt, **more)
