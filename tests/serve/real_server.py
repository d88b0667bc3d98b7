"""Calls of a service behind a real port."""

import json
import socket
import urllib.error
import urllib.request
from typing import Any


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def call(url: str, path: str, **body: Any) -> tuple[int, Any]:
    """Status and answer; 0 where the connection broke."""
    sent = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + path, sent, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, None
    except OSError:
        return 0, None
