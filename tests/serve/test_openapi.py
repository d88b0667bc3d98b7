"""For every request, /openapi.json describes the answer, and the answer is never a fault of the server."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import schemathesis
from gateway_here import Client, Reranker, service
from hypothesis import given, settings
from hypothesis import strategies as st
from pair import DIM
from pydantic import ValidationError
from schemathesis import GenerationMode, checks

from scalingnote.run.ingest import IndexRows
from scalingnote.run.service_config import LiveServe, ServeConfig
from scalingnote.serve import api
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.embeddings import OpenAIRefusal
from scalingnote.serve.messages import Document, Range, Refusal
from scalingnote.storage.artifact import Artifact

# Hypothesis takes random numbers that threads of the server draw for numbers drawn by an example.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
OPERATIONS = [
    ("/search", "POST"),
    ("/similar", "POST"),
    ("/encode", "POST"),
    ("/documents", "POST"),
    ("/documents/delete", "POST"),
    ("/documents/{doc_id}", "GET"),
    ("/documents/{doc_id}", "DELETE"),
    ("/admin/index", "GET"),
    ("/admin/index/activate", "POST"),
    ("/admin/index/compact", "POST"),
    ("/admin/index/roll_back", "POST"),
    ("/v1/embeddings", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/embed", "POST"),
    ("/embed_sparse", "POST"),
    ("/rerank", "POST"),
    ("/similarity", "POST"),
    ("/tokenize", "POST"),
    ("/info", "GET"),
    ("/health", "GET"),
    ("/healthz", "GET"),
    ("/metrics", "GET"),
]


class Writer:
    """A fake encoder and writer that accepts every document."""

    async def encode(self, documents: list[dict[str, Any]]) -> dict[str, IndexRows]:
        rows = pa.table({"doc_id": [row["doc_id"] for row in documents]})
        return {"": IndexRows(rows, np.zeros((len(rows), DIM), np.float32), [])}

    async def upsert(self, rows: dict[str, IndexRows]) -> tuple[int, list[dict[str, str]]]:
        return len(rows[""].documents), []

    async def delete(self, doc_ids: list[str]) -> int:
        return len(doc_ids)

    async def compact(self) -> None:
        return None


@pytest.fixture(scope="module")
def client(index: Artifact, query_tower: Artifact) -> Iterator[Client]:
    config = ServeConfig(
        deadline_s=60,
        rerank="a fake",
        live=LiveServe(folder="live"),
    )
    parts = {
        "document_encoder": LocalHandle(Writer()),
        "writer": LocalHandle(Writer()),
        "reranker": LocalHandle(Reranker()),
    }
    http_client = Client(api.build(service(index, query_tower, config, **parts), config))
    yield http_client
    http_client.close()


@pytest.fixture(scope="module")
def api_schema(client: Client) -> Any:
    return schemathesis.openapi.from_dict(client("GET", "/openapi.json").json())


def checked_answer(client: Client, method: str, path: str, *, hurried: bool = False, **options: Any) -> Any:
    """Send a request, and check that its answer is not a fault of the server, or is a valid refusal."""
    answer = client(method, path, **options)
    assert answer.status_code < 500 or (hurried and answer.status_code == 503), (answer.text, options)
    if answer.status_code >= 400 and method != "HEAD":
        assert answer.headers["x-request-id"]
        if answer.request.url.path.startswith("/v1/"):
            contents = OpenAIRefusal.model_validate(answer.json(), extra="forbid").error.message
        else:
            refusal = Refusal.model_validate(answer.json(), extra="forbid")
            assert refusal.request_id == answer.headers["x-request-id"]
            contents = refusal.error.message
        assert len(contents) > 8
    return answer


def test_every_operation_is_in_the_list_of_tests(api_schema):
    operations = {(each.ok().path, each.ok().method.upper()) for each in api_schema.get_all_operations()}
    assert operations == set(OPERATIONS)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda value: value)
def test_openapi_describes_every_answer(client, api_schema, path, method, mode):
    operation = api_schema[path][method]
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return  # it has no body that could be invalid

    @settings(derandomize=True, max_examples=25, database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        kwargs = case.as_transport_kwargs(base_url="http://test")
        kwargs["content"] = kwargs.pop("data", None)
        options = {
            name: kwargs[name] for name in ("headers", "json", "content") if kwargs.get(name) is not None
        }
        hurried = "deadline_ms" in (case.body if isinstance(case.body, dict) else ())
        answer = checked_answer(client, kwargs["method"], kwargs["url"], hurried=hurried, **options)
        case.validate_response(answer, checks=CHECKS)

    check()


SEARCH = {
    "k": 3,
    "nprobe": 1,
    "arm": "default",
    "user_id": "u",
    "filter": {"topic": "topic 1"},
    "explain": True,
}
GOOD: dict[str, list[dict[str, Any]]] = {
    "/search": [{"query": "zo", **SEARCH}, {"vector": [1.0] * DIM}, {"query": "zo", "rerank": 3}],
    "/similar": [{"doc_id": "d7", "filter": {"topic": ["topic 1", "topic 2"]}}],
    "/encode": [{"queries": ["zo"], "arm": "default", "user_id": "u"}],
    "/v1/embeddings": [
        {"input": ["zo", "ba"], "model": "scalingnote", "encoding_format": "base64"},
        {"input": [[1, 2], [3]], "model": "scalingnote-query", "dimensions": 3, "input_type": "query"},
    ],
    "/embed": [{"inputs": ["zo"], "normalize": False, "prompt_name": "query"}],
    "/embed_sparse": [{"inputs": ["zo"], "truncate": True}],
    "/rerank": [{"query": "zo", "texts": ["ba", "zo"], "return_text": True}],
    "/similarity": [{"inputs": {"source_sentence": "zo", "sentences": ["ba"]}, "parameters": {}}],
    "/tokenize": [{"inputs": "zo", "add_special_tokens": True}],
    "/documents": [{"documents": [{"doc_id": "d7", "title": "t", "price": 3}, {"doc_id": "d8"}]}],
    "/documents/delete": [{"doc_ids": ["d7"]}],
    "/admin/index/activate": [{"version": "x"}, {"uri": "/nowhere"}],
    "/admin/index/compact": [{}],
    "/admin/index/roll_back": [{}],
}


def with_null(value: Any, schema: Any, models: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield for each optional field, also of nested objects: name, the object without it, and with null."""
    kinds = [models[kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind for kind in kinds_of(schema)]
    for kind in kinds if isinstance(value, dict) else ():
        for name, field in kind.get("properties", {}).items():
            without = {key: each for key, each in value.items() if key != name}
            if name not in kind.get("required", ()):
                yield name, without, {**value, name: None}
            if name in value:
                for inner, *pair in with_null(value[name], field, models):
                    yield f"{name}.{inner}", *({**value, name: each} for each in pair)


def kinds_of(schema: Any) -> list[Any]:
    return schema.get("anyOf", [schema])


def test_null_for_an_optional_field_means_its_default(client):
    api_schema, fields = client("GET", "/openapi.json").json(), set()
    varying = ("request_id", "timings_ms")
    for path, method in OPERATIONS:
        body = api_schema["paths"][path][method.lower()].get("requestBody")
        if body is None:
            continue
        schema, models = body["content"]["application/json"]["schema"], api_schema["components"]["schemas"]
        for good in GOOD[path]:
            for name, without, null in with_null(good, schema, models):
                answers = [
                    checked_answer(client, method, path, json=null_body) for null_body in (without, null)
                ]
                contents = [each.json() for each in answers]
                for each in contents:
                    for key in varying if isinstance(each, dict) else ():
                        each.pop(key, None)
                assert answers[0].status_code == answers[1].status_code, (path, name, answers[1].text)
                assert contents[0] == contents[1], (path, name)
                fields.add((path, name))
    assert len(fields) > 30
    assert ("/similarity", "parameters.truncation_direction") in fields
    assert ("/v1/embeddings", "encoding_format") in fields


def test_null_in_documents_and_ranges_means_the_default():
    document = Document.model_validate({"doc_id": "d", "title": None, "price": None})
    assert document.model_dump() == {"doc_id": "d", "title": "", "topic": "", "content": "", "price": None}
    assert Range.model_validate({"min": None, "max": 3}) == Range(max=3)
    with pytest.raises(ValidationError, match="doc_id"):
        Document.model_validate({"doc_id": None})


def test_openapi_lists_every_status_separately(client):
    for path, operations in client("GET", "/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            statuses = operation["responses"].keys()
            assert all(status.isdigit() for status in statuses), (path, method)
            assert statuses >= {"200", "401", "413", "415", "429", "500", "503"}, (path, method)
            assert ("422" in statuses) <= (not path.startswith("/v1/")), (path, method)


ODD_JSON = {
    "half of a surrogate pair": b'{"a": "\\ud83d"}',
    "NaN": b'{"a": NaN}',
    "a huge number": b'{"a": ' + b"9" * 5000 + b"}",
    "deep": b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "a name twice": b'{"a": 1, "a": 2}',
    "a byte-order mark": b'\xef\xbb\xbf{"a": 1}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a control character": b'{"a": "\x01"}',
}


@pytest.mark.parametrize("odd", ODD_JSON)
def test_ambiguous_json_is_refused(client, odd):
    for path in GOOD:
        if path in ("/admin/index/compact", "/admin/index/roll_back"):
            continue  # they read no body
        headers = {"content-type": "application/json"}
        answer = checked_answer(client, "POST", path, content=ODD_JSON[odd], headers=headers)
        assert answer.status_code == (400 if path.startswith("/v1/") else 422), (path, answer.text)
    rows = ODD_JSON[odd].replace(b'"a"', b'"doc_id": "d", "price"', 1)
    body = b'{"documents": [' + rows + b"]}"
    answer = checked_answer(client, "POST", "/documents", content=body, headers=headers)
    assert answer.status_code == 422 or odd == "a name twice", answer.text


@settings(derandomize=True, max_examples=60, database=None)
@given(
    method=st.sampled_from(["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "QUERY"]),
    path=st.sampled_from([path for path, _ in OPERATIONS] + ["/", "/page/", "/page/..%2fapi.py", "/docs"]),
    doc_id=st.binary(max_size=20) | st.sampled_from([b"d7", b"x" * 600, b"..", b"\x00", b"a/b", b"%2f"]),
)
def test_any_method_and_any_id_gets_a_valid_answer(client, method, path, doc_id):
    escaped_id = "".join(f"%{byte:02x}" for byte in doc_id)
    answer = checked_answer(client, method, path.replace("{doc_id}", escaped_id))
    assert answer.status_code != 405 or answer.headers["allow"]
