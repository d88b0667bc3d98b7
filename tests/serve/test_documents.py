"""Documents that cannot be read: results by their ids, the absence named, another try every few seconds."""

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gateway_here import Client, service
from pair import DIM

from scalingnote.core.errors import ArtifactError
from scalingnote.index.shard import DocumentStore, documents_file
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.searcher import Candidates, Results, Searcher
from scalingnote.serve import api, document_stores, index_searcher
from scalingnote.serve.access import RefusedError
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.serve.messages import SearchRequest, SearchResponse
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import RequestRecord
from scalingnote.serve.towers import Refused
from scalingnote.storage.artifact import Artifact, open_artifact

QUERY = {"query": "bakoli menura", "k": 5}


@pytest.fixture
def moved(index: Artifact, tmp_path: Path) -> tuple[Artifact, Path]:
    """An index without the documents of one shard, and the place where these are."""
    copied = shutil.copytree(index.uri, tmp_path / "index")
    away = tmp_path / "documents.arrow"
    os.rename(copied / documents_file(1), away)
    return open_artifact(str(copied), kind="index"), away


@pytest.fixture
def made(moved: tuple[Artifact, Path], query_tower: Artifact) -> Service:
    config = ServeConfig(deadline_s=60, rerank="a fake")
    return service(moved[0], query_tower, config, groups=2)


@pytest.fixture
def client(made: Service) -> Iterator[Client]:
    opened = Client(api.build(made, made._config))
    yield opened
    opened.close()


@pytest.fixture
def whole(index: Artifact, query_tower: Artifact) -> list[dict[str, Any]]:
    made = service(index, query_tower, ServeConfig(deadline_s=60))
    opened = Client(api.build(made, made._config))
    answer = opened.search(**QUERY, explain=True).json()
    opened.close()
    results: list[dict[str, Any]] = answer["results"]
    return results


def test_unreadable_documents_degrade_the_answer(client, made, moved, whole, monkeypatch):
    answer = client.search(**QUERY, explain=True).json()
    SearchResponse.model_validate(answer, extra="forbid")
    assert answer["degraded"] == ["documents_unreadable"]
    assert (answer["shards_answered"], answer["missing_groups"]) == (2, [])
    for hit, wanted in zip(answer["results"], whole, strict=True):
        same = ("doc_id", "score", "topic", "explain")  # topic is a column that searches filter by
        assert {name: hit[name] for name in same} == {name: wanted[name] for name in same}
        assert (hit["title"], hit["snippet"], hit["semantic_id"]) == ("", "", "")
    health = client("GET", "/healthz")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert health.json()["silent"] == ["documents"]
    assert client("GET", "/documents/d7").status_code == 503
    similar = client("POST", "/similar", json={"doc_id": "d7", "k": 3}).json()
    assert (similar["degraded"], len(similar["results"])) == (["documents_unreadable"], 3)
    monkeypatch.setattr(document_stores, "REOPEN_AFTER_S", 0.0)
    client.wait(made.versions.follow())
    assert client.search(**QUERY).json()["degraded"] == ["documents_unreadable"]
    os.rename(moved[1], f"{moved[0].uri}/{documents_file(1)}")
    client.wait(made.versions.follow())
    answer = client.search(**QUERY, explain=True).json()
    assert (answer["results"], answer["degraded"]) == (whole, [])
    assert client("GET", "/healthz").json()["status"] == "ok"
    assert client("GET", "/documents/d7").json()["title"] == "Title 7"


def test_unreadable_documents_are_not_reranked(client, made):
    class Never:
        @property
        def score(self) -> Any:
            raise AssertionError("it has no texts to score")

    made._deployed = replace(made._deployed, reranker=Never())
    assert client.search(**QUERY, rerank=3).json()["degraded"] == ["documents_unreadable", "not_reranked"]


def test_documents_that_fail_during_a_read_are_reopened(client, made, moved, whole, monkeypatch):
    os.rename(moved[1], f"{moved[0].uri}/{documents_file(1)}")
    monkeypatch.setattr(document_stores, "REOPEN_AFTER_S", 0.0)
    client.wait(made.versions.follow())

    def fail(*_: Any) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DocumentStore, "read", fail)
        answer = client.search(**QUERY).json()
        assert answer["degraded"] == ["documents_unreadable"]
        assert [hit["doc_id"] for hit in answer["results"]] == [hit["doc_id"] for hit in whole]
    client.wait(made.versions.follow())
    assert client.search(**QUERY, explain=True).json()["results"] == whole


