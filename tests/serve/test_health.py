"""Health checks of Ray Serve: replicas that hang or compute wrong values fail, busy ones do not."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pair import table

from scalingnote.core.errors import ArtifactError, DatabaseError, SearchError
from scalingnote.index.config import LiveConfig
from scalingnote.search.query_path import Query
from scalingnote.serve import app, concurrency
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import WorkerThread
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts, Reranker
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.serve.writer import Writer
from scalingnote.storage.artifact import Artifact

SHORT_S = 0.05  # a limit for calls that never end


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event that a hanging thread waits for; it is set at the end."""
    monkeypatch.setattr(concurrency, "PROBE_WAIT_S", 2 * SHORT_S)
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def searcher(index: Artifact) -> IndexSearcher:
    return IndexSearcher(Catalog(Version.of(index.uri)))


@pytest.fixture
def encoder(query_tower: Artifact) -> ArmEncoder:
    """Return a transformer with a cache of queries."""
    return ArmEncoder(QueryPathParts((query_tower.uri, "student"), cache=10))


def test_every_check_of_a_hanging_thread_fails(hanging):
    thread = WorkerThread("searches", limit_s=SHORT_S)

    async def check_thrice() -> list[str]:
        reasons = []
        for _ in range(3):
            with pytest.raises(TimeoutError) as hung:
                await thread.check(hanging.wait)
            reasons.append(str(hung.value))
            await asyncio.sleep(SHORT_S)
        return reasons

    assert all("'searches' has not ended one call" in reason for reason in asyncio.run(check_thrice()))


def test_a_busy_thread_is_healthy_and_gets_no_probe(hanging):
    thread, probes = WorkerThread("searches"), []
    running = threading.Event()

    def work() -> None:
        running.set()
        hanging.wait()

    thread.submit(work)
    running.wait()
    asyncio.run(thread.check(lambda: probes.append(1)))
    assert not probes
    hanging.set()
    asyncio.run(thread.run(lambda: None))
    asyncio.run(thread.check(lambda: probes.append(1)))
    assert probes


def test_a_check_searches_every_version_of_a_searcher(searcher: IndexSearcher, monkeypatch):
    (searcher_of_version,) = searcher._held.values()
    calls: list[tuple[str, Any]] = []
    find = searcher_of_version.find

    def count(embeddings: np.ndarray, *args: Any, **options: Any) -> Any:
        calls.append((threading.current_thread().name, embeddings.shape))
        return find(embeddings, *args, **options)

    monkeypatch.setattr(searcher_of_version, "find", count)
    asyncio.run(searcher.check_health())
    assert calls == [("searches_0", (1, searcher_of_version.dim))]


def test_the_check_of_a_failing_or_hanging_searcher_fails(
    searcher: IndexSearcher, hanging: threading.Event, monkeypatch
):
    (held,) = searcher._held.values()

    def fail(*_: Any, **__: Any) -> None:
        raise SearchError("the file is gone")

    monkeypatch.setattr(held, "find", fail)
    with pytest.raises(SearchError, match="gone"):
        asyncio.run(searcher.check_health())
    monkeypatch.setattr(held, "find", lambda *_, **__: hanging.wait())
    searcher._thread = WorkerThread("searches", limit_s=SHORT_S)
    with pytest.raises(TimeoutError, match="hangs"):
        asyncio.run(searcher.check_health())


def test_a_searcher_is_healthy_without_its_database(searcher, monkeypatch):
    (held,) = searcher._held.values()

    def fail(*_: Any, **__: Any) -> None:
        raise DatabaseError("no answer")

    monkeypatch.setattr(held, "find", fail)
    asyncio.run(searcher.check_health())


def test_no_check_runs_during_an_exact_search(searcher, hanging, monkeypatch):
    (held,) = searcher._held.values()
    searcher._thread = WorkerThread("searches", limit_s=0.0)
    running = threading.Event()

    def scan(*_: Any, **__: Any) -> list[Any]:
        running.set()
        hanging.wait()
        return []

    async def check_during_a_search() -> None:
        query = Query(np.ones((1, held.dim), np.float32), exact=True, version=held.version)
        search = asyncio.create_task(searcher.search(query))
        await asyncio.to_thread(running.wait)
        await searcher.check_health()
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        hanging.set()

    with monkeypatch.context() as patch:
        patch.setattr(held, "find", scan)
        asyncio.run(check_during_a_search())


@pytest.mark.parametrize("kind", ["transformer", "table"])
def test_the_check_fails_for_embeddings_that_are_not_finite(encoder, kind, tmp_path, monkeypatch):
    if kind == "table":
        encoder = ArmEncoder(QueryPathParts((table(f"{tmp_path}/table").uri, "student"), cache=10))
    asyncio.run(encoder.check_health())
    # The cache does not answer a check.
    monkeypatch.setattr(encoder._path.encoder, "_compute", lambda texts: np.full((len(texts), 4), np.nan))
    with pytest.raises(ValueError, match="not finite"):
        asyncio.run(encoder.check_health())


def test_a_check_of_a_cross_encoder_scores_a_pair(monkeypatch):
    reranker = Reranker.__new__(Reranker)
    scores = [0.5]
    reranker._model = type("Model", (), {"predict": lambda *_, **__: np.float32(scores)})()
    reranker._thread = WorkerThread("pairs")
    asyncio.run(reranker.check_health())
    scores[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        asyncio.run(reranker.check_health())


def test_the_check_of_a_writer_without_its_claim_fails(index, tmp_path):
    writer = Writer(LiveCatalog(f"{tmp_path}/live", LivePair(index.uri)), LiveConfig())
    asyncio.run(writer.check_health())
    lock = next((tmp_path / "live").rglob("lock"))
    lock.unlink()
    with pytest.raises(ArtifactError, match="lock cannot be reached"):
        asyncio.run(writer.check_health())
    lock.touch()
    with pytest.raises(ArtifactError, match="lock was replaced"):
        asyncio.run(writer.check_health())
    writer.close()


def test_the_check_of_a_gateway_includes_its_own_parts(searcher, encoder, monkeypatch):
    gateway = app._Ingress.__new__(app._Ingress)
    gateway._own_parts = [encoder, searcher]
    asyncio.run(gateway.check_health())
    (held,) = searcher._held.values()
    monkeypatch.setattr(held, "find", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(gateway.check_health())
