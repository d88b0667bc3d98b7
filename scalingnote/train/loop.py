"""The training loop of one rank: batches by step are its input, a trained module its output. Without Ray.

    batch ─► loss, backward ─► mean over ranks ─► finite? ─► step ─► measure ─► checkpoint

Ranks decide (to stop, to keep the best, to save now) by numbers that are equal on all of them. The
checkpoint's notes hold the state of the loop, so a resumed run continues as if it had not been interrupted.

Rank 0 sends its numbers to trackers: TensorBoard files always, Weights & Biases and MLflow if configured.
Event files contain times, so they are not part of an artifact: they are in the run's ``tensorboard`` folder,
which remains when the work directory is deleted.
"""

import importlib
import math
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from scalingnote.core.errors import ConfigError, TrainingError
from scalingnote.core.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Optimizer, Schedule, Tracking, ValidationSchedule, steps_of
from scalingnote.train.engine import Engine, mean_over_ranks, rank
from scalingnote.train.grad_cache import GradientShares, cached_backward

EVENTS_FOLDER = "tensorboard"
_UPLOAD_INTERVAL_S = 30.0  # a killed run loses the events since the last upload to a remote folder

CURVE_INTERVAL_STEPS = 10
NOTICE_INTERVAL_S = 5.0  # between polls of the notice that this machine will soon be taken away
GRADIENT_NORM = "gradient_norm"
MetricValues = dict[str, float]


@dataclass
class TrainingHistory:
    """Measurements of a run so far; stored with every checkpoint."""

    curve: list[dict[str, Any]] = field(default_factory=list)
    """Loss, its parts, gradient norm and learning rate of every tenth step; of every fiftieth also norm and
    cosine (with the total gradient) of the gradient of each weighted loss."""
    measured: list[dict[str, Any]] = field(default_factory=list)
    """Validation metrics, each with the number of steps before it."""
    best_step: int | None = None
    best_value: float | None = None
    worse: int = 0
    """Measurements since the best one."""


@runtime_checkable
class Tracker(Protocol):
    """Receiver of a run's numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step by name. A resumed run repeats those of the steps since its checkpoint."""
        ...

    def close(self) -> None:
        """Release resources. Called once, after the last numbers."""
        ...


