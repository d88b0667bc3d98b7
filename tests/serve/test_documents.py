"""Documents that cannot be read: results have ids, answers report it, and every few seconds is a retry."""

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
def partial_index(index: Artifact, tmp_path: Path) -> tuple[Artifact, Path]:
    """Return an index without the documents of one shard, and the path of these documents."""
    copy = shutil.copytree(index.uri, tmp_path / "index")
    away = tmp_path / "documents.arrow"
    os.rename(copy / documents_file(1), away)
    return open_artifact(str(copy), kind="index"), away


@pytest.fixture
def gateway(partial_index: tuple[Artifact, Path], query_tower: Artifact) -> Service:
    config = ServeConfig(deadline_s=60, rerank="a fake")
    return service(partial_index[0], query_tower, config, groups=2)


@pytest.fixture
def client(gateway: Service) -> Iterator[Client]:
    http_client = Client(api.build(gateway, gateway._config))
    yield http_client
    http_client.close()


@pytest.fixture
def complete_results(index: Artifact, query_tower: Artifact) -> list[dict[str, Any]]:
    gateway = service(index, query_tower, ServeConfig(deadline_s=60))
    http_client = Client(api.build(gateway, gateway._config))
    answer = http_client.search(**QUERY, explain=True).json()
    http_client.close()
    results: list[dict[str, Any]] = answer["results"]
    return results


def test_unreadable_documents_degrade_the_answer(
    client, gateway, partial_index, complete_results, monkeypatch
):
    answer = client.search(**QUERY, explain=True).json()
    SearchResponse.model_validate(answer, extra="forbid")
    assert answer["degraded"] == ["documents_unreadable"]
    assert (answer["shards_answered"], answer["missing_groups"]) == (2, [])
    for hit, expected in zip(answer["results"], complete_results, strict=True):
        same = ("doc_id", "score", "topic", "explain")  # topic is a filter column
        assert {name: hit[name] for name in same} == {name: expected[name] for name in same}
        assert (hit["title"], hit["snippet"], hit["semantic_id"]) == ("", "", "")
    health = client("GET", "/healthz")
    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert health.json()["silent"] == ["documents"]
    assert client("GET", "/documents/d7").status_code == 503
    similar = client("POST", "/similar", json={"doc_id": "d7", "k": 3}).json()
    assert (similar["degraded"], len(similar["results"])) == (["documents_unreadable"], 3)
    monkeypatch.setattr(document_stores, "REOPEN_AFTER_S", 0.0)
    client.wait(gateway.versions.follow())
    assert client.search(**QUERY).json()["degraded"] == ["documents_unreadable"]
    os.rename(partial_index[1], f"{partial_index[0].uri}/{documents_file(1)}")
    client.wait(gateway.versions.follow())
    answer = client.search(**QUERY, explain=True).json()
    assert (answer["results"], answer["degraded"]) == (complete_results, [])
    assert client("GET", "/healthz").json()["status"] == "ok"
    assert client("GET", "/documents/d7").json()["title"] == "Title 7"


def test_unreadable_documents_are_not_reranked(client, gateway):
    class Never:
        @property
        def score(self) -> Any:
            raise AssertionError("there are no texts to score")

    gateway._deployed = replace(gateway._deployed, reranker=Never())
    assert client.search(**QUERY, rerank=3).json()["degraded"] == ["documents_unreadable", "not_reranked"]


def test_documents_that_fail_during_a_read_are_reopened(
    client, gateway, partial_index, complete_results, monkeypatch
):
    os.rename(partial_index[1], f"{partial_index[0].uri}/{documents_file(1)}")
    monkeypatch.setattr(document_stores, "REOPEN_AFTER_S", 0.0)
    client.wait(gateway.versions.follow())

    def fail(*_: Any) -> Any:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DocumentStore, "read", fail)
        answer = client.search(**QUERY).json()
        assert answer["degraded"] == ["documents_unreadable"]
        assert [hit["doc_id"] for hit in answer["results"]] == [hit["doc_id"] for hit in complete_results]
    client.wait(gateway.versions.follow())
    assert client.search(**QUERY, explain=True).json()["results"] == complete_results


