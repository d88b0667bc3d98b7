"""The loop: resumed runs repeat uninterrupted ones, and stop at the right step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scalingnote.core.errors import TrainingError
from scalingnote.core.log import Progress
from scalingnote.train import loop
from scalingnote.train.checkpoint import Checkpoints
from scalingnote.train.config import Optimizer, Schedule, Validation
from scalingnote.train.loop import TrainingHistory, TrainingLoop
from scalingnote.train.strategies import build

STEPS = 12


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup": 0.2}, [0.5, 1.0, 1.0, 0.625, 0.125]),
        ({"warmup": 2}, [0.5, 1.0, 1.0, 0.625, 0.125]),
        ({"warmup": 2, "floor": 0.2}, [0.5, 1.0, 1.0, 0.7, 0.3]),
        ({"warmup": 2, "floor": 0.2, "schedule": "cosine"}, [0.5, 1.0, 1.0, 0.753073, 0.230448]),
    ],
    ids=["a share", "steps", "floor", "cosine"],
)
def test_the_rate_rises_linearly_and_falls_to_the_floor(settings: dict[str, Any], expected: list[float]):
    optimizer = Optimizer(peak_lr=1.0, **settings)
    rates = [loop.learning_rate(step, steps=10, settings=optimizer) for step in (0, 1, 2, 5, 9)]
    assert rates == pytest.approx(expected, abs=1e-5)


class Regression(nn.Module):
    """A layer with dropout, to test that a resumed run draws the same masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        error = self.layer(batch).squeeze(-1) - batch.sum(-1)
        loss = error.pow(2).mean()
        return loss, {"squared": loss.detach(), "absolute": error.detach().abs().mean()}


