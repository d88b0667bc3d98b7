"""A gateway, two groups of searchers and a delta: answers show all writes, replacements and deletions."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gateway_here import Client
from pair import DIM

from scalingnote.encode.engines import Cost
from scalingnote.index.live import wal
from scalingnote.index.shard import SHARD_DOCUMENTS
from scalingnote.run.ingest import IndexRows
from scalingnote.run.service_config import LiveServe, ServeConfig
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Searcher
from scalingnote.serve import api
from scalingnote.serve.artifacts import ServedArtifacts
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.encoders import ArmEncoder, QueryPathParts
from scalingnote.serve.fan_out import Aggregator
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.serve.live_catalog import LiveCatalog, LivePair
from scalingnote.serve.service import Service
from scalingnote.serve.towers import Refused
from scalingnote.serve.writer import Writer
from scalingnote.storage.artifact import Artifact
from synthetic_corpus import vectors

NEW = vectors(200, DIM, seed=5)
Truth = dict[str, np.ndarray]


class NumberedTexts:
    """A fake document encoder: the text of a document is the number of its vector in NEW."""

    def __init__(self, index: str) -> None:
        self._index = index

    async def encode(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, IndexRows]:
        columns = {
            "doc_id": [row["doc_id"] for row in documents],
            "title": [f"written {row['content']}" for row in documents],
            "topic": [row["topic"] for row in documents],
            "snippet": [row["content"] for row in documents],
            "semantic_id": ["" for _ in documents],
        }
        rows = NEW[[int(row["content"]) for row in documents]]
        cost = Cost(cut_texts=len(documents), lost_tokens=7)
        return {self._index: IndexRows(pa.table(columns, schema=SHARD_DOCUMENTS), rows, [], cost)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "live")


@pytest.fixture
def truth(index: Artifact) -> Truth:
    searcher = Searcher.open(index.uri)
    all_vectors = {f"d{n}": searcher.vector(f"d{n}") for n in range(len(searcher))}
    return {name: vector for name, vector in all_vectors.items() if vector is not None}


def opened(
    index: Artifact, query_tower: Artifact, folder: str, *, aggregated: bool = False
) -> tuple[Client, Writer, Service]:
    catalog = LiveCatalog(folder, LivePair(index.uri), delta=True)
    live = LiveServe(folder=folder, delta=True)
    config = ServeConfig(deadline_s=60, live=live)
    if aggregated:  # set without validation: this index has only two groups
        config = config.model_copy(update={"groups_per_aggregator": 1})
    searchers = [LocalHandle(IndexSearcher(catalog, shards=[group], mapped=group == 1)) for group in range(2)]
    writer = Writer(catalog, live)
    aggregators = [Aggregator([searchers[group]], [group], False) for group in range(2)]
    arms = [
        ServedArm("default", LocalHandle(ArmEncoder(QueryPathParts((query_tower.uri, "student")))), "", False)
    ]
    service = Service(
        Deployed(
            arms,
            catalog,
            searchers,
            [in_another_process(each) for each in aggregators] if aggregated else [],
            document_encoder=LocalHandle(NumberedTexts(index.uri)),
            writer=LocalHandle(writer),
        ),
        config,
    )
    return Client(api.build(service, config)), writer, service


def in_another_process(aggregator: Any) -> Any:
    """Return a handle like one of another process, to which the gateway sends pickled queries."""
    return SimpleNamespace(
        search_many=SimpleNamespace(remote=aggregator.search_many),
        ping=SimpleNamespace(remote=aggregator.ping),
    )


@pytest.fixture(params=[False])
def served(
    index: Artifact, query_tower: Artifact, folder: str, request: pytest.FixtureRequest
) -> Iterator[tuple[Client, Writer, Service]]:
    parts = opened(index, query_tower, folder, aggregated=request.param)
    yield parts
    parts[0].close()
    parts[1].close()


def write(client: Client, truth: Truth, numbers: Mapping[str, int], *, topic: str = "new") -> None:
    rows = [{"doc_id": i, "title": "", "topic": topic, "content": str(n)} for i, n in numbers.items()]
    answer = client("POST", "/documents", json={"documents": rows})
    assert answer.status_code == 200
    counts = {"written": len(rows), "cut_texts": len(rows), "lost_tokens": 7}
    assert answer.json() == {**counts, "rejected": []}
    truth |= {name: NEW[n] / np.linalg.norm(NEW[n]) for name, n in numbers.items()}


def delete(client: Client, truth: Truth, doc_ids: Sequence[str]) -> None:
    assert client("POST", "/documents/delete", json={"doc_ids": doc_ids}).status_code == 200
    for name in doc_ids:
        truth.pop(name, None)


def best(truth: Mapping[str, np.ndarray], query: np.ndarray, k: int) -> list[str]:
    scores = {name: float(vector @ query) for name, vector in truth.items()}
    return sorted(scores, key=lambda name: -scores[name])[:k]


def agree(client: Client, truth: Truth, *, version: str = "0") -> None:
    for query in vectors(3, DIM, seed=11):
        for k in (5, 60):
            answer = client.search(vector=query.tolist(), k=k, explain=True).json()
            assert [hit["doc_id"] for hit in answer["results"]] == best(truth, query, k)
            assert (answer["index_version"], answer["shards_answered"]) == (version, 2)
            assert (answer["missing_groups"], answer["degraded"]) == ([], [])
            for hit in answer["results"]:
                document = client("GET", f"/documents/{hit['doc_id']}").json()
                assert {"title", "snippet"} <= document.keys()
                assert document.items() <= hit.items()


@pytest.mark.parametrize("served", [False, True], indirect=True, ids=["groups", "aggregators"])
def test_writes_replace_and_hide_documents_of_the_groups(served, truth, index):
    client, _, _ = served
    agree(client, truth)
    write(client, truth, {f"d{n}": n // 5 for n in range(0, 420, 7)})
    agree(client, truth)
    delete(client, truth, [f"d{n}" for n in range(0, 420, 3)])
    write(client, truth, {"new": 150, "d3": 151}, topic="odd")
    delete(client, truth, ["d7", "nothing"])
    agree(client, truth)
    odd = client.search(vector=NEW[150].tolist(), k=5, filter={"topic": "odd"}).json()["results"]
    assert [hit["doc_id"] for hit in odd] == best({n: truth[n] for n in ("new", "d3")}, NEW[150], 5)
    assert [client("GET", f"/documents/{name}").status_code for name in ("d7", "d6", "d3", "d1")] == [
        *(404, 404, 200, 200)
    ]
    for name in ("d3", "d1"):
        near = client("POST", "/similar", json={"doc_id": name, "k": 6}).json()["results"]
        others = {other: vector for other, vector in truth.items() if other != name}
        assert [hit["doc_id"] for hit in near] == best(others, truth[name], 6)
    assert client("POST", "/similar", json={"doc_id": "d6", "k": 6}).status_code == 404
    info = client("GET", "/info").json()
    assert (info["live"], info["shards"]) == (True, 2)
    assert client("GET", "/healthz").json()["status"] == "ok"


def test_answers_survive_a_fold_a_rollback_and_a_restart(served, truth, index, query_tower, folder):
    client, writer, service = served
    write(client, truth, {f"d{n}": n // 5 for n in range(0, 420, 7)})
    delete(client, truth, ["d1", "d2"])
    assert client("POST", "/admin/index/compact").status_code == 200
    agree(client, truth, version="1")
    assert len(writer.active) == 0
    write(client, truth, {"d1": 100, "d14": 101})
    delete(client, truth, ["d7"])
    agree(client, truth, version="1")
    assert client("POST", "/admin/index/roll_back").status_code == 200
    agree(client, truth, version="0")
    writer.close()
    again, second, _ = opened(index, query_tower, folder)
    agree(again, truth, version="0")
    write(again, truth, {"d2": 102})
    client.wait(service.versions.deltas.refresh())  # of the first gateway, in place of its periodic task
    agree(client, truth, version="0")
    agree(again, truth, version="0")
    again.close()
    second.close()


def test_an_index_with_a_delta_is_divided_into_groups(index, tmp_path):
    catalog = LiveCatalog(str(tmp_path), LivePair(index.uri), delta=True)

    def groups(**live: Any) -> tuple[range, ...]:
        config = ServeConfig(live=LiveServe(folder=str(tmp_path), **live), shards_per_searcher=1)
        return ServedArtifacts(index, (), catalog, config).groups

    assert groups(delta=True) == (range(1), range(1, 2))
    assert groups() == (range(2),)
    ServeConfig(live=LiveServe(folder="here", delta=True), mapped=True)  # valid: searchers add no vectors


def test_a_delta_without_an_answer_is_a_missing_group(served, truth, monkeypatch):
    client, _, service = served
    write(client, truth, {"d0": 0})
    deltas = service.versions.deltas

    async def never(_: Any) -> Any:
        await asyncio.sleep(3600)

    with monkeypatch.context() as patch:
        patch.setattr(deltas, "_batcher", never)
        answer = client.search(vector=NEW[0].tolist(), k=5, deadline_ms=300).json()
        assert (answer["missing_groups"], answer["shards_answered"]) == ([2], 2)
        assert "d0" not in [hit["doc_id"] for hit in answer["results"]]
    with monkeypatch.context() as patch:
        patch.setattr(wal, "last_acknowledged", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            client.wait(deltas.refresh())
        health = client("GET", "/healthz").json()
        assert (health["status"], health["silent"]) == ("degraded", ["delta"])
    client.wait(deltas.refresh())
    assert client("GET", "/healthz").json()["status"] == "ok"


def test_the_delta_does_not_change_the_query_of_the_groups(served, truth):
    client, _, service = served
    write(client, truth, {"d0": 0})
    unchanged = []

    async def groups(query: Query, _: float) -> Refused:
        before = {**vars(query)}
        await asyncio.sleep(0.2)  # the delta is searched
        unchanged.append(vars(query) == before)
        return Refused("none")

    query = Query(NEW[:1], version="0")
    client.wait(service.versions.deltas.search(query, 60.0, groups))
    assert unchanged == [True]


def test_without_a_store_documents_of_the_delta_are_complete(served, truth, monkeypatch):
    client, _, service = served
    write(client, truth, {"d0": 0})
    monkeypatch.setattr(service.versions.documents, "_stores", {})
    monkeypatch.setattr(service.versions.documents, "_tried", float("inf"))
    answer = client.search(vector=NEW[0].tolist(), k=5).json()
    assert [hit["doc_id"] for hit in answer["results"]] == best(truth, NEW[0], 5)
    assert answer["degraded"] == ["documents_unreadable"]
    titles = [hit["title"] for hit in answer["results"]]
    assert (titles[0], set(titles[1:])) == ("written 0", {""})
