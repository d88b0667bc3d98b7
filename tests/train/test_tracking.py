import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scalingnote.core.errors import ConfigError
from scalingnote.train import loop
from scalingnote.train.config import Tracking
from scalingnote.train.loop import TensorBoard, build_trackers, events_folder


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in found.Scalars(name)]


def test_events_lie_beside_the_artifact_in_the_runs_folder():
    assert events_folder("/runs/demo/train/abc123") == "/runs/demo/tensorboard/train/abc123"
    assert events_folder("s3://bucket/demo/distill/abc/") == "s3://bucket/demo/tensorboard/distill/abc"


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path):
    [board] = build_trackers(Tracking(), str(tmp_path), "train-abc")
    for step in range(3):
        board.log(step, {"loss": 1 / (step + 1), "R@10": 0.25})
    board.close()
    assert scalars(tmp_path, "loss") == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))]
    assert [value for _, value in scalars(tmp_path, "R@10")] == [0.25] * 3


def test_a_resumed_run_hides_the_steps_after_its_checkpoint(tmp_path: Path):
    killed, resumed = TensorBoard(str(tmp_path)), TensorBoard(str(tmp_path))
    for step in range(8):
        killed.log(step, {"loss": 1.0})
    killed.close()
    time.sleep(1)  # file names begin with seconds, and are read in their order
    for step in range(4, 10):
        resumed.log(step, {"loss": 2.0})
    resumed.close()
    assert scalars(tmp_path, "loss") == [(step, 1.0 if step < 4 else 2.0) for step in range(10)]


def test_a_remote_folder_gets_its_files_while_training_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop, "_UPLOAD_INTERVAL_S", 0.0)
    board = TensorBoard(f"file://{tmp_path}/events")
    board.log(0, {"loss": 1.0})
    assert scalars(tmp_path / "events", "loss") == [(0, 1.0)]
    board.log(1, {"loss": 2.0})
    board.close()
    assert scalars(tmp_path / "events", "loss") == [(0, 1.0), (1, 2.0)]


def test_nothing_logged_leaves_no_file(tmp_path: Path):
    TensorBoard(str(tmp_path / "none")).close()
    assert not (tmp_path / "none").exists()


def test_wandb_is_told_under_the_runs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append(("finish",))
    )

    def init(**kwargs):
        calls.append((kwargs["project"], kwargs["name"], kwargs["id"], kwargs["resume"]))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    _, told = build_trackers(Tracking(wandb="papers"), str(tmp_path), "train/abc")
    told.log(7, {"loss": 1.0})
    told.close()
    assert calls == [("papers", "train/abc", "train-abc", "allow"), (7, {"loss": 1.0}), ("finish",)]


class FakeClient:
    """As much of an MLflow server as is asked."""

    experiments: dict[str, str]
    runs: dict[str, str]

    def __init__(self) -> None:
        self.calls = CALLS

    def get_experiment_by_name(self, name: str):
        return SimpleNamespace(experiment_id="e1") if ("experiment", name) in CALLS else None

    def create_experiment(self, name: str) -> str:
        CALLS.append(("experiment", name))
        return "e1"

    def search_runs(self, experiments: list[str], filter_string: str, max_results: int):
        known = [call[1] for call in CALLS if call[0] == "run"]
        name = filter_string.split("'")[1]
        return [SimpleNamespace(info=SimpleNamespace(run_id=name))] if name in known else []

    def create_run(self, experiment: str, run_name: str):
        CALLS.append(("run", run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def update_run(self, run: str, status: str) -> None:
        CALLS.append((status, run))

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        CALLS.append((run, name, value, step))

    def set_terminated(self, run: str) -> None:
        CALLS.append(("terminated", run))


CALLS: list[tuple] = []


def test_mlflow_goes_on_with_the_run_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    CALLS.clear()
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=FakeClient))
    for step in (1, 2):
        _, told = build_trackers(Tracking(mlflow="towers"), str(tmp_path), "train-abc")
        told.log(step, {"R@10": 0.5})
        told.close()
    assert [call[0] for call in CALLS].count("run") == 1
    assert ("train-abc", "R_at_10", 0.5, 2) in CALLS
    assert CALLS[-1] == ("terminated", "train-abc")


@pytest.mark.parametrize("knob", ["wandb", "mlflow"])
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knob: str
):
    monkeypatch.setitem(sys.modules, knob, None)
    with pytest.raises(ConfigError, match=rf"tracking.{knob} needs .* pip install 'scalingnote\[track\]'"):
        build_trackers(Tracking(**{knob: "x"}), str(tmp_path), "train")
