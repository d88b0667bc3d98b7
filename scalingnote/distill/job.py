"""Stage II on Ray: stored teacher embeddings in, a student query tower out. No teacher is loaded."""

import safetensors.torch

from scalingnote.config import dump
from scalingnote.distill import batching
from scalingnote.distill.config import DistillConfig
from scalingnote.distill.inherit import inherit
from scalingnote.distill.objective import StageTwo
from scalingnote.log import get_logger
from scalingnote.models import tower
from scalingnote.models.config import Scratch
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.train import corpus
from scalingnote.train.job import Settings, in_tasks, launch, start_rank, train_rank
from scalingnote.train.order import Order
from scalingnote.train.stream import Store

log = get_logger("distill")


def run(config: DistillConfig, *, query_embeddings: str, output: str) -> Artifact:
    """Train the student; killed at any moment, the next call resumes from the newest checkpoint."""
    parents = {"query_embeddings": open_artifact(query_embeddings, kind="query_embeddings")}
    draft = Draft(output, kind="student", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    tokenizer = _tokenizer(config, parents["query_embeddings"])
    sizes = batching.prepare(
        parents["query_embeddings"],
        student=config.student,
        tokenizer_json=tokenizer,
        folder=draft.work("rows"),
        each=in_tasks,
    )
    rows, steps = sum(sizes.values()), _order(config, sizes).steps(config.epochs)
    log.info("%s queries, %d steps", f"{rows:,}", steps)
    launch(
        _worker,
        {
            "config": dump(config),
            "query_embeddings": query_embeddings,
            "output": output,
            "work": draft.work(),
            "store": draft.work("rows"),
            "tokenizer": tokenizer,
            "steps": steps,
        },
        schedule=config,
        room="distill",
    )
    return draft.commit(counts={"queries": rows, "steps": steps})


def _order(config: DistillConfig, sizes: dict[str, int]) -> Order:
    return Order(sizes, global_batch=config.global_batch, seed=config.seed)


def _tokenizer(config: DistillConfig, teacher: Artifact) -> str | None:
    """Tokenizer JSON of a student from scratch; a pretrained one brings its own."""
    if _inherits(config):
        return fs.read_bytes(teacher.file("teacher/tokenizer.json")).decode()
    learnt = corpus.tokenizers(
        {"student": config.student}, texts=lambda: corpus.distinct_queries(teacher, "embeddings")
    )
    return learnt.get("student")


def _inherits(config: DistillConfig) -> bool:
    return config.inherit_tokens and isinstance(config.student.backbone, Scratch)


def _worker(settings: Settings) -> dict[str, str] | None:
    """One rank of stage II."""
    config, rank, world = start_rank(DistillConfig, settings, room="distill")
    teacher = open_artifact(settings["query_embeddings"], kind="query_embeddings")
    store = Store.open(settings["store"])

    def make() -> StageTwo:
        student = tower.build(
            config.student,
            role="query",
            dim=store.facts["dim"],
            tokenizer_json=settings["tokenizer"],
            seed=config.seed,
        )
        if _inherits(config):
            weights = safetensors.torch.load(fs.read_bytes(teacher.file("teacher/tokens.safetensors")))
            inherit(student.token_embeddings, weights["weight"])
        return StageTwo(student, cosine_weight=config.cosine_weight)

    stage = make()
    batches = batching.LessonBatches(
        store,
        _order(config, store.facts["sizes"]),
        pad=stage.student.pad,
        packed=config.memory.packing,
        rank=rank,
        world=world,
    )
    return train_rank(
        stage,
        batches,
        make=make,
        schedule=config,
        settings=settings,
        room="distill",
        save=lambda whole, folder: whole.student.save(folder / "query"),
    )
