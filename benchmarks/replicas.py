"""Replicas of a service on two nodes of Ray on this machine, to kill under load, and its clients."""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil
from ray import serve
from ray.cluster_utils import Cluster as RayCluster
from ray.serve.schema import ServeDeploySchema

from scalingnote.core import cluster, ray_internals

NODE = "node"  # the fault that kills all replicas of a node at once
NODE_CPUS = 16  # logical: each node can take every replica of the other one
START = "import sys; from scalingnote.cli.commands import _serve; sys.exit(_serve({}, sys.argv[1:]))"
Deploy = Callable[[dict[str, Any]], None]  # a `user_config` of the gateways


class Client:
    """A connection that reconnects when it breaks."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._host, timeout=60)

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request; return status and JSON, or (0, None) if the connection broke."""
        data = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, path, data, {"content-type": "application/json"})
            answer = self._connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return 0, None
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, None

    def settle(self, *, shards: int) -> None:
        """Wait until all shards answer again."""
        for _ in range(600):
            status, health = self("GET", "/healthz")
            if status == 200 and health["status"] == "ok" and health["shards_answered"] == shards:
                return
            time.sleep(0.2)
        raise SystemExit("the service did not come back within two minutes")


@dataclass
class Tally:
    """Counts of the clients' answers. Threads may share one."""

    statuses: Counter[int] = field(default_factory=Counter)
    partial: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    wrong: int = 0  # answers that mix versions, or differ from those of the stated version
    twice: int = 0  # answers with a document twice

    @property
    def errors(self) -> int:
        """Number of requests without an answer."""
        return sum(count for status, count in self.statuses.items() if status not in (200, 404))


@contextmanager
def searches(
    url: str,
    tally: Tally,
    draw: Callable[[], dict[str, Any]],
    *,
    shards: int,
    threads: int,
    is_right: Callable[[dict[str, Any], dict[str, Any]], bool] = lambda body, answer: True,
) -> Iterator[None]:
    """Run clients that search repeatedly: each sends the body from `draw`, and counts the answer."""
    stop = threading.Event()

    def search() -> None:
        client = Client(url)
        while not stop.is_set():
            body = draw()
            status, answer = client("POST", "/search", body)
            tally.statuses[status] += 1
            if status == 200:
                doc_ids = [hit["doc_id"] for hit in answer["results"]]
                tally.twice += len(doc_ids) != len(set(doc_ids))
                tally.partial += answer["shards_answered"] < shards
                tally.degraded.update(answer["degraded"])
                if not is_right(body, answer):
                    tally.wrong += 1
                    print(f"wrong: {json.dumps([body, answer])}", flush=True)

    clients = [threading.Thread(target=search) for _ in range(threads)]
    for each in clients:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in clients:
            each.join()


class Cluster:
    """Two nodes of Ray on this machine; services run on both."""

    def __init__(self) -> None:
        self._nodes = RayCluster(
            initialize_head=True, head_node_args={"num_cpus": NODE_CPUS, "include_dashboard": False}
        )
        self._second: Any = self._nodes.add_node(num_cpus=NODE_CPUS)
        cluster.connect(self._nodes.address)
        self._killed = 0.0
        self.kills: Counter[str] = Counter()

    @contextmanager
    def service(self, settings: dict[str, Any], **served: str) -> Iterator[str]:
        """Run a service like `scalingnote serve`, with artifacts or a run; yield its URL."""
        command = [sys.executable, "-c", START, *(f"{name}={uri!r}" for name, uri in served.items())]
        command += [f"serve.{key}={json.dumps(value)}" for key, value in settings.items()]
        environment = {**os.environ, "RAY_ADDRESS": self._nodes.address}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        try:
            yield next(line for line in process.stdout if line.startswith("http://")).split()[0]
        finally:
            process.terminate()
            process.wait(60)
            serve.shutdown()  # in this process: drop the state of the Serve that ended with the other one

    @contextmanager
    def deployed(self, settings: dict[str, Any], **served: str) -> Iterator[tuple[str, Deploy]]:
        """Run a service like `serve deploy`; yield its URL, and a function that deploys a `user_config`."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")

        def deploy(user_config: dict[str, Any]) -> None:
            application = {
                "name": "scalingnote",
                "import_path": "scalingnote.serve.app:build",
                "args": {**served, "serve": {**settings, "port": port}},
                "deployments": [{"name": "Gateway", "user_config": user_config}],
            }
            schema = ServeDeploySchema.model_validate({"applications": [application]})
            ray_internals.serve_client().deploy_apps(schema)

        try:
            deploy({})
            yield f"http://127.0.0.1:{port}", deploy
        finally:
            serve.shutdown()

    def kill(self, part: str, wait_s: float = 0.0, hold_s: float = 0.0) -> None:
        """Wait, then kill -9 a replica of a deployment of `part`, or the second NODE.

        For `hold_s` seconds before that the replica accepts calls without an answer.
        """
        time.sleep(wait_s)
        if part == NODE:
            node, self._second = self._second, None
            self._nodes.remove_node(node, allow_graceful=False)
        else:
            replica = random.choice(self._replicas(part))
            if hold_s:
                replica.suspend()
                time.sleep(hold_s)
            replica.kill()
        self.kills[part] += 1
        self._killed = time.monotonic()

    def whole(self) -> bool:
        """Replace a lost node, then return whether every deployment has all its replicas, each of them ready.

        Call it in the main thread, in which Ray must start nodes.
        """
        if self._second is None:
            self._second = self._nodes.add_node(num_cpus=NODE_CPUS)
        if time.monotonic() < self._killed + 2:  # Serve may not have noticed yet
            return False
        application = serve.status().applications["scalingnote"]
        return all(each.status == "HEALTHY" for each in application.deployments.values())

    def processes(self) -> set[int]:
        """Return the process ids of all replicas."""
        return {replica.pid for replica in self._replicas("")}

    @staticmethod
    def _replicas(part: str) -> list[psutil.Process]:
        replicas = []
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it may end during the check
                line = "".join(each.cmdline())
                if "ServeReplica" in line and f":{part}" in line:
                    replicas.append(each)
        return replicas
