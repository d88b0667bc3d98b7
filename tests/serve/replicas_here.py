"""Real replicas on this machine: started, asked over HTTP, killed."""

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

TRIES, PAUSE_S = 600, 0.1  # until what was killed is back
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def found(index: str, query_tower: str, **knobs: Any) -> artifacts.ServedArtifacts:
    """An index and a query tower, to be served at a free port."""
    common = {"port": free_port(), "deadline_s": 20, "shards_per_searcher": 1, "cpus_per_replica": 0.1}
    args = {"index": index, "query_tower": query_tower, "serve": common | knobs}
    served = artifacts.find(AppArgs.model_validate(args))
    assert isinstance(served, artifacts.ServedArtifacts)
    return served


@contextmanager
def running(served: artifacts.ServedArtifacts) -> Iterator[str]:
    """The URL of an application, which runs meanwhile."""
    yield launch.start(served, app.bind(served))
    serve.delete(launch.APPLICATION_NAME)
    serve.shutdown()


def post(url: str, headers: Mapping[str, str] = NO_HEADERS, **body: Any) -> tuple[int, Any]:
    """Status and answer; 0 where the connection broke. Serve's own proxy refuses by a text."""
    sent = {"content-type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), sent)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        text = refused.read().decode()
        return refused.code, json.loads(text) if text.startswith("{") else text
    except OSError:
        return 0, None


def hits(answer: Any) -> list[str]:
    """The ids of an answer's documents."""
    return [hit["doc_id"] for hit in answer["results"]]


def processes(part: str, of: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes of a deployment's replicas, below this one or another."""
    replicas = []
    for process in (of or psutil.Process()).children(recursive=True):
        with suppress(psutil.Error):
            if f":{part}" in "".join(process.cmdline()):
                replicas.append(process)
    return replicas


def kill(part: str, *, of: psutil.Process | None = None) -> list[int]:
    """kill -9 the replicas of a deployment; their processes."""
    replicas = processes(part, of)
    for process in replicas:
        process.kill()
    return [process.pid for process in replicas]
