"""Stage II on Ray: from stored teacher embeddings to a student query tower. No teacher is loaded.

Losses over documents also read triplets and the teacher's document embeddings; a student for documents also
reads the documents.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch

from scalingnote import cluster
from scalingnote.config import dump
from scalingnote.distillation import agreement, objective, prepare, student
from scalingnote.distillation.config import DistillConfig
from scalingnote.distillation.initial_weights import inherit_token_embeddings
from scalingnote.distillation.objective import StageTwo
from scalingnote.distillation.prepare import CandidateSources
from scalingnote.errors import ConfigError
from scalingnote.log import get_logger
from scalingnote.models.config import Scratch
from scalingnote.models.dual_encoder import build_tower
from scalingnote.models.prompt import DocumentPrompt
from scalingnote.models.tower import Tower
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.train import tokens
from scalingnote.train.data import Order, Store
from scalingnote.train.job import Settings, device_of, finished_steps, launch, start_rank, train_rank
from scalingnote.train.validation import INDEXED_VIEW

log = get_logger("distill")


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
        ConfigError: the losses, or a student for documents, read an artifact that is missing.
    """
    uris = {"triplets": triplets, "embeddings": embeddings, "dataset": dataset}
    parents = {"query_embeddings": open_artifact(query_embeddings, kind="query_embeddings")}
    parents |= _opened(uris, config.reads)
    draft = Draft(output, kind="student", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    start = student.prepare_start(config, parents["query_embeddings"], folder=draft.work("start"))
    document_tokenizer = _document_tokenizer(config, parents)
    sizes = prepare.prepare(
        parents["query_embeddings"],
        prompt=student.build_prompt(config, start),
        folder=draft.work("rows"),
        candidates=_sources(config, parents, document_tokenizer),
        each=cluster.map_tasks,
    )
    rows, steps = sum(sizes.values()), _order(config, sizes).steps(config.epochs)
    log.info("%s rows, %d steps", f"{rows:,}", steps)
    launch(
        _worker,
        {
            "config": dump(config),
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


def _opened(uris: Mapping[str, str | None], kinds: Sequence[str]) -> dict[str, Artifact]:
    missing = [kind for kind in kinds if uris[kind] is None]
    if missing:
        raise ConfigError(f"distill's losses read {', '.join(missing)}: pass them, or leave these losses out")
    return {kind: open_artifact(uris[kind] or "", kind=kind) for kind in kinds}


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
        return parents["query_embeddings"].read_bytes("teacher/tokenizer.json").decode()
    triplets, dataset = parents["triplets"], parents["dataset"]
    named, _ = tokens.document_hashes(triplets.batches("triplets", columns=["positive", "negatives"]))
    learnt = tokens.train_tokenizers(
        {"document": config.document}, texts=lambda: tokens.tokenizer_texts(triplets, dataset, named)
    )
    return learnt["document"]


def _document_student(
    config: DistillConfig, settings: Settings, *, dim: int, teacher: Artifact
) -> Tower | None:
    """The student for documents, if there is one."""
    if config.document is None:
        return None
    made = build_tower(
        config.document,
        role="document",
        dim=dim,
        tokenizer_json=settings["document_tokenizer"],
        seed=config.seed,
    )
    if config.inherit_tokens and isinstance(config.document.backbone, Scratch):
        weights = safetensors.torch.load(teacher.read_bytes("teacher/tokens.safetensors"))
        inherit_token_embeddings(made.token_embeddings, weights["weight"])
    return made


def _save(whole: StageTwo, folder: Path) -> None:
    whole.student.save(folder / "query")
    if whole.document is not None:
        whole.document.save(folder / "document")


def _order(config: DistillConfig, sizes: dict[str, int]) -> Order:
    return Order(sizes, global_batch=config.global_batch, seed=config.seed)


def _worker(settings: Settings) -> dict[str, str] | None:
    """One rank of stage II."""
    config, rank, world = start_rank(DistillConfig, settings, section="distill")
    teacher = open_artifact(settings["query_embeddings"], kind="query_embeddings")
    store, start = Store.open(settings["store"]), student.read_start(settings["start"])

    def build_stage() -> StageTwo:
        made = student.build_student(config, start, teacher=teacher, dim=store.facts["dim"])
        document = _document_student(config, settings, dim=store.facts["dim"], teacher=teacher)
        return StageTwo(made, config.losses, document)

    stage, packed = build_stage(), config.memory.packing
    batches = objective.LessonBatches(
        store,
        _order(config, store.facts["sizes"]),
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
        section="distill",
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