def test_results_without_readable_ids_are_left_out(client, made):
    held = made.versions.documents._searchers
    made.versions.documents._searchers = held[:1]
    answer = client.search(query="bakoli menura", k=50).json()
    assert 0 < len(answer["results"]) < 50
    assert answer["degraded"] == ["documents_unreadable"]
    assert all(int(hit["doc_id"].removeprefix("d")) < 210 for hit in answer["results"])
    made.versions.documents._searchers = []
    with pytest.raises(RefusedError, match="neither documents nor ids") as refused:
        client.wait(made.search(SearchRequest(**QUERY), RequestRecord("r")))
    assert refused.value.status == 503


# --- an index in a bucket: searchers read the documents of their shards ------------------------------------


class Away:
    """A searcher in another process, as far as a gateway sees; the calls of its methods are counted."""

    def __init__(self, searcher: LocalHandle) -> None:
        self._searcher, self.calls = searcher, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._searcher, name)


def apart(served: Artifact, tower: Artifact, config: ServeConfig, patch: pytest.MonkeyPatch) -> Service:
    """A gateway before two searchers with a shard each, whose documents it must not open."""

    def never(*_: Any) -> Any:
        raise AssertionError("the gateway opened documents")

    patch.setattr(document_stores, "DocumentStore", SimpleNamespace(open=never))
    patch.setattr(document_stores, "read_by_searchers", lambda *_: True)
    made = service(served, tower, config, groups=2)
    made.versions.documents._searchers = [Away(each) for each in made._deployed.searchers]
    return made


def asked(made: Service) -> list[int]:
    """How often each searcher was asked for documents."""
    return [each.calls["documents"] for each in made.versions.documents._searchers]


def test_documents_are_read_where_their_shard_is_searched(index, query_tower, whole, monkeypatch):
    made = apart(index, query_tower, ServeConfig(deadline_s=60), monkeypatch)
    client = Client(api.build(made, made._config))
    answer = client.search(**QUERY, explain=True).json()
    assert (answer["results"], answer["degraded"]) == (whole, [])
    shards = {hit["explain"]["shard"] for hit in whole}
    assert asked(made) == [int(shard in shards) for shard in (0, 1)]
    best = client.search(query="bakoli menura", k=1, explain=True).json()["results"][0]["explain"]["shard"]
    before = asked(made)
    client.search(query="bakoli menura", k=1)
    assert [now - then for now, then in zip(asked(made), before, strict=True)] == [best == 0, best == 1]
    assert client("GET", "/documents/d7").json()["title"] == "Title 7"
    assert client("GET", "/documents/unknown").status_code == 404
    assert client("GET", "/healthz").json()["status"] == "ok"
    client.close()


def test_a_searcher_without_its_documents_costs_those_alone(moved, query_tower, whole, monkeypatch):
    monkeypatch.setattr(document_stores, "REOPEN_AFTER_S", 0.0)
    monkeypatch.setattr(index_searcher, "REOPEN_AFTER_S", 0.0)
    made = apart(moved[0], query_tower, ServeConfig(deadline_s=60), monkeypatch)
    client = Client(api.build(made, made._config))
    os.rename(moved[1], f"{moved[0].uri}/{documents_file(1)}")
    client.wait(made.versions.follow())
    assert client.search(**QUERY, explain=True).json()["results"] == whole
    for searcher in made._deployed.searchers:  # as those of replicas that start anew
        for held in searcher.target._held.values():
            vars(held).pop("store")
    broken = open_artifact(moved[0].uri, kind="index")
    monkeypatch.setattr(
        made._deployed.searchers[1].target._held[made.versions.active.name], "_artifact", broken
    )
    os.rename(f"{moved[0].uri}/{documents_file(1)}", moved[1])
    answer = client.search(query="bakoli menura", k=20, explain=True).json()
    assert answer["degraded"] == ["documents_unreadable"]
    shown = {hit["explain"]["shard"]: bool(hit["title"]) for hit in answer["results"]}
    assert shown == {0: True, 1: False}
    assert client("GET", "/healthz").json()["silent"] == ["documents"]
    os.rename(moved[1], f"{moved[0].uri}/{documents_file(1)}")
    answer = client.search(query="bakoli menura", k=20, explain=True).json()
    assert (all(hit["title"] for hit in answer["results"]), answer["degraded"]) == (True, [])
    assert client("GET", "/healthz").json()["status"] == "ok"
    client.close()


