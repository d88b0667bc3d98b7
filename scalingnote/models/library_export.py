"""Export of a tower's folder in the format of sentence-transformers, which then gives our embeddings.

    text -> exported tokenizer -> transformer -> pooling -> dense layer (our projection)

The folder names only modules of that library and contains no code.

Our prompts tokenize each piece of a template separately. An exported document is one text in the layout of
:func:`document_layout`, with BOUNDARY between pieces that must not be tokenized together; it ends with the
template's last field. The tokenizer's post-processor adds the rest of the template, so that truncation
shortens the content and never the prompt.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from scalingnote.core.model_files import write_json
from scalingnote.models.heads import Dense, Head
from scalingnote.models.prompt import (
    BOUNDARY,
    PLACEHOLDERS,
    TEXT_PLACEHOLDERS,
    DocumentPrompt,
    SpecialTokens,
    TokenRow,
    indexed_view,
    plain,
    split,
    template_of,
)
from scalingnote.models.published_model import MODES, PublishedModel, Role, dense_settings

_LIBRARY_RELEASE = "6.2.0"  # release of sentence-transformers in whose format files are written
LIBRARY = "sentence_transformers"
_WORD_WEIGHTS = "sentence_transformer.modules.word_weights.WordWeights"
_POOLING = "sentence_transformer.modules.pooling.Pooling"
_DENSE = "base.modules.dense.Dense"
_TEXT_TRANSFORMER = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
_Module = tuple[str, dict[str, Any], dict[str, Tensor]]  # class, settings, tensors


def document_layout(template: str, *, causal: bool) -> str:
    """Return the layout of a document as one text, for `str.format` with title, topic and content."""
    pieces, _ = _halves(template, causal=causal)
    text = "".join(pieces[:1])
    for left, right in pairwise(pieces):
        # A placeholder is a special token, which tokenizers never join with its neighbours.
        could_join = (left in TEXT_PLACEHOLDERS or right in TEXT_PLACEHOLDERS) and not {
            left,
            right,
        } & PLACEHOLDERS.keys()
        text += (BOUNDARY if could_join else "") + right
    return text


def indexed_placeholder(template: str) -> str:
    """Return the placeholder of the indexed view: that of the summary if there is one, else the last."""
    placeholders = [piece for piece in split(template) if piece in PLACEHOLDERS]
    return "[EMB]" if "[EMB]" in placeholders else placeholders[-1]


def unread_tokens(prompt: DocumentPrompt) -> int:
    """Count the tokens of a causal prompt after the indexed view's position; they do not change the view."""
    (row,) = prompt.rows([""], [""], [""])
    assert isinstance(row, TokenRow)
    return len(row.ids) - 1 - row.positions[prompt.views.index(indexed_view(prompt.views))]


def export_tokenizer(
    template: str | None,
    tokenizer: PreTrainedTokenizerFast,
    special: SpecialTokens,
    *,
    causal: bool,
    max_length: int,
) -> PreTrainedTokenizerFast:
    """Return a copy of `tokenizer` whose post-processor adds what our prompts add around a text.

    With the `template` of documents, texts are documents in their layout; without one they are queries.
    `max_length` includes the added tokens.
    """
    raw = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    before = [] if special.first is None else [special.first]
    after: list[int] = []
    if template is not None:
        for piece in _halves(template, causal=causal)[1]:
            after += raw.encode(plain(piece), add_special_tokens=False).ids
    if special.end is not None and (template is None or not causal):
        after.append(special.end)
    raw.post_processor = template_of(raw, before, after)
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
    """Return whether three exported documents get the same tokens as from `prompt`."""
    fields = (["A title, 5 words long", "", "x"], ["topic", "", " y "], ["content. " * 99, "Content", ""])
    texts = [
        document_layout(template, causal=causal).format(title=title, topic=topic, content=content)
        for title, topic, content in zip(*fields, strict=True)
    ]
    for row, ids in zip(prompt.rows(*fields), tokenizer(texts, truncation=True).input_ids, strict=True):
        if not isinstance(row, TokenRow) or (row.ids[: len(ids)] if causal else row.ids) != ids:
            return False
    return True


def _halves(template: str, *, causal: bool) -> tuple[list[str], list[str]]:
    """Split a template after its last field, without pieces that the indexed view does not attend to."""
    pieces = split(template)
    if causal:
        pieces = pieces[: pieces.index(indexed_placeholder(template))]
    end = max((i + 1 for i, piece in enumerate(pieces) if piece in TEXT_PLACEHOLDERS), default=0)
    return pieces[:end], pieces[end:]


