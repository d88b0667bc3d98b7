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

from scalingnote.models.layout import indexed, layout

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
    listed = [
        {"idx": i, "name": str(i), "path": _path(i, name), "type": f"sentence_transformers.{name}"}
        for i, name in enumerate(modules)
    ]
    _json(folder / "modules.json", listed)
    _json(
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
    _json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {
                "sentence_transformers": _RELEASE,
                "transformers": transformers.__version__,
                "pytorch": torch.__version__,
            },
            "model_type": "SentenceTransformer",
            "prompts": {"query": "", "document": alone},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )


def _weight_of_one(
    token: str, tokenizer: PreTrainedTokenizerFast
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Settings and tensors of a WordWeights module that hears `token` alone."""
    words = {id: word for word, id in tokenizer.get_vocab().items()}
    vocabulary = [words.get(id, "") for id in range(max(words) + 1)]
    weights = torch.tensor([[float(word == token)] for word in vocabulary])
    settings = {"vocab": vocabulary, "word_weights": {token: 1.0}, "unknown_word_weight": 0.0}
    return settings, {"emb_layer.weight": weights}


def _module(folder: Path, modules: list[str], settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the last of `modules`."""
    path = folder / _path(len(modules) - 1, modules[-1])
    path.mkdir(exist_ok=True)
    _json(path / "config.json", settings)
    if tensors:
        save_file(tensors, path / "model.safetensors")


def _path(number: int, name: str) -> str:
    return f"{number}_{name.rpartition('.')[2]}" if number else ""


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
