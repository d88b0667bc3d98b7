import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scalingnote.core.errors import ConfigError
from scalingnote.train import loop
from scalingnote.train.config import Tracking
from scalingnote.train.loop import TensorBoard, build_trackers, events_folder


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_events_are_in_the_tensorboard_folder_of_the_run():
    assert events_folder("/runs/demo/train/abc123") == "/runs/demo/tensorboard/train/abc123"
    assert events_folder("s3://bucket/demo/distill/abc/") == "s3://bucket/demo/tensorboard/distill/abc"


def test_tensorboard_reads_the_logged_values(tmp_path: Path):
    [board] = build_trackers(Tracking(), str(tmp_path), "train-abc")
    for step in range(3):
        board.log(step, {"loss": 1 / (step + 1), "R@10": 0.25})
    board.close()
    TensorBoard(str(tmp_path / "none")).close()  # a board without values writes no file
    assert not (tmp_path / "none").exists()
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


def test_remote_events_are_uploaded_in_training_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loop, "_UPLOAD_INTERVAL_S", 0.0)
    board = TensorBoard(f"file://{tmp_path}/events")
    board.log(0, {"loss": 1.0})
    assert scalars(tmp_path / "events", "loss") == [(0, 1.0)]
    board.log(1, {"loss": 2.0})
    board.close()
    assert scalars(tmp_path / "events", "loss") == [(0, 1.0), (1, 2.0)]


def test_wandb_receives_numbers_under_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = Mock(Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    _, tracker = build_trackers(Tracking(wandb="papers"), str(tmp_path), "train/abc")
    tracker.log(7, {"loss": 1.0})
    tracker.close()
    arguments = wandb.init.call_args.kwargs
    assert (arguments["project"], arguments["name"], arguments["id"]) == ("papers", "train/abc", "train-abc")
    assert arguments["resume"] == "allow"
    assert wandb.init.return_value.mock_calls == [call.log({"loss": 1.0}, step=7), call.finish()]


def test_mlflow_continues_the_run_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    client = Mock()
    info = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    client.get_experiment_by_name.side_effect = [None, SimpleNamespace(experiment_id="e1")]
    client.create_experiment.return_value, client.create_run.return_value = "e1", info
    client.search_runs.side_effect = [[], [info]]
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda: client))
    for step in (1, 2):
        _, tracker = build_trackers(Tracking(mlflow="towers"), str(tmp_path), "train-abc")
        tracker.log(step, {"R@10": 0.5})
        tracker.close()
    client.create_experiment.assert_called_once_with("towers")
    client.create_run.assert_called_once_with("e1", run_name="train-abc")
    query = call(["e1"], "attributes.run_name = 'train-abc'", max_results=1)
    assert client.search_runs.call_args_list == [query] * 2
    assert client.log_metric.call_args_list == [call("r1", "R_at_10", 0.5, step=step) for step in (1, 2)]
    assert client.update_run.call_args_list == [call("r1", status="RUNNING")] * 2
    assert client.set_terminated.call_args_list == [call("r1")] * 2


@pytest.mark.parametrize("knob", ["wandb", "mlflow"])
def test_the_error_for_a_missing_package_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knob: str
):
    monkeypatch.setitem(sys.modules, knob, None)
    with pytest.raises(ConfigError, match=rf"tracking.{knob} needs .* pip install 'scalingnote\[track\]'"):
        build_trackers(Tracking(**{knob: "x"}), str(tmp_path), "train")