class ListTracker:
    """A tracker that stores steps and names."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.names: set[str] = set()

    def log(self, step: int, values: Any) -> None:
        self.steps.append(step)
        self.names |= values.keys()

    def close(self) -> None: ...


def batch_at(step: int) -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(step))


def train(
    module: nn.Module,
    folder: Path,
    *,
    until: int = STEPS,
    source=batch_at,
    every: int = 4,
    seed: int = 3,
    **options: Any,
) -> TrainingHistory:
    def stop_at(step: int) -> Tensor:
        if step >= until:
            raise InterruptedError
        return source(step)

    schedule = Schedule(
        optimizer=Optimizer(peak_lr=1e-2),
        precision="float32",
        checkpoint_every=every,
        global_batch=16,
        seed=seed,
    )
    engine = build(module, schedule=schedule, device=torch.device("cpu"))
    loop = TrainingLoop(engine, schedule, Checkpoints(str(folder)), section="test", steps=STEPS, **options)
    return loop.fit(stop_at)


def measuring(*values: float) -> dict[str, Any]:
    """Return a validation every second step with these values, which stops after two worse ones."""
    remaining = iter(values)
    return {
        "validation": Validation(every=2, patience=2),
        "validate": lambda: {"MRR@10": next(remaining)},
    }


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("*/checkpoint.json"))


def same(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_run(tmp_path: Path):
    uninterrupted = Regression()
    history = train(uninterrupted, tmp_path / "whole")
    with pytest.raises(InterruptedError):
        train(Regression(), tmp_path / "cut", until=10)
    resumed, other = Regression(), Regression()
    assert train(resumed, tmp_path / "cut") == history
    assert same(uninterrupted, resumed)
    train(other, tmp_path / "other", seed=2**64)  # any number is a seed
    assert not same(uninterrupted, other)


def test_progress_shows_the_loss_and_parts_that_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    notes: list[str] = []
    monkeypatch.setattr(Progress, "advance", lambda self, rows, note="": notes.append(note))
    curve = train(Regression(), tmp_path).curve
    assert len(notes) == STEPS
    assert notes[0] == f"loss {curve[0]['loss']:.4f} (absolute {curve[0]['absolute']:.4g})"


def test_the_last_step_has_a_checkpoint(tmp_path: Path):
    first = Regression()
    history = train(first, tmp_path, every=5)
    assert steps_in(tmp_path) == [10, 12]
    second = Regression()
    assert train(second, tmp_path, until=0) == history  # no step is repeated if saving fails
    assert same(first, second)


def test_a_loss_that_is_not_finite_raises_an_error_with_a_remedy(tmp_path: Path):
    def poisoned(step: int) -> Tensor:
        return batch_at(step) * (torch.nan if step == 5 else 1.0)

    with pytest.raises(TrainingError, match=r"step 5 is not finite .*lower optimizer.peak_lr"):
        train(Regression(), tmp_path, source=poisoned)


def test_trackers_receive_training_and_validation_numbers(tmp_path: Path):
    tracker = ListTracker()
    train(
        Regression(),
        tmp_path,
        trackers=[tracker],
        validation=Validation(every=5),
        validate=lambda: {"MRR@10": 0.5},
    )
    assert tracker.steps == [0, 5, 10, 10, 11, 12]  # steps 0, 10, 11, and measurements after 5, 10, 12 steps
    assert tracker.names == {"loss", "squared", "absolute", "gradient_norm", "lr", "validation/MRR@10"}


def test_training_stops_without_improvement_also_after_a_kill(tmp_path: Path):
    values = {2: 0.1, 4: 0.5, 6: 0.4, 8: 0.3}
    step_of = {float(batch_at(step)[0, 0]): step for step in range(STEPS)}

    def run(folder: Path, *, until: int = STEPS) -> TrainingHistory:
        module = Regression()
        inputs_seen: list[float] = []
        module.register_forward_pre_hook(lambda _, inputs: inputs_seen.append(float(inputs[0][0, 0])))
        return train(
            module,
            folder,
            until=until,
            every=1,
            validation=Validation(every=2, patience=2),
            validate=lambda: {"MRR@10": values[step_of[inputs_seen[-1]] + 1]},
        )

    history = run(tmp_path / "whole")
    assert [measured["step"] for measured in history.measured] == [2, 4, 6, 8]
    assert (history.best_step, history.worse) == (4, 2)
    with pytest.raises(InterruptedError):
        run(tmp_path / "cut", until=7)
    assert run(tmp_path / "cut") == history


@pytest.mark.parametrize(("patience", "expected"), [(9, 4), (None, 12)], ids=["best", "last"])
def test_the_best_or_the_last_weights_are_kept(tmp_path: Path, patience: int | None, expected: int):
    module, snapshots = Regression(), []

    def validate() -> dict[str, float]:
        snapshots.append([p.detach().clone() for p in module.parameters()])
        return {"MRR@10": {2: 2.0, 3: float("nan")}.get(len(snapshots), 1.0)}

    validation = Validation(every=2, patience=patience)
    train(module, tmp_path, validation=validation, validate=validate)
    kept_weights = snapshots[expected // 2 - 1]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), kept_weights, strict=True))


def test_a_notice_causes_one_checkpoint_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "NOTICE_INTERVAL_S", -1.0)
    answers = iter([False, False, True, True, True, *[False] * STEPS])
    checkpoints: list[list[int]] = []

    def notice() -> bool:
        checkpoints.append(steps_in(tmp_path))
        return next(answers)

    train(Regression(), tmp_path, every=100, notice=notice)
    assert len(checkpoints) == STEPS
    assert checkpoints[2] == []
    assert checkpoints[3] == [3]
    assert steps_in(tmp_path) == [3, STEPS]


@pytest.mark.parametrize("noticed", [False, True])
def test_a_run_that_stops_early_stays_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool):
    """It has a checkpoint of its last step, also if a notice arrives in that step."""
    monkeypatch.setattr(loop, "NOTICE_INTERVAL_S", -1.0)
    notices = iter([False] * 5 + [noticed])
    stopped, resumed = Regression(), Regression()
    options = {"every": 100, "notice": lambda: next(notices)}
    history = train(stopped, tmp_path, **measuring(0.5, 0.4, 0.3), **options)
    assert steps_in(tmp_path) == [2, 6]  # the best one, and the last one
    assert train(resumed, tmp_path, until=0, every=100, **measuring()) == history
    assert same(stopped, resumed)
