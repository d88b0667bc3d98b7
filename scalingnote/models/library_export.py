"""Write a tower's folder in the format of sentence-transformers, so that the library gives our embeddings.

    text -> exported tokenizer -> transformer -> pooling -> dense layer (our projection)

Only modules of that library are named: no code is stored beside the weights.

Our prompts tokenize each piece of a template separately. An exported document is one text in the layout of
:func:`document_layout`, with BOUNDARY between pieces that must not be tokenized together; it ends with the
template's last field. The rest of the template is added by the tokenizer's post-processor, so that truncation
shortens the content and never the prompt.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from scalingnote.models.heads import Dense, Head
from scalingnote.models.prompt import FIELDS, PLACEHOLDERS, DocumentPrompt, Row, SpecialTokens, plain, split
from scalingnote.models.published_model import MODES, PublishedModel, Role

BOUNDARY = "␞"  # U+241E; no control character: some tokenizers drop those before they split


def split_at_boundary(tokenizer: Tokenizer) -> None:
    """Make `tokenizer` split text at BOUNDARY, remove it, and tokenize each piece as a text of its own."""
    pre_tokenizer, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    if BOUNDARY in repr(pre_tokenizer):
        return
    # Tokenizers that mark the start of a text must mark the start of every piece that is not empty.
    if isinstance(pre_tokenizer, pre_tokenizers.Metaspace) and pre_tokenizer.prepend_scheme == "first":
        pre_tokenizer.prepend_scheme = "always"
    if "Prepend(" in repr(normalizer):
        mark = normalizers.Replace(Regex(f"{BOUNDARY}(?=[^{BOUNDARY}])"), f"{BOUNDARY}▁")
        tokenizer.normalizer = normalizers.Sequence([normalizer, mark])
    split_first = pre_tokenizers.Split(BOUNDARY, "removed")
    others = [] if pre_tokenizer is None else [pre_tokenizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split_first, *others]) if others else split_first


def document_layout(template: str, *, causal: bool) -> str:
    """Return the layout of a document as one text, for `str.format` with title, topic and content."""
    pieces, _ = _halves(template, causal=causal)
    text = "".join(pieces[:1])
    for left, right in pairwise(pieces):
        # A placeholder is a special token, which tokenizers never join with its neighbours.
        could_join = (left in FIELDS or right in FIELDS) and not {left, right} & PLACEHOLDERS.keys()
        text += (BOUNDARY if could_join else "") + right
    return text


def indexed_placeholder(template: str) -> str:
    """Return the placeholder of the indexed view: the summary's if there is one, else the last."""
    placeholders = [piece for piece in split(template) if piece in PLACEHOLDERS]
    return "[EMB]" if "[EMB]" in placeholders else placeholders[-1]


def unread_tokens(prompt: DocumentPrompt) -> int:
    """Return how many tokens of a causal prompt follow the indexed view's position, without effect on it."""
    (row,) = prompt.rows([""], [""], [""])
    assert isinstance(row, Row)
    view = "summary" if "summary" in prompt.views else prompt.views[-1]
    return len(row.ids) - 1 - row.positions[prompt.views.index(view)]


def export_tokenizer(
    template: str | None,
    tokenizer: PreTrainedTokenizerFast,
    special: SpecialTokens,
    *,
    causal: bool,
    max_length: int,
) -> PreTrainedTokenizerFast:
    """Return a copy of `tokenizer` whose post-processor adds what our prompts add around a text.

    Args:
        template: document template; texts are then documents in their layout. None: texts are queries.
        tokenizer: the tower's tokenizer.
        special: ids around a text.
        causal: whether the tower's backbone is causal.
        max_length: tokens of a text with those added.
    """
    raw = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    before = [] if special.first is None else [special.first]
    after: list[int] = []
    if template is not None:
        for piece in _halves(template, causal=causal)[1]:
            after += raw.encode(plain(piece), add_special_tokens=False).ids
    if special.end is not None and (template is None or not causal):
        after.append(special.end)
    added = {name: ids for name, ids in (("before", before), ("after", after)) if ids}
    raw.post_processor = processors.TemplateProcessing(
        single=[name for name in ("before", "$A", "after") if name == "$A" or name in added],
        special_tokens=[
            {"id": name, "ids": ids, "tokens": [raw.id_to_token(id) for id in ids]}
            for name, ids in added.items()
        ],
    )
    names = {key: token for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        **{**names, "pad_token": raw.id_to_token(special.pad)},
        padding_side="right",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
    )


def layout_agrees(
    tokenizer: PreTrainedTokenizerFast, prompt: DocumentPrompt, template: str, *, causal: bool
) -> bool:
    """Whether exported documents get the tokens that `prompt` gives them; tried on three documents."""
    fields = (["A title, 5 words long", "", "x"], ["topic", "", " y "], ["content. " * 99, "Content", ""])
    texts = [
        document_layout(template, causal=causal).format(title=title, topic=topic, content=content)
        for title, topic, content in zip(*fields, strict=True)
    ]
    for row, ids in zip(prompt.rows(*fields), tokenizer(texts, truncation=True).input_ids, strict=True):
        if not isinstance(row, Row) or (row.ids[: len(ids)] if causal else row.ids) != ids:
            return False
    return True