def test_results_without_readable_ids_are_left_out(client, gateway):
    searchers = gateway.versions.documents._searchers
    gateway.versions.documents._searchers = searchers[:1]
    answer = client.search(query="bakoli menura", k=50).json()
    assert 0 < len(answer["results"]) < 50
    assert answer["degraded"] == ["documents_unreadable"]
    assert all(int(hit["doc_id"].removeprefix("d")) < 210 for hit in answer["results"])
    gateway.versions.documents._searchers = []
    with pytest.raises(RefusedError, match="neither documents nor ids") as refused:
        client.wait(gateway.search(SearchRequest(**QUERY), RequestRecord("r")))
    assert refused.value.status == 503


# --- an index in a bucket: searchers read the documents of their shards ------------------------------------


class Away:
    """A searcher that looks like one in another process to a gateway, and counts the calls of its methods."""

    def __init__(self, searcher: LocalHandle) -> None:
        self._searcher, self.calls = searcher, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._searcher, name)


def gateway_of_searchers(
    served: Artifact, tower: Artifact, config: ServeConfig, patch: pytest.MonkeyPatch
) -> Service:
    """Return a gateway with two searchers of one shard each; the gateway must not open documents."""

    def never(*_: Any) -> Any:
        raise AssertionError("the gateway opened documents")

    patch.setattr(document_stores, "DocumentStore", SimpleNamespace(open=never))
    patch.setattr(document_stores, "read_by_searchers", lambda *_: True)
    gateway = service(served, tower, config, groups=2)
    gateway.versions.documents._searchers = [Away(each) for each in gateway._deployed.searchers]
    return gateway


def document_calls(gateway: Service) -> list[int]:
    """Return how often each searcher was called for documents."""
    return [each.calls["documents"] for each in gateway.versions.documents._searchers]


def test_searchers_of_the_results_read_the_documents(index, query_tower, complete_results, monkeypatch):
    gateway = gateway_of_searchers(index, query_tower, ServeConfig(deadline_s=60), monkeypatch)
    client = Client(api.build(gateway, gateway._config))
    answer = client.search(**QUERY, explain=True).json()
    assert (answer["results"], answer["degraded"]) == (complete_results, [])
    shards = {hit["explain"]["shard"] for hit in complete_results}
    assert document_calls(gateway) == [int(shard in shards) for shard in (0, 1)]
    best = client.search(query="bakoli menura", k=1, explain=True).json()["results"][0]["explain"]["shard"]
    before = document_calls(gateway)
    client.search(query="bakoli menura", k=1)
    assert [now - then for now, then in zip(document_calls(gateway), before, strict=True)] == [
        best == 0,
        best == 1,
    ]
    assert client("GET", "/documents/d7").json()["title"] == "Title 7"
    assert client("GET", "/documents/unknown").status_code == 404
    assert client("GET", "/healthz").json()["status"] == "ok"
    client.close()


def test_only_documents_of_one_searcher_are_missing(
    partial_index, query_tower, complete_results, monkeypatch
):
    monkeypatch.setattr(document_stores, "REOPEN_AFTER_S", 0.0)
    monkeypatch.setattr(index_searcher, "REOPEN_AFTER_S", 0.0)
    gateway = gateway_of_searchers(partial_index[0], query_tower, ServeConfig(deadline_s=60), monkeypatch)
    client = Client(api.build(gateway, gateway._config))
    os.rename(partial_index[1], f"{partial_index[0].uri}/{documents_file(1)}")
    client.wait(gateway.versions.follow())
    assert client.search(**QUERY, explain=True).json()["results"] == complete_results
    for searcher in gateway._deployed.searchers:  # as in replicas that restart
        for searcher_of_version in searcher.target._held.values():
            vars(searcher_of_version).pop("store")
    broken = open_artifact(partial_index[0].uri, kind="index")
    monkeypatch.setattr(
        gateway._deployed.searchers[1].target._held[gateway.versions.active.name], "_artifact", broken
    )
    os.rename(f"{partial_index[0].uri}/{documents_file(1)}", partial_index[1])
    answer = client.search(query="bakoli menura", k=20, explain=True).json()
    assert answer["degraded"] == ["documents_unreadable"]
    has_title = {hit["explain"]["shard"]: bool(hit["title"]) for hit in answer["results"]}
    assert has_title == {0: True, 1: False}
    assert client("GET", "/healthz").json()["silent"] == ["documents"]
    os.rename(partial_index[1], f"{partial_index[0].uri}/{documents_file(1)}")
    answer = client.search(query="bakoli menura", k=20, explain=True).json()
    assert (all(hit["title"] for hit in answer["results"]), answer["degraded"]) == (True, [])
    assert client("GET", "/healthz").json()["status"] == "ok"
    client.close()


