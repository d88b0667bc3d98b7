"""A real service with changing settings and a dying searcher: no request is lost."""

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
CALLS = 8  # enough to reach both gateways


@pytest.fixture(scope="module")
def query_tower(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return a table, which starts without torch."""
    return table(f"{tmp_path_factory.mktemp('student')}/student")


Deploy = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def served(cluster: None, index: Artifact, query_tower: Artifact) -> Iterator[tuple[str, Deploy]]:
    """Yield the URL of two gateways with two searchers, and a function that deploys other settings."""
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
    """Wait until a condition holds; the timeout of the test ends the wait."""
    while not holds():
        time.sleep(0.1)


def replicas() -> dict[int, str]:
    """Return the command lines of the processes of all replicas, by process id."""
    lines = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            line = "".join(process.cmdline())
            if "ServeReplica" in line:
                lines[process.pid] = line
    return lines


@contextmanager
def load(url: str) -> Iterator[list[int]]:
    """Search all the time with two clients, and yield the list of their statuses."""
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
    """Return the largest allowed k of the gateways that answer a few calls."""
    return {call(url, "/info")[1]["max_k"] for _ in range(CALLS)}


def health(url: str) -> list[dict[str, Any]]:
    """Return the health reports of the gateways that answer a few calls."""
    return [call(url, "/healthz")[1] for _ in range(CALLS)]


def test_new_limits_restart_no_replica_and_fail_no_request(served: tuple[str, Deploy]):
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


def test_invalid_settings_are_reported_and_change_nothing(served: tuple[str, Deploy]):
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


def test_no_request_fails_when_a_searcher_dies(served: tuple[str, Deploy]):
    url, _ = served
    victim = next(pid for pid, line in replicas().items() if "IndexSearcher" in line)
    with load(url) as statuses:
        os.kill(victim, signal.SIGKILL)
        until(lambda: victim not in replicas() and len(replicas()) == 4)
    assert {*statuses} == {200}


def test_a_read_is_repeated_after_its_replica_died(served: tuple[str, Deploy], tmp_path: Path):
    class Dying:
        async def encode(self, name: str) -> str:
            """Kill the own process in the first call of a name."""
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
    assert call(url, "/dying?name=once")[1].keys() == {"lost"}  # without for_reading
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
    assert handle.process.remote().result() == before  # its event loop still answers

    def is_another() -> bool:
        with suppress(RayActorError):
            return bool(handle.process.remote().result() != before)
        return False

    until(is_another)
    serve.delete("hanging")
