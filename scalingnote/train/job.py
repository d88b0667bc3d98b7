"""Stage I on Ray Train: triplets and documents in, a dual encoder artifact out."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.compute as pc
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer, get_device
from torch import nn

from scalingnote import cluster
from scalingnote.config import dump, validate
from scalingnote.errors import ScalingNoteError, TrainingError
from scalingnote.log import configure, get_logger
from scalingnote.models import tower
from scalingnote.models.dual_encoder import DualEncoder
from scalingnote.models.precision import compute_dtype
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.train import batching, corpus
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Schedule, TrainConfig
from scalingnote.train.loop import fit
from scalingnote.train.objective import StageOne

log = get_logger("train")
M = TypeVar("M", bound=nn.Module)


def run(config: TrainConfig, *, dataset: str, triplets: str, output: str) -> Artifact:
    """Train both towers; killed at any moment, the next call resumes from the newest checkpoint."""
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "triplets": open_artifact(triplets, kind="triplets"),
    }
    draft = Draft(output, kind="dual_encoder", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    table = parents["triplets"].table("triplets")
    rows = pc.sum(pc.equal(table["split"], "train")).as_py() or 0
    steps = batching.total_steps(rows=rows, global_batch=config.global_batch, epochs=config.epochs)
    documents = corpus.named_documents(parents["dataset"], table)
    learnt = corpus.tokenizers(
        {"query": config.query, "document": config.document}, texts=lambda: corpus.texts(table, documents)
    )
    log.info("%s triplets, %s documents, %d steps", f"{rows:,}", f"{len(documents):,}", steps)
    launch(
        _worker,
        {
            "config": dump(config),
            "dataset": dataset,
            "triplets": triplets,
            "output": output,
            "work": draft.work(),
            "tokenizers": learnt,
            "steps": steps,
        },
        schedule=config,
        room="train",
    )
    return draft.commit(counts={"triplets": rows, "documents": len(documents), "steps": steps})


def launch(
    worker: Callable[[dict[str, Any]], None],
    settings: dict[str, Any],
    *,
    schedule: Schedule,
    room: str,
) -> None:
    """Run `worker` on every rank under Ray Train and wait; a dead rank restarts the group.

    Ray's own records go to ``settings["work"]``; the worker finds its state in its own checkpoints there.
    """
    resources, max_failures = schedule.resources, schedule.max_failures
    cluster.require(resources, stage=room)
    filesystem, path = fs.resolve(fs.join(settings["work"], "ray"))
    trainer = TorchTrainer(
        worker,
        train_loop_config=settings,
        scaling_config=ScalingConfig(
            num_workers=resources.workers,
            use_gpu=resources.gpus_per_worker > 0,
            resources_per_worker={"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker},
        ),
        run_config=RunConfig(
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        for failure in getattr(error, "worker_failures", {}).values():
            if isinstance(failure, ScalingNoteError):
                raise failure from None
        raise TrainingError(f"training failed after {max_failures} restarts: {error}") from error


def _worker(settings: dict[str, Any]) -> None:
    """One rank: rebuild the towers from config and seed, train, and let rank 0 write them."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    configure(rank=rank)
    config = validate(TrainConfig, settings["config"], source="train")
    torch.set_num_threads(max(int(config.resources.cpus_per_worker), 1))
    learnt = settings["tokenizers"]
    query = tower.build(
        config.query, role="query", dim=config.dim, tokenizer_json=learnt.get("query"), seed=config.seed
    )
    document = tower.build(
        config.document,
        role="document",
        dim=config.dim,
        tokenizer_json=learnt.get("document"),
        seed=config.seed,
    )
    table = open_artifact(settings["triplets"], kind="triplets").table("triplets")
    documents = corpus.named_documents(open_artifact(settings["dataset"], kind="dataset"), table)
    batches = batching.TripletBatches(
        table.filter(pc.equal(table["split"], "train")),
        documents,
        query=query,
        document=document,
        global_batch=config.global_batch,
        rank=rank,
        world=world,
        seed=config.seed,
    )
    train_rank(
        StageOne(DualEncoder(query, document), config.losses),
        batches,
        schedule=config,
        settings=settings,
        room="train",
        save=lambda stage, folder: stage.towers.save(folder),
    )


def train_rank(
    stage: M,
    batches: Callable[[int], Any],
    *,
    schedule: Schedule,
    settings: dict[str, Any],
    room: str,
    save: Callable[[M, Path], None],
) -> None:
    """Train one rank's module through the loop; rank 0 then saves it and the loss curve as parts."""
    device = get_device()
    curve = fit(
        stage.to(device),
        lambda step: batches(step).to(device),
        steps=settings["steps"],
        rows_per_step=schedule.global_batch,
        settings=schedule.optimizer,
        checkpoints=Checkpoints(fs.join(settings["work"], "checkpoints"), keep=schedule.keep_checkpoints),
        checkpoint_every=schedule.checkpoint_every,
        dtype=compute_dtype(schedule.precision, device),
        seed=schedule.seed,
        room=room,
    )
    if ray.train.get_context().get_world_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            save(stage.cpu(), Path(folder))
            fs.upload(folder, settings["output"])
        fs.write_bytes(fs.join(settings["output"], "curve.json"), json.dumps(curve, indent=0).encode())
    ray.train.report({"step": settings["steps"]})
