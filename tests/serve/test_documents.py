"""Documents that cannot be read: results by their ids, the absence named, another try every few seconds."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_here import Client, service

from scalingnote.core.errors import ArtifactError
from scalingnote.index.shard import DocumentStore, documents_file
from scalingnote.run.service_config import ServeConfig
from scalingnote.serve import api, versions
from scalingnote.serve.access import RefusedError
from scalingnote.serve.messages import SearchRequest, SearchResponse
from scalingnote.serve.service import Service
from scalingnote.serve.telemetry import RequestRecord
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


def test_unreadable_documents_degrade_the_answer(
    client: Client, made: Service, moved: tuple[Artifact, Path], whole: Any, monkeypatch: pytest.MonkeyPatch
):
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
    monkeypatch.setattr(versions, "REOPEN_AFTER_S", 0.0)
    client.wait(made.versions.follow())
    assert client.search(**QUERY).json()["degraded"] == ["documents_unreadable"]
    os.rename(moved[1], f"{moved[0].uri}/{documents_file(1)}")
    client.wait(made.versions.follow())
    answer = client.search(**QUERY, explain=True).json()
    assert (answer["results"], answer["degraded"]) == (whole, [])
    assert client("GET", "/healthz").json()["status"] == "ok"
    assert client("GET", "/documents/d7").json()["title"] == "Title 7"


def test_unreadable_documents_are_not_reranked(client: Client, made: Service):
    class Never:
        @property
        def score(self) -> Any:
            raise AssertionError("it has no texts to score")

    made._deployed = replace(made._deployed, reranker=Never())  # type: ignore[arg-type]
    assert client.search(**QUERY, rerank=3).json()["degraded"] == ["documents_unreadable", "not_reranked"]


def test_documents_that_fail_during_a_read_are_reopened(
    client: Client, made: Service, moved: tuple[Artifact, Path], whole: Any, monkeypatch: pytest.MonkeyPatch
):
    os.rename(moved[1], f"{moved[0].uri}/{documents_file(1)}")
    monkeypatch.setattr(versions, "REOPEN_AFTER_S", 0.0)
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


def test_results_without_readable_ids_are_left_out(client: Client, made: Service):
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


def test_a_version_without_documents_is_not_activated(
    index: Artifact, query_tower: Artifact, moved: tuple[Artifact, Path], tmp_path: Path
):
    made = service(index, query_tower, ServeConfig(deadline_s=60, state=str(tmp_path / "state")), groups=2)
    asyncio.run(made.versions.start())
    before = made.versions.active
    other = type(before)("other", moved[0].uri, before.documents, before.dim, before.created)
    with pytest.raises(ArtifactError, match=r"documents\.arrow is missing"):
        asyncio.run(made.versions.activate(other))
    assert made.versions.active == before
