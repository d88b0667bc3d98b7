"""Initial weights of a student: the teacher's layers, its knowledge of each token, and rows for new words.

*Layers* are copied tensor by tensor from the safetensors of the teacher's own artifact, without building a
model: the teacher's job does not know which layers a student will want, and a copy of a 7B teacher beside its
embeddings would weigh 28 GB.

*Tokens.* Distillation sees the training queries only. Words that occur in none of them, but in many
documents, are known to the teacher; a student with random rows never learns them, and answers the queries of
new topics badly. A transformer takes the teacher's token embeddings. The rows of a lookup table are
embeddings of queries, read by no layer; it takes the teacher's embeddings of every token read alone.

*New words* (ScalingNote, section 3.3) are frequent words of the queries as tokens of the student's own. The
planner segments queries into words, Chinese by its dictionary. A tokenizer finds added tokens before it
splits a text:

* A word between spaces must stand alone (`single_word`), or "art" would be cut out of "heart". It includes
  the space before it, as the pieces it replaces did, or that space would become a token.
* Han characters stand between other ones, so that rule would never let them match. There the tokenizer takes
  the longest word from the left, which is segmentation by maximum matching: it may divide other words than
  the planner would, but in the same way in training and in serving.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from scalingnote.errors import ConfigError
from scalingnote.models.lookup import LookupTower
from scalingnote.planner.planner import words
from scalingnote.words import HAN, aligned

_LAYER = re.compile(r"(^|\.)(layers?|h|blocks?)\.(\d+)\.")
_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "projection.safetensors",
    "tower.json",
)
_HAN = re.compile(f"[{HAN}]")


def copy_layers(teacher: Path, target: Path, *, layers: Sequence[int] | int) -> tuple[int, ...]:
    """Write to `target` a query tower with some layers of the tower in `teacher` and all its other weights.

    A published model keeps its pooling, dense layers and prompts. `layers` are numbers of layers from 0, or
    from the end (-1 is the last); or how many to take at equal distances. Returns the numbers from 0.
    ConfigError where the teacher has no such layers, or its folder holds an adapter alone.
    """
    if not (teacher / "config.json").exists() or not any(teacher.glob("model*.safetensors")):
        raise ConfigError(f"{teacher} holds an adapter, not a model: train with merge_adapters=true")
    settings: dict[str, Any] = json.loads((teacher / "config.json").read_text())
    count = int(settings["num_hidden_layers"])
    if isinstance(layers, int):
        layers = evenly_spaced_layers(layers, of=count)
    chosen = tuple(layer + count if layer < 0 else layer for layer in layers)
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= layer < count for layer in chosen):
        raise ConfigError(f"teacher_layers {[*layers]}: the teacher has layers 0 to {count - 1}, each once")
    target.mkdir(parents=True, exist_ok=True)
    # Settings that are lists with an entry per layer, such as kinds of attention.
    of_layers = {
        name: [value[layer] for layer in chosen]
        for name, value in settings.items()
        if isinstance(value, list) and len(value) == count and name.startswith("layer")
    }
    settings |= {"num_hidden_layers": len(chosen), **of_layers}
    (target / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    save_file(_tensors(teacher, chosen), target / "model.safetensors", metadata={"format": "pt"})
    if is_published(teacher):
        for path in teacher.iterdir():
            if path.name == "config.json" or path.name.startswith("model"):
                continue  # written above
            if path.is_dir():
                shutil.copytree(path, target / path.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, target / path.name)
        return chosen
    for name in _COPIED_FILES:
        if (teacher / name).exists():
            shutil.copyfile(teacher / name, target / name)
    return chosen


def is_published(folder: Path) -> bool:
    """Whether a tower's folder is a published model, with pooling and dense layers of its own."""
    return (folder / "modules.json").exists() and not (folder / "projection.safetensors").exists()


def evenly_spaced_layers(layers: int, *, of: int) -> tuple[int, ...]:
    """Numbers of `layers` out of `of` layers at equal distances, the last one included."""
    if layers > of:
        raise ConfigError(f"the student asks for {layers} layers, its teacher has {of}")
    return tuple(round((number + 1) * of / layers) - 1 for number in range(layers))


