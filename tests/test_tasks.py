"""Work handed to Ray: what the cluster could never do is refused, the rest is done in order, and again."""

import os
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from in_process import without_ray
from scalingnote import cluster
from scalingnote.config import Resources
from scalingnote.encode.config import Fleet
from scalingnote.errors import ConfigError, ScalingNoteError
from scalingnote.train.config import Ranks

GIB = 2.0**30
NODES = [{"CPU": 8.0, "GPU": 1.0, "memory": 32 * GIB}, {"CPU": 8.0, "memory": 8 * GIB}, {"CPU": 8.0}]


def of_nodes(patch: pytest.MonkeyPatch, nodes: list[dict[str, float]], *, gpu: str | None = None) -> None:
    """Have Ray tell of these, where those with a GPU have the label `gpu`; this process runs on another."""
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
def test_what_no_cluster_of_these_nodes_could_do_is_refused(
    resources: Resources, task_cpus: int, says: str, monkeypatch: pytest.MonkeyPatch
):
    of_nodes(monkeypatch, NODES)
    if not says:
        cluster.check_resources(resources, knob="teacher.resources", task_cpus=task_cpus)
        return
    with pytest.raises(ConfigError, match=says):
        cluster.check_resources_early(resources, knob="teacher.resources", task_cpus=task_cpus)


@pytest.mark.parametrize(("own", "says"), [({"CPU": 8.0}, "asks for a GPU of this machine"), (NODES[0], "")])
def test_a_driver_that_trains_on_a_gpu_has_one(
    own: dict[str, float], says: str, monkeypatch: pytest.MonkeyPatch
):
    of_nodes(monkeypatch, NODES)
    monkeypatch.setattr(cluster, "_own_node", lambda: {"NodeID": "own", "Resources": own})
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        cluster.check_resources(Ranks(workers=0, gpus_per_worker=1), knob="train.resources")


def test_nodes_that_come_when_asked_for_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    wanted = Resources(workers=2, cpus_per_worker=4, gpus_per_worker=1)
    monkeypatch.setattr(cluster, "_nodes_wait_s", 30.0)
    monkeypatch.setattr(cluster, "NODE_POLL_INTERVAL_S", 0.0)
    of_nodes(monkeypatch, NODES)
    cluster.check_resources_early(wanted, knob="train.resources")  # it is not needed yet

    def ask(bundles: list[Any]) -> None:
        asked.append(bundles)
        of_nodes(monkeypatch, [*NODES, {"CPU": 8.0, "GPU": 1.0}])

    monkeypatch.setattr(cluster, "_request_nodes", ask)
    cluster.check_resources(wanted, knob="train.resources")
    assert asked == [[{"CPU": 4.0, "GPU": 1.0}] * 2, []]  # and no longer than they are waited for
    monkeypatch.setattr(cluster, "_nodes_wait_s", 0.01)
    with pytest.raises(ConfigError, match=r"asks for 3 GPU, the cluster has 2.*none came in 0\.01 s"):
        cluster.check_resources(wanted.model_copy(update={"workers": 3}), knob="train.resources")


def test_the_workers_are_those_that_the_nodes_have_room_for(monkeypatch: pytest.MonkeyPatch):
    of_nodes(monkeypatch, NODES)
    assert cluster.workers(Resources()) == 24
    assert cluster.workers(Resources(workers=3)) == 3
    assert cluster.workers(Resources(cpus_per_worker=5)) == 3
    assert cluster.workers(Resources(memory_per_worker=4)) == 8 + 2
    assert cluster.with_memory(Resources(), 4 << 30).workers == 8 + 2
    assert cluster.with_memory(Resources(), 64 << 30).workers == 1  # it may do with less
    assert cluster.with_memory(Resources(workers=3), 64 << 30).workers == 3
    assert cluster.workers(Resources(gpus_per_worker=1)) == 1
    assert cluster.workers(Resources(gpus_per_worker=2)) == 1  # of which the check says that none fits


def test_work_of_cpus_keeps_off_nodes_with_gpus(monkeypatch: pytest.MonkeyPatch):
    selector = {"label_selector": {"ray.io/accelerator-type": "!in(H100)"}}
    on_cpus = {"num_cpus": 1.0, "num_gpus": 0}
    of_nodes(monkeypatch, NODES, gpu="H100")
    assert cluster.actor_options(Resources()) == on_cpus | selector
    assert cluster.workers(Resources()) == 16
    with_gpu = cluster.actor_options(Resources(gpus_per_worker=1, memory_per_worker=2))
    assert with_gpu == {"num_cpus": 1.0, "num_gpus": 1.0, "memory": 2 * GIB}
    of_nodes(monkeypatch, NODES[:1], gpu="H100")  # no other node can do it
    assert cluster.actor_options(Resources()) == on_cpus
    of_driver = [NODES[0], {"CPU": 1.0}]  # the second one's CPU is the driver's
    of_nodes(monkeypatch, of_driver, gpu="H100")
    monkeypatch.setattr(cluster, "_own_node", lambda: {"NodeID": "1", "Resources": {}})
    assert cluster.actor_options(Resources()) == on_cpus
    of_nodes(monkeypatch, NODES)  # without a label there is nothing to select by
    assert cluster.actor_options(Resources()) == on_cpus