def test_searchers_are_asked_for_documents_that_the_delta_has_not_given(index, query_tower, monkeypatch):
    made = apart(index, query_tower, ServeConfig(deadline_s=60), monkeypatch)
    asyncio.run(made.versions.start())
    (found,) = Searcher.open(index.uri).find(np.ones((1, DIM), np.float32), k=3)
    own, of_delta = found.take([0]), {"doc_id": "new", "title": "Written"}
    best = Candidates(
        ids=np.append(own.ids, 2 << 40),  # the delta comes after both shards
        shards=np.append(own.shards, 2),
        dense=np.append(own.dense, 0.1),
        sparse=None,
        documents=[None, of_delta],
        searched=2,
        version=made.versions.active.name,
    )
    results, whole = asyncio.run(
        made.versions.documents.read(Results(best, [1.0, 0.1], best.documents), 60.0)
    )
    first, second = results.documents
    assert (whole, second, bool(first["title"])) == (True, of_delta, True)
    assert asked(made) == [int(own.shards[0] == shard) for shard in (0, 1)]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["gateway", "searchers"])
def test_a_version_without_documents_is_not_activated(
    index: Artifact,
    query_tower: Artifact,
    moved: tuple[Artifact, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    elsewhere: bool,
):
    config = ServeConfig(deadline_s=60, state=str(tmp_path / "state"))
    if elsewhere:
        made = apart(index, query_tower, config, monkeypatch)
    else:
        made = service(index, query_tower, config, groups=2)
    asyncio.run(made.versions.start())
    before = made.versions.active
    with pytest.raises(ArtifactError, match=r"documents\.arrow is missing"):
        asyncio.run(made.versions.activate(replace(before, name="other", uri=moved[0].uri)))
    assert made.versions.active == before


def test_a_searcher_that_cannot_read_documents_tries_again_after_a_while(monkeypatch):
    opened = IndexSearcher.__new__(IndexSearcher)
    tried = []

    def fail(*_: Any) -> None:
        tried.append(1)
        raise OSError("the bucket is away")

    opened._documents_closed_until = 0.0
    opened._require = lambda _: asyncio.sleep(0, SimpleNamespace())  # type: ignore[assignment, return-value]
    monkeypatch.setattr(index_searcher, "_documents", fail)
    for _ in range(2):
        assert isinstance(asyncio.run(opened.documents("v", [1])), Refused)
    assert len(tried) == 1
    opened._documents_closed_until = 0.0
    monkeypatch.setattr(index_searcher, "_documents", lambda *_: {1: {"title": "one"}})
    assert asyncio.run(opened.documents("v", [1])) == {1: {"title": "one"}}


@pytest.mark.parametrize(
    ("uri", "here", "apart"),
    [("s3://bucket/index", False, True), ("/srv/index", False, False), ("s3://bucket/index", True, False)],
)
def test_only_searchers_elsewhere_read_documents_from_a_bucket(uri, here, apart):
    searchers: list[Any] = [LocalHandle(object())] if here else [Away(LocalHandle(object()))]
    assert document_stores.read_by_searchers(uri, searchers) == apart


def test_a_searcher_opens_the_documents_of_a_bucket_with_the_version(index, moved, tmp_path, monkeypatch):
    def held(searched: Artifact, **options: Any) -> Any:
        searcher = IndexSearcher(Catalog(Version.of(searched.uri)), **options)
        (found,) = searcher._held.values()
        return vars(found)

    assert "store" not in held(index, shows_documents=True)  # a gateway maps local files itself
    monkeypatch.setattr(index_searcher, "fs", SimpleNamespace(is_local=lambda _: False))
    assert "store" not in held(index)
    assert "store" in held(index, shows_documents=True)
    assert "store" not in held(moved[0], shows_documents=True)  # which it searches all the same
    live = LiveCatalog(str(tmp_path / "live"), LivePair(index.uri))  # whose searches have documents
    assert len(IndexSearcher(live, shows_documents=True)._held) == 1
