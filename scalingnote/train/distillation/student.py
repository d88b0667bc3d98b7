"""The student of a query tower: its initial tokenizer and weights, its prompt, and the tower that is trained.

    prepare_start ─► tokenizer, new words, teacher layers in a folder ─► build_prompt, build_student per rank

*Layers* are copied tensor by tensor from the safetensors of the teacher's own artifact, without building a
model: when the teacher's job runs, the layers of a future student are not known, and a copy of a 7B teacher
next to its embeddings would take 28 GB.

*Tokens.* Distillation reads only the training queries. The teacher has learnt words that occur in many
documents, but in none of these queries; a student with random rows never learns them, and answers queries on
new topics badly. A transformer takes the teacher's token embeddings. The rows of a lookup table are
embeddings of queries, which no layer reads; it takes the teacher's embeddings of every token read by itself.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import get_logger
from scalingnote.models import backbone as backbones
from scalingnote.models import lookup
from scalingnote.models.config import LookupConfig, Pretrained, Scratch, TowerConfig
from scalingnote.models.dual_encoder import build_tower
from scalingnote.models.lookup import LookupPrompt, LookupStart, LookupTower
from scalingnote.models.lookup_table import LookupFeatures
from scalingnote.models.prompt import QueryPrompt, without_limits
from scalingnote.models.tower import Tower
from scalingnote.storage import filesystem as fs
from scalingnote.storage.arrow import npy_bytes
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.train import tokens
from scalingnote.train.distillation.config import DistillConfig
from scalingnote.train.distillation.vocabulary import (
    add_words,
    initialize_word_rows,
    mine_words,
    pieces_of,
    read_tokenizer,
    start_arrays,
    train_word_pieces,
)

log = get_logger("distill")
START_FILE = "start.json"
MIN_WORD_COUNT = 4  # number of queries that must contain a new word
_LAYER = re.compile(r"(^|\.)(layers?|h|blocks?)\.(\d+)\.")


@dataclass(frozen=True)
class StudentStart:
    """Tokenizer and weights that a student starts from; equal for all ranks."""

    tokenizer: str | None
    """Tokenizer JSON, without the new words; None for a student that has its own tokenizer."""
    words: tuple[str, ...]
    """New tokens, in order."""
    backbone: Path | None
    """A checkpoint of some of the teacher's layers."""
    lookup: LookupStart | None
    """Features and weights of a table, from the training queries."""


def prepare_start(config: DistillConfig, teacher: Artifact, *, folder: str) -> StudentStart:
    """Write the start of a student to `folder`, or find it there. Must be called once, before ranks start.

    The folder must belong to this config and this teacher, the artifact with the embeddings of queries.
    """
    if not fs.exists(fs.join(folder, START_FILE)):
        with tempfile.TemporaryDirectory() as local:
            _write_start(config, teacher, Path(local))
            fs.upload(local, folder)
        files = {name: size for name, size in fs.list_files(folder).items() if not name.endswith(fs.PENDING)}
        fs.write_bytes(fs.join(folder, START_FILE), json.dumps({"files": files}).encode())
    return read_start(folder)


def read_start(folder: str) -> StudentStart:
    """Read the start that :func:`prepare_start` wrote."""
    files = json.loads(fs.read_bytes(fs.join(folder, START_FILE)))["files"]
    # The list holds sizes, so a new start at the same URI is a new version of the local copy.
    return _read(fs.download(folder, list(files), version=json.dumps(files, sort_keys=True)))


def _write_start(config: DistillConfig, teacher: Artifact, folder: Path) -> None:
    if config.teacher_layers is not None:
        _copy_teacher_layers(config, teacher, folder / "backbone")
    elif (tokenizer_json := _tokenizer(config, teacher)) is not None:
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    if config.new_vocabulary:
        new_words = mine_words(
            tokens.distinct_queries(teacher, "embeddings"),
            build_prompt(config, _read(folder)).tokenizer,
            tokens=config.new_vocabulary,
            min_count=MIN_WORD_COUNT,
            pairs=isinstance(config.student, LookupConfig),
        )
        log.info("%s new words: %s...", f"{len(new_words):,}", ", ".join(new_words[:8]))
        (folder / "words.json").write_text(json.dumps(new_words, ensure_ascii=False), encoding="utf-8")
    if isinstance(config.student, LookupConfig):
        prompt = build_prompt(config, _read(folder))
        assert isinstance(prompt, LookupPrompt)
        for name, array in start_arrays(config, config.student, teacher, prompt).items():
            (folder / name).write_bytes(npy_bytes(array))


def _read(folder: Path) -> StudentStart:
    """Read the start as far as its files exist."""
    tokenizer, words, backbone = (folder / name for name in ("tokenizer.json", "words.json", "backbone"))
    keys, weights, rows, prior = (
        np.load(folder / name) if (folder / name).exists() else None
        for name in ("feature_keys.npy", "weights.npy", "rows.npy", "prior.npy")
    )
    return StudentStart(
        tokenizer.read_text(encoding="utf-8") if tokenizer.exists() else None,
        tuple(json.loads(words.read_text(encoding="utf-8"))) if words.exists() else (),
        backbone if backbone.exists() else None,
        None if keys is None else LookupStart(keys, weights, rows, prior),
    )


