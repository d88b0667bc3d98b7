"""A service with a vector database answers like one with its own index, or reports why it cannot."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_here import Client, service
from pair import DIM, built
from test_grpc import Call

from scalingnote.core.config import validate
from scalingnote.core.errors import ConfigError
from scalingnote.export import databases, vectors
from scalingnote.run.service_config import AppArgs, ServeConfig
from scalingnote.serve import api, artifacts
from scalingnote.serve.access import Admission
from scalingnote.serve.grpc import scalingnote_pb2 as pb
from scalingnote.serve.grpc.servicer import Servicer
from scalingnote.serve.index_searcher import IndexSearcher
from scalingnote.storage.artifact import Artifact, open_artifact
from synthetic_corpus import Corpus, queries

CLIENTS = {"qdrant": "qdrant_client", "milvus": "pymilvus"}


def loaded(backend: str, index: Artifact, folder: Path, collection: str = "scalingnote") -> dict[str, Any]:
    """Write the documents of an index to a database, and return the settings for it."""
    url = f"{folder / backend}.db"
    dataset, embeddings = (
        open_artifact(index.manifest.parents[kind]["uri"], kind=kind) for kind in ("dataset", "embeddings")
    )
    target = databases.connect(backend, url, collection)
    source = vectors.ExportSource(embeddings, dataset, None, ("title", "topic"))
    vectors.export(source, target, checkpoint=f"{folder}/{collection}.json")
    target._client.close()
    return {"backend": backend, "url": url, "collection": collection}


@pytest.fixture(scope="module")
def own_client(index: Artifact, query_tower: Artifact) -> Iterator[Client]:
    config = ServeConfig(deadline_s=60)
    client = Client(api.build(service(index, query_tower, config), config))
    yield client
    client.close()


@pytest.fixture(scope="module", params=CLIENTS)
def database(
    request: pytest.FixtureRequest,
    index: Artifact,
    query_tower: Artifact,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Client, Servicer, Any]]:
    """Yield the name of a database, a service that searches it over HTTP and gRPC, and its client."""
    pytest.importorskip(CLIENTS[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    config = ServeConfig(deadline_s=60, search=loaded(request.param, index, folder))
    gateway = service(index, query_tower, config)
    client = Client(api.build(gateway, config))
    (searcher,) = gateway._deployed.searchers[0].target._held.values()
    servicer = Servicer(gateway, Admission(config.limits), lambda *_: None)
    yield request.param, client, servicer, searcher._collection._client
    client.close()
    searcher.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/search", {"query": "bakoli menura", "k": 7}),
        ("/search", {"vector": [0.1 * n for n in range(DIM)], "k": 5, "explain": True}),
        ("/search", {"query": "menura", "k": 5, "filter": {"topic": ["topic 2", "topic 4"]}}),
        ("/search", {"query": "menura", "k": 5, "filter": {"topic": "none"}}),
        ("/search", {"query": "menura", "k": 0}),
        ("/search", {"query": "menura", "filter": {"price": 3}}),
        ("/search", {"query": "menura", "dense_weight": 0.5}),
        ("/search", {"query": " "}),
        ("/similar", {"doc_id": "d17", "k": 4}),
        ("/similar", {"doc_id": "nothing"}),
    ],
    ids=str,
)
def test_answers_equal_those_of_our_index(
    own_client: Client, database: tuple[Any, ...], path: str, body: dict[str, Any]
) -> None:
    _, client, _, _ = database
    expected, actual = (each("POST", path, json=body) for each in (own_client, client))
    assert actual.status_code == expected.status_code
    actual, expected = actual.json(), expected.json()
    for answer in (actual, expected):
        del answer["request_id"]
        answer["timings_ms"] = sorted(answer.get("timings_ms", {}))
    for row in expected.get("results", []):
        row["score"] = pytest.approx(row["score"], abs=1e-4)
        if "explain" in row:
            row["explain"]["dense"] = pytest.approx(row["explain"]["dense"], abs=1e-4)
    assert actual == expected


def test_documents_and_limits_equal_those_of_our_index(own_client: Client, database: tuple[Any, ...]) -> None:
    _, client, _, _ = database
    for path in ("/info", "/healthz", "/documents/d3", "/admin/index"):
        assert client("GET", path).json() == own_client("GET", path).json()
    assert client("GET", "/documents/nothing").status_code == 404
    assert (
        client("POST", "/documents", json={"documents": [{"doc_id": "a", "content": "b"}]}).status_code == 409
    )


def test_nprobe_is_refused_with_a_database(database: tuple[Any, ...]) -> None:
    name, client, _, _ = database
    answer = client.search(query="bakoli", nprobe=3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid")
    assert f"set search.ef for {name}" in answer.json()["error"]["message"]


def test_a_failing_database_is_unavailable_until_it_answers(
    database: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, client, servicer, database_client = database

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("Connection refused")

    with monkeypatch.context() as patch:
        for method in ("query_batch_points", "search", "retrieve", "get", "count", "query"):
            patch.setattr(database_client, method, fail, raising=False)
        for answer in (client.search(query="bakoli"), client("POST", "/similar", json={"doc_id": "d17"})):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"] == {
                "code": "unavailable",
                "message": f"{name} failed: Connection refused: try again",
                "field": None,
            }
        context = Call()
        client.wait(servicer.Search(pb.SearchRequest(query="bakoli"), grpc_context=context))
        assert (context.code.name, context.details) == ("UNAVAILABLE", answer.json()["error"]["message"])
        health = client("GET", "/healthz")
        assert (health.status_code, health.json()["status"], health.json()["shards_answered"]) == (
            503,
            "down",
            0,
        )
    assert client.search(query="bakoli").status_code == 200
    assert client("GET", "/healthz").json()["status"] == "ok"


def test_a_slow_database_is_unavailable_at_the_deadline(
    database: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, client, _, database_client = database
    for method in ("query_batch_points", "search"):
        monkeypatch.setattr(database_client, method, lambda *_, **__: time.sleep(1), raising=False)
    answer = client.search(vector=[1.0] * DIM, deadline_ms=300)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == f"{name} does not answer in time: try again"


def test_another_version_is_searched_in_its_own_collection(
    index: Artifact, query_tower: Artifact, tmp_path: Path
) -> None:
    pytest.importorskip("pymilvus")
    other = built(tmp_path / "other", corpus_seed=1)
    for each in (index, other):
        search = loaded("milvus", each, tmp_path, f"docs_{each.digest[:12]}")
    config = ServeConfig(
        deadline_s=60, state=str(tmp_path), search={**search, "collection": "docs_{version}"}
    )
    client = Client(api.build(service(index, query_tower, config), config))
    vector = queries(Corpus.build(f"{tmp_path}/c", sizes=[200, 220], dim=DIM, seed=1).matrix, 1)[0].tolist()
    before = client.search(vector=vector).json()
    answer = client("POST", "/admin/index/activate", json={"uri": other.uri})
    assert answer.status_code == 200
    after = client.search(vector=vector).json()
    assert (before["index_version"], after["index_version"]) == (index.digest[:12], other.digest[:12])
    assert before["results"] != after["results"]
    third = built(tmp_path / "third", corpus_seed=2)
    answer = client("POST", "/admin/index/activate", json={"uri": third.uri})
    assert answer.status_code == 422
    assert f"there is no collection 'docs_{third.digest[:12]}' of milvus" in answer.json()["error"]["message"]
    assert client.search(vector=vector).json()["results"] == after["results"]
    client.close()


# --- at the start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"live": {"folder": "live"}},
            r"can be used with live: documents are written only to files of an index",
        ),
        ({"mapped": True}, "mapped: a database has no files"),
        ({"canary": 0.1, "search": {"backend": "milvus", "url": "m.db"}}, "canary needs an exact search"),
        (
            {"split": {"arms": [{"name": "a", "share": 1, "index": "elsewhere"}]}},
            r"an arm with a separate index.*put \{version\} into search\.collection",
        ),
        (
            {"deployments": {"gateway": {"num_replicas": 2}}},
            r"deployments\.gateway has 2 replicas, but one process can open .*/q: set num_replicas to 1",
        ),
        (
            {"deployments": {"searcher": {"num_replicas": 3}}},
            r"searcher has 3 replicas, but one process",
        ),
        ({"deployments": {"gateway": {"num_replicas": 0}}}, r"gateway\.num_replicas is 0: give 1 or more"),
        ({"deployments": {"writer": {"num_replicas": 2}}}, "one writer holds the claim on the log"),
        ({"search": {"backend": "qdrant"}}, "backend qdrant needs a url"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit_a_database_are_refused(values: dict[str, Any], message: str) -> None:
    settings = {"search": {"backend": "qdrant", "url": "q"}} | values
    with pytest.raises(ConfigError, match=message):
        validate(ServeConfig, settings, source="serve")


@pytest.mark.parametrize(
    "values",
    [
        {"deployments": {"gateway": {"num_replicas": 2}}},
        {"canary": 0.1},
        {"deployments": {"searcher": {"num_replicas": 3}}},
    ],
)
def test_a_database_server_may_have_several_processes(values: dict[str, Any]) -> None:
    search = {"backend": "qdrant", "url": "http://localhost:6333"}
    assert validate(ServeConfig, {"search": search} | values, source="serve").search.url == search["url"]


@pytest.mark.parametrize("backend", CLIENTS)
def test_a_database_is_checked_before_replicas_start(
    backend: str, index: Artifact, query_tower: Artifact, tmp_path: Path
) -> None:
    pytest.importorskip(CLIENTS[backend])
    search = loaded(backend, index, tmp_path)
    places = {"index": index.uri, "query_tower": query_tower.uri}
    absent = AppArgs(**places, serve={"search": search | {"collection": "absent"}})
    with pytest.raises(ConfigError, match=rf"there is no collection 'absent' of {backend}.*--to {backend}"):
        artifacts.find(absent)
    served = artifacts.find(AppArgs(**places, serve={"search": search}))
    assert isinstance(served, artifacts.ServedArtifacts)
    assert served.gateway_searches
    assert served.groups == (range(2),)
    index_searcher = IndexSearcher(served.catalog, search=served.config.search)
    (searcher,) = index_searcher._held.values()
    searcher.close()


def test_a_model_without_an_index_refuses_a_database(tmp_path: Path) -> None:
    search = {"backend": "qdrant", "url": "http://localhost:6333"}
    with pytest.raises(ConfigError, match=r"serve\.search needs an index"):
        artifacts.find(AppArgs(model=str(tmp_path), serve={"search": search}))
