"""A cluster whose nodes, with simulated GPUs, leave and join during encode and train: nothing is repeated.

`python -m benchmarks.cluster_faults` and `python -m benchmarks.faults` measure the same many times over.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import elastic_driver
import numpy as np
import pytest
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
# Ray's own intervals, of seconds up to a minute, are for clusters of many nodes.
INTERVALS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2",  # a wait for the resources of a node that is gone
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """Two nodes of two CPUs and one simulated GPU each, and a head without any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        for name, value in INTERVALS.items():
            patch.setenv(name, value)
        path = [str(Path(__file__).parent), str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(path))  # workers import the driver's file
        head = {"num_cpus": 0, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            made.add_node(num_cpus=2, num_gpus=1)
        patch.setenv("RAY_ADDRESS", made.address)
        yield made
        made.shutdown()


def kill_node(nodes: Cluster) -> None:
    nodes.remove_node(sorted(nodes.worker_nodes, key=lambda node: node.node_id)[-1], allow_graceful=False)


@pytest.mark.timeout(600)
def test_encoding_goes_on_without_a_node_and_repeats_no_finished_part(nodes: Cluster, tmp_path: Path):
    tiny_towers(tmp_path)
    parts = lambda: len(list(tmp_path.glob("encoded/_work/parts/*.json")))  # noqa: E731
    with Driver("encode", tmp_path) as process:
        wait_for(lambda: parts() >= 3, process)
        done = {path.stem for path in tmp_path.glob("encoded/_work/parts/*.json")}
        kill_node(nodes)
        nodes.add_node(num_cpus=2, num_gpus=1)
        assert process.wait(timeout=600) == 0
    found = open_artifact(str(tmp_path / "encoded"), kind="embeddings")
    assert found.table("embeddings", ["doc_id"])["doc_id"].to_pylist() == [
        row["doc_id"] for row in tiny.document_rows()
    ]
    encoded = (tmp_path / "calls").read_text().splitlines()
    assert len(done) >= 3
    assert len(encoded) <= tiny.DOCUMENTS // ROWS_PER_PART + 2, (
        "more than the parts in flight were encoded again"
    )


@pytest.mark.timeout(600)
def test_training_goes_on_with_fewer_ranks_and_then_with_more_on_the_same_curve(
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
    alone = CONFIG.model_copy(update={"resources": Ranks(workers=0), "data": DataAccess(stream="never")})
    whole = job.run(alone, **parents(tmp_path), output=str(tmp_path / "alone")).read_json("curve.json")
    assert [at["step"] for at in curve] == [at["step"] for at in whole]
    np.testing.assert_allclose(
        [at["loss"] for at in curve], [at["loss"] for at in whole], rtol=0.05, atol=0.02
    )


def newest_checkpoint(folder: Path) -> int:
    """The step of the newest checkpoint; 0 before the first."""
    markers = folder.glob("trained/_work/checkpoints/*/checkpoint.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in markers), default=0)


def tiny_towers(folder: Path) -> None:
    """A dataset, and a dual encoder that has a document tower alone."""
    tiny.dataset(str(folder / "dataset"), rows_per_part=ROWS_PER_PART)
    learnt = train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    draft = Draft(str(folder / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    made = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=8, tokenizer_json=learnt, seed=0
    )
    made.save(Path(draft.path("document")))
    draft.commit(counts={})


class Driver:
    """A driver of the cluster; killed at the end of the block if it still runs."""

    def __init__(self, what: str, folder: Path) -> None:
        self._log = (folder / f"{what}.log").open("wb")
        command = [sys.executable, elastic_driver.__file__, what, str(folder)]
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
        assert process.poll() is None, f"the driver ended with {process.returncode}"
        assert time.monotonic() < deadline, "nothing to interrupt within 500 s"
        time.sleep(0.02)
