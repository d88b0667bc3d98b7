"""Replicas of a service on two nodes of Ray here, to kill under load, and its clients."""

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
    """A connection that is made anew when it breaks."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._host, timeout=60)

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON; (0, None) if the connection broke."""
        sent = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, path, sent, {"content-type": "application/json"})
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
        """Wait until everything answers again."""
        for _ in range(600):
            status, health = self("GET", "/healthz")
            if status == 200 and health["status"] == "ok" and health["shards_answered"] == shards:
                return
            time.sleep(0.2)
        raise SystemExit("the service did not come back within two minutes")


@dataclass
class Tally:
    """What clients have seen. Threads may share one."""

    statuses: Counter[int] = field(default_factory=Counter)
    partial: int = 0
    degraded: Counter[str] = field(default_factory=Counter)
    wrong: int = 0  # answers that mix versions, or are not what they say they are
    twice: int = 0  # answers with a document twice

    @property
    def errors(self) -> int:
        """Requests that got no answer."""
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
    """Clients that search over and over: each sends what `draw` gives, and counts the answer."""
    stop = threading.Event()

    def search() -> None:
        client = Client(url)
        while not stop.is_set():
            body = draw()
            status, answer = client("POST", "/search", body)
            tally.statuses[status] += 1
            if status == 200:
                found = [hit["doc_id"] for hit in answer["results"]]
                tally.twice += len(found) != len(set(found))
                tally.partial += answer["shards_answered"] < shards
                tally.degraded.update(answer["degraded"])
                if not is_right(body, answer):
                    tally.wrong += 1
                    print(f"wrong: {json.dumps([body, answer])}", flush=True)

    running = [threading.Thread(target=search) for _ in range(threads)]
    for each in running:
        each.start()
    try:
        yield
    finally:
        stop.set()
        for each in running:
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
        """A service as the shell starts it, of artifacts or of a run: its URL."""
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
            serve.shutdown()  # in here: this process forgets the Serve that has ended with that one

    @contextmanager
    def deployed(self, settings: dict[str, Any], **served: str) -> Iterator[tuple[str, Deploy]]:
        """A service as `serve deploy` starts it: its URL, and a deploy of its file with a `user_config`."""
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
        """kill -9 a replica of a deployment that is one of `part`, or the second NODE, in a moment.

        For `hold_s` seconds before that the replica takes calls and answers none.
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
        """Whether every deployment has all its replicas, each of them ready; a lost node is replaced before.

        To be called by the main thread, as Ray wants it of what starts nodes.
        """
        if self._second is None:
            self._second = self._nodes.add_node(num_cpus=NODE_CPUS)
        if time.monotonic() < self._killed + 2:  # Serve may not have noticed yet
            return False
        found = serve.status().applications["scalingnote"]
        return all(each.status == "HEALTHY" for each in found.deployments.values())

    def processes(self) -> set[int]:
        """The numbers of the processes of all replicas."""
        return {replica.pid for replica in self._replicas("")}

    @staticmethod
    def _replicas(part: str) -> list[psutil.Process]:
        found = []
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it may end while it is looked at
                line = "".join(each.cmdline())
                if "ServeReplica" in line and f":{part}" in line:
                    found.append(each)
        return found
