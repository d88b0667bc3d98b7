"""A training run, started like from the shell, has no listener that the network can reach.

tests/serve checks services, which it starts anyway.
"""

import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import listeners
from scalingnote.core.config import load
from scalingnote.run.config import RunConfig
from tiny_run import run_here, write_config

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "scalingnote.cli.main"]


@pytest.fixture(scope="module")
def network() -> str:
    try:
        return listeners.network_address()
    except SystemExit as reason:
        pytest.skip(str(reason))


@pytest.mark.timeout(600)  # for a busy machine
def test_a_training_run_opens_no_port_to_the_network(network: str, tmp_path: Path):
    config = write_config(tmp_path)
    knobs = [f"run_dir={tmp_path}", "train.epochs=100000", "train.checkpoint_every=100000"]
    run_here(load(RunConfig, [config], knobs), until="collect")
    words = [*COMMAND, "run", str(config), "--only", "train"]
    words += [word for knob in knobs for word in ("--set", knob)]
    quick = {"RAY_worker_niceness": "0"}
    with listeners.running(words, tmp_path, listeners.trains, ray=quick) as process:
        rows = listeners.examine(process, network, client_s=5)
    assert {"gcs_server", "raylet", "a Ray client"} <= {row["process"] for row in rows}
    assert {row["from the network"] for row in rows} == {"closed"}
    # Ranks send gradients to each other there; their rendezvous is a file.
    silent = [row for row in rows if row["from loopback"] == "silent"]
    assert {row["process"].partition(".")[0] for row in silent} == {"ray::RayTrainWorker"}
    assert not [row for row in rows if row["from loopback"] == "OPEN"]


def test_a_store_without_a_token_is_detected(network: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listeners, "ANSWER_S", 0.5)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert (
        listeners.ask(network, store.port) == "silent"
    )  # it listens on all interfaces, like the store of Ray Train
