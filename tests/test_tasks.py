"""Work on Ray: impossible resources are an error, parts are processed, and repeated after failures."""

import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from scalingnote.core import cluster
from scalingnote.core.config import Resources
from scalingnote.core.errors import ConfigError, PartsFailedError
from scalingnote.core.parts import PartStage
from scalingnote.encode.config import Fleet
from scalingnote.train.config import Ranks

GIB = 2.0**30
NODES = [{"CPU": 8.0, "GPU": 1.0, "memory": 32 * GIB}, {"CPU": 8.0, "memory": 8 * GIB}, {"CPU": 8.0}]


def of_nodes(patch: pytest.MonkeyPatch, nodes: list[dict[str, float]], *, gpu: str | None = None) -> None:
    """Let Ray report these nodes, with the label `gpu` on those with a GPU; this process runs on another."""
    alive = [{"Alive": True, "NodeID": str(number), "Resources": node} for number, node in enumerate(nodes)]
    for node in alive:
        node["Labels"] = {cluster.ACCELERATOR_LABEL: gpu} if gpu and "GPU" in node["Resources"] else {}
    dead = {"Alive": False, "NodeID": "dead", "Resources": {"CPU": 99.0}, "Labels": {}}
    patch.setattr(cluster, "_own_node", lambda: {"NodeID": "own", "Resources": {}})
    total = {key: sum(node.get(key, 0.0) for node in nodes) for key in ("CPU", "GPU")}
    patch.setattr(ray, "nodes", lambda: [*alive, dead])
    patch.setattr(ray, "cluster_resources", lambda: total)


@pytest.mark.parametrize(
    ("resources", "task_cpus", "says"),
    [
        (Resources(workers=24), 0, ""),
        (Resources(workers=24), 1, r"asks for 25 CPU, the cluster has 24: lower teacher\.resources\.workers"),
        (Resources(workers=2, gpus_per_worker=1), 0, "asks for 2 GPU, the cluster has 1"),
        (Resources(workers=4, cpus_per_worker=5), 0, "4 workers of 5 CPU, the nodes have room for 3"),
        (Resources(workers=1, gpus_per_worker=2), 0, r"2 GPU a worker, no node has that: .*gpus_per_worker"),
        (Resources(workers=3, cpus_per_worker=8), 0, ""),
        (Resources(workers=2, cpus_per_worker=9), 0, r"9 CPU a worker, no node has that: .*cpus_per_worker"),
        (Resources(workers=1, cpus_per_worker=8, gpus_per_worker=1), 0, ""),
        (Resources(workers=5, memory_per_worker=8), 0, ""),
        (
            Resources(workers=6, memory_per_worker=8),
            0,
            "6 workers of 1 CPU and 8 GiB .*, .* room for 5",
        ),
        (Resources(memory_per_worker=33), 0, r"33 GiB of memory a worker, no node .*memory_per_worker"),
        (Resources(), 24, "asks for 25 CPU"),
        (Fleet(workers=9, gpus_per_worker=1, min_workers=1), 0, ""),
        (Fleet(workers=9, gpus_per_worker=1, min_workers=2), 0, r"asks for 2 GPU.*lower .*\.min_workers"),
    ],
)
def test_resources_that_no_node_has_are_an_error(
    resources: Resources, task_cpus: int, says: str, monkeypatch: pytest.MonkeyPatch
):
    of_nodes(monkeypatch, NODES)
    if not says:
        cluster.check_resources(resources, knob="teacher.resources", task_cpus=task_cpus)
        return
    with pytest.raises(ConfigError, match=says):
        cluster.check_resources_early(resources, knob="teacher.resources", task_cpus=task_cpus)


@pytest.mark.parametrize(("own", "says"), [({"CPU": 8.0}, "asks for a GPU of this machine"), (NODES[0], "")])
def test_a_driver_that_trains_on_a_gpu_needs_one(
    own: dict[str, float], says: str, monkeypatch: pytest.MonkeyPatch
):
    of_nodes(monkeypatch, NODES)
    monkeypatch.setattr(cluster, "_own_node", lambda: {"NodeID": "own", "Resources": own})
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        cluster.check_resources(Ranks(workers=0, gpus_per_worker=1), knob="train.resources")


def test_missing_nodes_are_requested_and_awaited(monkeypatch: pytest.MonkeyPatch):
    requests: list[Any] = []
    resources = Resources(workers=2, cpus_per_worker=4, gpus_per_worker=1)
    monkeypatch.setattr(cluster, "_nodes_wait_s", 30.0)
    monkeypatch.setattr(cluster, "NODE_POLL_INTERVAL_S", 0.0)
    of_nodes(monkeypatch, NODES)
    cluster.check_resources_early(resources, knob="train.resources")  # the nodes are not needed yet

    def ask(bundles: list[Any]) -> None:
        requests.append(bundles)
        of_nodes(monkeypatch, [*NODES, {"CPU": 8.0, "GPU": 1.0}])

    monkeypatch.setattr(cluster, "_request_nodes", ask)
    cluster.check_resources(resources, knob="train.resources")
    assert requests == [[{"CPU": 4.0, "GPU": 1.0}] * 2, []]  # the request ends with the wait
    monkeypatch.setattr(cluster, "_nodes_wait_s", 0.01)
    with pytest.raises(ConfigError, match=r"asks for 3 GPU, the cluster has 2.*no node started in 0\.01 s"):
        cluster.check_resources(resources.model_copy(update={"workers": 3}), knob="train.resources")


