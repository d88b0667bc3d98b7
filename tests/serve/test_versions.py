"""The catalog of index versions, and the versions that a searcher holds."""

import asyncio
import json

import pytest

from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.serve import index_searcher
from scalingnote.serve.catalog import CATALOG_FILE, Catalog, Version, version_named
from scalingnote.serve.index_searcher import RELEASE_AFTER_S, IndexSearcher
from scalingnote.serve.versions import OPEN_TIMEOUT_S


def version(name: str, dim: int = 8) -> Version:
    return Version(name, f"/somewhere/{name}", 10, dim, "2026-01-01T00:00:00Z")


def test_the_last_activated_version_is_served(tmp_path):
    catalog = Catalog(version("a"), str(tmp_path / "state"))
    assert [each.name for each in catalog.read()] == ["a"]
    with pytest.raises(SearchError, match="nothing to roll back to"):
        catalog.previous()
    for name in "bcb":
        assert catalog.activate(version(name))[0].name == name
    assert [each.name for each in Catalog(version("a"), str(tmp_path / "state")).read()] == [
        "b",
        "c",
    ]
    assert catalog.activate(catalog.previous())[0].name == "c"
    assert catalog.previous().name == "b"
    assert [
        each["name"] for each in json.loads((tmp_path / "state" / CATALOG_FILE).read_text())["versions"]
    ] == [
        "c",
        "b",
    ]


def test_versions_of_arms_are_always_served(tmp_path):
    catalog = Catalog(version("a"), str(tmp_path), pinned=(version("arm"), version("b")))
    assert [each.name for each in catalog.read()] == ["a", "arm", "b"]
    assert [each.name for each in catalog.activate(version("b"))] == ["b", "a", "arm"]
    assert catalog.previous().name == "a"
    assert version_named(catalog.read(), "arm") == version("arm")
    with pytest.raises(SearchError, match=r"'x'.*kept are b, a, arm"):
        version_named(catalog.read(), "x")


def test_a_version_that_does_not_fit_is_not_activated(tmp_path):
    with pytest.raises(ConfigError, match=r"set serve\.state"):
        Catalog(version("a")).activate(version("b"))
    catalog = Catalog(version("a"), str(tmp_path))
    with pytest.raises(ConfigError, match="dim 4, the query tower of 8"):
        catalog.activate(version("b", dim=4))
    assert catalog.read()[0].name == "a"


A, B, C = map(version, "abc")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that a test moves; a version is opened as its URI."""
    now = [100.0]
    monkeypatch.setattr(index_searcher.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(IndexSearcher, "_open", lambda _, version: version.uri)
    return now


def held_after(seconds: float, holding: IndexSearcher, clock: list[float]) -> list[str]:
    """Let seconds pass with periodic releases, and return the versions that are still held."""
    for _ in range(10):
        clock[0] += seconds / 10
        asyncio.run(holding.release_old_versions())
    return sorted(holding._held)


def test_old_versions_are_released_after_a_while(tmp_path, clock):
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
    asyncio.run(holding.load(A))  # activated by its URI again
    catalog.activate(A)
    asyncio.run(holding.release_old_versions())
    assert held_after(2 * RELEASE_AFTER_S, holding, clock) == ["a", "c"]


def test_a_version_is_held_until_all_have_opened_it(tmp_path, clock):
    holding = IndexSearcher(Catalog(A, str(tmp_path)))
    asyncio.run(holding.load(B))
    assert held_after(0.9 * OPEN_TIMEOUT_S, holding, clock) == ["a", "b"]
    assert held_after(0.2 * OPEN_TIMEOUT_S, holding, clock) == ["a"]  # it was never activated


def test_an_old_version_is_held_until_the_next_is_open(tmp_path, clock):
    catalog = Catalog(A, str(tmp_path), kept=1)
    holding = IndexSearcher(catalog)
    catalog.activate(B)
    assert held_after(2 * OPEN_TIMEOUT_S, holding, clock) == ["a"]
    asyncio.run(holding.load(B))
    assert sorted(holding._held) == ["b"]


def test_a_version_is_released_before_the_next_is_opened(tmp_path, clock, monkeypatch):
    catalog = Catalog(A, str(tmp_path), kept=2)
    holding = IndexSearcher(catalog)
    asyncio.run(holding.load(B))
    catalog.activate(B)
    assert held_after(2 * RELEASE_AFTER_S, holding, clock) == ["a", "b"]
    held_at_open: list[str] = []
    monkeypatch.setattr(IndexSearcher, "_open", lambda self, _: held_at_open.extend(sorted(self._held)))
    asyncio.run(holding.load(C))
    assert held_at_open == ["b"]
    assert sorted(holding._held) == ["b", "c"]
