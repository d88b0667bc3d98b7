"""The student of a run: what it starts from, how it reads, and the tower itself.

prepare ─► a folder: tokenizer, new words, teacher layers ─► prompt; build on every rank
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

from scalingnote.distillation import layers, vocabulary
from scalingnote.distillation.config import DistillConfig, NewVocabulary
from scalingnote.distillation.inherit import inherit, inherit_rows
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.log import get_logger
from scalingnote.models import backbone as backbones
from scalingnote.models import lookup, lookup_features, tower
from scalingnote.models.config import LookupConfig, Pretrained, Scratch, TowerConfig
from scalingnote.models.lookup import LookupPrompt, LookupStart, LookupTower
from scalingnote.models.lookup_features import LookupFeatures
from scalingnote.models.prompt import QueryPrompt, tokenize
from scalingnote.models.table import npy_bytes
from scalingnote.models.tower import Tower
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact
from scalingnote.train import corpus

log = get_logger("distill")
_START = "start.json"
_MAX_TEXTS = 1_000_000  # that features and weights are counted in: more change them little


@dataclass(frozen=True)
class Start:
    """What a student starts from; equal for all ranks."""

    tokenizer: str | None = None
    """Tokenizer JSON, without the new words, of a student that brings none."""
    words: tuple[str, ...] = ()
    """New tokens, in order."""
    backbone: Path | None = None
    """A checkpoint made of the teacher's layers."""
    lookup: LookupStart | None = None
    """Features and weights of a table, from the training queries."""


def prepare(config: DistillConfig, teacher: Artifact, *, folder: str) -> Start:
    """Find out what the student starts from and write it to `folder`, or find it there.

    To be called once, before any rank starts; `teacher` holds the embeddings of queries.
    """
    if not fs.exists(fs.join(folder, _START)):
        files: dict[str, bytes] = {}
        if config.start == "teacher":
            _cut(config, teacher, fs.join(folder, "backbone"))
        elif (learnt := _tokenizer(config, teacher)) is not None:
            files["tokenizer.json"] = learnt.encode()
        if config.new_vocabulary is not None:
            tokenizer = prompt(config, _bare(config, folder, files)).tokenizer
            files["words.json"] = _new_words(config.new_vocabulary, teacher, tokenizer)
        if isinstance(config.student, LookupConfig):
            files |= _of_lookup(config, config.student, teacher, _bare(config, folder, files))
        for name, data in files.items():
            fs.write_bytes(fs.join(folder, name), data)
        _finish(folder)
    return read(folder)


def read(folder: str) -> Start:
    """What :func:`prepare` wrote."""
    listed = json.loads(fs.read_bytes(fs.join(folder, _START)))
    names = list(listed["files"])
    # The list holds sizes: another start at the same place is another version of what was copied here.
    local = fs.download(folder, names, version=json.dumps(listed, sort_keys=True))
    tokenizer, words, backbone, keys, weights = (
        local / name if any(n.startswith(name) for n in names) else None
        for name in ("tokenizer.json", "words.json", "backbone", "feature_keys.npy", "weights.npy")
    )
    return Start(
        None if tokenizer is None else tokenizer.read_text(encoding="utf-8"),
        () if words is None else tuple(json.loads(words.read_text(encoding="utf-8"))),
        backbone,
        None if keys is None else LookupStart(np.load(keys), None if weights is None else np.load(weights)),
    )


def prompt(config: DistillConfig, start: Start) -> QueryPrompt | LookupPrompt:
    """How the student reads a query. Its weights are neither drawn nor loaded."""
    student = _settings(config, start)
    found = corpus.prompt(student, role="query", tokenizer_json=start.tokenizer)
    assert isinstance(found, QueryPrompt | LookupPrompt)
    vocabulary.extend(found.tokenizer, start.words)
    if isinstance(found, LookupPrompt) and start.lookup is not None:
        size = found.tokenizer.get_vocab_size()
        features = LookupFeatures(start.lookup.feature_keys, tokens=size)
        return LookupPrompt(found.tokenizer, max_length=student.max_length, features=features)
    return found


def build(config: DistillConfig, start: Start, *, teacher: Artifact, dim: int) -> Tower | LookupTower:
    """The student, ready to train; of one config and start it is the same on every rank."""
    student = _settings(config, start)
    if isinstance(student, LookupConfig):
        return _lookup(config, student, start, teacher=teacher, dim=dim)
    if student.pooling != "placeholders":  # a published model, with a tokenizer and tokens of its own
        return tower.build(student, role="query", dim=dim, tokenizer_json=None, seed=config.seed)
    backbone = backbones.build(student.backbone, tokenizer_json=start.tokenizer, seed=config.seed)
    table: Any = backbone.model.get_input_embeddings()  # type: ignore[operator]
    if inherits(config):
        inherit(table, _of_teacher(teacher, "tokens"))
    if start.words:
        before = Tokenizer.from_str(backbone.raw_tokenizer.to_str())
        vocabulary.extend(backbone.raw_tokenizer, start.words)
        backbones.grow(backbone)
        table = backbone.model.get_input_embeddings()  # type: ignore[operator]
        vocabulary.fill(table.weight, start.words, before=before, after=backbone.raw_tokenizer)
    made = tower.build(
        student, role="query", dim=dim, tokenizer_json=None, seed=config.seed, backbone=backbone
    )
    if start.backbone is not None:
        weight = load_file(start.backbone / "projection.safetensors")["weight"]
        with torch.no_grad():
            made.projection.weight.copy_(weight)
    return made


