"""Stage I on Ray: from triplets and documents to a dual encoder; and the launch of every training stage."""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer, get_device
from torch import nn

from scalingnote.core import cluster, errors, ray_internals
from scalingnote.core.config import dump, validate
from scalingnote.core.errors import ConfigError, ScalingNoteError, TrainingError
from scalingnote.core.log import configure, configure_unless_set, get_logger
from scalingnote.models import dual_encoder
from scalingnote.models.config import TokenWiseConfig
from scalingnote.models.token_wise import TokenWise
from scalingnote.models.weights import compute_dtype
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import MIXED, DeepSpeed, Schedule, TrainConfig, ValidationSchedule
from scalingnote.train.data import MappedShares, Order, RankShare, Store
from scalingnote.train.engine import Engine, autocast, join_process_group, load_weights, mean_over_ranks
from scalingnote.train.loop import MetricValues, Tracker, TrainingHistory, build_trackers, events_folder, fit
from scalingnote.train.objective import StageOne, TripletBatches
from scalingnote.train.prepare import PreparedStore, TrainingSet, mean_tokens, prepare, sparse_query
from scalingnote.train.strategies import build
from scalingnote.train.stream import StreamedShares, read_pool, write_stream
from scalingnote.train.validation import drawn_documents, validator

log = get_logger("train")
FATAL = "fatal.json"  # in the work folder: an error that a restart cannot fix
RESIZE_INTERVAL_S = 60.0  # between looks for nodes that joined; a change restarts from the newest checkpoint
M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=Schedule)
Settings = dict[str, Any]  # of a rank: plain values, sent by the driver
Failure = dict[str, str]  # an error as plain values: kind and text
Worker = Callable[[Settings], Failure | None]  # runs a rank


def run(config: TrainConfig, *, dataset: str, triplets: str, output: str) -> Artifact:
    """Train both towers; killed at any moment, the next call resumes from the newest checkpoint."""
    uris = {"dataset": dataset, "triplets": triplets}
    parents = {kind: open_artifact(uri, kind=kind) for kind, uri in uris.items()}
    mixture = open_mixture(config, TrainingSet(**parents))
    others = {
        f"{MIXED}{name}/{kind}": artifact
        for name, one in mixture.items()
        for kind, artifact in one._asdict().items()
        if artifact is not parents[kind]
    }
    draft = Draft(output, kind="dual_encoder", config=config, parents=parents | others)
    if draft.finished:
        return draft.existing()
    cluster.check_resources_early(config.resources, knob="train.resources")
    prepared = prepare(
        config,
        dataset=parents["dataset"],
        triplets=parents["triplets"],
        mixture=mixture,
        folder=draft.work("data"),
        each=cluster.map_tasks,
    )
    order = Order.of(config, prepared.sizes, config.batching, config.set_epochs)
    steps = order.steps(config)
    streamed = _stream(config, prepared, order, steps)
    rows = sum(prepared.sizes.values())
    log.info("%s triplets, %s documents, %d steps", f"{rows:,}", f"{prepared.documents:,}", steps)
    launch(
        _worker,
        {
            "output": output,
            "work": draft.work(),
            "store": prepared.store,
            "tokenizers": prepared.tokenizers,
            "steps": steps,
            "streamed": streamed is not None,
        },
        schedule=config,
        section="train",
    )
    made = finished_steps(output, planned=steps)
    pairs = made * config.global_batch
    query_tokens, document_tokens = streamed or mean_tokens(Store.open(prepared.store))
    return draft.commit(
        counts={
            "triplets": rows,
            "documents": prepared.documents,
            "steps": made,
            "pairs": pairs,
            "query_tokens": round(pairs * query_tokens),
            "document_tokens": round(pairs * document_tokens),
            "documents_per_pair": prepared.group,
        }
    )


def open_mixture(config: TrainConfig, own: TrainingSet) -> dict[str, TrainingSet]:
    """The sets of a mixture by name; empty without one."""
    return {
        name: TrainingSet(
            open_artifact(fs.absolute(one.dataset), kind="dataset"),
            open_artifact(fs.absolute(one.triplets), kind="triplets"),
        )
        if one.dataset is not None and one.triplets is not None
        else own
        for name, one in config.mixture.items()
    }


