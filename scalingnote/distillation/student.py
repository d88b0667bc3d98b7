"""The student of a run: its start, its prompt, and the tower itself.

prepare_start ─► a folder: tokenizer, new words, teacher layers ─► build_prompt; build_student on every rank
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import safetensors.torch
import torch
from jaxtyping import Float
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from scalingnote.distillation import initial_weights
from scalingnote.distillation.config import DistillConfig, NewVocabulary
from scalingnote.distillation.initial_weights import inherit_lookup_rows, inherit_token_embeddings
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.log import get_logger
from scalingnote.models import backbone as backbones
from scalingnote.models import lookup, lookup_table
from scalingnote.models.config import LookupConfig, Pretrained, Scratch, TowerConfig
from scalingnote.models.dual_encoder import build_tower
from scalingnote.models.lookup import LookupPrompt, LookupStart, LookupTower
from scalingnote.models.lookup_table import LookupFeatures, npy_bytes
from scalingnote.models.prompt import QueryPrompt, tokenize
from scalingnote.models.tower import Tower
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.train import tokens

log = get_logger("distill")
_START_FILE = "start.json"
_MAX_TEXTS = 1_000_000  # that features and weights are counted in: further ones change them little


@dataclass(frozen=True)
class StudentStart:
    """Tokenizer and weights that a student starts from; equal for all ranks."""

    tokenizer: str | None = None
    """Tokenizer JSON, without the new words, of a student that brings none."""
    words: tuple[str, ...] = ()
    """New tokens, in order."""
    backbone: Path | None = None
    """A checkpoint of some of the teacher's layers."""
    lookup: LookupStart | None = None
    """Features and weights of a table, from the training queries."""


def prepare_start(config: DistillConfig, teacher: Artifact, *, folder: str) -> StudentStart:
    """Write the start of a student to `folder`, or find it there. To be called once, before any rank starts.

    Args:
        config: of the student.
        teacher: the artifact with the embeddings of queries.
        folder: must belong to both.
    """
    if not fs.exists(fs.join(folder, _START_FILE)):
        files: dict[str, bytes] = {}
        if config.start == "teacher":
            _copy_teacher_layers(config, teacher, fs.join(folder, "backbone"))
        elif (learnt := _tokenizer(config, teacher)) is not None:
            files["tokenizer.json"] = learnt.encode()
        if config.new_vocabulary is not None:
            tokenizer = build_prompt(config, _start_without_words(config, folder, files)).tokenizer
            files["words.json"] = _new_words(config.new_vocabulary, teacher, tokenizer)
        if isinstance(config.student, LookupConfig):
            files |= _lookup_files(
                config, config.student, teacher, _start_without_words(config, folder, files)
            )
        for name, data in files.items():
            fs.write_bytes(fs.join(folder, name), data)
        _write_index(folder)
    return read_start(folder)


def read_start(folder: str) -> StudentStart:
    """The start that :func:`prepare_start` wrote."""
    listed = json.loads(fs.read_bytes(fs.join(folder, _START_FILE)))
    names = list(listed["files"])
    # The list holds sizes: a new start at the same URI is a new version of the local copy.
    local = fs.download(folder, names, version=json.dumps(listed, sort_keys=True))
    tokenizer, words, backbone, keys, weights = (
        local / name if any(n.startswith(name) for n in names) else None
        for name in ("tokenizer.json", "words.json", "backbone", "feature_keys.npy", "weights.npy")
    )
    return StudentStart(
        None if tokenizer is None else tokenizer.read_text(encoding="utf-8"),
        () if words is None else tuple(json.loads(words.read_text(encoding="utf-8"))),
        backbone,
        None if keys is None else LookupStart(np.load(keys), None if weights is None else np.load(weights)),
    )


def build_prompt(config: DistillConfig, start: StudentStart) -> QueryPrompt | LookupPrompt:
    """The prompt by which the student reads a query, without drawing or loading weights."""
    student = _tower_config(config, start)
    prompt = tokens.build_prompt(student, role="query", tokenizer_json=start.tokenizer)
    assert isinstance(prompt, QueryPrompt | LookupPrompt)
    initial_weights.add_words(prompt.tokenizer, start.words)
    if isinstance(prompt, LookupPrompt) and start.lookup is not None:
        size = prompt.tokenizer.get_vocab_size()
        features = LookupFeatures(start.lookup.feature_keys, tokens=size)
        return LookupPrompt(prompt.tokenizer, max_length=student.max_length, features=features)
    return prompt


