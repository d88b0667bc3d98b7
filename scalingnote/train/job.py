"""Stage I on Ray: from triplets and documents to a dual encoder; and the launch of every training stage."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer, get_device
from torch import nn

from scalingnote.core import cluster, errors, ray_internals
from scalingnote.core.errors import ConfigError, ScalingNoteError, TrainingError
from scalingnote.core.log import configure, configure_unless_set, get_logger
from scalingnote.models import dual_encoder
from scalingnote.models.config import TokenWiseConfig
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.weights import compute_dtype
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import WORK, Artifact, Draft, open_artifact
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import MIXED, DeepSpeed, Schedule, TrainConfig, ValidationSchedule
from scalingnote.train.data import MappedShares, Order, RankShare, Store
from scalingnote.train.engine import Engine, autocast, join_process_group, load_weights, mean_over_ranks
from scalingnote.train.loop import MetricValues, Tracker, TrainingLoop, build_trackers, events_folder
from scalingnote.train.objective import StageOne, TripletBatches
from scalingnote.train.prepare import PreparedStore, TrainingSet, mean_tokens, prepare, sparse_query
from scalingnote.train.strategies import build
from scalingnote.train.stream import StreamedShares, read_pool, write_stream
from scalingnote.train.validation import drawn_documents, validator

log = get_logger("train")
FATAL = "fatal.json"  # in the work folder: an error that a restart cannot fix
RESIZE_INTERVAL_S = 60.0  # between checks for new nodes; a change restarts from the newest checkpoint
Failure = dict[str, str]  # an error as plain values: `kind` and `text`


def run(config: TrainConfig, *, dataset: str, triplets: str, output: str) -> Artifact:
    """Train both towers. After a kill at any moment, the next call resumes from the newest checkpoint."""
    run_set = TrainingSet(open_artifact(dataset, kind="dataset"), open_artifact(triplets, kind="triplets"))
    parents, mixture = run_set._asdict(), open_mixture(config, run_set)
    mixture_parents = {
        f"{MIXED}{name}/{kind}": artifact
        for name, entry in mixture.items()
        for kind, artifact in entry._asdict().items()
        if artifact is not parents[kind]
    }
    draft = Draft(output, kind="dual_encoder", config=config, parents=parents | mixture_parents)
    if draft.finished:
        return draft.existing()
    cluster.check_resources_early(config.resources, knob="train.resources")
    folder = draft.work("data")
    prepared = prepare(config, **parents, mixture=mixture, folder=folder, each=cluster.map_tasks)
    order = Order(config, prepared.sizes, config.batching, config.set_epochs)
    streamed, steps = _stream(config, prepared, order), order.steps
    rows = sum(prepared.sizes.values())
    log.info("%s triplets, %s documents, %d steps", f"{rows:,}", f"{prepared.documents:,}", steps)
    rank = partial(_prepare_rank, config=config, prepared=prepared, steps=steps, streamed=bool(streamed))
    steps_run = launch(rank, TrainingRun(config, "train", output, steps))
    pairs = steps_run * config.global_batch
    query_tokens, document_tokens = streamed or mean_tokens(Store.open(prepared.store))
    return draft.commit(
        counts={
            "triplets": rows,
            "documents": prepared.documents,
            "steps": steps_run,
            "pairs": pairs,
            "query_tokens": round(pairs * query_tokens),
            "document_tokens": round(pairs * document_tokens),
            "documents_per_pair": prepared.group,
        }
    )


def open_mixture(config: TrainConfig, run_set: TrainingSet) -> dict[str, TrainingSet]:
    """Open the sets of a mixture, by name; empty without one."""
    return {
        name: TrainingSet(
            open_artifact(fs.absolute(entry.dataset), kind="dataset"),
            open_artifact(fs.absolute(entry.triplets), kind="triplets"),
        )
        if entry.dataset is not None and entry.triplets is not None
        else run_set
        for name, entry in config.mixture.items()
    }


def _stream(config: TrainConfig, prepared: PreparedStore, order: Order) -> tuple[float, float] | None:
    """Write the stream of a run if it needs one; return :func:`mean_tokens` of its rows, None without one."""
    limit, store = config.data.copy_limit_gb, prepared.store
    size = sum(file.bytes for table in ("train", "documents") for file in Store.files(store, table)) / 1e9
    large = size > limit and ("://" in store or not limit)
    if not order.steps or not large:
        return None
    pool = np.empty(0, np.int64)
    if config.validation:
        pool = drawn_documents(Store.open(store, ["validation"]), config.validation, seed=config.seed)
    totals = write_stream(store, order, batch=config.global_batch, pool=pool, each=cluster.map_tasks)
    log.info("%.1f GB of rows are streamed, of a store of %.1f GB", totals["bytes"] / 1e9, size)
    rows = order.steps * config.global_batch
    return totals["query_tokens"] / rows, totals["document_tokens"] / rows


def build_stage_one(config: TrainConfig, tokenizers: dict[str, str]) -> StageOne:
    """Build both towers and their losses, with initial weights that follow from ``config.seed``.

    `tokenizers` are JSON by tower, for towers that start from scratch. Such a document tower has a separate
    seed: with equal weights in both towers, an untrained pair of decoders already matches words.
    """
    towers = dual_encoder.build(
        config.query_tower,
        config.document,
        dim=config.dim,
        tokenizers=tokenizers,
        seed=config.seed,
        document_seed=config.seed + 1,
        share_backbone=config.shares_backbone,
        sparse=config.sparse is not None,
    )
    towers.sparse_query = sparse_query(config, towers.document.prompt.tokenizer)
    return StageOne(towers, config.losses, sparse=config.sparse, align=config.align)


def _prepare_rank(
    rank: int, world: int, *, config: TrainConfig, prepared: PreparedStore, steps: int, streamed: bool
) -> "RankTraining":
    build_stage = partial(build_stage_one, config, prepared.tokenizers)
    stage = build_stage()
    towers = stage.towers
    store = Store.open(prepared.store, ["validation"] if streamed else None)
    share_of: Callable[[int], RankShare]
    if streamed:
        share_of = StreamedShares(prepared.store, rank=rank, world=world)
    else:
        order = Order(config, prepared.sizes, config.batching, config.set_epochs)
        share_of = MappedShares(store, order, rank=rank, world=world)
    instructions = None
    if isinstance(config.query, TokenWiseConfig) and config.query.instructions:
        instructions = [config.query.instructions_of(name) for name in config.mixture]
    pads = (towers.query.pad, towers.document.pad)

    def validate_with(engine: Engine) -> Callable[[], MetricValues] | None:
        measured = config.validation and len(store["validation"])
        pool = read_pool(prepared.store) if streamed and measured else None
        return validator(store, engine, config, views=towers.document.views, pads=pads, pool=pool)

    batches = TripletBatches(
        share_of, store.facts, pads=pads, steps=steps, instructions=instructions, seed=config.seed
    )
    save = partial(_save, config=config)
    return RankTraining(stage, build_stage, batches, save, config.validation, validate_with)


def _save(stage: StageOne, folder: Path, *, config: TrainConfig) -> None:
    """Write both towers. A token_wise one encodes its entire vocabulary for it, on a GPU if there is one."""
    device = device_of(config)
    if isinstance(stage.towers.query, TokenWise):
        stage.towers.query.to(device)
    dtype = compute_dtype(config.precision, device) if device.type == "cuda" else torch.float32
    with autocast(device, dtype):
        stage.towers.save(folder, merge_adapters=config.merge_adapters)


# --- training on ranks, of every stage ---------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingRun:
    """Settings of a training run that the driver and all ranks share."""

    schedule: Schedule  # the config of the stage
    section: str  # its name, for messages
    output: str  # URI of the artifact; Ray's own records and the checkpoints go to its work folder
    steps: int

    def work(self, name: str) -> str:
        """Return a URI inside the work folder."""
        return fs.join(self.output, WORK, name)


class RankTraining(NamedTuple):
    """The module, the batches and the validation of one rank."""

    stage: nn.Module  # with the losses
    build_stage: Callable[[], nn.Module]  # builds a second one from config and seed
    batches: Callable[[int], Any]  # this rank's batch of a step
    save: Callable[[Any, Path], None]  # writes the trained module into a folder
    validation: ValidationSchedule | None = None  # when to measure, and which weights to keep
    validate_with: Callable[[Engine], Callable[[], MetricValues] | None] = lambda engine: None


def launch(prepare_rank: Callable[[int, int], RankTraining], run: TrainingRun) -> int:
    """Train on every rank under Ray Train; rank 0 writes the module and the loss curve as parts.

    Without workers, this process is the only rank (Ray Train's local mode). After the loss of a node or
    process, the run restarts from the newest checkpoint, at most `max_failures` times, or without a limit if
    the cloud announced the loss. Errors that would occur again are raised here the first time: those that
    :func:`train_rank` returns, and too little memory.

    Args:
        prepare_rank: builds the training of a rank from its number and the number of ranks; runs in its
            process.
        run: the training run.

    Returns:
        The number of steps that were run, fewer than planned if validation stopped the run.

    Raises:
        TrainingError: the restarts did not help, or a rank had too little memory.
    """
    fs.delete(run.work(FATAL))  # of an earlier call: its cause may be fixed
    resources = run.schedule.resources
    smallest = resources.model_copy(update={"workers": resources.min_workers or resources.workers})
    cluster.check_resources(smallest, knob=f"{run.section}.resources")
    private = resources.workers and cluster.is_private()
    with tempfile.TemporaryDirectory() if private else nullcontext() as folder:
        trainer = _trainer(partial(_run_rank, prepare_rank, run), run, folder)
        try:
            with cluster.restored_interrupt_handler():
                result: int | Failure = trainer.fit().return_value
        except TrainingFailedError as error:
            raise _cause(error, run) from error
    if isinstance(result, dict):
        raise getattr(errors, result["kind"])(result["text"])
    return result


def _trainer(rank: Callable[[], int | Failure], run: TrainingRun, folder: str | None) -> Any:
    """Build a TorchTrainer; ranks of a private cluster connect through a file in `folder`."""
    schedule, resources = run.schedule, run.schedule.resources
    filesystem, path = fs.resolve(run.work("ray"))
    on_cpu = resources.gpus_per_worker == 0
    # DeepSpeed chooses its accelerator when it is imported.
    variables = {"DS_ACCELERATOR": "cpu"} if isinstance(schedule.strategy, DeepSpeed) and on_cpu else {}
    if not resources.workers:
        os.environ.update(variables)
    # A dictionary, because Ray's stubs are those of Ray Train before 2.43, without elastic groups.
    elastic = resources.min_workers not in (None, resources.workers)
    group: dict[str, Any] = {
        "num_workers": (resources.min_workers, resources.workers) if elastic else resources.workers,
        "elastic_resize_monitor_interval_s": RESIZE_INTERVAL_S,
    }
    return TorchTrainer(
        rank,  # type: ignore[arg-type]
        torch_config=ray_internals.ranks_on_one_machine(folder, join_process_group) if folder else None,
        scaling_config=ScalingConfig(
            use_gpu=not on_cpu,
            resources_per_worker={"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker},
            **group,
        ),
        run_config=RunConfig(  # type: ignore[call-arg]  # its stubs are those of Ray Train before 2.43
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=schedule.max_failures),
            worker_runtime_env={"env_vars": variables} if variables else {},
        ),
    )


def _run_rank(prepare_rank: Callable[[int, int], RankTraining], run: TrainingRun) -> int | Failure:
    """Run a rank, unless a rank of an earlier group had too little memory.

    The other ranks wait for such a rank, so its process ends; the restarted group reads the note and stops.
    """
    note, resources = run.work(FATAL), run.schedule.resources
    if fs.exists(note):
        return dict(json.loads(fs.read_bytes(note)))
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    if resources.workers:  # a separate process
        configure(rank=rank)
        torch.set_num_threads(max(int(resources.cpus_per_worker), 1))
    else:
        configure_unless_set()
    try:
        return train_rank(prepare_rank(rank, world), run, first=rank == 0)
    except (torch.OutOfMemoryError, MemoryError) as failure:
        error = TrainingError(
            "a rank has too little memory, and would have after a restart: lower global_batch, set "
            "memory.grad_cache or memory.gradient_checkpointing, or use more workers with "
            f"strategy.kind=fsdp2 ({failure})"
        )
        fs.write_bytes(note, json.dumps(_plain_error(error)).encode())
        raise


def _cause(error: TrainingFailedError, run: TrainingRun) -> ScalingNoteError:
    """Return the error to raise after Ray has stopped retrying: our own error if there is one."""
    for cause in getattr(error, "worker_failures", {}).values():
        if isinstance(cause, ScalingNoteError):
            return cause
    if fs.exists(run.work(FATAL)):
        return TrainingError(json.loads(fs.read_bytes(run.work(FATAL)))["text"])
    return TrainingError(f"training failed after {run.schedule.max_failures} restarts: {error}")


def train_rank(training: RankTraining, run: TrainingRun, *, first: bool) -> int | Failure:
    """Train one rank's module through the loop; the `first` rank saves it and the loss curve as parts.

    Returns:
        The number of steps that were run; or an error of all ranks that would occur again. If it were raised,
        Ray would restart the group.
    """
    schedule, device = run.schedule, device_of(run.schedule)
    trackers: list[Tracker] = []
    error: ConfigError | None = None
    if first:
        name = run.output.rstrip("/").rpartition("/")[2]
        try:
            trackers = build_trackers(schedule.tracking, events_folder(run.output), name)
        except ConfigError as failure:
            error = failure
    # All ranks need this result: else they would wait for rank 0.
    if mean_over_ranks(torch.tensor(float(error is not None), device=device)) > 0:
        return _plain_error(error or ConfigError("rank 0 could not start"))
    try:
        engine = build(training.stage, schedule=schedule, device=device)
        loop = TrainingLoop(
            engine,
            schedule,
            Checkpoints(run.work("checkpoints")),
            section=run.section,
            steps=run.steps,
            trackers=trackers,
            validation=training.validation,
            validate=training.validate_with(engine),
            notice=lambda: ray.train.get_preemption_info() is not None,
        )
        history = loop.fit(lambda step: training.batches(step).to(device))
    except (ConfigError, TrainingError) as failure:
        return _plain_error(failure)
    finally:
        for tracker in trackers:
            tracker.close()
    weights = engine.weights()
    if weights is not None:
        # The engine's module may be sharded or compiled, so the weights go into a fresh one.
        target = training.build_stage()
        load_weights(target, weights)
        with tempfile.TemporaryDirectory() as folder:
            training.save(target.eval(), Path(folder))
            fs.upload(folder, run.output)
        for name, value in (("curve.json", history.curve), ("validation.json", history.measured)):
            fs.write_bytes(fs.join(run.output, name), json.dumps(value, indent=0).encode())
    ray.train.report({"step": run.steps})
    # Validation measures after the last step, too.
    return history.measured[-1]["step"] if history.measured else run.steps


def device_of(schedule: Schedule) -> torch.device:
    """Return the device of this rank."""
    resources = schedule.resources
    if resources.workers:
        return get_device()
    return torch.device("cuda", 0) if resources.gpus_per_worker else torch.device("cpu")


def _plain_error(error: ScalingNoteError) -> Failure:
    return {"kind": type(error).__name__, "text": str(error)}