def _stream(
    config: TrainConfig, prepared: PreparedStore, order: Order, steps: int
) -> tuple[float, float] | None:
    """Write the stream of a run if it has one; returns :func:`mean_tokens` of its rows, or None without."""
    limit, store = config.data.copy_limit_gb, prepared.store
    size = sum(file.bytes for table in ("train", "documents") for file in Store.files(store, table)) / 1e9
    large = size > limit and ("://" in store or not limit)
    if not steps or not large:
        return None
    pool = np.empty(0, np.int64)
    if config.validation:
        pool = drawn_documents(Store.open(store, ["validation"]), config.validation, seed=config.seed)
    totals = write_stream(
        store, order, steps=steps, batch=config.global_batch, pool=pool, each=cluster.map_tasks
    )
    log.info("%.1f GB of rows are streamed, of a store of %.1f GB", totals["bytes"] / 1e9, size)
    rows = steps * config.global_batch
    return totals["query_tokens"] / rows, totals["document_tokens"] / rows


def launch(worker: Worker, settings: Settings, *, schedule: Schedule, section: str) -> None:
    """Run `worker` on every rank under Ray Train and wait; a dead rank restarts the group.

    Without workers, this process is the only rank (Ray Train's local mode). A lost node or a dead process is
    restarted from the newest checkpoint, `max_failures` times, and where the cloud announced the loss without
    a limit. Errors that would occur again are raised here after the first: those that :func:`train_rank`
    returns, and too little memory.

    Args:
        worker: one rank; calls :func:`start_rank` and :func:`train_rank`.
        settings: of the worker, which also gets config and section. Ray's own records and the checkpoints go
            to ``settings["work"]``.
        schedule: the config of the stage.
        section: its name, for messages.

    Raises:
        TrainingError: the restarts did not help, or a rank had too little memory.
    """
    fs.delete(fs.join(settings["work"], FATAL))  # of an earlier call, whose cause may be fixed
    resources = schedule.resources
    least = resources.model_copy(update={"workers": resources.min_workers or resources.workers})
    cluster.check_resources(least, knob=f"{section}.resources")
    private = resources.workers and cluster.is_private()
    with tempfile.TemporaryDirectory() if private else nullcontext() as folder:
        settings = {**settings, "config": dump(schedule), "section": section}
        trainer = _trainer(partial(_run_worker, worker=worker), settings, schedule, folder)
        try:
            with cluster.restored_interrupt_handler():
                result = trainer.fit()
        except TrainingFailedError as error:
            raise _cause(error, settings, schedule.max_failures) from error
    failure: Failure | None = result.return_value
    if failure:
        raise getattr(errors, failure["kind"])(failure["text"])


