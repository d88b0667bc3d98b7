"""Stage II on Ray: from stored teacher embeddings to a student query tower. No teacher is loaded.

    prepare_start ─► tokenizer, new words, teacher layers in a folder ─► build_prompt, build_student per rank

Losses over documents also read triplets and the teacher's document embeddings; a student for documents also
reads the documents.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import safetensors.torch
import torch
from jaxtyping import Float
from numpy import ndarray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from scalingnote import cluster
from scalingnote.distillation import agreement, initial_weights, prepare
from scalingnote.distillation.config import DistillConfig, NewVocabulary
from scalingnote.distillation.objective import LessonBatches, StageTwo
from scalingnote.distillation.prepare import CandidateSources
from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.log import get_logger
from scalingnote.models import backbone as backbones
from scalingnote.models import lookup, lookup_table
from scalingnote.models.config import LookupConfig, Pretrained, Scratch, TowerConfig
from scalingnote.models.dual_encoder import build_tower
from scalingnote.models.lookup import LookupPrompt, LookupStart, LookupTower
from scalingnote.models.lookup_table import LookupFeatures, npy_bytes
from scalingnote.models.prompt import DocumentPrompt, QueryPrompt, tokenize
from scalingnote.models.published_model import Similarity
from scalingnote.models.tower import Tower
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.train import tokens
from scalingnote.train.data import Order, Store
from scalingnote.train.job import Failure, Settings, device_of, finished_steps, launch, start_rank, train_rank
from scalingnote.train.validation import INDEXED_VIEW

log = get_logger("distill")
_START_FILE = "start.json"
_MAX_TEXTS = 1_000_000  # that features and weights are counted in: further ones change them little


def run(
    config: DistillConfig,
    *,
    query_embeddings: str,
    triplets: str | None = None,
    embeddings: str | None = None,
    dataset: str | None = None,
    output: str,
) -> Artifact:
    """Train the student; killed at any moment, the next call resumes from the newest checkpoint.

    Args:
        config: student, losses and schedule.
        query_embeddings: URI of the teacher's embeddings of queries.
        triplets: URI, for losses over documents; as are the next two. An artifact that is not read is no
            parent.
        embeddings: URI of the teacher's embeddings of documents.
        dataset: URI, for a student for documents.
        output: URI of the student.

    Raises:
        ConfigError: the losses, or a student for documents, read an artifact that is missing; or a lookup
            student the embeddings of single tokens, which `query_embeddings` was made without.
    """
    uris = {"triplets": triplets, "embeddings": embeddings, "dataset": dataset}
    if missing := [kind for kind in config.reads if uris[kind] is None]:
        raise ConfigError(f"distill's losses read {', '.join(missing)}: pass them, or leave these losses out")
    teacher = open_artifact(query_embeddings, kind="query_embeddings")
    if config.reads_tokens and _token_file("alone") not in teacher.manifest.parts:
        raise ConfigError(
            f"{query_embeddings} holds no embeddings of single tokens, which a lookup student starts from: "
            "encode the queries with teacher.tokens=true, or set distill.inherit_tokens=false"
        )
    parents = {"query_embeddings": teacher}
    parents |= {kind: open_artifact(uris[kind] or "", kind=kind) for kind in config.reads}
    draft = Draft(output, kind="student", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    _require_one_similarity(teacher, parents.get("embeddings"))
    _require_published_student(config, teacher)
    start = prepare_start(config, teacher, folder=draft.work("start"))
    document_tokenizer = _document_tokenizer(config, parents)
    sizes = prepare.prepare(
        teacher,
        prompt=build_prompt(config, start),
        folder=draft.work("rows"),
        candidates=_sources(config, parents, document_tokenizer),
        each=cluster.map_tasks,
    )
    rows, steps = sum(sizes.values()), Order.of(config, sizes).steps(config)
    log.info("%s rows, %d steps", f"{rows:,}", steps)
    launch(
        _worker,
        {
            "query_embeddings": query_embeddings,
            "output": output,
            "work": draft.work(),
            "store": draft.work("rows"),
            "start": draft.work("start"),
            "document_tokenizer": document_tokenizer,
            "steps": steps,
        },
        schedule=config,
        section="distill",
    )
    learnt = sizes if config.losses.reads_documents else {"queries": rows}
    return draft.commit(counts={**learnt, "steps": finished_steps(output, planned=steps)})


def _worker(settings: Settings) -> Failure | None:
    """One rank of stage II."""
    config, rank, world = start_rank(DistillConfig, settings)
    teacher = open_artifact(settings["query_embeddings"], kind="query_embeddings")
    store, start = Store.open(settings["store"]), read_start(settings["start"])
    dim, packed = store.facts["dim"], config.memory.packing

    def build_stage() -> StageTwo:
        document = _document_student(config, settings["document_tokenizer"], dim=dim, teacher=teacher)
        student = build_student(config, start, teacher=teacher, dim=dim)
        return StageTwo(student, config.losses, document, similarity=compared_by(teacher))

    stage = build_stage()
    batches = LessonBatches(
        store,
        Order.of(config, store.facts["sizes"]),
        pad=stage.student.pad,
        document_pad=None if stage.document is None else stage.document.pad,
        packed=packed,
        rank=rank,
        world=world,
    )
    return train_rank(
        stage,
        batches,
        build_stage=build_stage,
        schedule=config,
        settings=settings,
        save=_save,
        validation=config.validation,
        validate_with=lambda engine: agreement.validator(
            store,
            engine,
            config.validation,
            pad=stage.student.pad,
            packed=packed,
            device=device_of(config),
            seed=config.seed,
            cosine_weight=config.losses.cosine_weight,
        ),
    )


def _save(stage: StageTwo, folder: Path) -> None:
    stage.student.save(folder / "query")
    if stage.document is not None:
        stage.document.save(folder / "document")


def compared_by(artifact: Artifact) -> Similarity:
    """How queries and documents are compared, as their artifact says: `query_embeddings` or `embeddings`."""
    return "dot" if artifact.manifest.info.get("similarity") == "dot" else "cosine"


# --- the student for documents -----------------------------------------------------------------------------


def _sources(
    config: DistillConfig, parents: Mapping[str, Artifact], tokenizer: str | None
) -> CandidateSources | None:
    """The artifacts that candidates come from, where a loss reads any."""
    if not config.losses.reads_documents:
        return None
    if config.document is None:
        return CandidateSources(parents["triplets"], parents["embeddings"])
    prompt = tokens.build_prompt(config.document, role="document", tokenizer_json=tokenizer)
    assert isinstance(prompt, DocumentPrompt)
    if INDEXED_VIEW not in prompt.views:
        raise ConfigError(
            f"distill.document.prompt gives {', '.join(prompt.views)}, but {INDEXED_VIEW} is searched: "
            "end it with [EMB]"
        )
    return CandidateSources(parents["triplets"], parents["embeddings"], parents["dataset"], prompt)


def _document_tokenizer(config: DistillConfig, parents: Mapping[str, Artifact]) -> str | None:
    """Tokenizer JSON of a student for documents that starts from scratch."""
    if config.document is None or not isinstance(config.document.backbone, Scratch):
        return None
    if config.inherit_tokens:
        return _teacher_tokenizer(parents["query_embeddings"])
    triplets, dataset = parents["triplets"], parents["dataset"]
    named, _ = tokens.document_hashes(triplets.batches("triplets", columns=["positive", "negatives"]))
    learnt = tokens.train_tokenizers(
        {"document": config.document}, texts=lambda: tokens.tokenizer_texts(triplets, dataset, named)
    )
    return learnt["document"]


def _require_one_similarity(teacher: Artifact, embeddings: Artifact | None) -> None:
    """ConfigError for queries that were encoded before artifacts said how they are compared."""
    if embeddings is not None and compared_by(embeddings) != compared_by(teacher):
        raise ConfigError(
            f"the documents of {embeddings.uri} are compared by {compared_by(embeddings)}, the queries of "
            f"{teacher.uri} by {compared_by(teacher)}: encode the queries again (stage teacher)"
        )


def _require_published_student(config: DistillConfig, teacher: Artifact) -> None:
    """ConfigError where a student for documents could not be compared by dot, as its teacher is."""
    student = config.document
    if student is None or compared_by(teacher) == "cosine":
        return
    if student.pooling == "placeholders" or student.normalise:
        raise ConfigError(
            f"the teacher of {teacher.uri} compares by dot, and distill.document gives embeddings for "
            "cosines: set its pooling to cls, as in EmbedDistill, and normalise to false"
        )


def _document_student(
    config: DistillConfig, tokenizer: str | None, *, dim: int, teacher: Artifact
) -> Tower | None:
    """The student for documents, if there is one."""
    if config.document is None:
        return None
    made = build_tower(config.document, role="document", dim=dim, tokenizer_json=tokenizer, seed=config.seed)
    if compared_by(teacher) == "dot":
        made.native = replace(made.native, similarity="dot")  # type: ignore[type-var]
    if config.inherit_tokens and isinstance(config.document.backbone, Scratch):
        initial_weights.inherit_token_embeddings(made.token_embeddings, _token_weights(teacher, "tokens"))
    return made


# --- the student for queries -------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudentStart:
    """Tokenizer and weights that a student starts from; equal for all ranks."""

    tokenizer: str | None
    """Tokenizer JSON, without the new words, of a student that brings none."""
    words: tuple[str, ...]
    """New tokens, in order."""
    backbone: Path | None
    """A checkpoint of some of the teacher's layers."""
    lookup: LookupStart | None
    """Features and weights of a table, from the training queries."""