def build_student(
    config: DistillConfig, start: StudentStart, *, teacher: Artifact, dim: int
) -> Tower | LookupTower:
    """The student, ready to train; the same on every rank, given one config and start."""
    student = _tower_config(config, start)
    if isinstance(student, LookupConfig):
        return _build_lookup(config, student, start, teacher=teacher, dim=dim)
    if student.pooling != "placeholders":  # a published model, with a tokenizer and tokens of its own
        return build_tower(student, role="query", dim=dim, tokenizer_json=None, seed=config.seed)
    backbone = backbones.build(student.backbone, tokenizer_json=start.tokenizer, seed=config.seed)
    table: Any = backbone.model.get_input_embeddings()  # type: ignore[operator]
    if inherits_tokens(config):
        inherit_token_embeddings(table, _token_weights(teacher, "tokens"))
    if start.words:
        before = Tokenizer.from_str(backbone.raw_tokenizer.to_str())
        initial_weights.add_words(backbone.raw_tokenizer, start.words)
        backbones.grow(backbone.model, len(backbone.tokenizer))
        table = backbone.model.get_input_embeddings()  # type: ignore[operator]
        initial_weights.initialize_word_rows(
            table.weight, start.words, before=before, after=backbone.raw_tokenizer
        )
    made = build_tower(
        student, role="query", dim=dim, tokenizer_json=None, seed=config.seed, backbone=backbone
    )
    if start.backbone is not None:
        weight = load_file(start.backbone / "projection.safetensors")["weight"]
        with torch.no_grad():
            made.projection.weight.copy_(weight)
    return made


def inherits_tokens(config: DistillConfig) -> bool:
    """Whether the student starts with the teacher's tokenizer and its weights of each token."""
    student = config.student
    own = isinstance(student, TowerConfig) and isinstance(student.backbone, Pretrained)
    return config.inherit_tokens and config.start == "random" and not own


def _build_lookup(
    config: DistillConfig, student: LookupConfig, start: StudentStart, *, teacher: Artifact, dim: int
) -> LookupTower:
    before = Tokenizer.from_str(_tokenizer_json(start))
    after = Tokenizer.from_str(_tokenizer_json(start))
    initial_weights.add_words(after, start.words)
    made = lookup.build(student, dim=dim, tokenizer_json=after.to_str(), seed=config.seed, start=start.lookup)
    if inherits_tokens(config):
        inherit_lookup_rows(made, _token_weights(teacher, "alone"))
    initial_weights.initialize_word_rows(made.table, start.words, before=before, after=after)
    made.made_from["query_embeddings"] = teacher.digest
    return made


def _lookup_files(
    config: DistillConfig, student: LookupConfig, teacher: Artifact, start: StudentStart
) -> dict[str, bytes]:
    """Files of the features and starting weights of a table, as far as it has them."""
    if not (student.bigrams or student.ends or student.start_weights == "inverse_frequency"):
        return {}
    tokenizer, length = build_prompt(config, start).tokenizer, student.max_length
    size = tokenizer.get_vocab_size()
    rows = [ids[:length] for texts in _training_texts(teacher) for ids in tokenize(tokenizer, texts, length)]
    keys = lookup_table.frequent_features(rows, tokens=size, bigrams=student.bigrams, ends=student.ends)
    files = {"feature_keys.npy": npy_bytes(keys)}
    if student.weighting == "learned" and student.start_weights == "inverse_frequency":
        counts = np.bincount(np.fromiter(chain.from_iterable(rows), np.int64), minlength=size)
        features = LookupFeatures(keys, tokens=size)
        files["weights.npy"] = npy_bytes(lookup_table.start_weights(counts, features))
    log.info("the table has rows for %s tokens and %s features", f"{size:,}", f"{len(keys):,}")
    return files