def write_trained(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    projection: Float[Tensor, "dim hidden"],
    *,
    template: str | None,
    causal: bool,
) -> None:
    """Add sentence-transformers' files to a folder with a trained tower's model and tokenizer.

    `tokenizer` is that of :func:`export_tokenizer`; `template` is that of a document tower, None for a query
    tower.
    """
    dim, hidden = projection.shape
    modules: list[_Module] = []
    pooling = "lasttoken" if causal else "cls"
    if template is not None and not causal:
        # The state at a placeholder inside the row is a weighted mean with one weight that is not 0.
        pooling = "mean"
        token = indexed_placeholder(template)
        words = {id: word for word, id in tokenizer.get_vocab().items()}
        vocabulary = [words.get(id, "") for id in range(max(words) + 1)]
        weights = torch.tensor([[float(word == token)] for word in vocabulary])
        words_settings = {"vocab": vocabulary, "word_weights": {token: 1.0}, "unknown_word_weight": 0.0}
        modules.append((_WORD_WEIGHTS, words_settings, {"emb_layer.weight": weights}))
    weight = {"linear.weight": projection.detach().contiguous()}
    modules += [
        (_POOLING, {"embedding_dimension": hidden, "pooling_mode": pooling}, {}),
        (_DENSE, dense_settings(hidden, dim), weight),
    ]
    _write_modules(folder, modules)
    settings = {
        # This type loads tokenizer.json unchanged. With the model's type, Qwen2's splits would replace ours.
        "processor_kwargs": {"tokenizer_type": "modernbert"},
        "unpad_inputs": False if pooling == "mean" else None,  # word weights read only padded rows
    }
    write_json(folder / "sentence_bert_config.json", {**_TEXT_TRANSFORMER, **settings})
    # `encode_document(text)` reads the text as the content of a document without a title.
    prompt = "" if template is None else document_layout(template, causal=causal)
    prompt = prompt.format(title="", topic="", content="") if prompt.endswith("{content}") else ""
    write_settings(folder, {"query": "", "document": prompt})


def write_published(
    folder: Path, model: PublishedModel, layers: Head, *, role: Role, max_length: int
) -> None:
    """Add sentence-transformers' files to a folder with the transformer of a published model.

    They contain the model's settings for this role. The prompt is written for both roles, so that `encode`,
    `encode_query` and `encode_document` read a text in the same way.
    """
    pooling = {
        "embedding_dimension": layers.hidden,
        "pooling_mode": MODES[model.pooling],
        "include_prompt": True,
    }
    modules: list[_Module] = [(_POOLING, pooling, {})]
    for layer in layers:
        if isinstance(layer, Dense):
            tensors = {f"linear.{name}": value.contiguous() for name, value in layer.state_dict().items()}
            modules.append((_DENSE, layer.settings, tensors))
        else:
            modules.append(("base.modules.normalize.Normalize", {}, {}))
    _write_modules(folder, modules)
    settings: dict[str, Any] = {"max_seq_length": max_length, "do_lower_case": model.lower_case}
    if model.tokenizer_type:
        settings["processor_kwargs"] = {"tokenizer_type": model.tokenizer_type}
    write_json(folder / "sentence_bert_config.json", {**_TEXT_TRANSFORMER, **settings})
    prompts = {"query": model.prefix, "document": model.prefix}
    default = role if model.prefix else None
    write_settings(folder, prompts, default=default, truncate_dim=layers.keep, similarity=model.similarity)


def _write_modules(folder: Path, modules: Sequence[_Module]) -> None:
    """Write modules.json and the modules that follow the transformer, whose files are in `folder` itself."""
    entries = [("", f"{LIBRARY}.base.modules.transformer.Transformer")]
    for number, (name, settings, tensors) in enumerate(modules, 1):
        path = folder / f"{number}_{name.rpartition('.')[2]}"
        path.mkdir(exist_ok=True)
        write_json(path / "config.json", settings)
        if tensors:
            save_file(tensors, path / "model.safetensors")
        entries.append((path.name, f"{LIBRARY}.{name}"))
    write_module_list(folder, entries)


def write_module_list(folder: Path, modules: Sequence[tuple[str, str]]) -> None:
    """Write modules.json: the folder and the class of each module, in order."""
    numbered = enumerate(modules)
    entries = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in numbered]
    write_json(folder / "modules.json", entries)


def write_settings(
    folder: Path,
    prompts: dict[str, str],
    *,
    default: str | None = None,
    truncate_dim: int | None = None,
    similarity: str = "cosine",
) -> None:
    """Write config_sentence_transformers.json.

    `default` is the name of the prompt that `encode` uses, `truncate_dim` the number of dimensions that are
    kept, None for all, and `similarity` the model's own one, which is cosine for all models that we train.
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
        "similarity_fn_name": similarity,
    }
    if truncate_dim is not None:
        settings["truncate_dim"] = truncate_dim
    write_json(folder / "config_sentence_transformers.json", settings)
