"""What a run says of itself: counted by the steps that were made."""

import json
import signal
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
from scalingnote.storage import filesystem as fs
from scalingnote.train import job
from scalingnote.train.config import (
    Ddp,
    DualPooledConfig,
    Fsdp2,
    Losses,
    Optimizer,
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


@pytest.mark.parametrize(("measured", "steps"), [([{"step": 4}, {"step": 6}], 6), ([], 18)])
def test_a_run_that_stopped_early_counts_the_pairs_that_it_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[dict[str, int]], steps: int
):
    def launch(worker: Any, settings: dict[str, Any], **_: Any) -> None:
        assert settings["steps"] == 18
        fs.write_bytes(fs.join(settings["output"], "validation.json"), json.dumps(measured).encode())

    without_ray(monkeypatch)
    monkeypatch.setattr(job, "launch", launch)
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    triplets = tiny.triplets(str(tmp_path / "triplets"), dataset)
    made = job.run(CONFIG, dataset=dataset.uri, triplets=triplets.uri, output=str(tmp_path / "towers"))
    counts = made.counts
    assert (counts["steps"], counts["pairs"], counts["documents_per_pair"]) == (steps, steps * 8, 2)
    assert 3 < counts["query_tokens"] / counts["pairs"] < 17
    assert 2 * 10 < counts["document_tokens"] / counts["pairs"] <= 2 * 40


def test_an_elastic_group_has_from_min_workers_to_workers_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, Any] = {}

    class Recording:
        def __init__(self, worker: Any, *, scaling_config: ScalingConfig, **_: Any) -> None:
            asked["ranks"] = scaling_config.num_workers

        def fit(self) -> SimpleNamespace:
            return SimpleNamespace(return_value=None)

    def check(resources: Ranks, *, knob: str) -> None:
        asked["needed"] = resources.workers

    without_ray(monkeypatch)
    monkeypatch.setattr(job, "TorchTrainer", Recording)
    monkeypatch.setattr(job.cluster, "is_private", lambda: False)
    monkeypatch.setattr(job.cluster, "check_resources", check)
    for ranks, expected in (
        (Ranks(workers=4, min_workers=2), ((2, 4), 2)),
        (Ranks(workers=4), (4, 4)),
        (Ranks(workers=4, min_workers=4), (4, 4)),
    ):
        schedule = CONFIG.model_copy(update={"global_batch": 24, "resources": ranks})
        job.launch(lambda _: None, {"work": str(tmp_path)}, schedule=schedule, section="train")
        assert (asked["ranks"], asked["needed"]) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"resources": {"workers": 2, "min_workers": 3}}, "min_workers=3 is above workers=2"),
        (
            {"global_batch": 32, "resources": {"workers": 4, "min_workers": 2}},
            "global_batch 32 does not divide over 3 workers: a multiple of 12 does",
        ),
        (
            {
                "global_batch": 2,
                "resources": {"workers": 2, "min_workers": 1},
                "strategy": {"kind": "deepspeed"},
            },
            "fits one number of workers only",
        ),
    ],
)
def test_an_elastic_group_that_could_not_train_alike_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        Schedule.model_validate(given)


@pytest.mark.parametrize("stage", [TrainConfig, DistillConfig, FuseConfig, DualPooledConfig])
def test_the_workers_of_a_stage_are_started_again_as_often_as_it_says(
    stage: type[Schedule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Failing:
        def __init__(self, worker: Any, *, run_config: RunConfig, **_: Any) -> None:
            assert run_config.failure_config.max_failures == 5

        def fit(self) -> None:
            raise TrainingFailedError("the node is gone")

    without_ray(monkeypatch)
    monkeypatch.setattr(job, "TorchTrainer", Failing)
    with pytest.raises(TrainingError, match="training failed after 5 restarts: the node is gone"):
        job.launch(print, {"work": str(tmp_path)}, schedule=stage(max_failures=5), section="train")


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_without_memory_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
):
    tries = []

    class Restarting:
        """Starts the group again as Ray Train does."""

        def __init__(self, worker: Any, *, train_loop_config: dict[str, Any], **_: Any) -> None:
            self._worker, self._settings = worker, train_loop_config

        def fit(self) -> SimpleNamespace:
            for attempt in range(1 + restarts):
                try:
                    return SimpleNamespace(return_value=self._worker(self._settings))
                except torch.OutOfMemoryError:
                    if attempt == restarts:
                        raise TrainingFailedError("worker failed") from None
            raise AssertionError

    def batches(step: int) -> None:
        tries.append(step)
        raise torch.OutOfMemoryError("CUDA out of memory")

    def worker(settings: dict[str, Any]) -> dict[str, str] | None:
        return job.train_rank(
            torch.nn.Linear(2, 2), batches, build_stage=lambda: torch.nn.Linear(2, 2), schedule=schedule,
            settings=settings, save=lambda *_: None,
        )  # fmt: skip

    schedule = Schedule(resources=Ranks(workers=0), max_failures=restarts)
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    without_ray(monkeypatch)
    monkeypatch.setattr(job.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(job, "TorchTrainer", Restarting)
    output = str(tmp_path / "run" / "train" / "mark")
    settings = {"output": output, "work": f"{output}/_work", "steps": 3}
    for expected in ([0], [0, 0]):  # the next call of a user tries again, once
        with pytest.raises(TrainingError, match=r"too little memory.*CUDA out of memory"):
            job.launch(worker, settings, schedule=schedule, section="train")
        assert tries == expected


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (0.5, "cuda:0")])
def test_a_driver_that_trains_takes_its_configured_device(gpus: float, device: str):
    schedule = Schedule(resources=Ranks(workers=0, gpus_per_worker=gpus))
    assert job.device_of(schedule) == torch.device(device)


def test_towers_from_scratch_start_apart():
    made = job.build_stage_one(CONFIG, {"query": learnt(), "document": learnt()})
    query, document = (tower.backbone.state_dict() for tower in (made.towers.query, made.towers.document))
    layers = [name for name in query if "layers.0" in name and query[name].dim() > 1]
    assert layers
    assert not any(torch.equal(query[name], document[name]) for name in layers)


def test_large_models_are_sharded_where_nothing_else_is_asked_for():
    small, large = 10**8, 2 * 10**9
    assert isinstance(Schedule().strategy_for(large), Fsdp2)
    assert isinstance(Schedule().strategy_for(small), Ddp)
    assert isinstance(Schedule(resources=Ranks(workers=1)).strategy_for(large), Ddp)
    assert isinstance(Schedule(strategy=Ddp()).strategy_for(large), Ddp)
    assert isinstance(Schedule(optimizer=Optimizer(kind="row_adam")).strategy_for(large), Ddp)


def test_ray_trains_interrupt_handler_does_not_outlive_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Interrupting:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def fit(self) -> SimpleNamespace:
            signal.signal(signal.SIGINT, lambda *_: None)
            return SimpleNamespace(return_value=None)

    without_ray(monkeypatch)
    monkeypatch.setattr(job, "TorchTrainer", Interrupting)
    before = signal.getsignal(signal.SIGINT)
    job.launch(print, {"work": str(tmp_path)}, schedule=TrainConfig(), section="train")
    assert signal.getsignal(signal.SIGINT) is before
