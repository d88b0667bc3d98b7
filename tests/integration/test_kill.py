"""kill -9 of the driver during train, then during encode: a second run gives the undisturbed result."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import ray

import tiny
from scalingnote.core.config import load
from scalingnote.encode.encoder import Encoder
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.storage import arrow
from tiny_run import run_here, write_config

pytestmark = pytest.mark.slow


def command(config: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Return the command of a driver that joins the cluster of the session, which outlives the driver."""
    return [
        *(str(Path(sys.executable).with_name("scalingnote")), "run", str(config), "--until", "encode"),
        *("--set", f"run_dir={run_dir}", "--set", f"address={ray.get_runtime_context().gcs_address}"),
        *(word for override in overrides for word in ("--set", override)),
    ]


def kill_when(ready: Callable[[], bool], arguments: list[str]) -> None:
    """Start a driver, and SIGKILL it as soon as `ready` returns true; it must not end before that."""
    driver = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
        while not ready():
            assert driver.poll() is None, "the driver ended before it could be killed"
            assert time.monotonic() < deadline, "nothing to kill within 200 s"
            time.sleep(0.02)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()


def count(run_dir: Path, pattern: str) -> int:
    return len(list(run_dir.glob(pattern)))


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(600)
def test_a_killed_driver_loses_and_repeats_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    config = write_config(tmp_path)
    # The place of training does not change its result.
    shorter, inside = "train.epochs=4", "train.resources.workers=0"
    undisturbed = load(RunConfig, [config], [f"run_dir={tmp_path / 'undisturbed'}", shorter, inside])
    expected = run_here(undisturbed, until="train")

    run_dir = tmp_path / "killed"
    killed = load(RunConfig, [config], [f"run_dir={run_dir}", shorter, inside])
    for stage in ("prepare", "planner", "collect"):  # other tests kill these stages
        shutil.copytree(tmp_path / "undisturbed" / stage, run_dir / stage)
    checkpoints = "train/*/_work/checkpoints/*/checkpoint.json"
    kill_when(lambda: count(run_dir, checkpoints) >= 1, command(config, run_dir, shorter))
    assert count(run_dir, "train/*/manifest.json") == 0
    logger = logging.getLogger("scalingnote")
    monkeypatch.setattr(
        logger, "handlers", [*logger.handlers, caplog.handler]
    )  # a driver turns propagation off
    caplog.set_level(logging.INFO, logger="scalingnote")
    run_here(killed, until="train")
    assert "resuming at step " in caplog.text
    caplog.clear()
    parts = "encode/*/_work/parts/*.json"
    kill_when(lambda: count(run_dir, parts) >= 3, command(config, run_dir, shorter))
    assert count(run_dir, "encode/*/manifest.json") == 0
    report = run_here(killed)["report"].read_json("report.json")
    assert "train: finished before" in caplog.text
    assert "resuming: " in caplog.text

    for kind in ("triplets", "dual_encoder"):
        assert pipeline.locate(killed, kind).digest == expected[kind].digest
    encoded = pipeline.locate(killed, "embeddings").table("embeddings", ["doc_id", "summary"])
    assert encoded["doc_id"].to_pylist() == [row["doc_id"] for row in tiny.document_rows()]
    encoder = Encoder.load(expected["dual_encoder"].directory("document"))
    direct, _ = encoder.encode_rows(expected["dataset"].table("documents"))
    stored_vectors = arrow.to_numpy(encoded["summary"])
    np.testing.assert_allclose(
        stored_vectors, arrow.l2_normalize(direct["summary"]), rtol=1e-2, atol=2e-3
    )  # float16

    assert set(report["methods"]) == {"scalingdual", "scalingdual (index)", "bm25"}
    assert report["methods"]["bm25"]["R@10"] > 0.9  # each query contains the title of its document
    assert report["index"]["recall@10"] > 0.9
    assert (tmp_path / "killed" / "report.html").exists()
