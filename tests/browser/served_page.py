"""The page and its API on a free port, over a small index, with switches for what may go wrong."""

import asyncio
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from small_index import SmallIndex
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import scalingnote.serve
from scalingnote.core.errors import SearchError
from scalingnote.search.searcher import SearchHit

PAGE = Path(scalingnote.serve.__file__).parent / "page"
# Everything the page is made of comes from its own server, and no text becomes markup.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
MAX_QUERY_CHARS, MAX_K, FEW_VALUES = 200, 40, 50
INDEX_VERSION = "3f0c9a1be27d"


@dataclass
class Failing:
    """An error as the API answers it."""

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
    """What the server does wrong, and the requests that it got."""

    failures: deque[Failing] = field(default_factory=deque)  # of the next searches
    slow: dict[str, float] = field(default_factory=dict)  # query, or /info -> seconds
    silent_shards: int = 0
    api_key: str | None = None
    arms: tuple[str, ...] = ("words", "trigrams")
    info: dict[str, Any] = field(default_factory=dict)  # laid over what /info says
    requests: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Served:
    """A server that runs: where, and its switches."""

    url: str
    app: "App"

    @property
    def switches(self) -> Switches:
        return self.app.switches


class App:
    """The routes."""

    def __init__(self, index: SmallIndex) -> None:
        self.index, self.switches = index, Switches()
        self.asgi = Starlette(
            routes=[
                Route("/", self.page),
                Mount("/page", StaticFiles(directory=PAGE)),
                Route("/info", self.info),
                Route("/search", self.search, methods=["POST"]),
                Route("/similar", self.similar, methods=["POST"]),
                Route("/documents/{doc_id:path}", self.document),
            ]
        )

    def page(self, _: Request) -> Response:
        return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": POLICY})

    def info(self, request: Request) -> Response:
        time.sleep(self.switches.slow.get("/info", 0.0))
        if refused := self._refused(request):
            return refused.response()
        searcher, fields = self.index.searcher, self.index.searcher.fields
        kinds = {f.name: _kind(f.type) for f in fields}
        facets = {name: self._facet(name) for name, kind in kinds.items() if kind == "text"}
        found = {
            "name": "ScalingNote",
            "version": "0.1.0",
            "documents": len(searcher),
            "dim": searcher.dim,
            "index_version": INDEX_VERSION,
            "shards": len(searcher.shards),
            "arms": [{"name": n, "tower": n, "personalised": False} for n in self.switches.arms],
            "fields": kinds,
            "facets": {name: values for name, values in facets.items() if values},
            "sparse": False,
            "rerank": False,
            "live": False,
            "max_k": MAX_K,
            "max_query_chars": MAX_QUERY_CHARS,
        }
        return JSONResponse(found | self.switches.info)

    async def search(self, request: Request) -> Response:
        body = await request.json()
        self.switches.requests.append(body)
        if refused := self._refused(request):
            return refused.response()
        if "query" in body:
            await asyncio.sleep(self.switches.slow.get(body["query"], 0.0))
            if self.switches.failures:
                return self.switches.failures.popleft().response()
            if len(body["query"]) > MAX_QUERY_CHARS:
                message = f"query has {len(body['query'])} characters: send up to {MAX_QUERY_CHARS}"
                return Failing(422, "invalid", message, "query").response()
        arm = body.get("arm") or self.switches.arms[0]
        if arm not in self.switches.arms:
            return Failing(422, "invalid", f"no arm is called {arm!r}", "arm").response()
        start = time.perf_counter()
        tower = self.index.towers[arm]
        embedding = np.array(body["vector"], np.float32) if "vector" in body else tower(body["query"])
        encoded = time.perf_counter()
        return self._answer(body, arm, embedding, encode=1000 * (encoded - start))

    async def similar(self, request: Request) -> Response:
        body = await request.json()
        self.switches.requests.append(body)
        document = self.index.searcher.get(body["doc_id"])
        if document is None:
            return _absent(body["doc_id"])
        text = f"{document['title']} {document['snippet']}"
        both = np.sum([tower(text) for tower in self.index.towers.values()], axis=0)
        return self._answer(body, self.switches.arms[0], both, left_out=body["doc_id"])

    def document(self, request: Request) -> Response:
        wanted = request.path_params["doc_id"]
        found = self.index.searcher.get(wanted)
        return _absent(wanted) if found is None else JSONResponse(found)

    def _answer(
        self,
        body: Mapping[str, Any],
        arm: str,
        embedding: np.ndarray,
        *,
        encode: float = 0.0,
        left_out: str | None = None,
    ) -> Response:
        searcher, start = self.index.searcher, time.perf_counter()
        k = body.get("k", 10)
        try:
            found = searcher.search(embedding[None], k=k + 1, where=body.get("filter"))[0]
        except SearchError as error:
            return Failing(422, "invalid", str(error), "filter").response()
        answering = len(searcher.shards) - self.switches.silent_shards
        kept = [hit for hit in found if hit.doc_id != left_out and hit.shard < answering][:k]
        search = 1000 * (time.perf_counter() - start)
        return JSONResponse(
            {
                "request_id": "r-17",
                "results": [self._result(hit) for hit in kept],
                "arm": arm,
                "index_version": INDEX_VERSION,
                "personalised": False,
                "shards": len(searcher.shards),
                "shards_answered": answering,
                "timings_ms": {"encode": encode, "search": search, "rerank": 0.0, "total": encode + search},
            }
        )

    def _result(self, hit: SearchHit) -> dict[str, Any]:
        explain = {"dense": hit.score, "sparse": None, "rerank": None, "shard": hit.shard}
        return {**hit.document, "score": hit.score, "explain": explain}

    def _refused(self, request: Request) -> Failing | None:
        key = self.switches.api_key
        if key is None or request.headers.get("authorization") == f"Bearer {key}":
            return None
        return Failing(401, "unauthorized", "this key is not known here: ask for one")

    def _facet(self, name: str) -> list[dict[str, Any]]:
        counts = Counter(value for table in self.index.documents for value in table[name].to_pylist())
        return [{"value": value, "count": count} for value, count in counts.most_common(FEW_VALUES)]


def _absent(doc_id: str) -> Response:
    return Failing(404, "not_found", f"no document {doc_id!r} in this index").response()


def _kind(kind: Any) -> str:
    return {"string": "text", "bool": "boolean"}.get(str(kind), "number")


@contextmanager
def running(index: SmallIndex) -> Iterator[Served]:
    """A server in a thread of its own."""
    app = App(index)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app.asgi, log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", app)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()