def _tensors(teacher: Path, chosen: Sequence[int]) -> dict[str, Tensor]:
    """Tensors of the chosen layers and all others, by the names they have in the student."""
    number = {layer: place for place, layer in enumerate(chosen)}
    out: dict[str, Tensor] = {}
    for path in sorted(teacher.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a mapping
                match = _LAYER.search(name)
                if match is None:
                    out[name] = file.get_tensor(name)
                elif int(match[3]) in number:
                    renamed = name[: match.start(3)] + str(number[int(match[3])]) + name[match.end(3) :]
                    out[renamed] = file.get_tensor(name)
    return out


def inherit_token_embeddings(table: nn.Embedding, teacher: Float[Tensor, "vocabulary hidden"]) -> None:
    """Fill the first rows of `table` with `teacher`'s, fitted to its width; further rows keep their values.

    The two vocabularies must number their common tokens alike.
    """
    rows = min(len(teacher), table.num_embeddings)
    with torch.no_grad():
        table.weight[:rows] = fit_width(teacher, width=table.embedding_dim)[:rows]


def inherit_lookup_rows(student: LookupTower, teacher: Float[Tensor, "vocabulary dim"]) -> None:
    """Fill the first rows of a lookup table with the teacher's embeddings of its tokens, each read alone."""
    rows = min(len(teacher), student.tokens)
    with torch.no_grad():
        student.table[:rows] = teacher[:rows]


def fit_width(tokens: Float[Tensor, "vocabulary hidden"], *, width: int) -> Float[Tensor, "vocabulary width"]:
    """`tokens` in `width` dimensions with their inner products kept: exactly, or as well as can be.

    A wider table gets zeros on the right; a narrower one the principal directions of the rows, which no
    other linear map to `width` dimensions beats (Eckart-Young).
    """
    hidden = tokens.shape[1]
    if width >= hidden:
        wider: Tensor = nn.functional.pad(tokens, (0, width - hidden))
        return wider
    _, directions = torch.linalg.eigh((tokens.T @ tokens).double())
    rotated: Tensor = tokens @ directions[:, -width:].flip(1).to(tokens.dtype)
    return rotated


def mine_words(queries: Iterable[str], tokenizer: Tokenizer, *, tokens: int, min_count: int) -> list[str]:
    """The words that occur in most queries and that the student's tokenizer breaks into pieces.

    At most `tokens` words that occur in at least `min_count` queries, by falling count, then by their
    characters; without numbers and single Han characters.
    """
    lowers = tokenizer.normalizer is not None and tokenizer.normalizer.normalize_str("A") == "a"
    counts: Counter[str] = Counter()
    for query in queries:
        counts.update(set(_words_as_written(query.lower() if lowers else query)))
    ranked = sorted(
        (word for word, count in counts.items() if count >= min_count and _is_word(word)),
        key=lambda word: (-counts[word], word),
    )
    new: list[str] = []
    for word in ranked:
        if len(new) == tokens:
            break
        if not any(_is_token(tokenizer, text) for text in (word, f" {word}")):
            new.append(word)
    return new


def add_words(tokenizer: Tokenizer, new: Sequence[str]) -> None:
    """Add words to a tokenizer, in this order, after the tokens it has."""
    # A normalizer that replaces spaces by marks hides where a word ends: words are then matched before it.
    # It also marks the text after a word, so the word must take that text's own space.
    normalizer = tokenizer.normalizer
    marks = normalizer is not None and normalizer.normalize_str("a b") != "a b"
    normalized = normalizer is not None and not marks
    added = []
    for word in new:
        alone = not _HAN.search(word)
        added.append(
            AddedToken(word, single_word=alone, lstrip=alone, rstrip=alone and marks, normalized=normalized)
        )
    tokenizer.add_tokens(added)


def initialize_word_rows(
    table: Float[Tensor, "rows width"], new: Sequence[str], *, before: Tokenizer, after: Tokenizer
) -> None:
    """Set the rows of new words to the mean of the rows of their pieces, the space before them included."""
    with torch.no_grad():
        for word in new:
            pieces = before.encode(word if _HAN.search(word) else f" {word}", add_special_tokens=False).ids
            table[after.token_to_id(word)] = table[pieces].mean(0)


def _words_as_written(query: str) -> Iterable[str]:
    """The words of a query as written in it, without those that normalising changed."""
    text, places = aligned(query)
    at = 0
    for word in words(query):
        start = text.index(word, at)
        at = start + len(word)
        written = query[places[start] : places[at]]
        if written.casefold() == word:
            yield written


def _is_word(word: str) -> bool:
    return len(word) > 1 and any(character.isalpha() for character in word)


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is one token, other than the unknown token."""
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    return len(tokens) == 1 and tokens[0] != getattr(tokenizer.model, "unk_token", None)
