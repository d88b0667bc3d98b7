"""The launch of a stage: how often and on which devices ranks start, and the counts of a run."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from stages import learnt

import tiny
from in_process import without_ray
from scalingnote.core.errors import TrainingError
from scalingnote.fuse.config import FuseConfig
from scalingnote.train import job
from scalingnote.train.config import (
    Ddp,
    DualPooledConfig,
    Fsdp2,
    Losses,
    Ranks,
    Schedule,
    TrainConfig,
)
from scalingnote.train.distillation.config import DistillConfig

CONFIG = TrainConfig(
    query=tiny.query_tower(),
    document=tiny.document_tower(),
    dim=8,
    losses=Losses(matryoshka=(8,)),
    global_batch=8,
    epochs=2,
)
Fit = Callable[..., Any]  # of the arguments of a trainer


def launch(
    patch: pytest.MonkeyPatch, folder: Path, schedule: Schedule, fit: Fit, prepare_rank: Any = print
) -> int:
    """Launch a training run of three steps in `folder` with a trainer that calls `fit` with its arguments."""
    without_ray(patch)
    fake = lambda rank, **args: SimpleNamespace(fit=lambda: SimpleNamespace(return_value=fit(rank, **args)))  # noqa: E731
    patch.setattr(job, "TorchTrainer", fake)
    return job.launch(prepare_rank, job.TrainingRun(schedule, "train", str(folder / "run/train/mark"), 3))


@pytest.mark.parametrize("steps", [6, 18])
def test_a_run_counts_the_pairs_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int):
    def launch(_: Any, run: job.TrainingRun) -> int:
        assert run.steps == 18
        return steps

    without_ray(monkeypatch)
    monkeypatch.setattr(job, "launch", launch)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    towers = job.run(CONFIG, dataset=dataset.uri, triplets=triplets.uri, output=str(tmp_path / "towers"))
    counts = towers.counts
    assert (counts["steps"], counts["pairs"], counts["documents_per_pair"]) == (steps, steps * 8, 2)
    assert 3 < counts["query_tokens"] / counts["pairs"] < 17
    assert 2 * 10 < counts["document_tokens"] / counts["pairs"] <= 2 * 40


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (Ranks(workers=4, min_workers=2), ((2, 4), 2)),
        (Ranks(workers=4), (4, 4)),
        (Ranks(workers=4, min_workers=4), (4, 4)),
    ],
)
def test_an_elastic_group_has_from_min_workers_to_workers_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks, expected: Any
):
    requested = []

    def fit(_: Any, *, scaling_config: ScalingConfig, **__: Any) -> int:
        requested.append(scaling_config.num_workers)
        return 3

    monkeypatch.setattr(job.cluster, "is_private", lambda: False)
    monkeypatch.setattr(
        job.cluster, "check_resources", lambda least, *, knob: requested.append(least.workers)
    )
    schedule = CONFIG.model_copy(update={"global_batch": 24, "resources": ranks})
    assert launch(monkeypatch, tmp_path, schedule, fit) == 3
    assert tuple(requested[::-1]) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resources": {"workers": 2, "min_workers": 3}}, "min_workers=3 is above workers=2"),
        (
            {"global_batch": 32, "resources": {"workers": 4, "min_workers": 2}},
            "global_batch 32 does not divide over 3 workers: a multiple of 12 does",
        ),
        (
            {"global_batch": 2, "resources": {"min_workers": 1}, "strategy": {"kind": "deepspeed"}},
            "fits one number of workers only",
        ),
    ],
)
def test_invalid_elastic_groups_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        Schedule.model_validate(settings)


@pytest.mark.parametrize("stage", [TrainConfig, DistillConfig, FuseConfig, DualPooledConfig])
def test_the_workers_of_a_stage_restart_max_failures_times(
    stage: type[Schedule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_: Any, *, run_config: RunConfig, **__: Any) -> int:
        assert run_config.failure_config.max_failures == 5
        raise TrainingFailedError("the node is gone")

    with pytest.raises(TrainingError, match="training failed after 5 restarts: the node is gone"):
        launch(monkeypatch, tmp_path, stage(max_failures=5), fail)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_without_memory_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int):
    tries = []

    def restart(rank: Callable[[], Any], **_: Any) -> Any:
        """Start the group again in the same way as Ray Train."""
        for attempt in range(1 + restarts):
            try:
                return rank()
            except torch.OutOfMemoryError:
                if attempt == restarts:
                    raise TrainingFailedError("worker failed") from None
        raise AssertionError

    def batches(step: int) -> None:
        tries.append(step)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def prepare_rank(rank: int, world: int) -> job.RankTraining:
        stage = torch.nn.Linear(2, 2)
        return job.RankTraining(stage, lambda: stage, batches, save=lambda *_: None)

    schedule = Schedule(resources=Ranks(workers=0), max_failures=restarts)
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(job.ray.train, "get_context", lambda: context)
    for expected in ([0], [0, 0]):  # the next call by a user tries once more
        with pytest.raises(TrainingError, match=r"too little memory.*CUDA out of memory"):
            launch(monkeypatch, tmp_path, schedule, restart, prepare_rank)
        assert tries == expected


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (0.5, "cuda:0")])
def test_a_driver_that_trains_uses_its_configured_device(gpus: float, device: str):
    schedule = Schedule(resources=Ranks(workers=0, gpus_per_worker=gpus))
    assert job.device_of(schedule) == torch.device(device)


def test_towers_from_scratch_start_with_different_weights():
    stage = job.build_stage_one(CONFIG, {"query": learnt(), "document": learnt()})
    query, document = (tower.backbone.state_dict() for tower in (stage.towers.query, stage.towers.document))
    layers = [name for name in query if "layers.0" in name and query[name].dim() > 1]
    assert layers
    assert not any(torch.equal(query[name], document[name]) for name in layers)


def test_large_models_are_sharded_by_default():
    small, large = 10**8, 2 * 10**9
    assert isinstance(Schedule().strategy_for(large), Fsdp2)
    assert isinstance(Schedule().strategy_for(small), Ddp)
    for settings in ({"resources": {"workers": 1}}, {"strategy": Ddp()}, {"optimizer": {"kind": "row_adam"}}):
        assert isinstance(Schedule(**settings).strategy_for(large), Ddp)


def test_the_interrupt_handler_is_restored_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any, **__: Any) -> int:
        signal.signal(signal.SIGINT, lambda *_: None)
        return 3

    before = signal.getsignal(signal.SIGINT)
    launch(monkeypatch, tmp_path, TrainConfig(), interrupt)
    assert signal.getsignal(signal.SIGINT) is before
