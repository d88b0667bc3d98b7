"""The complete HTTP side with a real index and tower, in this process: every answer, every refusal."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from gateway_here import Client, service
from pair import DIM

from scalingnote.encode.encoder import Encoder
from scalingnote.run.service_config import Limits, ServeConfig
from scalingnote.search.searcher import Searcher
from scalingnote.serve import api
from scalingnote.serve.messages import Refusal, SearchResponse
from scalingnote.storage.artifact import Artifact


@pytest.fixture(scope="module", params=[1, 2], ids=["one group", "a group per shard"])
def client(request: Any, index: Artifact, query_tower: Artifact) -> Iterator[Client]:
    config = ServeConfig(deadline_s=60, limits=Limits(max_k=50, max_query_chars=40, max_body_bytes=4096))
    http_client = Client(api.build(service(index, query_tower, config, groups=request.param), config))
    yield http_client
    http_client.close()


@pytest.fixture(scope="module")
def in_process(index: Artifact, query_tower: Artifact) -> Callable[..., tuple[list[str], list[float]]]:
    """Return a function for the same search without the service; it returns ids and scores."""
    encoder, searcher = Encoder.load(query_tower.directory("query")), Searcher.open(index.uri)

    def search(query: str, **options: Any) -> tuple[list[str], list[float]]:
        results = searcher.search(encoder.encode_queries([query]), **options)[0]
        return [result.doc_id for result in results], [result.score for result in results]

    return search


@pytest.mark.parametrize(
    "options", [{"k": 7}, {"k": 50}, {"k": 5, "where": {"topic": "topic 3"}}, {"k": 3, "nprobe": 1}]
)
def test_the_service_returns_the_results_of_the_searcher(client, in_process, options):
    for query in ("bakoli menura", "  sitave\n", "数据 zo"):
        body = {"filter" if name == "where" else name: value for name, value in options.items()}
        answer = client.search(query=query, **body).json()
        doc_ids, scores = in_process(query.strip(), **options)
        assert [hit["doc_id"] for hit in answer["results"]] == doc_ids
        assert [hit["score"] for hit in answer["results"]] == pytest.approx(scores, abs=1e-5)
        SearchResponse.model_validate(answer, extra="forbid")
        best = answer["results"][0]
        number = int(best["doc_id"].removeprefix("d"))
        assert (best["title"], best["topic"]) == (f"Title {number}", f"topic {number % 7}")
        assert best["snippet"].startswith(f"Text of document {number}.")
        assert best["semantic_id"] == f"1-0-{number}"


def test_concurrent_requests_get_their_own_answers(client, in_process):
    options = [{"query": f"bakoli {word}", "k": k} for k in (2, 3) for word in ("menura", "sitave", "zoba")]

    async def crowd() -> list[httpx.Response]:
        return await asyncio.gather(*(client._client.post("/search", json=body) for body in options))

    for body, answer in zip(options, client.wait(crowd()), strict=True):
        doc_ids, _ = in_process(body["query"], k=body["k"])
        assert [hit["doc_id"] for hit in answer.json()["results"]] == doc_ids


def test_a_vector_and_its_text_give_the_same_results(client):
    answer = client("POST", "/encode", json={"queries": ["bakoli menura", "zo"]}).json()
    assert answer["dim"] == DIM
    assert np.linalg.norm(answer["embeddings"], axis=1) == pytest.approx([1, 1], abs=1e-5)
    of_text = client.search(query="bakoli menura", k=5).json()["results"]
    of_vector = client.search(vector=[3 * value for value in answer["embeddings"][0]], k=5).json()["results"]
    assert [hit["doc_id"] for hit in of_vector] == [hit["doc_id"] for hit in of_text]


def test_vectors_of_any_length_are_normalised(client):
    answers = [client.search(vector=[size] * DIM, k=3).json()["results"] for size in (1.0, 1e200, 1e-200)]
    assert answers[0] == answers[1] == answers[2]


def test_explained_results_have_their_scores(client):
    plain, explained = (
        client.search(query="bakoli", k=4, explain=e).json()["results"] for e in (False, True)
    )
    assert all("explain" not in hit for hit in plain)
    for hit in explained:
        assert hit["explain"]["dense"] == pytest.approx(hit["score"])
        assert hit["explain"]["shard"] == (int(hit["doc_id"].removeprefix("d")) >= 210)
        assert hit["explain"]["sparse"] is None
        assert hit["explain"]["rerank"] is None


def test_similar_searches_with_the_vector_of_the_document(client, index):
    answer = client("POST", "/similar", json={"doc_id": "d7", "k": 5, "filter": {"topic": "topic 0"}}).json()
    searcher = Searcher.open(index.uri)
    results = searcher.search(searcher.vector("d7")[np.newaxis], k=6, where={"topic": "topic 0"})[0]
    assert results[0].doc_id == "d7"
    assert [hit["doc_id"] for hit in answer["results"]] == [result.doc_id for result in results[1:]]


def test_a_document_is_found_by_its_id(client):
    assert client("GET", "/documents/d301").json()["title"] == "Title 301"
    for doc_id in ("d/nothing", "दान/१", "50% of a?b#c", "d\nno", "द\r\n"):
        missing = client("GET", f"/documents/{quote(doc_id, safe='')}")
        assert missing.status_code == 404
        assert repr(doc_id) in missing.json()["error"]["message"]
    assert client("POST", "/similar", json={"doc_id": "nothing"}).status_code == 404
    too_long = client("GET", f"/documents/{'x' * 513}")
    assert (too_long.status_code, too_long.json()["error"]["field"]) == (422, "doc_id")


def test_info_lists_arms_fields_and_facets(client, index):
    info = client("GET", "/info").json()
    assert (info["documents"], info["dim"], info["shards"]) == (420, DIM, 2)
    assert info["index_version"] == index.digest[:12]
    assert info["fields"] == {"topic": "text"}
    assert info["facets"]["topic"] == [{"value": f"topic {n}", "count": 60} for n in range(7)]
    assert [arm["name"] for arm in info["arms"]] == ["default"]
    health = {"status": "ok", "encoder_answers": True, "shards": 2, "shards_answered": 2, "silent": []}
    assert client("GET", "/healthz").json() == health


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"query": ""}', "query"),
        ('{"query": "   "}', "query"),
        ('{"query": 3}', "query"),
        ('{"query": null}', None),
        ('{"k": 3}', None),
        ('{"query": "x", "vector": [1]}', None),
        ('{"query": "x", "k": 0}', "k"),
        ('{"query": "x", "k": 51}', "k"),
        ('{"query": "x", "k": 2.5}', "k"),
        ('{"query": "x", "k": true}', "k"),
        ('{"query": "x", "k": "2"}', "k"),
        ('{"query": "x", "k": NaN}', "k"),
        ('{"query": "x", "top": 2}', "top"),
        ('{"query": "x", "nprobe": 0}', "nprobe"),
        ('{"query": "x", "rerank": 3}', "rerank"),
        ('{"query": "x", "arm": "other"}', "arm"),
        ('{"query": "x", "dense_weight": 0.5}', "dense_weight"),
        ('{"query": "x", "dense_weight": 1.5}', "dense_weight"),
        ('{"query": "x", "deadline_ms": 0}', "deadline_ms"),
        ('{"query": "x", "filter": {"nope": 1}}', "filter"),
        ('{"query": "x", "filter": {"topic": 1}}', "filter"),
        ('{"query": "x", "filter": {"topic": {"min": 1}}}', "filter"),
        ('{"query": "x", "filter": {"topic": {}}}', "filter.topic"),
        ('{"query": "x", "filter": {"topic": []}}', "filter.topic"),
        ('{"query": "x", "top": null}', "top"),
        ('{"query": "x", "filter": {"topic": {"min": 1, "min": 2}}}', "min"),
        ('{"query": "x", "k": 1e400}', "k"),
        (json.dumps({"query": "x", "k": 10**400}), "k"),
        ('{"query": "x", "filter": ' + '{"a": ' * 500 + "1" + "}" * 501, None),
        (json.dumps({"query": "x" * 41}), "query"),
        ('{"vector": [1, 2]}', "vector"),
        (json.dumps({"vector": [0] * DIM}), "vector"),
        (json.dumps({"vector": [float("nan")] * DIM}), "vector"),
        (json.dumps({"query": "x", "queries": ["x"]}), "queries"),
        ("", None),
        ("{", None),
        ("[]", None),
    ],
)
def test_an_invalid_body_is_refused_with_field_and_reason(client, body, field):
    answer = client("POST", "/search", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    refusal = Refusal.model_validate(answer.json(), extra="forbid")
    assert refusal.error.code == "invalid"
    assert len(refusal.error.message) > 8
    assert refusal.request_id == answer.headers["x-request-id"]
    if field is not None:
        assert (refusal.error.field or "").startswith(field)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/nothing", None),
        ("/search", "POST"),
        ("/info", "GET, HEAD"),
        ("/documents/d7", "DELETE, GET, HEAD"),
        ("/", "GET, HEAD"),
    ],
)
def test_a_wrong_method_or_path_is_refused(client, path, methods):
    answer = client("PATCH", path)
    Refusal.model_validate(answer.json(), extra="forbid")
    assert (answer.status_code, answer.headers.get("allow")) == (405 if methods else 404, methods)


PATHS = ["/", "/page/page.css", "/openapi.json", "/info", "/health", "/healthz", "/metrics", "/admin/index"]
PATHS += [
    "/v1/models",
    "/v1/models/scalingnote",
    "/documents/d7",
    "/documents/nothing",
    "/nothing",
    "/search",
]


@pytest.mark.parametrize("path", PATHS)
def test_head_has_the_headers_of_get_and_no_body(client, path):
    get, head = (client(method, path, headers={"x-request-id": "a"}) for method in ("GET", "HEAD"))
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert get.content or path == "/metrics"  # this gateway has no metrics
    assert get.headers == head.headers


def test_large_bodies_with_and_without_a_length_are_refused(client):
    async def pieces():
        for _ in range(5):
            yield b"x" * 1000

    for content in (b'{"query": "' + b"x" * 5000 + b'"}', pieces()):
        answer = client("POST", "/search", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert "4,096" in answer.json()["error"]["message"]
    assert client.search(query="x").status_code == 200


def test_a_request_keeps_its_id(client):
    answer = client("POST", "/search", json={"query": "x"}, headers={"x-request-id": "mine-17"})
    assert (answer.headers["x-request-id"], answer.json()["request_id"]) == ("mine-17", "mine-17")
    for odd in ("a b", "x" * 65, "\x7f"):
        assert client("GET", "/info", headers={"x-request-id": odd}).headers["x-request-id"] != odd


def test_the_page_may_run_only_its_own_scripts(client):
    page = client("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "require-trusted-types-for 'script'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    for name in ("page.css", "page.js"):
        assert client("GET", f"/page/{name}").headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/plain", b'{"query": "x"}'),
        ("application/x-www-form-urlencoded", b"query=x"),
        ("multipart/form-data; boundary=x", b"--x--"),
        ("application/jsonp", b'{"query": "x"}'),
        (None, b'{"query": "x"}'),
    ],
)
def test_a_body_of_another_content_type_is_refused(client, kind, body):
    headers = {} if kind is None else {"content-type": kind}
    answer = client("POST", "/search", content=body, headers=headers)
    assert answer.status_code == 415
    assert (kind or "no content-type") in Refusal.model_validate(answer.json()).error.message
    accepted = {"content-type": "Application/JSON; charset=utf-8"}
    assert client("POST", "/search", content=b'{"query": "x"}', headers=accepted).status_code == 200


def test_only_pages_of_listed_origins_may_call(index: Artifact, query_tower: Artifact):
    page, other = "https://shop.example", "https://other.example"
    options = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    for origins in ((), (page,)):
        config = ServeConfig(cors_origins=origins)
        client = Client(api.build(service(index, query_tower, config), config))
        for origin in (page, other):
            allowed = origin if origin in origins else None
            before = client("OPTIONS", "/search", headers={"origin": origin, **options})
            answer = client("POST", "/search", json={"query": "x"}, headers={"origin": origin})
            allowed_origins = [each.headers.get("access-control-allow-origin") for each in (before, answer)]
            assert allowed_origins == [allowed, allowed]
        client.close()
