"""Which versions a searcher holds, and for how long; what it finds in them is tested through the gateway."""

import asyncio
from pathlib import Path

import pytest

from scalingnote.serve import replicas
from scalingnote.serve.replicas import RELEASE_AFTER_S, IndexSearcher
from scalingnote.serve.versions import OPEN_TIMEOUT_S, Catalog, LiveCatalog, Version

A, B, C = (Version(name, f"runs/{name}", 10, 8, "") for name in "abc")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still unless it is moved; versions are opened as their URIs."""
    now = [100.0]
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(IndexSearcher, "_open", lambda _, version: version.uri)
    return now


def held_after(seconds: float, holding: IndexSearcher, clock: list[float]) -> list[str]:
    """Versions that are held after so many seconds of looking now and then."""
    for _ in range(10):
        clock[0] += seconds / 10
        asyncio.run(holding.release_old_versions())
    return sorted(holding._held)


def test_what_is_no_longer_kept_is_let_go_when_nobody_asks_for_it_any_more(
    tmp_path: Path, clock: list[float]
):
    catalog = Catalog(A, str(tmp_path), kept=2)
    holding = IndexSearcher(catalog)
    for version in (B, C):
        asyncio.run(holding.load(version))
        catalog.activate(version)
        asyncio.run(holding.load(version))
        asyncio.run(holding.release_old_versions())
    assert held_after(0.9 * RELEASE_AFTER_S, holding, clock) == ["a", "b", "c"]
    assert held_after(0.2 * RELEASE_AFTER_S, holding, clock) == ["b", "c"]
    assert held_after(10 * OPEN_TIMEOUT_S, holding, clock) == ["b", "c"]
    asyncio.run(holding.load(A))  # by its URI, again
    catalog.activate(A)
    asyncio.run(holding.release_old_versions())
    assert held_after(2 * RELEASE_AFTER_S, holding, clock) == ["a", "c"]


def test_what_is_about_to_be_activated_is_held_until_all_have_opened_it(tmp_path: Path, clock: list[float]):
    holding = IndexSearcher(Catalog(A, str(tmp_path)))
    asyncio.run(holding.load(B))
    assert held_after(0.9 * OPEN_TIMEOUT_S, holding, clock) == ["a", "b"]
    assert held_after(0.2 * OPEN_TIMEOUT_S, holding, clock) == ["a"]  # it was refused


def test_an_old_version_is_better_than_none(tmp_path: Path, clock: list[float]):
    catalog = Catalog(A, str(tmp_path), kept=1)
    holding = IndexSearcher(catalog)
    catalog.activate(B)
    assert held_after(2 * OPEN_TIMEOUT_S, holding, clock) == ["a"]
    asyncio.run(holding.load(B))
    assert sorted(holding._held) == ["b"]


class Written(LiveCatalog):
    """Of a live index with one version."""

    def read(self) -> tuple[Version, ...]:
        return (A,)


def test_a_searcher_of_a_live_index_reads_writes_at_the_interval_that_is_set(monkeypatch: pytest.MonkeyPatch):
    read: list[IndexSearcher] = []

    async def refresh(holding: IndexSearcher) -> None:
        read.append(holding)

    monkeypatch.setattr(IndexSearcher, "_open", lambda _, version: version.uri)
    monkeypatch.setattr(IndexSearcher, "refresh", refresh)
    often, rarely = (IndexSearcher(Written("live", A.uri, 8), refresh_s=after) for after in (0.001, 60.0))

    async def wait() -> None:
        following = [asyncio.create_task(holding._follow_catalog()) for holding in (often, rarely)]
        while read.count(often) < 3:
            await asyncio.sleep(0.01)
        for task in following:
            task.cancel()

    asyncio.run(asyncio.wait_for(wait(), timeout=30))
    assert rarely not in read


def test_a_version_that_will_be_displaced_is_let_go_before_another_is_opened(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
):
    catalog = Catalog(A, str(tmp_path), kept=2)
    holding = IndexSearcher(catalog)
    asyncio.run(holding.load(B))
    catalog.activate(B)
    assert held_after(2 * RELEASE_AFTER_S, holding, clock) == ["a", "b"]
    held: list[str] = []
    monkeypatch.setattr(IndexSearcher, "_open", lambda self, _: held.extend(sorted(self._held)))
    asyncio.run(holding.load(C))
    assert held == ["b"]
    assert sorted(holding._held) == ["b", "c"]
