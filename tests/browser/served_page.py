"""The real API and its page on a free port, over a small index, with switches for faults."""

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from small_index import SmallIndex, TowerFunction
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scalingnote.index import filters
from scalingnote.run.service_config import Limits, ServeConfig
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates, Searcher, candidate_places
from scalingnote.serve import api
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.service import Service
from scalingnote.serve.versions import Catalog, Version, VersionContent

MAX_QUERY_CHARS = 200
NOT_SERVED = ("dense_weight", "rerank", "user_id")  # options that a switch adds to /info


@dataclass
class Failing:
    """An error in the form of the API."""

    status: int
    code: str
    message: str
    field: str | None = None
    retry_after: int | None = None

    def response(self) -> JSONResponse:
        error = {"code": self.code, "message": self.message, "field": self.field}
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse({"error": error, "request_id": "r-17"}, self.status, headers)


@dataclass
class Switches:
    """Faults of the server, and its recorded requests."""

    failures: deque[Failing] = field(default_factory=deque)  # answers to the next searches
    slow: dict[str, float] = field(default_factory=dict)  # query, or /info -> seconds
    silent_shards: int = 0
    api_key: str | None = None
    info: dict[str, Any] = field(default_factory=dict)  # overrides fields of /info
    requests: list[dict[str, Any]] = field(default_factory=list)


class Served:
    """A running server: its URL, its index, and its switches."""

    def __init__(self, index: SmallIndex, port: int) -> None:
        self.index, self.switches, self.url = index, Switches(), f"http://127.0.0.1:{port}"
        version = Version("3f0c9a1be27d", "nowhere", len(index.searcher), index.searcher.dim, "")
        arms = [ServedArm(n, LocalHandle(Encoder(t)), n, False) for n, t in index.towers.items()]
        groups = [LocalHandle(Group(self, number)) for number in range(len(index.shards))]
        config = ServeConfig(
            deadline_s=60,
            limits=Limits(max_k=40, max_query_chars=MAX_QUERY_CHARS),
            split={"arms": [{"name": arm.name, "share": arm is arms[0]} for arm in arms]},
            allow_unauthenticated=True,
        )
        self.service = Service(Deployed(arms, Catalog(version), groups), config)
        info = self.service.info
        self.service.info = lambda: info().model_dump() | self.switches.info  # type: ignore[method-assign, assignment, return-value]
        self.asgi = api.build(self.service, config)
        self.asgi.entry = self.switched(self.asgi.entry)  # type: ignore[attr-defined]

    def switched(self, app: ASGIApp) -> ASGIApp:
        """Wrap an application with the switches."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            path, switches = scope.get("path"), self.switches
            if path not in ("/info", "/search", "/similar"):
                await app(scope, receive, send)
                return
            request = Request(scope, receive)
            body = json.loads(await request.body() or "{}")
            await asyncio.sleep(switches.slow.get(body.get("query", path), 0.0))
            answering = app
            if switches.api_key and request.headers.get("authorization") != f"Bearer {switches.api_key}":
                answering = Failing(401, "unauthorized", "this key is not known here: ask for one").response()
            elif "query" in body and switches.failures:
                answering = switches.failures.popleft().response()
            if body:
                switches.requests.append(body)
            content = json.dumps({name: value for name, value in body.items() if name not in NOT_SERVED})

            async def receive_again() -> Message:
                return {"type": "http.request", "body": content.encode()}

            await answering(scope, receive_again, send)

        return answer


class Encoder:
    """A query tower with the interface that a gateway calls."""

    def __init__(self, tower: TowerFunction) -> None:
        self._tower = tower

    async def encode(self, query: str, user_id: str | None) -> Query:
        return Query(self._tower(query)[None])


class Group:
    """A searcher of one shard with the interface that a gateway calls; some shards may be silent."""

    def __init__(self, served: Served, number: int) -> None:
        self._served, self._number = served, number
        self._searcher: Searcher = served.index.shards[number]

    async def search(self, query: Query) -> Candidates:
        if self._number >= len(self._served.index.shards) - self._served.switches.silent_shards:
            raise OSError("the shard is gone")
        (candidates,) = self._searcher.find(query.embedding, k=query.k, where=query.where)
        places = candidate_places(candidates.ids.tolist())
        documents = [self._searcher.store.read(*place) for place in places]
        return replace(candidates, documents=documents, version=query.version)

    async def describe(self, version: str) -> VersionContent:
        searcher, documents = self._searcher, self._searcher.documents()
        facets = filters.facets(documents, searcher.fields, most=50)
        return VersionContent(searcher.layout, 1, len(searcher), searcher.fields, facets)

    async def vector(self, version: str, doc_id: str) -> Any:
        vector = self._searcher.vector(doc_id)
        return [] if vector is None else vector[None]

    async def document(self, version: str, doc_id: str) -> list[dict[str, Any]]:
        document = self._searcher.get(doc_id)
        return [] if document is None else [document]


@contextmanager
def running(index: SmallIndex) -> Iterator[Served]:
    """Run a server in a separate thread."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = Served(index, listening.getsockname()[1])
        config = uvicorn.Config(served.asgi, log_level="error", ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield served  # earlier connections wait until it runs
        server.should_exit = True
        thread.join(timeout=10)