def test_searchers_send_documents_that_the_delta_lacks(index, query_tower, monkeypatch):
    gateway = gateway_of_searchers(index, query_tower, ServeConfig(deadline_s=60), monkeypatch)
    asyncio.run(gateway.versions.start())
    (candidates,) = Searcher.open(index.uri).find(np.ones((1, DIM), np.float32), k=3)
    of_index, of_delta = candidates.take([0]), {"doc_id": "new", "title": "Written"}
    best = Candidates(
        ids=np.append(of_index.ids, 2 << 40),  # the number of the delta follows those of both shards
        shards=np.append(of_index.shards, 2),
        dense=np.append(of_index.dense, 0.1),
        sparse=None,
        documents=[None, of_delta],
        searched=2,
        version=gateway.versions.active.name,
    )
    results, are_read = asyncio.run(
        gateway.versions.documents.read(Results(best, [1.0, 0.1], best.documents), 60.0)
    )
    first, second = results.documents
    assert (are_read, second, bool(first["title"])) == (True, of_delta, True)
    assert document_calls(gateway) == [int(of_index.shards[0] == shard) for shard in (0, 1)]


@pytest.mark.parametrize("in_searchers", [False, True], ids=["gateway", "searchers"])
def test_a_version_without_documents_is_not_activated(
    index: Artifact,
    query_tower: Artifact,
    partial_index: tuple[Artifact, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_searchers: bool,
):
    config = ServeConfig(deadline_s=60, state=str(tmp_path / "state"))
    if in_searchers:
        gateway = gateway_of_searchers(index, query_tower, config, monkeypatch)
    else:
        gateway = service(index, query_tower, config, groups=2)
    asyncio.run(gateway.versions.start())
    before = gateway.versions.active
    with pytest.raises(ArtifactError, match=r"documents\.arrow is missing"):
        asyncio.run(gateway.versions.activate(replace(before, name="other", uri=partial_index[0].uri)))
    assert gateway.versions.active == before


def test_a_searcher_reopens_documents_only_after_a_pause(monkeypatch):
    searcher = IndexSearcher.__new__(IndexSearcher)
    attempts = []

    def fail(*_: Any) -> None:
        attempts.append(1)
        raise OSError("the bucket is away")

    searcher._documents_closed_until = 0.0
    searcher._require = lambda _: asyncio.sleep(0, SimpleNamespace())  # type: ignore[assignment, return-value]
    monkeypatch.setattr(index_searcher, "_documents", fail)
    for _ in range(2):
        assert isinstance(asyncio.run(searcher.documents("v", [1])), Refused)
    assert len(attempts) == 1
    searcher._documents_closed_until = 0.0
    monkeypatch.setattr(index_searcher, "_documents", lambda *_: {1: {"title": "one"}})
    assert asyncio.run(searcher.documents("v", [1])) == {1: {"title": "one"}}


@pytest.mark.parametrize(
    ("uri", "here", "expected"),
    [("s3://bucket/index", False, True), ("/srv/index", False, False), ("s3://bucket/index", True, False)],
)
def test_searchers_of_other_processes_read_from_a_bucket(uri, here, expected):
    searchers: list[Any] = [LocalHandle(object())] if here else [Away(LocalHandle(object()))]
    assert document_stores.read_by_searchers(uri, searchers) == expected


def test_a_searcher_opens_documents_of_a_bucket_at_the_start(index, partial_index, tmp_path, monkeypatch):
    def held(searched: Artifact, **options: Any) -> Any:
        searcher = IndexSearcher(Catalog(Version.of(searched.uri)), **options)
        (held_searcher,) = searcher._held.values()
        return vars(held_searcher)

    assert "store" not in held(index, shows_documents=True)  # a gateway maps local files itself
    monkeypatch.setattr(index_searcher, "fs", SimpleNamespace(is_local=lambda _: False))
    assert "store" not in held(index)
    assert "store" in held(index, shows_documents=True)
    assert "store" not in held(partial_index[0], shows_documents=True)  # it can still be searched
    live = LiveCatalog(str(tmp_path / "live"), LivePair(index.uri))  # its searches return documents
    assert len(IndexSearcher(live, shows_documents=True)._held) == 1
