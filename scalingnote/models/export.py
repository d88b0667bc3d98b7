"""A tower's folder as sentence-transformers reads it: `SentenceTransformer(folder).encode` is our embedding.

    text -> tokenizer of :mod:`scalingnote.models.layout` -> model -> pooling -> dense layer, our projection

Only that library's own modules are named: no code travels with the weights.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from scalingnote.models.head import Dense, Head
from scalingnote.models.layout import indexed, layout
from scalingnote.models.module_list import Role
from scalingnote.models.native import MODES, NativeModel

_RELEASE = "6.2.0"  # whose files these are


def write(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    projection: Float[Tensor, "dim hidden"],
    *,
    template: str | None,
    causal: bool,
) -> None:
    """Add sentence-transformers' files to a folder that holds a query tower's or a document tower's model."""
    dim, hidden = projection.shape
    modules = ["base.modules.transformer.Transformer"]
    pooling = "lasttoken" if causal else "cls"
    if template is not None and not causal:
        # The state at a placeholder in the middle of the row: a mean in which it alone has weight.
        pooling = "mean"
        modules.append("sentence_transformer.modules.word_weights.WordWeights")
        _module(folder, modules, *_weight_of_one(indexed(template), tokenizer))
    modules.append("sentence_transformer.modules.pooling.Pooling")
    _module(folder, modules, {"embedding_dimension": hidden, "pooling_mode": pooling}, {})
    modules.append("base.modules.dense.Dense")
    settings = {
        "in_features": hidden,
        "out_features": dim,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    _module(folder, modules, settings, {"linear.weight": projection.detach().contiguous()})
    _list(folder, modules)
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            # Says "nothing but tokenizer.json"; by the kind of model, Qwen2's splits would be put over ours.
            "processor_kwargs": {"tokenizer_type": "modernbert"},
            "unpad_inputs": False if pooling == "mean" else None,  # word weights read padded rows only
        },
    )
    # `encode_document(text)` of a text alone takes it for the content of a document without a title.
    alone = "" if template is None else layout(template, causal=causal)
    alone = alone.format(title="", topic="", content="") if alone.endswith("{content}") else ""
    describe(folder, {"query": "", "document": alone})


def write_native(folder: Path, model: NativeModel, layers: Head, *, role: Role, max_length: int) -> None:
    """Add sentence-transformers' files to a folder that holds the transformer of a published model.

    They say what the model's own files said of this role; its prompt stands under both roles' names, so that
    `encode`, `encode_query` and `encode_document` read a text alike.
    """
    modules = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    names = [MODES[mode] for mode in model.pooling]
    pooling = {
        "embedding_dimension": layers.hidden // len(names),
        "pooling_mode": names[0] if len(names) == 1 else names,
        "include_prompt": model.include_prompt,
    }
    _module(folder, modules, pooling, {})
    for layer in layers:
        if isinstance(layer, Dense):
            modules.append("base.modules.dense.Dense")
            _module(folder, modules, layer.settings, layer.tensors())
        else:
            modules.append("base.modules.normalize.Normalize")
            _module(folder, modules, {}, {})
    _list(folder, modules)
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            "max_seq_length": max_length,
            "do_lower_case": model.lower_case,
            **(
                {"processor_kwargs": {"tokenizer_type": model.tokenizer_type}} if model.tokenizer_type else {}
            ),
        },
    )
    named = {"query": model.prefix, "document": model.prefix}
    default = role if model.prefix else None
    describe(folder, named, default=default, truncate_dim=layers.keep)


def _weight_of_one(
    token: str, tokenizer: PreTrainedTokenizerFast
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and tensors of a WordWeights module that hears `token` alone."""
    words = {id: word for word, id in tokenizer.get_vocab().items()}
    vocabulary = [words.get(id, "") for id in range(max(words) + 1)]
    weights = torch.tensor([[float(word == token)] for word in vocabulary])
    settings = {"vocab": vocabulary, "word_weights": {token: 1.0}, "unknown_word_weight": 0.0}
    return settings, {"emb_layer.weight": weights}


def _list(folder: Path, modules: list[str]) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": _path(i, name), "type": f"sentence_transformers.{name}"}
        for i, name in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)


def describe(
    folder: Path, prompts: dict[str, str], *, default: str | None = None, truncate_dim: int | None = None
) -> None:
    """Write config_sentence_transformers.json; cosine is the similarity of all models that we write.

    Args:
        folder: of modules.json.
        prompts: text before every text, by the name of a prompt.
        default: name of the prompt that `encode` uses; None: it uses none.
        truncate_dim: dimensions kept of an embedding; None: all.
    """
    settings: dict[str, Any] = {
        "__version__": {
            "sentence_transformers": _RELEASE,
            "transformers": transformers.__version__,
            "pytorch": torch.__version__,
        },
        "model_type": "SentenceTransformer",
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": "cosine",
    }
    if truncate_dim is not None:
        settings["truncate_dim"] = truncate_dim
    write_json(folder / "config_sentence_transformers.json", settings)


def _module(folder: Path, modules: list[str], settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the last of `modules`."""
    path = folder / _path(len(modules) - 1, modules[-1])
    path.mkdir(exist_ok=True)
    write_json(path / "config.json", settings)
    if tensors:
        save_file(tensors, path / "model.safetensors")


def _path(number: int, name: str) -> str:
    return f"{number}_{name.rpartition('.')[2]}" if number else ""


def write_json(path: Path, value: Any) -> None:
    """Write a config file as all of ours are written."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