def build_prompt(config: DistillConfig, start: StudentStart) -> QueryPrompt | LookupPrompt:
    """Build the prompt by which the student reads a query, without drawing or loading weights."""
    student = _tower_config(config, start)
    if isinstance(student, LookupConfig):
        tokenizer, pieces = _with_new_words(start)
        features = None
        if start.lookup is not None:
            features = LookupFeatures(start.lookup.feature_keys, tokens=tokenizer.get_vocab_size())
        return LookupPrompt(tokenizer, max_length=student.max_length, features=features, pieces=pieces)
    prompt = tokens.build_prompt(student, role="query", tokenizer_json=start.tokenizer)
    assert isinstance(prompt, QueryPrompt)
    add_words(prompt.tokenizer, start.words)
    return prompt


def build_student(
    config: DistillConfig, start: StudentStart, *, teacher: Artifact, dim: int
) -> Tower | LookupTower:
    """Build the student, ready to train; equal on every rank, for one config and start."""
    student = _tower_config(config, start)
    if isinstance(student, LookupConfig):
        return _build_lookup(config, student, start, teacher=teacher, dim=dim)
    if student.pooling != "placeholders":  # a published model, with its own tokenizer and tokens
        return build_tower(student, role="query", dim=dim, tokenizer_json=None, seed=config.seed)
    backbone = backbones.build(student.backbone, tokenizer_json=start.tokenizer, seed=config.seed)
    table: Any = backbone.model.get_input_embeddings()  # type: ignore[operator]
    if config.inherits:
        inherit_token_embeddings(table, token_weights(teacher, "tokens"))
    if start.words:
        before = Tokenizer.from_str(backbone.raw_tokenizer.to_str())
        add_words(backbone.raw_tokenizer, start.words)
        backbones.grow(backbone.model, len(backbone.tokenizer))
        table = backbone.model.get_input_embeddings()  # type: ignore[operator]
        initialize_word_rows(table.weight, start.words, before=before, after=backbone.raw_tokenizer)
    tower = build_tower(
        student, role="query", dim=dim, tokenizer_json=None, seed=config.seed, backbone=backbone
    )
    if start.backbone is not None:
        with torch.no_grad():
            tower.projection.weight.copy_(load_file(start.backbone / "projection.safetensors")["weight"])
    return tower


def _build_lookup(
    config: DistillConfig, student: LookupConfig, start: StudentStart, *, teacher: Artifact, dim: int
) -> LookupTower:
    tokenizer, pieces = _with_new_words(start)
    table_start = start.lookup
    assert table_start is not None, "a lookup's start has its features"
    if config.inherits:
        teacher_size = tokenizer.get_vocab_size() - len(pieces)
        table_start = replace(table_start, rows=token_weights(teacher, "alone")[:teacher_size].numpy())
    tower = lookup.build(
        student,
        dim=dim,
        tokenizer_json=tokenizer.to_str(),
        seed=config.seed,
        start=table_start,
        pieces=pieces,
    )
    tower.made_from["query_embeddings"] = teacher.digest
    return tower


def _with_new_words(start: StudentStart) -> tuple[Tokenizer, dict[int, list[int]]]:
    """Build the tokenizer of a table, and return it with the pieces of each new word by its number."""
    assert start.tokenizer is not None, "a lookup's start has a tokenizer"
    before, tokenizer = (Tokenizer.from_str(start.tokenizer) for _ in range(2))
    add_words(tokenizer, start.words)
    return tokenizer, pieces_of(start.words, before=before, after=tokenizer)


def _tower_config(config: DistillConfig, start: StudentStart) -> TowerConfig | LookupConfig:
    """Return the student's config.

    If layers were copied, its backbone is the copy, and its pooling the teacher's.
    """
    if start.backbone is None or isinstance(config.student, LookupConfig):
        return config.student
    changed: dict[str, Any] = {"backbone": Pretrained(path=str(start.backbone))}
    if is_published(start.backbone):
        changed["pooling"] = "auto"
    return config.student.model_copy(update=changed)


def _tokenizer(config: DistillConfig, teacher: Artifact) -> str | None:
    """Return tokenizer JSON of a student from scratch; None for a pretrained one, which has its own."""
    if config.inherits:
        return teacher_tokenizer(teacher)
    if config.tokenizer not in ("teacher", "own"):
        return read_tokenizer(config.tokenizer)
    texts = partial(tokens.distinct_queries, teacher, "embeddings")
    if isinstance(config.student, LookupConfig):
        return train_word_pieces(texts(), vocabulary=config.student.vocabulary)
    return tokens.train_tokenizers({"student": config.student}, texts=texts).get("student")


