"""A real service whose settings change and whose searcher dies while requests are answered: none is lost."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from pair import table
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ServeDeploySchema
from real_server import call, free_port
from starlette.requests import Request

from scalingnote.core import ray_internals
from scalingnote.serve import launch
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import REPLICA_LOST, WorkerThread, for_reading
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.storage.artifact import Artifact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of a busy machine
K, LESS = 5, 3
SMALL = {"num_cpus": 0.1}
CALLS = 8  # which reach either gateway


@pytest.fixture(scope="module")
def query_tower(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A table, which starts without torch."""
    return table(f"{tmp_path_factory.mktemp('student')}/student")


Deploy = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def served(cluster: None, index: Artifact, query_tower: Artifact) -> Iterator[tuple[str, Deploy]]:
    """The URL of two gateways before two searchers, and `serve deploy` of its file with other settings."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    two, knobs = {"num_replicas": 2}, {"deadline_s": 60, "limits": {"burst": 7}}
    knobs |= {"port": port, "deployments": {"gateway": two, "searcher": two, "encoder": {"num_replicas": 0}}}

    def deploy(user_config: dict[str, Any]) -> None:
        application = {
            "name": launch.APPLICATION_NAME,
            "import_path": "scalingnote.serve.app:build",
            "args": {"index": index.uri, "query_tower": query_tower.uri, "serve": knobs},
            "deployments": [{"name": "Gateway", "user_config": user_config}],
        }
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        ray_internals.serve_client().deploy_apps(schema)

    url = f"http://127.0.0.1:{port}"
    deploy({})
    until(lambda: call(url, "/healthz")[0] == 200)
    yield url, deploy
    serve.delete(launch.APPLICATION_NAME)
    serve.shutdown()


def search(url: str, k: int) -> tuple[int, Any]:
    return call(url, "/search", query="bakoli menura", k=k)


def until(holds: Callable[[], bool]) -> None:
    """Wait for what comes sooner or later; the test's own timeout ends it."""
    while not holds():
        time.sleep(0.1)


def replicas() -> dict[int, str]:
    """What the processes of all replicas are called, by their numbers."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = "".join(process.cmdline())
            if "ServeReplica" in line:
                found[process.pid] = line
    return found


@contextmanager
def load(url: str) -> Iterator[list[int]]:
    """The statuses of a client that searches all the time."""
    statuses: list[int] = []
    stop = False

    def go() -> None:
        while not stop:
            statuses.append(search(url, 1)[0])

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(go) for _ in range(2)]
        try:
            yield statuses
        finally:
            stop = True
    assert all(client.exception() is None for client in clients)


def limits(url: str) -> set[int]:
    """The largest k of the gateways that answer some calls."""
    return {call(url, "/info")[1]["max_k"] for _ in range(CALLS)}


def health(url: str) -> list[dict[str, Any]]:
    """What the gateways that answer some calls say of themselves."""
    return [call(url, "/healthz")[1] for _ in range(CALLS)]


def test_other_limits_restart_no_replica_and_cost_no_request(served: tuple[str, Deploy]):
    url, deploy = served
    assert limits(url) == {100}
    assert search(url, K)[0] == 200
    before = {*replicas()}
    assert len(before) == 4
    with load(url) as statuses:
        deploy({"limits": {"max_k": LESS}, "deadline_s": 59})
        until(lambda: limits(url) == {LESS})
        deploy({})  # back to those of the application
        until(lambda: limits(url) == {100})
        deploy({"limits": {"max_k": LESS}})
        until(lambda: limits(url) == {LESS})
    assert {*statuses} == {200}
    assert search(url, K)[0] == 422
    assert {*replicas()} == before


def test_a_mistake_in_the_settings_changes_nothing_and_is_told(served: tuple[str, Deploy]):
    url, deploy = served
    before, allowed = {*replicas()}, limits(url)
    deploy({"limits": {"max_kk": 1}})
    until(lambda: all(each["silent"] == ["user_config"] for each in health(url)))
    assert {each["status"] for each in health(url)} == {"degraded"}
    assert search(url, 1)[0] == 200
    assert limits(url) == allowed
    deploy({"limits": {"max_k": 50}})
    until(lambda: limits(url) == {50})
    until(lambda: {each["status"] for each in health(url)} == {"ok"})
    assert {*replicas()} == before


def test_a_searcher_that_dies_costs_no_request(served: tuple[str, Deploy]):
    url, _ = served
    victim = next(pid for pid, line in replicas().items() if "IndexSearcher" in line)
    with load(url) as statuses:
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in replicas() and len(replicas()) == 4)
    assert {*statuses} == {200}


def test_what_a_replica_took_before_it_died_is_read_from_another_one(
    served: tuple[str, Deploy], tmp_path: Path
):
    class Dying:
        async def encode(self, name: str) -> str:
            """The first call of a name ends the process that took it."""
            with suppress(FileExistsError):
                (tmp_path / name).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            return name

    class Caller:
        def __init__(self, handle: DeploymentHandle[Any]) -> None:
            self._handles = {"again": for_reading(handle), "once": handle}

        async def __call__(self, request: Request) -> dict[str, str]:
            name = request.query_params["name"]
            try:
                return {"answer": await self._handles[name].encode.remote(name)}
            except REPLICA_LOST as lost:
                return {"lost": type(lost).__name__}

    dying = serve.deployment(Dying).options(num_replicas=2, ray_actor_options=SMALL).bind()
    caller = serve.deployment(Caller).options(ray_actor_options=SMALL).bind(dying)
    serve.run(caller, name="dying", route_prefix="/dying")
    url = served[0]
    assert call(url, "/dying?name=again") == (200, {"answer": "again"})
    assert call(url, "/dying?name=once")[1].keys() == {"lost"}  # as it would be without
    serve.delete("dying")


def test_a_searcher_whose_thread_hangs_is_replaced(served: tuple[str, Deploy], index: Artifact):
    class Hanging(IndexSearcher):
        async def hang(self) -> None:
            self._thread = WorkerThread("searches", limit_s=0.5)
            self._thread.submit(threading.Event().wait)

        async def process(self) -> int:
            return os.getpid()

    often = serve.deployment(Hanging).options(health_check_period_s=0.2, ray_actor_options=SMALL)
    handle = serve.run(often.bind(Catalog(Version.of(index.uri))), name="hanging", route_prefix=None)
    before = handle.process.remote().result()
    handle.hang.remote().result()
    assert handle.process.remote().result() == before  # its event loop answers

    def is_another() -> bool:
        with suppress(RayActorError):
            return bool(handle.process.remote().result() != before)
        return False

    until(is_another)
    serve.delete("hanging")
