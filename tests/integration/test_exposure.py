"""A run that trains, and a service without keys, started as from the shell: no listener is an open door."""

import shutil
import sys
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from benchmarks import doors, exposure
from scalingnote.config import load
from scalingnote.run_config import RunConfig
from tiny_run import run_here, write_config

COMMAND = [sys.executable, "-m", "scalingnote.cli"]


@pytest.fixture(scope="module")
def network() -> str:
    try:
        return exposure.network_address()
    except SystemExit as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def finished(config: Path) -> Path:
    """The directory of a run that may be served."""
    folder = config.parent / "finished"
    knobs = [f"run_dir={folder}", "train.resources.workers=0", "train.epochs=1"]
    run_here(load(RunConfig, [config], knobs), until="index")
    return folder


def answers(process: psutil.Process, network: str) -> list[exposure.Row]:
    """Of every listener; a Ray client from the network is asked, too, and finds nothing to connect to."""
    rows = exposure.examine(process, network, client_s=5)
    assert {"gcs_server", "raylet", "a Ray client"} <= {row["process"] for row in rows}
    assert rows[-1]["from the network"] == "closed"
    return rows


@pytest.mark.timeout(600)  # of a busy machine
def test_a_run_that_trains_opens_no_door(config: Path, finished: Path, network: str, tmp_path: Path):
    for stage in ("prepare", "planner", "collect"):
        shutil.copytree(finished / stage, tmp_path / stage)
    knobs = [f"run_dir={tmp_path}", "train.epochs=100000", "train.checkpoint_every=100000"]
    words = [*COMMAND, "run", str(config), "--only", "train"]
    words += [word for knob in knobs for word in ("--set", knob)]
    with exposure.running(words, tmp_path, exposure.trains) as process:
        rows = answers(process, network)
    assert {row["from the network"] for row in rows} == {"closed"}
    # Ranks send each other gradients there; what they meet at is a file.
    silent = [row for row in rows if row["from loopback"] == "silent"]
    assert {row["process"].partition(".")[0] for row in silent} == {"ray::RayTrainWorker"}
    assert not exposure.count(rows, "from loopback", "OPEN")


@pytest.mark.timeout(600)
def test_a_service_without_keys_answers_this_machine_alone(finished: Path, network: str, tmp_path: Path):
    words = [*COMMAND, "serve", "--run", str(finished), "--set", "serve.port=0"]
    with exposure.running(words, tmp_path, exposure.serves) as process:
        rows = answers(process, network)
    assert {row["from the network"] for row in rows} <= {"closed", "refused", "harmless"}
    proxies = [row for row in rows if row["from loopback"] == "OPEN"]
    assert [(row["process"], row["from the network"]) for row in proxies] == [("ray::ProxyActor", "closed")]


def test_a_store_that_asks_for_no_token_is_noticed(network: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "ANSWER_S", 0.5)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert doors.ask(network, store.port) == "silent"  # as Ray Train's own would be: on every interface
