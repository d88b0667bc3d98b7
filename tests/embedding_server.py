"""A server with the responses of OpenAI and TEI at /v1/embeddings and /embed, which records its requests."""

import base64
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DIM = 6


def vector(text: str) -> np.ndarray:
    return np.random.default_rng(list(text.encode())).standard_normal(DIM).astype(np.float32)


def embed_by_hash(texts: Sequence[str]) -> np.ndarray:
    return np.stack([vector(text) for text in texts])


class Server(ThreadingHTTPServer):
    """Server of the vectors of `embed`; `fault` may return another response: (status, headers, body)."""

    daemon_threads = True

    def __init__(self, embed: Callable[[Sequence[str]], np.ndarray] = embed_by_hash) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.embed = embed
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.usage: dict[str, int] = {}  # added to the usage in each response
        self.fault: Callable[[dict[str, Any]], tuple[int, dict[str, str], Any] | None] = lambda _: None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, path: str = "/v1") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.keys.add(self.headers["authorization"])
        self.server.bodies.append(body)
        fault = self.server.fault(body)
        if fault is None:
            texts = body["inputs"] if self.path == "/embed" else body["input"]
            self.server.asked.update(texts)
            rows = self.server.embed(texts).astype("<f4")
            if self.path == "/embed":
                content: Any = [row.tolist() for row in rows]
            else:
                as_text = body.get("encoding_format") == "base64"
                data = [
                    {"index": n, "embedding": base64.b64encode(row).decode() if as_text else row.tolist()}
                    for n, row in enumerate(rows)
                ]
                content = {"data": data[::-1], "usage": {"total_tokens": 2 * len(texts)} | self.server.usage}
            fault = 200, {}, content
        status, headers, content = fault
        payload = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(payload))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None: ...