def teacher_tokenizer(teacher: Artifact) -> str:
    """Read the tokenizer JSON of the teacher, which its job wrote, without limits.

    A published tokenizer may pad every text to a fixed length: a table would learn from pads that no query
    has.
    """
    tokenizer = Tokenizer.from_str(teacher.read_bytes("teacher/tokenizer.json").decode())
    return str(without_limits(tokenizer).to_str())


def token_weights(teacher: Artifact, name: str) -> Float[Tensor, "vocabulary width"]:
    """Read weights of each of the teacher's tokens, which its job wrote: ``tokens`` or ``alone``."""
    return safetensors.torch.load(teacher.read_bytes(token_file(name)))["weight"].float()


def token_file(name: str) -> str:
    """Return the part of the teacher's artifact with weights of its tokens: ``tokens`` or ``alone``."""
    return f"teacher/{name}.safetensors"


def _copy_teacher_layers(config: DistillConfig, teacher: Artifact, target: Path) -> None:
    """Write a checkpoint of the teacher's layers that the student's config names."""
    parent = teacher.manifest.parents.get("dual_encoder")
    if parent is None:
        raise ConfigError(
            "distill.teacher_layers needs a dual encoder's query tower as the teacher: leave it out"
        )
    towers = open_artifact(parent["uri"], kind="dual_encoder")
    if towers.digest != parent["digest"]:
        raise ArtifactError(
            f"{towers.uri} is not the teacher that {teacher.uri} was made with: re-run teacher"
        )
    assert isinstance(config.student, TowerConfig)
    assert isinstance(config.student.backbone, Scratch)
    wanted: Sequence[int] | int = config.student.backbone.layers
    if isinstance(config.teacher_layers, tuple):
        wanted = config.teacher_layers
    chosen = copy_layers(towers.directory("query"), target, layers=wanted)
    log.info("the student starts from the teacher's layers %s", ", ".join(map(str, chosen)))


# --- layers and tokens of the teacher -----------------------------------------------------------------------


def copy_layers(teacher: Path, target: Path, *, layers: Sequence[int] | int) -> tuple[int, ...]:
    """Write to `target` a query tower with some layers of the tower in `teacher` and all its other weights.

    A published model keeps its pooling, dense layers and prompts too. `layers` are numbers of layers from 0,
    or from the end (-1 is the last); or the number of layers to take, evenly spaced.

    Returns:
        The numbers of the layers, from 0.

    Raises:
        ConfigError: the teacher has no such layers, or its folder holds only an adapter.
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
    # Settings that are lists with an entry per layer, for example kinds of attention.
    of_layers = {
        name: [value[layer] for layer in chosen]
        for name, value in settings.items()
        if isinstance(value, list) and len(value) == count and name.startswith("layer")
    }
    settings |= {"num_hidden_layers": len(chosen), **of_layers}
    (target / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    save_file(_tensors(teacher, chosen), target / "model.safetensors", metadata={"format": "pt"})
    for path in teacher.iterdir():
        if path.name == "config.json" or path.name.startswith("model"):
            continue  # written above
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target / path.name)
    return chosen


def is_published(folder: Path) -> bool:
    """Return whether a tower's folder is a published model, with its own pooling and dense layers."""
    return (folder / "modules.json").exists() and not (folder / "projection.safetensors").exists()


def evenly_spaced_layers(layers: int, *, of: int) -> tuple[int, ...]:
    """Return numbers of `layers` out of `of` layers, evenly spaced, including the last one."""
    if layers > of:
        raise ConfigError(f"the student needs {layers} layers, its teacher has {of}: choose fewer")
    return tuple(round((number + 1) * of / layers) - 1 for number in range(layers))


def _tensors(teacher: Path, chosen: Sequence[int]) -> dict[str, Tensor]:
    """Read tensors of the chosen layers and all others, by their names in the student."""
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
    """Fill the first rows of `table` with those of `teacher`, fitted to the width of `table`.

    Further rows keep their values. The two vocabularies must number their common tokens in the same way.
    """
    rows = min(len(teacher), table.num_embeddings)
    with torch.no_grad():
        table.weight[:rows] = fit_width(teacher, width=table.embedding_dim)[:rows]


def fit_width(tokens: Float[Tensor, "vocabulary hidden"], *, width: int) -> Float[Tensor, "vocabulary width"]:
    """Fit `tokens` to `width` dimensions with their inner products kept: exactly, or as well as possible.

    A wider table gets zeros on the right; a narrower one the principal directions of the rows, the best
    linear map to `width` dimensions (Eckart-Young).
    """
    hidden = tokens.shape[1]
    if width >= hidden:
        wider: Tensor = nn.functional.pad(tokens, (0, width - hidden))
        return wider
    _, directions = torch.linalg.eigh((tokens.T @ tokens).double())
    rotated: Tensor = tokens @ directions[:, -width:].flip(1).to(tokens.dtype)
    return rotated
