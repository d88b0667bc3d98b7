"""A gateway in this process with a real index and query tower, and a client that calls it like over HTTP."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import httpx

from scalingnote.run.service_config import ServeConfig
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.serve.service import Service
from scalingnote.storage.artifact import Artifact

T = TypeVar("T")


class Client:
    """A client that calls an application like over HTTP, with its lifespan."""

    def __init__(self, application: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._lifespan = application.router.lifespan_context(application)
        self._loop.run_until_complete(self._lifespan.__aenter__())
        transport = httpx.ASGITransport(application, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    def __call__(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self.wait(self._client.request(method, path, **request))

    def wait(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the loop of the application, and return its result."""
        return self._loop.run_until_complete(work)

    def search(self, **body: Any) -> httpx.Response:
        return self("POST", "/search", json=body)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self._loop.close()


class Reranker:
    """A cross-encoder that prefers short texts."""

    async def logits(self, query: str, texts: list[str], **_: Any) -> list[float]:
        return [float(len(query) - len(text)) for text in texts]

    score = logits


def service(
    index: Artifact,
    query_tower: Artifact,
    config: ServeConfig,
    *,
    groups: int = 1,
    teacher: Any = None,
    **parts: LocalHandle,
) -> Service:
    catalog = Catalog(Version.of(index.uri), config.state, config.versions_kept)
    encoder = LocalHandle(ArmEncoder(QueryPathParts((query_tower.uri, "student"))))
    shard_groups = [(0, 1)] if groups == 1 else [(0,), (1,)]
    searchers = [
        LocalHandle(IndexSearcher(catalog, shards=shards, search=config.search, timeout_s=config.deadline_s))
        for shards in shard_groups
    ]
    if teacher is not None:
        parts["teacher"] = LocalHandle(teacher)
    arms = [ServedArm("default", encoder, "torch", False)]
    return Service(Deployed(arms, catalog, searchers, **parts), config)