def inherits(config: DistillConfig) -> bool:
    """Whether the student starts with the teacher's tokenizer and what that knows of each token."""
    student = config.student
    own = isinstance(student, TowerConfig) and isinstance(student.backbone, Pretrained)
    return config.inherit_tokens and config.start == "random" and not own


def _lookup(
    config: DistillConfig, student: LookupConfig, start: Start, *, teacher: Artifact, dim: int
) -> LookupTower:
    before = Tokenizer.from_str(_given(start))
    after = Tokenizer.from_str(_given(start))
    vocabulary.extend(after, start.words)
    made = lookup.build(student, dim=dim, tokenizer_json=after.to_str(), seed=config.seed, start=start.lookup)
    if inherits(config):
        inherit_rows(made, _of_teacher(teacher, "alone"))
    vocabulary.fill(made.table, start.words, before=before, after=after)
    made.made_from["query_embeddings"] = teacher.digest
    return made


def _of_lookup(
    config: DistillConfig, student: LookupConfig, teacher: Artifact, bare: Start
) -> dict[str, bytes]:
    """Features and starting weights of a table; no file where it starts with neither."""
    if not (student.bigrams or student.ends or student.start_weights == "inverse_frequency"):
        return {}
    tokenizer, room = prompt(config, bare).tokenizer, student.max_length
    size = tokenizer.get_vocab_size()
    rows = [ids[:room] for texts in _training_texts(teacher) for ids in tokenize(tokenizer, texts, room)]
    keys = lookup_features.learn(rows, tokens=size, bigrams=student.bigrams, ends=student.ends)
    files = {"feature_keys.npy": npy_bytes(keys)}
    if student.weighting == "learned" and student.start_weights == "inverse_frequency":
        counts = np.bincount(np.fromiter(chain.from_iterable(rows), np.int64), minlength=size)
        features = LookupFeatures(keys, tokens=size)
        files["weights.npy"] = npy_bytes(lookup_features.start_weights(counts, features))
    log.info("the table has rows for %s tokens and %s features", f"{size:,}", f"{len(keys):,}")
    return files


def _training_texts(teacher: Artifact) -> Iterator[list[str]]:
    """Texts of the training split, batch by batch, at most :data:`_MAX_TEXTS`."""
    count = 0
    for batch in teacher.batches("embeddings", columns=["query", "split"]):
        found = batch.filter(pc.equal(batch["split"], "train"))["query"].to_pylist()
        yield found[: _MAX_TEXTS - count]
        count += len(found)
        if count >= _MAX_TEXTS:
            return


def _settings(config: DistillConfig, start: Start) -> TowerConfig | LookupConfig:
    """The student's config, its backbone the teacher's where layers were copied, and its pooling too."""
    if start.backbone is None or isinstance(config.student, LookupConfig):
        return config.student
    changed: dict[str, Any] = {"backbone": Pretrained(path=str(start.backbone))}
    if layers.is_published(start.backbone):
        changed["pooling"] = "auto"
    return config.student.model_copy(update=changed)


def _given(start: Start) -> str:
    assert start.tokenizer is not None, "a lookup's start has a tokenizer"
    return start.tokenizer


def _of_teacher(teacher: Artifact, name: str) -> Float[Tensor, "vocabulary width"]:
    """What the teacher's job left of each of its tokens."""
    data = fs.read_bytes(teacher.file(f"teacher/{name}.safetensors"))
    return safetensors.torch.load(data)["weight"].float()


def _tokenizer(config: DistillConfig, teacher: Artifact) -> str | None:
    """Tokenizer JSON of a student from scratch; a pretrained one brings its own."""
    if inherits(config):
        return fs.read_bytes(teacher.file("teacher/tokenizer.json")).decode()
    texts = partial(corpus.distinct_queries, teacher, "embeddings")
    return corpus.tokenizers({"student": config.student}, texts=texts).get("student")


def _bare(config: DistillConfig, folder: str, files: dict[str, bytes]) -> Start:
    """The start without what is mined."""
    learnt = files.get("tokenizer.json")
    where = fs.join(folder, "backbone")
    copied = fs.list_files(where) if config.start == "teacher" else {}
    local = fs.download(where, list(copied), version=json.dumps(copied)) if copied else None
    return Start(None if learnt is None else learnt.decode(), backbone=local)


def _new_words(knobs: NewVocabulary, teacher: Artifact, tokenizer: Tokenizer) -> bytes:
    """New words of the training queries, mined from the first million of them, as JSON."""
    queries = corpus.distinct_queries(teacher, "embeddings")
    words = vocabulary.mine(queries, tokenizer, tokens=knobs.tokens, min_count=knobs.min_count)
    log.info("%s new words: %s...", f"{len(words):,}", ", ".join(words[:8]))
    return json.dumps(words, ensure_ascii=False).encode()


def _cut(config: DistillConfig, teacher: Artifact, target: str) -> None:
    """Write a checkpoint of the teacher's layers that the student wants."""
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
        chosen = layers.cut(towers.directory("query"), Path(local), layers=wanted)
        fs.upload(local, target)
    log.info("the student starts from the teacher's layers %s", ", ".join(map(str, chosen)))


def _finish(folder: str) -> None:
    listed = {name: size for name, size in fs.list_files(folder).items() if not name.endswith(".pending")}
    fs.write_bytes(fs.join(folder, _START), json.dumps({"files": listed}).encode())