@dataclass
class TrainingLoop:
    """Training of an engine from its newest checkpoint; every rank has its own loop."""

    engine: Engine
    schedule: Schedule
    checkpoints: Checkpoints
    _: KW_ONLY
    section: str  # name of the stage in the log
    steps: int  # of the entire run
    trackers: Sequence[Tracker] = ()  # on rank 0 only
    validation: ValidationSchedule | None = None  # when to measure, and which weights to keep
    validate: Callable[[], MetricValues] | None = None  # measures; returns the same numbers on all ranks
    notice: Callable[[], bool] = lambda: False
    """Whether this machine will soon be taken away, which causes a checkpoint; all ranks call it together."""
    history: TrainingHistory = field(default_factory=TrainingHistory)
    _polled_at: float = field(default_factory=time.monotonic)  # time of the last call of `notice`
    _poll_due: bool = False
    _preempted: bool = False

    def fit(self, batch_at: Callable[[int], Any]) -> TrainingHistory:
        """Train to the last step on this rank's batches; afterwards the engine holds the weights to keep.

        Every rank calls this method, and receives the loss curve and the validation metrics. Dropout is
        seeded by (seed, step, rank), so a resumed run draws the same numbers as an uninterrupted one.

        Raises:
            TrainingError: on every rank, if the loss or the gradient of one rank is not finite.
        """
        log, start = get_logger(self.section), 0
        if restored := self.checkpoints.restore(self.engine):
            start, self.history = restored.step, TrainingHistory(**restored.notes)
            log.info("resuming at step %d of %d", start, self.steps)
        last = start if self._out_of_patience() else self.steps  # a notice may arrive as a run stops
        shares = GradientShares(self.engine, section=self.section, cache=self.schedule.memory.grad_cache)
        self.engine.module.train()
        rows = self.schedule.global_batch
        with Progress(self.section, total=self.steps * rows, done=start * rows, unit="rows") as progress:
            for step, batch in _prefetch(batch_at, start, last):
                values = self._step(step, batch, shares)
                progress.advance(rows, _describe(values))
                if self._finish_step(step + 1):
                    worse = self.history.worse
                    log.info("stopped after step %d: %d measurements without a better one", step + 1, worse)
                    break
        self.checkpoints.wait()
        if self.validation is not None and self.validation.keeps_best and self.history.worse:
            self.checkpoints.restore(self.engine, best=True)
            log.info("kept the weights of step %s, which are the best", self.history.best_step)
        self.engine.module.eval()
        return self.history

    def _step(self, step: int, batch: Any, shares: GradientShares) -> MetricValues:
        """Run one optimizer step; return loss, parts and gradient norm as means over ranks."""
        seed = (self.schedule.seed * 1_000_003 + step) * 4_099 + rank()
        torch.manual_seed(seed % 2**64)  # a generator takes 64 bits; a config's seed has no bound
        measured = shares.measure(step, batch)
        cache = self.schedule.memory.grad_cache
        if cache is not None:
            loss, parts = cached_backward(self.engine, batch, config=cache)
        else:
            loss, parts = self.engine(batch)
            self.engine.backward(loss)
        values = self._means({"loss": loss.detach(), **parts}, step=step)
        rate = learning_rate(step, steps=self.steps, settings=self.schedule.optimizer)
        values[GRADIENT_NORM] = float(self.engine.step(rate))
        _require_finite(values, step=step)
        shares.note(values)
        if step % CURVE_INTERVAL_STEPS == 0 or step + 1 == self.steps:
            values_to_log = values | measured
            rounded = {name: round(value, 6) for name, value in values_to_log.items()}
            self.history.curve.append({"step": step, "lr": rate, **rounded})
            self._track(step, {"lr": rate, **values_to_log})
        return values

    def _finish_step(self, steps_done: int) -> bool:
        """Measure and save a checkpoint after `steps_done` steps if due; return whether to stop early.

        The last step has a checkpoint, too: writing the model (merged adapters, a table) can take long, and
        can fail.
        """
        best, stop = self._measure(steps_done)
        preempted = self._first_notice()
        regular = steps_done % self.schedule.checkpoint_every == 0 or steps_done == self.steps
        if regular or stop or best or preempted:
            self.checkpoints.save(steps_done, self.engine, asdict(self.history), best=best)
        if preempted:
            self.checkpoints.wait()
        return stop

    def _means(self, parts: dict[str, Tensor], *, step: int) -> MetricValues:
        """Compute means over ranks, in one exchange; in it, rank 0's clock also decides if a poll is due."""
        due = rank() == 0 and time.monotonic() - self._polled_at > NOTICE_INTERVAL_S
        numbers = [*parts.values(), torch.tensor(float(due))]
        device = next(iter(parts.values())).device
        means = mean_over_ranks(torch.stack([n.detach().float().to(device) for n in numbers])).tolist()
        self._poll_due = means.pop() > 0
        values = dict(zip(parts, means, strict=True))
        _require_finite(values, step=step)
        return values

    def _first_notice(self) -> bool:
        """Return whether `notice` has just become true: this run will be interrupted."""
        if not self._poll_due:
            return False
        self._polled_at = time.monotonic()
        before, self._preempted = self._preempted, self.notice()
        return self._preempted and not before

    def _measure(self, steps_done: int) -> tuple[bool, bool]:
        """Validate if due; return whether to save this as the best, and whether to stop."""
        config, history = self.validation, self.history
        if config is None or self.validate is None or (steps_done % config.every and steps_done < self.steps):
            return False, False
        metrics = self.validate()
        history.measured.append({"step": steps_done, **{k: round(v, 6) for k, v in metrics.items()}})
        self._track(steps_done, {f"validation/{name}": value for name, value in metrics.items()})
        value = metrics[config.metric]
        if not math.isnan(value) and (history.best_value is None or value > history.best_value):
            history.best_step, history.best_value, history.worse = steps_done, value, 0
            return config.keeps_best and steps_done < self.steps, False
        history.worse += 1
        return False, self._out_of_patience()

    def _out_of_patience(self) -> bool:
        patience = None if self.validation is None else self.validation.patience
        return patience is not None and self.history.worse >= patience

    def _track(self, step: int, values: MetricValues) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)


def _prefetch(batch_at: Callable[[int], Any], start: int, stop: int) -> Iterator[tuple[int, Any]]:
    """Yield steps and their batches; a thread builds each batch while the previous step runs."""
    with ThreadPoolExecutor(1) as ahead:
        waiting = deque([ahead.submit(batch_at, start)] if start < stop else [])
        for step in range(start, stop):
            batch = waiting.popleft().result()
            if step + 1 < stop:
                waiting.append(ahead.submit(batch_at, step + 1))
            yield step, batch