def prepare_start(config: DistillConfig, teacher: Artifact, *, folder: str) -> StudentStart:
    """Write the start of a student to `folder`, or find it there. To be called once, before any rank starts.

    The folder must belong to this config and this teacher, the artifact with the embeddings of queries.
    """
    if not fs.exists(fs.join(folder, _START_FILE)):
        if config.start == "teacher":
            _copy_teacher_layers(config, teacher, fs.join(folder, "backbone"))
        elif (learnt := _tokenizer(config, teacher)) is not None:
            fs.write_bytes(fs.join(folder, "tokenizer.json"), learnt.encode())
        if config.new_vocabulary is not None or isinstance(config.student, LookupConfig):
            # New words, features and weights are counted with the tokenizer as it is without them.
            plain = replace(_read(folder, _listed(folder)), words=(), lookup=None)
            tokenizer = build_prompt(config, plain).tokenizer
        if config.new_vocabulary is not None:
            words = _new_words(config.new_vocabulary, teacher, tokenizer)
            fs.write_bytes(fs.join(folder, "words.json"), json.dumps(words, ensure_ascii=False).encode())
        if isinstance(config.student, LookupConfig):
            for name, array in _lookup_arrays(config.student, teacher, tokenizer).items():
                fs.write_bytes(fs.join(folder, name), npy_bytes(array))
        fs.write_bytes(fs.join(folder, _START_FILE), json.dumps({"files": _listed(folder)}).encode())
    return read_start(folder)


