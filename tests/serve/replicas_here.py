"""Functions that start real replicas on this machine, call them over HTTP, and kill them."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import psutil
from ray import serve

from scalingnote.run.service_config import AppArgs
from scalingnote.serve import app, artifacts, launch

TRIES, PAUSE_S = 600, 0.1  # until a killed replica is replaced
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def find_artifacts(index: str, query_tower: str, **knobs: Any) -> artifacts.ServedArtifacts:
    """Find the artifacts of a service of an index and a query tower, with a free port."""
    common = {"port": free_port(), "deadline_s": 20, "shards_per_searcher": 1, "cpus_per_replica": 0.1}
    args = {"index": index, "query_tower": query_tower, "serve": common | knobs}
    served = artifacts.find(AppArgs.model_validate(args))
    assert isinstance(served, artifacts.ServedArtifacts)
    return served


@contextmanager
def running(served: artifacts.ServedArtifacts) -> Iterator[str]:
    """Run an application, and yield its URL."""
    yield launch.start(served, app.bind(served))
    serve.delete(launch.APPLICATION_NAME)
    serve.shutdown()


def post(url: str, headers: Mapping[str, str] = NO_HEADERS, **body: Any) -> tuple[int, Any]:
    """Return status and answer; status 0 if the connection broke. A refusal of Serve's proxy is a text."""
    all_headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), all_headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        text = refused.read().decode()
        return refused.code, json.loads(text) if text.startswith("{") else text
    except OSError:
        return 0, None


def hits(answer: Any) -> list[str]:
    """Return the ids of the documents of an answer."""
    return [hit["doc_id"] for hit in answer["results"]]


def processes(part: str, of: psutil.Process | None = None) -> list[psutil.Process]:
    """Return the processes of the replicas of a deployment, children of this process or of another."""
    replicas = []
    for process in (of or psutil.Process()).children(recursive=True):
        with suppress(psutil.Error):
            if f":{part}" in "".join(process.cmdline()):
                replicas.append(process)
    return replicas


def kill(part: str, *, of: psutil.Process | None = None) -> list[int]:
    """Kill (-9) the replicas of a deployment, and return their process ids."""
    replicas = processes(part, of)
    for process in replicas:
        process.kill()
    return [process.pid for process in replicas]