def _describe(values: MetricValues) -> str:
    """Format the loss and, in brackets, the values that differ from it: unweighted parts, and measures."""
    loss = values["loss"]
    parts = [
        f"{name} {value:.4g}"
        for name, value in values.items()
        if name not in ("loss", GRADIENT_NORM) and value != loss
    ]
    return f"loss {loss:.4f}" + (f" ({', '.join(parts)})" if parts else "")


def learning_rate(step: int, *, steps: int, settings: Optimizer) -> float:
    """Compute the learning rate of a step.

    It rises linearly from 0 to the peak over the warm-up (appendix A), then falls to the floor, linearly or
    as a cosine.
    """
    warmup: int = max(round(steps_of(settings.warmup, steps)), 1)
    if step < warmup:
        return settings.peak_lr * (step + 1) / warmup
    remaining = (steps - step) / max(steps - warmup, 1)
    if settings.schedule == "cosine":
        remaining = (1 - math.cos(math.pi * remaining)) / 2
    return settings.peak_lr * (settings.floor + (1 - settings.floor) * remaining)


def _require_finite(values: MetricValues, *, step: int) -> None:
    if not all(map(math.isfinite, values.values())):
        numbers = ", ".join(f"{name} {value:g}" for name, value in values.items())
        raise TrainingError(
            f"step {step} is not finite ({numbers}): lower optimizer.peak_lr or raise losses.temperature; "
            "the last checkpoint before it is kept"
        )


def events_folder(output: str) -> str:
    """Return the folder for the events of the stage that builds `output`.

    ``RUN/train/MARK`` gives ``RUN/tensorboard/train/MARK``, so that one TensorBoard shows the entire run.
    """
    run, stage, mark = output.rstrip("/").rsplit("/", 2)
    return fs.join(run, EVENTS_FOLDER, stage, mark)


def build_trackers(config: Tracking, folder: str, run_name: str) -> list[Tracker]:
    """Build TensorBoard and the trackers that the config names.

    Raises:
        ConfigError: the package of a tracker is missing.
    """
    trackers: list[Tracker] = [TensorBoard(folder)]
    if config.wandb is not None:
        trackers.append(WandB(config.wandb, run_name))
    if config.mlflow is not None:
        trackers.append(MLflow(config.mlflow, run_name))
    return trackers


class TensorBoard:
    """Event files in a folder; those of a remote folder are written locally and uploaded."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._local = tempfile.TemporaryDirectory() if "://" in folder else None
        self._writer: Any = None
        self._uploaded = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars. The first call hides those that a killed run wrote from this step on."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # late: it takes a second to import

            target = self._local.name if self._local else self._folder
            # Events from this step on were written by a run that was killed after its last checkpoint.
            self._writer = SummaryWriter(target, purge_step=step, flush_secs=10)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if time.monotonic() - self._uploaded > _UPLOAD_INTERVAL_S:
            self._upload()

    def close(self) -> None:
        """Write and upload the remaining events."""
        if self._writer is not None:
            self._writer.close()
            self._upload()
        if self._local:
            self._local.cleanup()

    def _upload(self) -> None:
        if self._local:
            self._writer.flush()
            for path in Path(self._local.name).iterdir():
                fs.upload(path, fs.join(self._folder, path.name))
            self._uploaded = time.monotonic()


class WandB:
    """A run of a Weights & Biases project; the same name continues the same run."""

    def __init__(self, project: str, run_name: str) -> None:
        wandb = _import_tracker("wandb", "tracking.wandb")
        identity = re.sub(r"[^\w-]", "-", run_name)
        # Capture of the console and upload of code are off: they disturb a training rank.
        settings = wandb.Settings(console="off", save_code=False, silent=True)
        self._run = wandb.init(project=project, name=run_name, id=identity, resume="allow", settings=settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment, at ``MLFLOW_TRACKING_URI``; the same name continues the same run."""

    def __init__(self, experiment: str, run_name: str) -> None:
        mlflow = _import_tracker("mlflow", "tracking.mlflow")
        self._client = mlflow.MlflowClient()
        existing = self._client.get_experiment_by_name(experiment)
        experiment_id = existing.experiment_id if existing else self._client.create_experiment(experiment)
        name = run_name.replace("'", "")
        runs = self._client.search_runs([experiment_id], f"attributes.run_name = '{name}'", max_results=1)
        self._run = (runs[0] if runs else self._client.create_run(experiment_id, run_name=name)).info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step. MLflow allows no @ in the name of a metric."""
        for name, value in values.items():
            self._client.log_metric(self._run, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


def _import_tracker(package: str, knob: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{knob} needs the package {package}: pip install 'scalingnote[track]' ({error})"
        ) from None
