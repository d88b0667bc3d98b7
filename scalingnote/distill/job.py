"""Stage II on Ray Train: stored teacher embeddings in, a student query tower out. No teacher is loaded."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray.train
import safetensors.torch
import torch

from scalingnote.config import dump, validate
from scalingnote.distill.batching import LessonBatches
from scalingnote.distill.config import DistillConfig
from scalingnote.distill.inherit import inherit
from scalingnote.distill.objective import StageTwo
from scalingnote.log import configure, get_logger
from scalingnote.models import tower
from scalingnote.models.config import Scratch
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.train import corpus
from scalingnote.train.batching import total_steps
from scalingnote.train.job import launch, train_rank

log = get_logger("distill")


def run(config: DistillConfig, *, query_embeddings: str, output: str) -> Artifact:
    """Train the student; killed at any moment, the next call resumes from the newest checkpoint."""
    parents = {"query_embeddings": open_artifact(query_embeddings, kind="query_embeddings")}
    draft = Draft(output, kind="student", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    queries = parents["query_embeddings"].table("embeddings", ["query", "split"])
    rows = pc.sum(pc.equal(queries["split"], "train")).as_py() or 0
    steps = total_steps(rows=rows, global_batch=config.global_batch, epochs=config.epochs)
    tokenizer = _tokenizer(config, parents["query_embeddings"], queries)
    log.info("%s queries, %d steps", f"{rows:,}", steps)
    launch(
        _worker,
        {
            "config": dump(config),
            "query_embeddings": query_embeddings,
            "output": output,
            "work": draft.work(),
            "tokenizer": tokenizer,
            "steps": steps,
        },
        schedule=config,
        room="distill",
    )
    return draft.commit(counts={"queries": rows, "steps": steps})


def _tokenizer(config: DistillConfig, teacher: Artifact, queries: pa.Table) -> str | None:
    """Tokenizer JSON of a student from scratch; a pretrained one brings its own."""
    if _inherits(config):
        return fs.read_bytes(teacher.file("teacher/tokenizer.json")).decode()
    learnt = corpus.tokenizers({"student": config.student}, texts=lambda: queries["query"].to_pylist())
    return learnt.get("student")


def _inherits(config: DistillConfig) -> bool:
    return config.inherit_tokens and isinstance(config.student.backbone, Scratch)


def _worker(settings: dict[str, Any]) -> None:
    """One rank: rebuild the student from config and seed, train, and let rank 0 write it."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    configure(rank=rank)
    config = validate(DistillConfig, settings["config"], source="distill")
    torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
    teacher = open_artifact(settings["query_embeddings"], kind="query_embeddings")
    table = teacher.table("embeddings")
    student = tower.build(
        config.student,
        role="query",
        dim=table.schema.field("embedding").type.list_size,
        tokenizer_json=settings["tokenizer"],
        seed=config.seed,
    )
    if _inherits(config):
        weights = safetensors.torch.load(fs.read_bytes(teacher.file("teacher/tokens.safetensors")))
        inherit(student.token_embeddings, weights["weight"])
    batches = LessonBatches(
        table.filter(pc.equal(table["split"], "train")),
        student=student,
        global_batch=config.global_batch,
        rank=rank,
        world=world,
        seed=config.seed,
    )
    train_rank(
        StageTwo(student, cosine_weight=config.cosine_weight),
        batches,
        schedule=config,
        settings=settings,
        room="distill",
        save=lambda stage, folder: stage.student.save(folder / "query"),
    )
