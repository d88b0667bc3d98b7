"""A cluster with simulated GPUs: nodes leave and join during encode and train, and no work is repeated."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import elastic_driver
import numpy as np
import psutil
import pytest
import yaml
from elastic_driver import CONFIG, groups, parents, worlds
from ray.cluster_utils import Cluster

import tiny
from in_process import without_ray
from scalingnote.models import dual_encoder
from scalingnote.models.backbone import train_tokenizer
from scalingnote.storage.artifact import Draft, open_artifact
from scalingnote.train import job
from scalingnote.train.config import DataAccess, Ranks

pytestmark = pytest.mark.slow

ROWS_PER_PART = 4
# Ray's default intervals, of seconds up to a minute, are for clusters of many nodes.
INTERVALS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2",  # a wait for the resources of a lost node
}


# Lists that an autoscaler requires in its configuration.
UNUSED_LISTS = (
    *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands"),
    *("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Start two nodes of two CPUs and one simulated GPU each, and a head without any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        for name, value in INTERVALS.items():
            patch.setenv(name, value)
        path = [str(Path(__file__).parent), str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))  # workers import the driver's file
        head = {"num_cpus": 0, "include_dashboard": False}
        started = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            started.add_node(num_cpus=2, num_gpus=1)
        patch.setenv("RAY_ADDRESS", started.address)
        yield started
        started.shutdown()


@pytest.fixture
def autoscaled(tmp_path: Path) -> Iterator[None]:
    """Start a head without GPUs; its autoscaler starts up to two nodes with one GPU each on demand."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    temp_folder = tempfile.mkdtemp(prefix="sn-", dir="/tmp")  # Unix sockets have short names
    provider = {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}", "use_node_id_as_ip": True}
    provider |= {"disable_node_updaters": True, "disable_launch_config_check": True}
    gpu = {"CPU": 2, "GPU": 1, "object_store_memory": 10**8}
    description = {
        "cluster_name": "grown",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
        "provider": provider,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": gpu, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in UNUSED_LISTS},
    }
    config_file = tmp_path / "autoscaler.yaml"
    config_file.write_text(yaml.safe_dump(description))
    command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--num-cpus=1"]
    command += [f"--port={port}", f"--autoscaling-config={config_file}", f"--temp-dir={temp_folder}"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    path = [str(Path(__file__).parent), str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
    with pytest.MonkeyPatch.context() as patch, open(f"{temp_folder}/head.log", "wb") as log:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        process = psutil.Popen(command, stdout=log, stderr=log)
        patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        try:
            wait_for(lambda: b"Ray runtime started" in Path(log.name).read_bytes(), process)
            yield
        finally:
            end([*process.children(recursive=True), process])
            shutil.rmtree(temp_folder, ignore_errors=True)


def end(family: list[psutil.Process]) -> None:
    """Stop exactly these processes, because other clusters may run on this machine."""
    for kill in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(member)
        _, family = psutil.wait_procs(family, timeout=10)


def kill_node(nodes: Cluster) -> None:
    nodes.remove_node(sorted(nodes.worker_nodes, key=lambda node: node.node_id)[-1], allow_graceful=False)


@pytest.mark.timeout(600)
def test_encoding_survives_a_lost_node_without_repeating_parts(nodes: Cluster, tmp_path: Path):
    tiny_towers(tmp_path)
    parts = lambda: len(list(tmp_path.glob("encoded/_work/parts/*.json")))  # noqa: E731
    with Driver("encode", tmp_path) as process:
        wait_for(lambda: parts() >= 3, process)
        finished = {path.stem for path in tmp_path.glob("encoded/_work/parts/*.json")}
        kill_node(nodes)
        nodes.add_node(num_cpus=2, num_gpus=1)
        assert process.wait(timeout=600) == 0
    embeddings = open_artifact(str(tmp_path / "encoded"), kind="embeddings")
    assert embeddings.table("embeddings", ["doc_id"])["doc_id"].to_pylist() == [
        row["doc_id"] for row in tiny.document_rows()
    ]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(finished) >= 3
    assert len(calls) <= tiny.DOCUMENTS // ROWS_PER_PART + 2, (
        "more than the parts in flight were encoded again"
    )


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("autoscaled")
def test_encoding_starts_with_min_workers_and_uses_new_nodes(tmp_path: Path):
    tiny_towers(tmp_path)
    with Driver("grow", tmp_path) as process:
        code = process.wait(timeout=500)
    assert code == 0, (tmp_path / "grow.log").read_text()
    embeddings = open_artifact(str(tmp_path / "encoded"), kind="embeddings")
    assert embeddings.counts["documents"] == tiny.DOCUMENTS
    assert len(list((tmp_path / "nodes").iterdir())) == 2


@pytest.mark.timeout(600)
def test_training_continues_with_fewer_and_with_more_ranks(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    tiny.triplets(str(tmp_path / "triplets"), dataset)
    with Driver("train", tmp_path) as process:
        wait_for(lambda: newest_checkpoint(tmp_path) > 0, process)
        kill_node(nodes)
        wait_for(lambda: 1 in worlds(tmp_path), process)
        restarted = newest_checkpoint(tmp_path)
        wait_for(lambda: newest_checkpoint(tmp_path) > restarted, process)
        nodes.add_node(num_cpus=2, num_gpus=1)
        assert process.wait(timeout=900) == 0
    assert groups(tmp_path) == [2, 1, 2]
    curve = open_artifact(str(tmp_path / "trained"), kind="dual_encoder").read_json("curve.json")
    without_ray(monkeypatch)
    one_process = CONFIG.model_copy(update={"resources": Ranks(workers=0), "data": DataAccess()})
    expected = job.run(one_process, **parents(tmp_path), output=str(tmp_path / "alone")).read_json(
        "curve.json"
    )
    assert [point["step"] for point in curve] == [point["step"] for point in expected]
    np.testing.assert_allclose(
        [point["loss"] for point in curve], [point["loss"] for point in expected], rtol=0.05, atol=0.02
    )


def newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 before the first."""
    markers = folder.glob("trained/_work/checkpoints/*/checkpoint.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in markers), default=0)


def tiny_towers(folder: Path) -> None:
    """Write a dataset, and a dual encoder that has only a document tower."""
    tiny.dataset(str(folder / "dataset"), rows_per_part=ROWS_PER_PART)
    tokenizer_json = train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    draft = Draft(str(folder / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    tower = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=8, tokenizer_json=tokenizer_json, seed=0
    )
    tower.save(Path(draft.path("document")))
    draft.commit(counts={})


class Driver:
    """A driver of the cluster, which is killed at the end of the block if it still runs."""

    def __init__(self, program: str, folder: Path) -> None:
        self._log = (folder / f"{program}.log").open("wb")
        command = [sys.executable, elastic_driver.__file__, program, str(folder)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 500
    while not ready():
        assert process.poll() is None, f"the process ended with {process.returncode}"
        assert time.monotonic() < deadline, "nothing to interrupt within 500 s"
        time.sleep(0.02)