def test_the_number_of_workers_fits_the_nodes(monkeypatch: pytest.MonkeyPatch):
    of_nodes(monkeypatch, NODES)
    assert cluster.workers(Resources()) == 24
    assert cluster.workers(Resources(workers=3)) == 3
    assert cluster.workers(Resources(cpus_per_worker=5)) == 3
    assert cluster.workers(Resources(memory_per_worker=4)) == 8 + 2
    assert cluster.with_memory(Resources(), 4 << 30).workers == 8 + 2
    assert cluster.with_memory(Resources(), 64 << 30).workers == 1  # less memory may suffice
    assert cluster.with_memory(Resources(workers=3), 64 << 30).workers == 3
    assert cluster.workers(Resources(gpus_per_worker=1)) == 1
    assert cluster.workers(Resources(gpus_per_worker=2)) == 1  # check_resources reports that none fits


def test_cpu_work_avoids_nodes_with_gpus(monkeypatch: pytest.MonkeyPatch):
    selector = {"label_selector": {"ray.io/accelerator-type": "!in(H100)"}}
    on_cpus = {"num_cpus": 1.0, "num_gpus": 0}
    of_nodes(monkeypatch, NODES, gpu="H100")
    assert cluster.actor_options(Resources()) == on_cpus | selector
    assert cluster.workers(Resources()) == 16
    with_gpu = cluster.actor_options(Resources(gpus_per_worker=1, memory_per_worker=2))
    assert with_gpu == {"num_cpus": 1.0, "num_gpus": 1.0, "memory": 2 * GIB}
    of_nodes(monkeypatch, NODES[:1], gpu="H100")  # no other node can run it
    assert cluster.actor_options(Resources()) == on_cpus
    of_driver = [NODES[0], {"CPU": 1.0}]  # the second one's CPU is the driver's
    of_nodes(monkeypatch, of_driver, gpu="H100")
    monkeypatch.setattr(cluster, "_own_node", lambda: {"NodeID": "1", "Resources": {}})
    assert cluster.actor_options(Resources()) == on_cpus
    of_nodes(monkeypatch, NODES)  # without a label no node can be selected
    assert cluster.actor_options(Resources()) == on_cpus


def test_work_in_process_does_not_start_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray starts"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "_in_process", False)
    cluster.connect(cluster.IN_PROCESS)
    cluster.check_resources(Resources(workers=999, gpus_per_worker=8), knob="encode.resources")
    assert sorted(cluster.map_tasks(abs, [-1, -2])) == [1, 2]
    assert list(cluster.map_loaded(PartStage(lambda: abs), [-1], Resources())) == [1]


@pytest.mark.usefixtures("cluster")
def test_the_number_of_running_tasks_is_limited():
    def stay(number: int) -> tuple[int, float, float]:  # in here, since workers do not import tests
        began = time.time()
        time.sleep(0.4 if number == 0 else 0.1)
        return number, began, time.time()

    results = list(cluster.map_tasks(stay, range(6), Resources(workers=2, cpus_per_worker=0.25)))
    assert sorted(number for number, _, _ in results) == list(range(6))
    together = [sum(began <= at < ended for _, began, ended in results) for _, at, _ in results]
    assert max(together) <= 2


@pytest.mark.usefixtures("cluster")
def test_transient_errors_are_retried_and_ours_end_the_stage(tmp_path: Path):
    """An error of storage is transient; one of our errors ends the stage with its own class."""

    def fail(number: int, *, folder: Path, error: Exception, times: int) -> int:
        tries = len(list(folder.glob(f"{number}-*")))
        (folder / f"{number}-{tries}").touch()
        if number == 1 and tries < times:
            raise error
        return number

    flaky = partial(fail, folder=tmp_path, error=OSError("slow down"), times=3)
    assert sorted(cluster.map_tasks(flaky, [1, 2])) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 5
    refusing = partial(fail, folder=tmp_path, error=ConfigError("not at all"), times=99)
    with pytest.raises(ConfigError, match="not at all"):
        list(cluster.map_tasks(refusing, [1, 2]))


@pytest.mark.usefixtures("cluster")
def test_parts_of_lost_actors_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One part ends every process, another only its first one; the others are processed once."""

    def work(number: int) -> int:
        with (tmp_path / f"{number}").open("a") as file:
            file.write("x")
        if number == 3 or (number == 1 and (tmp_path / "1").stat().st_size == 1):
            os._exit(1)
        return number

    monkeypatch.setattr(cluster, "BACKOFF_S", 0.1)
    results = []
    with pytest.raises(PartsFailedError, match=r"1 of 6 parts .*: 3: its process was lost \(2 of 2\)"):
        results.extend(cluster.map_loaded(PartStage(lambda: work), range(6), Resources(workers=2)))
    assert sorted(results) == [0, 1, 2, 4, 5]
    tries = [(tmp_path / f"{number}").stat().st_size for number in range(6)]
    assert tries == [1, 2, 1, 2, 1, 1]


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_starts_late_gets_parts(tmp_path: Path):
    """The second actor loads after the first began a part, which ends when both have begun one."""

    def wait_for(pattern: str, files: int) -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob(pattern))) < files:
            if time.monotonic() > deadline:
                raise TimeoutError(f"less than {files} actors have begun a part")
            time.sleep(0.05)

    def load() -> Any:
        try:
            (tmp_path / "first").mkdir()
        except FileExistsError:
            wait_for("begun-*", 1)

        def work(number: int) -> int:
            (tmp_path / f"begun-{os.getpid()}").touch()
            wait_for("begun-*", 2)
            return number

        return work

    assert sorted(cluster.map_loaded(PartStage(load), range(2), Resources(workers=2))) == [0, 1]
