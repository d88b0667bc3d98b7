"""Stage II on Ray: from stored teacher embeddings to a student query tower. No teacher is loaded.

Losses over documents also read triplets and the teacher's document embeddings; a student for documents also
reads the documents.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from scalingnote.core import cluster
from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.models.config import LookupConfig, Scratch
from scalingnote.models.dual_encoder import build_tower
from scalingnote.models.lookup import LookupTower
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.published_model import Similarity
from scalingnote.models.tower import Tower
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.schema import INDEXED_VIEW
from scalingnote.train import tokens
from scalingnote.train.data import Order, Store, permute
from scalingnote.train.distillation import agreement, prepare, student
from scalingnote.train.distillation.config import DistillConfig
from scalingnote.train.distillation.objective import LessonBatches, StageTwo
from scalingnote.train.distillation.prepare import LESSONS, CandidateSources
from scalingnote.train.job import RankTraining, TrainingRun, launch

log = get_logger("distill")
MAX_CENTRING_TEXTS = 4096  # sample for the mean embedding of all texts


def run(
    config: DistillConfig,
    *,
    query_embeddings: str,
    triplets: str | None = None,
    embeddings: str | None = None,
    dataset: str | None = None,
    output: str,
) -> Artifact:
    """Train the student. After a kill at any moment, the next call resumes from the newest checkpoint.

    Args:
        config: student, losses and schedule.
        query_embeddings: URI of the teacher's embeddings of queries.
        triplets: URI, for losses over documents, the same as the next two. An artifact that is not read is
            not a parent.
        embeddings: URI of the teacher's embeddings of documents.
        dataset: URI, for a student for documents.
        output: URI of the student.

    Raises:
        ConfigError: the losses, or a student for documents, need an artifact that is missing; or a lookup
            student needs the embeddings of single tokens, which `query_embeddings` does not have.
    """
    uris = {"triplets": triplets, "embeddings": embeddings, "dataset": dataset}
    if missing := [kind for kind in config.reads if uris[kind] is None]:
        raise ConfigError(f"distill's losses read {', '.join(missing)}: pass them, or leave these losses out")
    teacher = open_artifact(query_embeddings, kind="query_embeddings")
    parents = {"query_embeddings": teacher}
    parents |= {kind: open_artifact(uris[kind] or "", kind=kind) for kind in config.reads}
    draft = Draft(output, kind="student", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    _require_fitting_teacher(config, teacher, parents.get("embeddings"))
    start = student.prepare_start(config, teacher, folder=draft.work("start"))
    document_tokenizer = _document_tokenizer(config, parents)
    sizes = prepare.prepare(
        teacher,
        prompt=student.build_prompt(config, start),
        folder=draft.work("rows"),
        candidates=_sources(config, parents, document_tokenizer),
        each=cluster.map_tasks,
    )
    rows, steps = sum(sizes.values()), Order(config, sizes).steps
    log.info("%s rows, %d steps", f"{rows:,}", steps)
    steps_run = launch(
        partial(
            _prepare_rank,
            config=config,
            teacher=teacher,
            rows=draft.work("rows"),
            start=draft.work("start"),
            document_tokenizer=document_tokenizer,
        ),
        TrainingRun(config, "distill", output, steps),
    )
    counts = sizes if config.losses.reads_documents else {"queries": rows}
    return draft.commit(counts={**counts, "steps": steps_run})


def _prepare_rank(
    rank: int,
    world: int,
    *,
    config: DistillConfig,
    teacher: Artifact,
    rows: str,
    start: str,
    document_tokenizer: str | None,
) -> RankTraining:
    store, student_start = Store.open(rows), student.read_start(start)
    dim = store.facts["dim"]

    def build_stage() -> StageTwo:
        document = _document_student(config, document_tokenizer, dim=dim, teacher=teacher)
        tower = student.build_student(config, student_start, teacher=teacher, dim=dim)
        return StageTwo(tower, config.losses, document, similarity=similarity_of(teacher))

    stage = build_stage()
    batches = LessonBatches(
        store,
        Order(config, store.facts["sizes"]),
        pad=stage.student.pad,
        document_pad=None if stage.document is None else stage.document.pad,
        rank=rank,
        world=world,
    )
    return RankTraining(
        stage,
        build_stage,
        batches,
        save=partial(_save, config=config, store=store),
        validation=config.validation,
        validate_with=lambda engine: agreement.validator(store, engine, config, pad=stage.student.pad),
    )


def _save(stage: StageTwo, folder: Path, *, config: DistillConfig, store: Store) -> None:
    share = config.student.centring if isinstance(config.student, LookupConfig) else 0.0
    if share and (total := len(store[LESSONS])):
        sample = permute(np.arange(min(total, MAX_CENTRING_TEXTS)), size=total, key=(config.seed % 2**64, 0))
        assert isinstance(stage.student, LookupTower)
        stage.student.centre(store[LESSONS].tokens(sample), share=share)
    stage.student.save(folder / "query")
    if stage.document is not None:
        stage.document.save(folder / "document")


def similarity_of(artifact: Artifact) -> Similarity:
    """Read how queries and documents are compared from their artifact, `query_embeddings` or `embeddings`."""
    return "dot" if artifact.manifest.info.get("similarity") == "dot" else "cosine"


def _require_fitting_teacher(config: DistillConfig, teacher: Artifact, embeddings: Artifact | None) -> None:
    """Raise ConfigError if the student cannot start from, or compare in the same way as, `teacher`."""
    if config.reads_tokens and student.token_file("alone") not in teacher.manifest.parts:
        raise ConfigError(
            f"{teacher.uri} has no embeddings of single tokens, which a lookup student starts from: "
            "encode the queries with teacher.tokens=true, or set distill.tokenizer=own"
        )
    if embeddings is not None and similarity_of(embeddings) != similarity_of(teacher):
        raise ConfigError(
            f"the documents of {embeddings.uri} are compared by {similarity_of(embeddings)}, the queries of "
            f"{teacher.uri} by {similarity_of(teacher)}: encode the queries again (stage teacher)"
        )
    document = config.document
    if document is None or similarity_of(teacher) == "cosine":
        return
    if document.pooling == "placeholders" or document.normalise:
        raise ConfigError(
            f"the teacher of {teacher.uri} compares by dot, and distill.document gives embeddings for "
            "cosines: set its pooling to cls, as in EmbedDistill, and normalise to false"
        )


# --- the student for documents -----------------------------------------------------------------------------


def _sources(
    config: DistillConfig, parents: Mapping[str, Artifact], tokenizer: str | None
) -> CandidateSources | None:
    """Return the artifacts that candidates come from, None if no loss reads any."""
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
    """Return the tokenizer JSON of a student for documents that starts from scratch."""
    if config.document is None or not isinstance(config.document.backbone, Scratch):
        return None
    if config.tokenizer == "teacher":
        return student.teacher_tokenizer(parents["query_embeddings"])
    triplets, dataset = parents["triplets"], parents["dataset"]
    doc_hashes, _ = tokens.document_hashes(triplets.batches("triplets", columns=["positive", "negatives"]))
    tokenizers = tokens.train_tokenizers(
        {"document": config.document}, texts=lambda: tokens.tokenizer_texts(triplets, dataset, doc_hashes)
    )
    return tokenizers["document"]


def _document_student(
    config: DistillConfig, tokenizer: str | None, *, dim: int, teacher: Artifact
) -> Tower | None:
    if config.document is None:
        return None
    tower = build_tower(config.document, role="document", dim=dim, tokenizer_json=tokenizer, seed=config.seed)
    if similarity_of(teacher) == "dot":
        tower.native = replace(tower.native, similarity="dot")  # type: ignore[type-var]
    if config.tokenizer == "teacher" and isinstance(config.document.backbone, Scratch):
        student.inherit_token_embeddings(tower.token_embeddings, student.token_weights(teacher, "tokens"))
    return tower
