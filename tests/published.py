"""Small published models with random weights: folders in the format of sentence-transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers.processors import TemplateProcessing
from torch import nn

import families

PROMPTS = {"query": "find: ", "document": "text: "}
QUERIES = ["join tensors", "", "word " * 40, "don't [MASK] _this_ 12", "tensors"]
TITLES = ["torch stack", "", "numpy", "", "a"]
CONTENTS = ["joins tensors along a new axis", "arrays", "more than it can hold " * 20, "", "x"]
TEXTS = [" ".join(filter(None, fields)) for fields in zip(TITLES, CONTENTS, strict=True)]
HIDDEN = 32


def folder(
    path: Path,
    family: str = "bert",
    *,
    pooling: str | Sequence[str] = "mean",
    dense: Sequence[tuple[int, bool, nn.Module]] = (),
    normalise: bool = True,
    end: str = "[SEP]",
    prompts: dict[str, str] | None = None,
    include_prompt: bool = True,
    max_length: int | None = 24,
    lower_case: bool = False,
    truncate_dim: int | None = None,
    **flags: Any,
) -> Path:
    """Write a model of `family`; `dense` are (width, bias, activation) and `end` the token after every text.

    The end token comes from the tokenizer's post-processor and is not the model's end-of-sequence token.
    `flags` are put into the transformer's config.
    """
    base = families.folder(path / "base", family)
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | flags))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = Transformer(str(base), max_seq_length=max_length, do_lower_case=lower_case)
        raw = first.tokenizer.backend_tokenizer
        bert = family in families.BIDIRECTIONAL | families.PADDED
        raw.post_processor = TemplateProcessing(
            single=f"[CLS] $A {end}" if bert else f"$A {end}",
            special_tokens=[(token, raw.token_to_id(token)) for token in ("[CLS]", end)],
        )
        modes = [pooling] if isinstance(pooling, str) else pooling
        modules: list[nn.Module] = [first, Pooling(HIDDEN, list(modes), include_prompt=include_prompt)]
        width = HIDDEN * len(modes)
        for out, bias, activation in dense:
            modules.append(Dense(width, out, bias=bias, activation_function=activation))
            width = out
        if normalise:
            modules.append(Normalize())
        model = SentenceTransformer(
            modules=modules, device="cpu", prompts=prompts or {}, truncate_dim=truncate_dim
        )
        model.save(str(path / "model"), create_model_card=False)
    return path / "model"


def edited(path: Path, **values: Any) -> Path:
    """Replace values of a JSON file, which may be missing."""
    values_before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values_before, **values}))
    return path


def settings_of(model: Path) -> Path:
    """Return the file of a model's prompts and similarity."""
    return model / "config_sentence_transformers.json"
