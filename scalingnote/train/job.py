"""Stage I on Ray: triplets and documents in, a dual encoder artifact out. Stage II is launched alike."""

import json
import os
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from torch import nn

from scalingnote import cluster, errors
from scalingnote.config import dump, validate
from scalingnote.errors import ConfigError, ScalingNoteError, TrainingError
from scalingnote.log import configure, get_logger
from scalingnote.models import dual_encoder
from scalingnote.models.precision import compute_dtype
from scalingnote.models.token_wise import TokenWise
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.train.agreement import mean_over_ranks
from scalingnote.train.batching import TripletBatches
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import DeepSpeed, Schedule, TrainConfig, ValidationSchedule
from scalingnote.train.loop import Values, fit
from scalingnote.train.objective import StageOne
from scalingnote.train.order import Order
from scalingnote.train.prepare import prepare, read_of_a_row, sparse_query
from scalingnote.train.process_group import join
from scalingnote.train.strategies.engine import Engine, build, load_weights
from scalingnote.train.strategies.prepare import autocast
from scalingnote.train.stream import Store
from scalingnote.train.tracking import Tracker, events_folder, trackers
from scalingnote.train.validation import validator

log = get_logger("train")
M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=Schedule)
Settings = dict[str, Any]  # what a rank is told: plain values


@dataclass
class OneMachine(TorchConfig):
    """Ranks that meet at a file in `folder`, where Ray Train's own open a port to the network."""

    folder: str = ""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """What Ray Train starts the ranks with."""
        return _AtAFile


class _AtAFile(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_set_torch_distributed_env_vars)
        ranks, store = len(worker_group), f"{backend_config.folder}/{uuid.uuid4().hex}"
        given = (ranks, store, backend_config.backend, backend_config.timeout_s)
        ray.get([worker_group.execute_single_async(rank, join, rank, *given) for rank in range(ranks)])


def run(config: TrainConfig, *, dataset: str, triplets: str, output: str) -> Artifact:
    """Train both towers; killed at any moment, the next call resumes from the newest checkpoint."""
    parents = {
        "dataset": open_artifact(dataset, kind="dataset"),
        "triplets": open_artifact(triplets, kind="triplets"),
    }
    draft = Draft(output, kind="dual_encoder", config=config, parents=parents)
    if draft.finished:
        return draft.existing()
    cluster.check_resources_early(config.resources, knob="train.resources")
    prepared = prepare(config, **parents, folder=draft.work("data"), each=cluster.map_tasks)
    steps = _order(config, prepared.sizes).steps(config.epochs)
    rows = sum(prepared.sizes.values())
    log.info("%s triplets, %s documents, %d steps", f"{rows:,}", f"{prepared.documents:,}", steps)
    launch(
        _worker,
        {
            "config": dump(config),
            "output": output,
            "work": draft.work(),
            "store": prepared.store,
            "tokenizers": prepared.tokenizers,
            "steps": steps,
        },
        schedule=config,
        room="train",
    )
    made = steps_made(output, planned=steps)
    pairs = made * config.global_batch
    read = read_of_a_row(Store.open(prepared.store))
    return draft.commit(
        counts={"triplets": rows, "documents": prepared.documents, "steps": made, "pairs": pairs}
        | {"query_tokens": round(pairs * read.query_tokens)}
        | {"document_tokens": round(pairs * read.document_tokens)}
        | {"documents_per_pair": read.documents}
    )


def launch(
    worker: Callable[[Settings], dict[str, str] | None],
    settings: Settings,
    *,
    schedule: Schedule,
    room: str,
) -> None:
    """Run `worker` on every rank under Ray Train and wait; a dead rank restarts the group.

    Without workers, this process is the only rank (Ray Train's local mode).
    Ray's own records go to ``settings["work"]``; the worker finds its state in its own checkpoints there.
    What :func:`train_rank` returns is an error that a restart would only meet again, and is raised here.
    """
    resources, max_failures = schedule.resources, schedule.max_failures
    cluster.check_resources(resources, knob=f"{room}.resources")
    filesystem, path = fs.resolve(fs.join(settings["work"], "ray"))
    on_cpu = resources.gpus_per_worker == 0
    # DeepSpeed chooses its accelerator while it is imported.
    variables = {"DS_ACCELERATOR": "cpu"} if isinstance(schedule.strategy, DeepSpeed) and on_cpu else {}
    if not resources.workers:
        os.environ.update(variables)
    meeting = tempfile.TemporaryDirectory() if resources.workers and cluster.is_private() else None
    trainer = TorchTrainer(
        worker,  # type: ignore[arg-type]
        train_loop_config=settings,
        torch_config=OneMachine(folder=meeting.name) if meeting else None,
        scaling_config=ScalingConfig(
            num_workers=resources.workers,
            use_gpu=not on_cpu,
            resources_per_worker={"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker},
        ),
        run_config=RunConfig(  # type: ignore[call-arg]  # its stubs are those of Ray Train before 2.43
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=max_failures),
            worker_runtime_env={"env_vars": variables} if variables else {},
        ),
    )
    try:
        result = trainer.fit()
    except TrainingFailedError as error:
        for failure in getattr(error, "worker_failures", {}).values():
            if isinstance(failure, ScalingNoteError):
                raise failure from None
        raise TrainingError(f"training failed after {max_failures} restarts: {error}") from error
    finally:
        if meeting:
            meeting.cleanup()
    met: dict[str, str] | None = result.return_value  # type: ignore[attr-defined]
    if met:
        raise getattr(errors, met["kind"])(met["text"])