def _halves(template: str, *, causal: bool) -> tuple[list[str], list[str]]:
    """Split a template behind its last field; pieces that the indexed view cannot see are left out."""
    pieces = split(template)
    if causal:
        pieces = pieces[: pieces.index(indexed_placeholder(template))]
    end = max((i + 1 for i, piece in enumerate(pieces) if piece in FIELDS), default=0)
    return pieces[:end], pieces[end:]


_LIBRARY_RELEASE = "6.2.0"  # of sentence-transformers, whose file format is written


def write_trained(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    projection: Float[Tensor, "dim hidden"],
    *,
    template: str | None,
    causal: bool,
) -> None:
    """Add sentence-transformers' files to a folder with a trained tower's model.

    Args:
        folder: of the model; the tokenizer is saved there already.
        tokenizer: from :func:`export_tokenizer`.
        projection: weight of the tower's projection.
        template: of a document tower; None: a query tower.
        causal: whether the backbone is causal.
    """
    dim, hidden = projection.shape
    modules = ["base.modules.transformer.Transformer"]
    pooling = "lasttoken" if causal else "cls"
    if template is not None and not causal:
        # The state at a placeholder in the middle of the row: a weighted mean with one weight that is not 0.
        pooling = "mean"
        modules.append("sentence_transformer.modules.word_weights.WordWeights")
        _write_module(folder, modules, *_weight_of_one(indexed_placeholder(template), tokenizer))
    modules.append("sentence_transformer.modules.pooling.Pooling")
    _write_module(folder, modules, {"embedding_dimension": hidden, "pooling_mode": pooling}, {})
    modules.append("base.modules.dense.Dense")
    settings = {
        "in_features": hidden,
        "out_features": dim,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    _write_module(folder, modules, settings, {"linear.weight": projection.detach().contiguous()})
    _write_modules(folder, modules)
    write_json(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            "module_output_name": "token_embeddings",
            # Loads tokenizer.json unchanged. By the type of the model, Qwen2's splits would replace ours.
            "processor_kwargs": {"tokenizer_type": "modernbert"},
            "unpad_inputs": False if pooling == "mean" else None,  # word weights read padded rows only
        },
    )
    # `encode_document(text)` reads the text as the content of a document without a title.
    prompt = "" if template is None else document_layout(template, causal=causal)
    prompt = prompt.format(title="", topic="", content="") if prompt.endswith("{content}") else ""
    write_settings(folder, {"query": "", "document": prompt})


def write_published(
    folder: Path, model: PublishedModel, layers: Head, *, role: Role, max_length: int
) -> None:
    """Add sentence-transformers' files to a folder with the transformer of a published model.

    They contain the model's own settings for this role. The prompt is stored for both roles, so that
    `encode`, `encode_query` and `encode_document` read a text in the same way.
    """
    modules = ["base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling"]
    names = [MODES[mode] for mode in model.pooling]
    pooling = {
        "embedding_dimension": layers.hidden // len(names),
        "pooling_mode": names[0] if len(names) == 1 else names,
        "include_prompt": model.include_prompt,
    }
    _write_module(folder, modules, pooling, {})
    for layer in layers:
        if isinstance(layer, Dense):
            modules.append("base.modules.dense.Dense")
            _write_module(folder, modules, layer.settings, layer.tensors())
        else:
            modules.append("base.modules.normalize.Normalize")
            _write_module(folder, modules, {}, {})
    _write_modules(folder, modules)
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
    write_settings(folder, named, default=default, truncate_dim=layers.keep)


def _weight_of_one(
    token: str, tokenizer: PreTrainedTokenizerFast
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return settings and tensors of a WordWeights module in which all tokens but `token` have weight 0."""
    words = {id: word for word, id in tokenizer.get_vocab().items()}
    vocabulary = [words.get(id, "") for id in range(max(words) + 1)]
    weights = torch.tensor([[float(word == token)] for word in vocabulary])
    settings = {"vocab": vocabulary, "word_weights": {token: 1.0}, "unknown_word_weight": 0.0}
    return settings, {"emb_layer.weight": weights}


def _write_modules(folder: Path, modules: list[str]) -> None:
    listed = [
        {"idx": i, "name": str(i), "path": _module_path(i, name), "type": f"sentence_transformers.{name}"}
        for i, name in enumerate(modules)
    ]
    write_json(folder / "modules.json", listed)


def write_settings(
    folder: Path, prompts: dict[str, str], *, default: str | None = None, truncate_dim: int | None = None
) -> None:
    """Write config_sentence_transformers.json. The similarity of our models is the cosine.

    Args:
        folder: of modules.json.
        prompts: prefix of texts by the name of the prompt.
        default: name of the prompt that `encode` uses; None: it uses none.
        truncate_dim: dimensions kept of an embedding; None: all.
    """
    settings: dict[str, Any] = {
        "__version__": {
            "sentence_transformers": _LIBRARY_RELEASE,
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


def _write_module(
    folder: Path, modules: list[str], settings: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write settings and tensors of the last of `modules` to its folder."""
    path = folder / _module_path(len(modules) - 1, modules[-1])
    path.mkdir(exist_ok=True)
    write_json(path / "config.json", settings)
    if tensors:
        save_file(tensors, path / "model.safetensors")


def _module_path(number: int, name: str) -> str:
    return f"{number}_{name.rpartition('.')[2]}" if number else ""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file of settings."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