def _trainer(worker: Worker, settings: Settings, schedule: Schedule, folder: str | None) -> Any:
    """A TorchTrainer; ranks of a private cluster connect through a file in `folder`."""
    resources = schedule.resources
    filesystem, path = fs.resolve(fs.join(settings["work"], "ray"))
    on_cpu = resources.gpus_per_worker == 0
    # DeepSpeed chooses its accelerator while it is imported.
    variables = {"DS_ACCELERATOR": "cpu"} if isinstance(schedule.strategy, DeepSpeed) and on_cpu else {}
    if not resources.workers:
        os.environ.update(variables)
    # As a dictionary: Ray's stubs are those of Ray Train before 2.43, which knows no elastic groups.
    elastic = resources.min_workers not in (None, resources.workers)
    group: dict[str, Any] = {
        "num_workers": (resources.min_workers, resources.workers) if elastic else resources.workers,
        "elastic_resize_monitor_interval_s": RESIZE_INTERVAL_S,
    }
    return TorchTrainer(
        worker,  # type: ignore[arg-type]
        train_loop_config=settings,
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


def _run_worker(settings: Settings, *, worker: Worker) -> Failure | None:
    """Run a rank, unless one of a group before it had too little memory.

    The other ranks wait for such a rank, so its process ends; the restarted group reads the note and stops.
    """
    note = fs.join(settings["work"], FATAL)
    if fs.exists(note):
        return dict(json.loads(fs.read_bytes(note)))
    try:
        return worker(settings)
    except (torch.OutOfMemoryError, MemoryError) as failure:
        error = TrainingError(
            "a rank has too little memory, and would have after a restart: lower global_batch, set "
            "memory.grad_cache or memory.gradient_checkpointing, or use more workers with "
            f"strategy.kind=fsdp2 ({failure})"
        )
        fs.write_bytes(note, json.dumps(_plain_error(error)).encode())
        raise


def _cause(error: TrainingFailedError, settings: Settings, restarts: int) -> ScalingNoteError:
    """The error message after Ray has given up: that of our own error if there is one."""
    for cause in getattr(error, "worker_failures", {}).values():
        if isinstance(cause, ScalingNoteError):
            return cause
    note = fs.join(settings["work"], FATAL)
    if fs.exists(note):
        return TrainingError(json.loads(fs.read_bytes(note))["text"])
    return TrainingError(f"training failed after {restarts} restarts: {error}")


def start_rank(config: type[S], settings: Settings) -> tuple[S, int, int]:
    """A rank's config, its number and the number of ranks; a worker calls it first."""
    context = ray.train.get_context()
    validated = validate(config, settings["config"], source=settings["section"])
    if validated.resources.workers:  # a process of its own
        configure(rank=context.get_world_rank())
        torch.set_num_threads(max(int(validated.resources.cpus_per_worker), 1))
    else:
        configure_unless_set()
    return validated, context.get_world_rank(), context.get_world_size()


def train_rank(
    stage: M,
    batches: Callable[[int], Any],
    *,
    build_stage: Callable[[], M],
    schedule: Schedule,
    settings: Settings,
    save: Callable[[M, Path], None],
    validation: ValidationSchedule | None = None,
    validate_with: Callable[[Engine], Callable[[], MetricValues] | None] = lambda engine: None,
) -> Failure | None:
    """Train one rank's module through the loop; rank 0 then saves it and the loss curve as parts.

    Args:
        stage: module with the losses.
        batches: this rank's batch of a step.
        build_stage: builds another `stage` from config and seed.
        schedule: of the training.
        settings: of this rank; ``output``, ``work``, ``steps`` and ``section`` are read.
        save: writes the trained module into a folder.
        validation: when to measure, and which weights to keep.
        validate_with: makes the function that measures.

    Returns:
        None, or an error of all ranks that would occur again; raised, it would make Ray restart the group.
    """
    device = device_of(schedule)
    first = ray.train.get_context().get_world_rank() == 0
    trackers, error = _trackers(schedule, settings["output"]) if first else ([], None)
    if mean_over_ranks(torch.tensor(float(error is not None), device=device)) > 0:
        return _plain_error(error or ConfigError("rank 0 could not start"))
    try:
        engine = build(stage, schedule=schedule, device=device)
        history = fit(
            engine,
            lambda step: batches(step).to(device),
            steps=settings["steps"],
            schedule=schedule,
            checkpoints=Checkpoints(fs.join(settings["work"], "checkpoints")),
            section=settings["section"],
            trackers=trackers,
            validation=validation,
            validate=validate_with(engine),
            notice=lambda: ray.train.get_preemption_info() is not None,
        )
    except (ConfigError, TrainingError) as failure:
        return _plain_error(failure)
    finally:
        for tracker in trackers:
            tracker.close()
    weights = engine.weights()
    if weights is not None:
        # The engine's module may be sharded or compiled: the weights go into a fresh one.
        whole = build_stage()
        load_weights(whole, weights)
        _write_result(lambda folder: save(whole.eval(), folder), history, settings["output"])
    ray.train.report({"step": settings["steps"]})
    return None


def _write_result(save: Callable[[Path], None], history: TrainingHistory, output: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        fs.upload(folder, output)
    for name, value in (("curve.json", history.curve), ("validation.json", history.measured)):
        fs.write_bytes(fs.join(output, name), json.dumps(value, indent=0).encode())


def finished_steps(output: str, *, planned: int) -> int:
    """Steps of a run, fewer than planned where validation stopped it: it measures after the last step."""
    measured = json.loads(fs.read_bytes(fs.join(output, "validation.json")))
    return int(measured[-1]["step"]) if measured else planned


def _trackers(schedule: Schedule, output: str) -> tuple[list[Tracker], ConfigError | None]:
    """The trackers of rank 0, or the error, which all ranks must know: else they would wait for rank 0."""
    name = output.rstrip("/").rpartition("/")[2]
    try:
        return build_trackers(schedule.tracking, events_folder(output), name), None
    except ConfigError as error:
        return [], error


def device_of(schedule: Schedule) -> torch.device:
    """The device of this rank."""
    resources = schedule.resources
    if resources.workers:
        return get_device()
    return torch.device("cuda", 0) if resources.gpus_per_worker else torch.device("cpu")


def _plain_error(error: ScalingNoteError) -> Failure:
    return {"kind": type(error).__name__, "text": str(error)}


def build_stage_one(config: TrainConfig, tokenizers: dict[str, str]) -> StageOne:
    """Both towers and their losses, with initial weights that follow from ``config.seed``.

    `tokenizers` are JSON by tower, of those that start from scratch. Such a document tower has a seed of its
    own: with equal weights in both towers an untrained decoder pair already matches words.
    """
    towers = dual_encoder.build(
        config.query_tower,
        config.document,
        dim=config.dim,
        tokenizers=tokenizers,
        seed=config.seed,
        document_seed=config.seed + 1,
        share_base=True,
        share_backbone=config.shares_backbone,
        sparse=config.sparse is not None,
    )
    towers.sparse_query = sparse_query(config, towers.document.prompt.tokenizer)
    return StageOne(towers, config.losses, sparse=config.sparse, align=config.align)


def _worker(settings: Settings) -> Failure | None:
    """One rank of stage I."""
    config, rank, world = start_rank(TrainConfig, settings)
    build_stage = partial(build_stage_one, config, settings["tokenizers"])
    stage, uri, streamed = build_stage(), settings["store"], settings["streamed"]
    towers = stage.towers
    store = Store.open(uri, ["validation"] if streamed else None)
    shares: Callable[[int], RankShare]
    if streamed:
        shares = StreamedShares(uri, rank=rank, world=world)
    else:
        order = Order.of(config, store.facts["sizes"], config.batching, config.set_epochs)
        shares = MappedShares(store, order, rank=rank, world=world)
    instructions = None
    if isinstance(config.query, TokenWiseConfig) and config.query.instructions:
        instructions = [config.query.instructions_of(name) for name in config.mixture]
    pads = (towers.query.pad, towers.document.pad)
    batches = TripletBatches(
        shares,
        store.facts,
        pads=pads,
        steps=settings["steps"],
        instructions=instructions,
        seed=config.seed,
    )

    def validate_with(engine: Engine) -> Callable[[], MetricValues] | None:
        pool = read_pool(uri) if streamed and config.validation and len(store["validation"]) else None
        return validator(store, engine, config, views=towers.document.views, pads=pads, pool=pool)

    return train_rank(
        stage,
        batches,
        build_stage=build_stage,
        schedule=config,
        settings=settings,
        save=lambda whole, folder: _save(whole, folder, config=config, device=device_of(config)),
        validation=config.validation,
        validate_with=validate_with,
    )


def _save(stage: StageOne, folder: Path, *, config: TrainConfig, device: torch.device) -> None:
    """Write both towers; a token_wise one reads a whole vocabulary for that, on a GPU if there is one."""
    if isinstance(stage.towers.query, TokenWise):
        stage.towers.query.to(device)
    dtype = compute_dtype(config.precision, device) if device.type == "cuda" else torch.float32
    with autocast(device, dtype):
        stage.towers.save(folder, merge_adapters=config.merge_adapters)