@pytest.mark.usefixtures("cluster")
def test_no_more_items_are_worked_on_than_there_are_workers_and_they_come_in_order():
    def stay(number: int) -> tuple[int, float, float]:  # in here, since workers do not import tests
        began = time.time()
        time.sleep(0.4 if number == 0 else 0.1)
        return number, began, time.time()

    found = list(cluster.map_tasks_in_order(stay, range(6), Resources(workers=2, cpus_per_worker=0.25)))
    assert [number for number, _, _ in found] == list(range(6))
    together = [sum(began <= at < ended for _, began, ended in found) for _, at, _ in found]
    assert max(together) <= 2


def test_what_there_is_no_worker_for_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def begin(number: int, *, folder: Path) -> int:
        (folder / str(number)).touch()
        return number

    without_ray(monkeypatch)
    found = cluster.map_tasks_in_order(partial(begin, folder=tmp_path), range(6), Resources(workers=2))
    assert next(found) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}
    assert list(found) == [1, 2, 3, 4, 5]


def test_the_driver_holds_a_bounded_number_of_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def begin(number: int, *, folder: Path) -> int:
        (folder / str(number)).touch()
        return number

    without_ray(monkeypatch)
    monkeypatch.setattr(cluster, "MAX_TASKS_IN_FLIGHT", 3)
    done = cluster.map_tasks(partial(begin, folder=tmp_path), range(9))
    first = next(done)
    assert len(list(tmp_path.iterdir())) <= 4  # three, and the one in place of the first
    assert sorted([first, *done]) == list(range(9))


@pytest.mark.usefixtures("cluster")
def test_what_storage_refuses_for_a_moment_is_done_again(tmp_path: Path):
    def fail_twice(number: int, *, folder: Path) -> int:
        tries = len(list(folder.glob(f"{number}-*")))
        (folder / f"{number}-{tries}").touch()
        if tries < 2:
            raise OSError("slow down")
        return number

    for name, run in (
        ("each", cluster.map_tasks),
        ("in_order", partial(cluster.map_tasks_in_order, resources=Resources())),
    ):
        folder = tmp_path / name
        folder.mkdir()
        assert sorted(run(partial(fail_twice, folder=folder), [1, 2])) == [1, 2]
        assert len(list(folder.iterdir())) == 6


@pytest.mark.usefixtures("cluster")
def test_an_item_whose_process_ends_is_done_by_another_actor(tmp_path: Path):
    def end_once(item: tuple[int], *, folder: Path) -> int:
        (number,) = item
        if number == 1:
            with suppress(FileExistsError):
                (folder / "ended").touch(exist_ok=False)
                os._exit(1)
        return number

    work = partial(end_once, folder=tmp_path)
    found = cluster.map_loaded(work, [(number,) for number in range(5)], Resources(workers=2))
    assert sorted(found) == list(range(5))
    assert (tmp_path / "ended").exists()


@pytest.mark.usefixtures("cluster")
def test_an_item_that_ends_every_process_ends_the_stage(monkeypatch: pytest.MonkeyPatch):
    def end(item: tuple[int]) -> int:
        return os._exit(1) if item == (1,) else item[0]

    def refuse() -> Any:
        raise ConfigError("not at all")

    monkeypatch.setattr(cluster, "ATTEMPTS", 2)
    with pytest.raises(ScalingNoteError, match=r"item \(1,\) ended its process, 2 times tried"):
        list(cluster.map_loaded(end, [(0,), (1,)], Resources(workers=1)))
    with pytest.raises(ConfigError, match="not at all"):
        list(cluster.map_loaded(cluster.Loaded(refuse), [(0,)], Resources(workers=1)))


def test_an_actor_that_lost_its_work_between_two_items_starts_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "start_again", lambda: sys.exit("again"))
    actor = cluster._Mapper()
    with pytest.raises(SystemExit, match="again"):
        actor.map(7)
    actor.start(str)
    assert actor.map(7) == "7"


def test_work_that_is_loaded_goes_only_to_actors_that_run(monkeypatch: pytest.MonkeyPatch):
    """One of two actors never starts, as where there is no node for it: the other does all items."""

    class Actor:
        def __init__(self, number: int) -> None:
            self._number = number

        @property
        def start(self) -> "Actor":
            return self

        def options(self, **_: Any) -> "Actor":
            return self

        def remote(self, work: Any) -> str:
            assert work is str
            return f"start {self._number}"

        @property
        def map(self) -> Any:
            return Item()

    class Item:
        def remote(self, item: int) -> str:
            return f"item {item}"

    class Made:
        numbers = iter(range(2))

        def remote(self) -> Actor:
            return Actor(next(self.numbers))

    def wait(references: list[str]) -> tuple[list[str], list[str]]:
        ready = [reference for reference in references if reference != "start 0"]
        return ready[:1], references

    monkeypatch.setattr(cluster, "actor_options", lambda _: {})
    for name, value in {
        "remote": lambda **_: lambda _: Made(),
        "put": lambda value: value,
        "wait": wait,
        "get": lambda reference: reference,
        "kill": lambda _: None,
    }.items():
        monkeypatch.setattr(ray, name, value)
    found = list(cluster.map_loaded(str, [7, 8, 9], Resources(workers=2)))
    assert sorted(found) == ["item 7", "item 8", "item 9"]
