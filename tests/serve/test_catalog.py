"""The file that says what is served: replaced as a whole, the last versions kept, the way back known."""

import json

import pytest

from scalingnote.errors import ConfigError, SearchError
from scalingnote.serve.versions import CATALOG_FILE, Catalog, Version, named


def version(name: str, dim: int = 8) -> Version:
    return Version(name, f"/somewhere/{name}", 10, dim, "2026-01-01T00:00:00Z")


def test_what_was_activated_last_is_served_and_the_one_before_is_kept(tmp_path):
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


def test_versions_of_arms_are_served_whatever_is_active(tmp_path):
    catalog = Catalog(version("a"), str(tmp_path), pinned=(version("arm"), version("b")))
    assert [each.name for each in catalog.read()] == ["a", "arm", "b"]
    assert [each.name for each in catalog.activate(version("b"))] == ["b", "a", "arm"]
    assert catalog.previous().name == "a"
    assert named(catalog.read(), "arm") == version("arm")
    with pytest.raises(SearchError, match=r"'x'.*kept are b, a, arm"):
        named(catalog.read(), "x")


def test_what_does_not_fit_or_cannot_be_remembered_is_not_activated(tmp_path):
    with pytest.raises(ConfigError, match=r"set serve\.state"):
        Catalog(version("a")).activate(version("b"))
    catalog = Catalog(version("a"), str(tmp_path))
    with pytest.raises(ConfigError, match="dim 4, the query tower of 8"):
        catalog.activate(version("b", dim=4))
    assert catalog.read()[0].name == "a"