def start_rank(config: type[S], settings: Settings, *, room: str) -> tuple[S, int, int]:
    """A rank's config, its number and the number of ranks; called first in a worker."""
    context = ray.train.get_context()
    configure(rank=context.get_world_rank())
    found = validate(config, settings["config"], source=room)
    if found.resources.workers:
        torch.set_num_threads(max(int(found.resources.cpus_per_worker), 1))
    return found, context.get_world_rank(), context.get_world_size()


def train_rank(
    stage: M,
    batches: Callable[[int], Any],
    *,
    make: Callable[[], M],
    schedule: Schedule,
    settings: Settings,
    room: str,
    save: Callable[[M, Path], None],
    validation: ValidationSchedule | None = None,
    validate_with: Callable[[Engine], Callable[[], Values] | None] = lambda engine: None,
) -> dict[str, str] | None:
    """Train one rank's module through the loop; rank 0 then saves it and the loss curve as parts.

    `make` builds another `stage` from config and seed. Returns an error that all ranks
    met together and would meet again: Ray would restart the group for one that is raised.
    """
    device = device_of(schedule)
    first = ray.train.get_context().get_world_rank() == 0
    told, error = _trackers(schedule, settings["output"]) if first else ([], None)
    if mean_over_ranks(torch.tensor(float(error is not None), device=device)) > 0:
        return _told(error or ConfigError("rank 0 could not start"))
    try:
        engine = build(stage, schedule=schedule, device=device)
        history = fit(
            engine,
            lambda step: batches(step).to(device),
            steps=settings["steps"],
            schedule=schedule,
            checkpoints=Checkpoints(fs.join(settings["work"], "checkpoints"), keep=schedule.keep_checkpoints),
            room=room,
            trackers=told,
            validation=validation,
            validate=validate_with(engine),
            notice=lambda: ray.train.get_preemption_info() is not None,
        )
    except (ConfigError, TrainingError) as met:
        return _told(met)
    finally:
        for tracker in told:
            tracker.close()
    weights = engine.weights()
    if weights is not None:
        # What the engine holds may be cut in pieces, or compiled: the weights go into a module as it was.
        whole = make()
        load_weights(whole, weights)
        with tempfile.TemporaryDirectory() as folder:
            save(whole.eval(), Path(folder))
            fs.upload(folder, settings["output"])
        for name, value in (("curve.json", history.curve), ("validation.json", history.measured)):
            fs.write_bytes(fs.join(settings["output"], name), json.dumps(value, indent=0).encode())
    ray.train.report({"step": settings["steps"]})
    return None


def steps_made(output: str, *, planned: int) -> int:
    """Fewer than planned where validation stopped the run: the last measurement comes after the last step."""
    measured = json.loads(fs.read_bytes(fs.join(output, "validation.json")))
    return int(measured[-1]["step"]) if measured else planned


def _trackers(schedule: Schedule, output: str) -> tuple[list[Tracker], ConfigError | None]:
    """Who is told, or why nobody can be; only rank 0 finds out, and the others must not wait for it."""
    name = output.rstrip("/").rpartition("/")[2]
    try:
        return trackers(schedule.tracking, events_folder(output), name), None
    except ConfigError as error:
        return [], error


def device_of(schedule: Schedule) -> torch.device:
    """This rank's."""
    return get_device() if schedule.resources.workers else torch.device("cpu")


def _told(error: ScalingNoteError) -> dict[str, str]:
    return {"kind": type(error).__name__, "text": str(error)}


def _worker(settings: Settings) -> dict[str, str] | None:
    """One rank of stage I."""
    config, rank, world = start_rank(TrainConfig, settings, room="train")

    def make() -> StageOne:
        towers = dual_encoder.build(
            config.query_tower,
            config.document,
            dim=config.dim,
            tokenizers=settings["tokenizers"],
            seed=config.seed,
            share_base=config.share_base,
            share_backbone=config.shares_backbone,
            sparse=config.sparse is not None,
        )
        towers.sparse_query = sparse_query(config, towers.document.prompt.tokenizer)
        return StageOne(towers, config.losses, sparse=config.sparse, align=config.align)

    stage = make()
    store, packed = Store.open(settings["store"]), config.memory.packing
    pads = (stage.towers.query.pad, stage.towers.document.pad)
    order = _order(config, store.facts["sizes"])
    return train_rank(
        stage,
        TripletBatches(
            store, order, pads=pads, packed=packed, rank=rank, world=world, steps=settings["steps"]
        ),
        make=make,
        schedule=config,
        settings=settings,
        room="train",
        save=lambda whole, folder: _save(whole, folder, config=config, device=device_of(config)),
        validation=config.validation,
        validate_with=lambda engine: validator(
            store,
            engine,
            config.validation,
            views=stage.towers.document.views,
            pads=pads,
            packed=packed,
            temperature=config.losses.temperature,
            device=device_of(config),
            seed=config.seed,
        ),
    )


def _save(stage: StageOne, folder: Path, *, config: TrainConfig, device: torch.device) -> None:
    """Write both towers; a token_wise one reads a whole vocabulary for that, on a GPU if there is one."""
    if isinstance(stage.towers.query, TokenWise):
        stage.towers.query.to(device)
    dtype = compute_dtype(config.precision, device) if device.type == "cuda" else torch.float32
    with autocast(device, dtype):
        stage.towers.save(folder, merge_adapters=config.merge_adapters)


def _order(config: TrainConfig, sizes: dict[str, int]) -> Order:
    return Order(sizes, global_batch=config.global_batch, seed=config.seed, batching=config.batching)
