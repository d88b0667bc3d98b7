"""The training loop of one rank: batches by step in, a trained module out. It knows no Ray.

    batch ─► loss, backward ─► mean over ranks ─► finite? ─► step ─► measure ─► checkpoint

What ranks decide together (to stop, to keep the best, to save now) they decide on numbers that are equal on
all of them. Whatever the loop remembers travels in the checkpoint's notes, so a resumed run goes on as if
nothing had happened.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from scalingnote.errors import TrainingError
from scalingnote.log import Progress, get_logger
from scalingnote.train.agreement import mean_over_ranks
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Optimizer, Schedule, ValidationSchedule
from scalingnote.train.distributed import rank
from scalingnote.train.grad_cache import cached_backward
from scalingnote.train.strategies.engine import Engine
from scalingnote.train.tracking import Tracker
from scalingnote.train.validation import better

NOTE_EVERY = 10
NOTICE_EVERY = 5.0  # seconds between questions whether this machine is about to be taken away
Values = dict[str, float]


@dataclass
class History:
    """What a run remembers; travels with every checkpoint."""

    curve: list[dict[str, Any]] = field(default_factory=list)
    """Loss, its parts, gradient norm and learning rate of every tenth step."""
    measured: list[dict[str, Any]] = field(default_factory=list)
    """What validation found, after so many steps."""
    best_step: int | None = None
    best_value: float | None = None
    worse: int = 0
    """Measurements since the best one."""


def fit(
    engine: Engine,
    batch_at: Callable[[int], Any],
    *,
    steps: int,
    schedule: Schedule,
    checkpoints: Checkpoints,
    room: str,
    trackers: Sequence[Tracker] = (),
    validation: ValidationSchedule | None = None,
    validate: Callable[[], Values] | None = None,
    notice: Callable[[], bool] | None = None,
) -> History:
    """Train `engine` for `steps`, resuming where a run stopped; it holds the weights to keep afterwards.

    Every rank calls it with its own `batch_at`. `validate` gives the same numbers on all ranks, `validation`
    says what to make of them. `notice` is asked by all ranks together now and then: true means that this run
    will soon be interrupted, and is answered with a checkpoint. Dropout is seeded by (seed, step, rank), so
    a resumed run repeats what an uninterrupted one would have drawn.

    TrainingError on every rank when the loss or the gradient of one is not finite.
    """
    found = checkpoints.restore(engine)
    start, history = (found.step, History(**found.notes)) if found else (0, History())
    if start:
        get_logger(room).info("resuming at step %d of %d", start, steps)
    last = start if _out_of_patience(validation, history) else steps  # a notice may come as a run stops
    run = _Run(engine, schedule, checkpoints, history, trackers, validation, validate, notice, steps)
    engine.module.train()
    rows = schedule.global_batch
    with (
        Progress(room, total=steps * rows, done=start * rows, unit="rows") as progress,
        ThreadPoolExecutor(1) as ahead,
    ):
        following = ahead.submit(batch_at, start) if start < last else None
        for step in range(start, last):
            assert following is not None
            batch = following.result()
            following = ahead.submit(batch_at, step + 1) if step + 1 < steps else None
            values = run.step(step, batch)
            progress.advance(rows, f"loss {values['loss']:.4f}")
            if run.settle(step + 1):
                get_logger(room).info(
                    "stopped after step %d: %d measurements without a better one", step + 1, history.worse
                )
                break
    checkpoints.wait()
    if validation is not None and validation.keep == "best" and history.worse:
        checkpoints.restore(engine, best=True)
        get_logger(room).info("weights of step %s are the best and kept", history.best_step)
    engine.module.eval()
    return history


@dataclass
class _Run:
    """The parts of a loop's turn."""

    engine: Engine
    schedule: Schedule
    checkpoints: Checkpoints
    history: History
    trackers: Sequence[Tracker]
    validation: ValidationSchedule | None
    validate: Callable[[], Values] | None
    notice: Callable[[], bool] | None
    steps: int
    _asked: float = field(default_factory=time.monotonic)
    _due: bool = False
    _noticed: bool = False

    def step(self, step: int, batch: Any) -> Values:
        """One optimizer step; returns its numbers, means over ranks."""
        seed = (self.schedule.seed * 1_000_003 + step) * 4_099 + rank()
        torch.manual_seed(seed % 2**64)  # what a generator takes; a config's seed has no bound
        cache = self.schedule.memory.grad_cache
        if cache is not None:
            loss, parts = cached_backward(self.engine, batch, config=cache)
        else:
            loss, parts = self.engine(batch)
            self.engine.backward(loss)
        values = self._shared({"loss": loss.detach(), **parts}, step=step)
        rate = learning_rate(step, steps=self.steps, settings=self.schedule.optimizer)
        values["gradient_norm"] = float(self.engine.step(rate))
        _guard(values, step=step)
        if step % NOTE_EVERY == 0 or step + 1 == self.steps:
            self.history.curve.append(
                {"step": step, "lr": rate, **{name: round(value, 6) for name, value in values.items()}}
            )
            self._track(step, {"lr": rate, **values})
        return values

    def settle(self, done: int) -> bool:
        """After `done` steps: measure, save what must be saved; returns whether to stop early."""
        best, stop = self._measure(done)
        noticed = self._warned()
        regular = done % self.schedule.checkpoint_every == 0
        if (regular and done < self.steps and not stop) or best or noticed:
            self.checkpoints.save(done, self.engine, asdict(self.history), best=best)
        if noticed:
            self.checkpoints.wait()
        return stop

    def _shared(self, parts: dict[str, Tensor], *, step: int) -> Values:
        """Means over ranks, one exchange for all; rank 0's clock travels with them."""
        due = rank() == 0 and time.monotonic() - self._asked > NOTICE_EVERY
        numbers = [*parts.values(), torch.tensor(float(due))]
        device = next(iter(parts.values())).device
        means = mean_over_ranks(torch.stack([n.detach().float().to(device) for n in numbers])).tolist()
        self._due = means.pop() > 0
        values = dict(zip(parts, means, strict=True))
        _guard(values, step=step)
        return values

    def _warned(self) -> bool:
        """Whether this run was told for the first time that it will be interrupted."""
        if not self._due or self.notice is None:
            return False
        self._asked = time.monotonic()
        told = self.notice()
        first = told and not self._noticed
        self._noticed = told
        return first

    def _measure(self, done: int) -> tuple[bool, bool]:
        """Whether this is the best measurement and worth a checkpoint, and whether to stop."""
        config, history = self.validation, self.history
        if config is None or self.validate is None:
            return False, False
        if done % config.every and done < self.steps:
            return False, False
        found = self.validate()
        history.measured.append({"step": done, **{k: round(v, 6) for k, v in found.items()}})
        self._track(done, {f"validation/{name}": value for name, value in found.items()})
        if better(config.metric, found[config.metric], history.best_value):
            history.best_step, history.best_value, history.worse = done, found[config.metric], 0
            return config.keep == "best" and done < self.steps, False
        history.worse += 1
        return False, _out_of_patience(config, history)

    def _track(self, step: int, values: Values) -> None:
        for tracker in self.trackers:
            tracker.log(step, values)


def _out_of_patience(validation: ValidationSchedule | None, history: History) -> bool:
    return validation is not None and validation.patience is not None and history.worse >= validation.patience


def learning_rate(step: int, *, steps: int, settings: Optimizer) -> float:
    """Linear from 0 to the peak over the warm-up, then linear to 0 (appendix A)."""
    warmup = max(round(steps * settings.warmup), 1)
    if step < warmup:
        return settings.peak_lr * (step + 1) / warmup
    return settings.peak_lr * (steps - step) / max(steps - warmup, 1)


def _guard(values: Values, *, step: int) -> None:
    if not all(map(math.isfinite, values.values())):
        found = ", ".join(f"{name} {value:g}" for name, value in values.items())
        raise TrainingError(
            f"step {step} is not finite ({found}): lower optimizer.peak_lr or raise losses.temperature; "
            "the last checkpoint before it is kept"
        )