def _training_texts(teacher: Artifact) -> Iterator[list[str]]:
    """Texts of the training split, batch by batch, at most :data:`_MAX_TEXTS`."""
    count = 0
    for batch in teacher.batches("embeddings", columns=["query", "split"]):
        texts = batch.filter(pc.equal(batch["split"], "train"))["query"].to_pylist()
        yield texts[: _MAX_TEXTS - count]
        count += len(texts)
        if count >= _MAX_TEXTS:
            return


def _tower_config(config: DistillConfig, start: StudentStart) -> TowerConfig | LookupConfig:
    """The student's config; where layers were copied, with the copy as backbone and the teacher's pooling."""
    if start.backbone is None or isinstance(config.student, LookupConfig):
        return config.student
    changed: dict[str, Any] = {"backbone": Pretrained(path=str(start.backbone))}
    if initial_weights.is_published(start.backbone):
        changed["pooling"] = "auto"
    return config.student.model_copy(update=changed)


def _tokenizer_json(start: StudentStart) -> str:
    assert start.tokenizer is not None, "a lookup's start has a tokenizer"
    return start.tokenizer


def _token_weights(teacher: Artifact, name: str) -> Float[Tensor, "vocabulary width"]:
    """Weights of each of the teacher's tokens, which its job wrote: ``tokens`` or ``alone``."""
    data = teacher.read_bytes(f"teacher/{name}.safetensors")
    return safetensors.torch.load(data)["weight"].float()


def _tokenizer(config: DistillConfig, teacher: Artifact) -> str | None:
    """Tokenizer JSON of a student from scratch; a pretrained one brings its own."""
    if inherits_tokens(config):
        return teacher.read_bytes("teacher/tokenizer.json").decode()
    texts = partial(tokens.distinct_queries, teacher, "embeddings")
    return tokens.train_tokenizers({"student": config.student}, texts=texts).get("student")


def _start_without_words(config: DistillConfig, folder: str, files: dict[str, bytes]) -> StudentStart:
    """The start without new words, features and weights, which are mined with its help."""
    learnt = files.get("tokenizer.json")
    where = fs.join(folder, "backbone")
    copied = fs.list_files(where) if config.start == "teacher" else {}
    local = fs.download(where, list(copied), version=json.dumps(copied)) if copied else None
    return StudentStart(None if learnt is None else learnt.decode(), backbone=local)


def _new_words(knobs: NewVocabulary, teacher: Artifact, tokenizer: Tokenizer) -> bytes:
    """New words of the training queries, mined from the first million of them, as JSON."""
    queries = tokens.distinct_queries(teacher, "embeddings")
    words = initial_weights.mine_words(queries, tokenizer, tokens=knobs.tokens, min_count=knobs.min_count)
    log.info("%s new words: %s...", f"{len(words):,}", ", ".join(words[:8]))
    return json.dumps(words, ensure_ascii=False).encode()


def _copy_teacher_layers(config: DistillConfig, teacher: Artifact, target: str) -> None:
    """Write a checkpoint of the teacher's layers that the student asks for."""
    parent = teacher.manifest.parents.get("dual_encoder")
    if parent is None:
        raise ConfigError(
            "start: teacher needs a dual encoder's query tower as the teacher: set start=random"
        )
    towers = open_artifact(parent["uri"], kind="dual_encoder")
    if towers.digest != parent["digest"]:
        raise ArtifactError(
            f"{towers.uri} is not the teacher that {teacher.uri} was made with: re-run teacher"
        )
    assert isinstance(config.student, TowerConfig)
    assert isinstance(config.student.backbone, Scratch)
    wanted = config.student.backbone.layers if config.teacher_layers is None else config.teacher_layers
    with tempfile.TemporaryDirectory() as local:
        chosen = initial_weights.copy_layers(towers.directory("query"), Path(local), layers=wanted)
        fs.upload(local, target)
    log.info("the student starts from the teacher's layers %s", ", ".join(map(str, chosen)))


def _write_index(folder: str) -> None:
    listed = {name: size for name, size in fs.list_files(folder).items() if not name.endswith(fs.PENDING)}
    fs.write_bytes(fs.join(folder, _START_FILE), json.dumps({"files": listed}).encode())
