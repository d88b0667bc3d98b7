"""A local server that answers an export as OpenSearch does, and keeps the documents of one index."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Server(ThreadingHTTPServer):
    """The index `index` of OpenSearch, by the parts of the REST interface that an export uses."""

    def __init__(self, index: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.index = index
        self.mapping: dict[str, Any] | None = None
        self.documents: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []  # method and path
        self.refused = ""  # id of a document that is not taken

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running(index: str) -> Iterator[Server]:
    """Serve in a thread."""
    server = Server(index)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request after the other of a connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _answer_any(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        server, path = self.server, self.path.partition("?")[0]
        server.requests.append((self.command, path))
        match self.command, path.replace(f"/{server.index}", "/INDEX", 1):
            case "HEAD", "/INDEX":
                self._answer({}, 404 if server.mapping is None else 200)
            case "PUT", "/INDEX":
                server.mapping = json.loads(text)
                self._answer({"acknowledged": True})
            case "GET", "/INDEX/_mapping":
                self._answer({server.index: server.mapping})
            case _, "/INDEX/_refresh":
                self._answer({"_shards": {"failed": 0}})
            case _, "/INDEX/_count":
                self._answer({"count": len(server.documents)})
            case _, "/_bulk":
                self._answer(self._write([json.loads(line) for line in text.splitlines()]))
            case request:
                self._answer({"error": f"unexpected {request}"}, 400)

    def _write(self, lines: list[Any]) -> dict[str, Any]:
        items = []
        for action, document in zip(lines[::2], lines[1::2], strict=True):
            name = action["index"]["_id"]
            assert action["index"]["_index"] == self.server.index
            if name == self.server.refused:
                items.append({"index": {"_id": name, "status": 400, "error": {"reason": "bad vector"}}})
                continue
            self.server.documents[name] = document
            items.append({"index": {"_id": name, "status": 201}})
        return {"errors": any("error" in item["index"] for item in items), "items": items}

    def _answer(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = _answer_any  # noqa: N815
