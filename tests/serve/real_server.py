"""Calls of a service at a real port."""

import json
import socket
import urllib.error
import urllib.request
from typing import Any


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def call(url: str, path: str, **body: Any) -> tuple[int, Any]:
    """Return status and answer; status 0 if the connection broke."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, None
    except OSError:
        return 0, None