def read_start(folder: str) -> StudentStart:
    """The start that :func:`prepare_start` wrote."""
    return _read(folder, json.loads(fs.read_bytes(fs.join(folder, _START_FILE)))["files"])


def _listed(folder: str) -> dict[str, int]:
    return {name: size for name, size in fs.list_files(folder).items() if not name.endswith(fs.PENDING)}


def _read(folder: str, listed: Mapping[str, int]) -> StudentStart:
    # The list holds sizes: a new start at the same URI is a new version of the local copy.
    local = fs.download(folder, list(listed), version=json.dumps(listed, sort_keys=True))
    tokenizer, words, backbone, keys, weights = (
        local / name if (local / name).exists() else None
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
    if config.inherits:
        initial_weights.inherit_token_embeddings(table, _token_weights(teacher, "tokens"))
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
        with torch.no_grad():
            made.projection.weight.copy_(load_file(start.backbone / "projection.safetensors")["weight"])
    return made


def _build_lookup(
    config: DistillConfig, student: LookupConfig, start: StudentStart, *, teacher: Artifact, dim: int
) -> LookupTower:
    assert start.tokenizer is not None, "a lookup's start has a tokenizer"
    before, after = Tokenizer.from_str(start.tokenizer), Tokenizer.from_str(start.tokenizer)
    initial_weights.add_words(after, start.words)
    made = lookup.build(student, dim=dim, tokenizer_json=after.to_str(), seed=config.seed, start=start.lookup)
    if config.inherits:
        initial_weights.inherit_lookup_rows(made, _token_weights(teacher, "alone"))
    initial_weights.initialize_word_rows(made.table, start.words, before=before, after=after)
    made.made_from["query_embeddings"] = teacher.digest
    return made


def _tower_config(config: DistillConfig, start: StudentStart) -> TowerConfig | LookupConfig:
    """The student's config; where layers were copied, with the copy as backbone and the teacher's pooling."""
    if start.backbone is None or isinstance(config.student, LookupConfig):
        return config.student
    changed: dict[str, Any] = {"backbone": Pretrained(path=str(start.backbone))}
    if initial_weights.is_published(start.backbone):
        changed["pooling"] = "auto"
    return config.student.model_copy(update=changed)


def _tokenizer(config: DistillConfig, teacher: Artifact) -> str | None:
    """Tokenizer JSON of a student from scratch; a pretrained one brings its own."""
    if config.inherits:
        return _teacher_tokenizer(teacher)
    texts = partial(tokens.distinct_queries, teacher, "embeddings")
    return tokens.train_tokenizers({"student": config.student}, texts=texts).get("student")


def _teacher_tokenizer(teacher: Artifact) -> str:
    return teacher.read_bytes("teacher/tokenizer.json").decode()


def _token_weights(teacher: Artifact, name: str) -> Float[Tensor, "vocabulary width"]:
    """Weights of each of the teacher's tokens, which its job wrote: ``tokens`` or ``alone``."""
    return safetensors.torch.load(teacher.read_bytes(_token_file(name)))["weight"].float()


def _token_file(name: str) -> str:
    return f"teacher/{name}.safetensors"


def _new_words(knobs: NewVocabulary, teacher: Artifact, tokenizer: Tokenizer) -> list[str]:
    """New words of the training queries, mined from the first million of them."""
    queries = tokens.distinct_queries(teacher, "embeddings")
    words = initial_weights.mine_words(queries, tokenizer, tokens=knobs.tokens, min_count=knobs.min_count)
    log.info("%s new words: %s...", f"{len(words):,}", ", ".join(words[:8]))
    return words


def _lookup_arrays(student: LookupConfig, teacher: Artifact, tokenizer: Tokenizer) -> dict[str, ndarray]:
    """Features and starting weights of a table by the names of their files, as far as it has them."""
    if not (student.bigrams or student.ends or student.start_weights == "inverse_frequency"):
        return {}
    length, size = student.max_length, tokenizer.get_vocab_size()
    rows = [ids[:length] for texts in _training_texts(teacher) for ids in tokenize(tokenizer, texts, length)]
    keys = lookup_table.frequent_features(rows, tokens=size, bigrams=student.bigrams, ends=student.ends)
    log.info("the table has rows for %s tokens and %s features", f"{size:,}", f"{len(keys):,}")
    if student.weighting != "learned" or student.start_weights != "inverse_frequency":
        return {"feature_keys.npy": keys}
    counts = np.bincount(np.fromiter(chain.from_iterable(rows), np.int64), minlength=size)
    weights = lookup_table.start_weights(counts, LookupFeatures(keys, tokens=size))
    return {"feature_keys.npy": keys, "weights.npy": weights}


def _training_texts(teacher: Artifact) -> Iterator[list[str]]:
    """Texts of the training split, batch by batch, at most :data:`_MAX_TEXTS`."""
    count = 0
    for batch in teacher.batches("embeddings", columns=["query", "split"]):
        texts = batch.filter(pc.equal(batch["split"], "train"))["query"].to_pylist()
        yield texts[: _MAX_TEXTS - count]
        count += len(texts)
        if count >= _MAX_TEXTS:
            return


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
