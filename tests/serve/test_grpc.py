"""gRPC answers like HTTP: the same answers, refusals, limits and records."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from gateway_here import Client, service
from google.rpc import error_details_pb2, status_pb2
from grpc_tools import protoc
from pair import DIM

from scalingnote.run.service_config import Limits, ServeConfig
from scalingnote.serve import access, api, messages
from scalingnote.serve.access import Admission, RefusedError
from scalingnote.serve.grpc import scalingnote_pb2 as pb
from scalingnote.serve.grpc.servicer import DETAILS, Servicer, _document, status_of, validate_request
from scalingnote.serve.telemetry import RequestRecord
from scalingnote.storage.artifact import Artifact

ROOT = Path(api.__file__).parents[2]
KEY = "a-key-of-some-length"


class Call:
    """A fake of the context of a call that Serve passes to a replica."""

    def __init__(self, **metadata: str) -> None:
        self._metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        self.code, self.details, self.trailing = grpc.StatusCode.OK, "", {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:10.0.0.1:51234"

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, Any]]) -> None:
        self.trailing = dict(metadata)


@pytest.fixture(scope="module")
def both(index: Artifact, query_tower: Artifact) -> Iterator[SimpleNamespace]:
    """Yield one service over HTTP and over gRPC, and the records of the calls."""
    config = ServeConfig(deadline_s=60, limits=Limits(max_k=50, max_body_bytes=4096))
    one, records = service(index, query_tower, config), []
    servicer = Servicer(one, Admission(config.limits), lambda *record: records.append(record[:3]))
    client = Client(api.build(one, config))

    def call(method: str, request: Any, **metadata: str) -> tuple[Any, Call]:
        context = Call(**metadata)
        return client.wait(getattr(servicer, method)(request, grpc_context=context)), context

    yield SimpleNamespace(http=client, call=call, records=records)
    client.close()


def refusal(context: Call) -> tuple[str, str | None]:
    """Return the code and the field of a refused call."""
    status = status_pb2.Status.FromString(context.trailing[DETAILS])
    assert (status.code, status.message) == (context.code.value[0], context.details)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    fields = [v.field for d in status.details if d.Unpack(bad) for v in bad.field_violations]
    return info.reason, next(iter(fields), None)


def test_the_committed_code_equals_the_generated_code(tmp_path):
    definition = "scalingnote/serve/grpc/scalingnote.proto"
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    includes = [f"-I{ROOT}", f"-I{Path(protoc.__file__).parent / '_proto'}"]
    assert protoc.main(["protoc", *includes, *outputs, str(ROOT / definition)]) == 0
    generated = sorted(tmp_path.glob("scalingnote/serve/grpc/*"))
    assert len(generated) == 3
    for file in generated:
        committed = ROOT / "scalingnote" / "serve" / "grpc" / file.name
        assert committed.read_text() == file.read_text(), "run `make proto`"


def test_messages_have_the_fields_of_their_models():
    pairs = [
        (pb.SearchRequest, messages.SearchRequest),
        (pb.SimilarRequest, messages.SimilarRequest),
        (pb.EncodeRequest, messages.EncodeRequest),
        (pb.UpsertRequest, messages.UpsertRequest),
        (pb.DeleteRequest, messages.DeleteRequest),
        (pb.GetRequest, messages.GetRequest),
        (pb.SearchResponse, messages.SearchResponse),
        (pb.EncodeResponse, messages.EncodeResponse),
        (pb.Written, messages.Written),
        (pb.Rejected, messages.Rejected),
        (pb.Deleted, messages.Deleted),
        (pb.Timings, messages.Timings),
        (pb.Explained, messages.Explained),
        (pb.PassagePlace, messages.PassagePlace),
    ]
    for message, model in pairs:
        assert set(message.DESCRIPTOR.fields_by_name) == set(model.model_fields), message
    assert set(pb.Hit.DESCRIPTOR.fields_by_name) == set(messages.Hit.model_fields) | {"fields"}
    assert set(pb.Document.DESCRIPTOR.fields_by_name) == set(messages.Document.model_fields) | {"features"}


def test_a_hit_has_the_place_of_its_passage():
    hit = {"doc_id": "a", "passage": {"number": 2, "start": 5, "end": 9}, "brand": "x"}
    message = pb.Hit(**_document(hit))
    assert (message.passage.number, message.passage.start, message.passage.end) == (2, 5, 9)
    assert dict(message.fields) == {"brand": "x"}
    assert not pb.Hit(doc_id="a").HasField("passage")


@pytest.mark.parametrize(
    "fields_",
    [
        {"query": "bakoli menura", "k": 7, "explain": True},
        {"query": "数据 zo", "filter": {"topic": ["topic 3", "topic 4"]}, "nprobe": 1},
        {"vector": [1.0] * DIM},
    ],
)
def test_a_search_gives_the_results_of_http(both, fields_):
    answer, context = both.call("Search", pb.SearchRequest(**fields_), x_request_id="mine-17")
    over_http = both.http.search(**fields_).json()
    assert context.code is grpc.StatusCode.OK
    assert answer.request_id == context.trailing["x-request-id"] == "mine-17"
    assert (answer.index_version, answer.arm) == (over_http["index_version"], over_http["arm"])
    assert answer.shards == answer.shards_answered == 2
    assert answer.timings_ms.total > 0
    assert len(answer.results) == fields_.get("k", 10)
    for hit, expected in zip(answer.results, over_http["results"], strict=True):
        explain = expected.pop("explain", None)
        assert {name: getattr(hit, name) for name in expected} == pytest.approx(expected)
        assert hit.HasField("explain") == (explain is not None)
        if explain is not None:
            assert (hit.explain.dense, hit.explain.shard) == (explain["dense"], explain["shard"])
            assert not hit.explain.HasField("sparse")


def test_other_methods_answer_like_http(both):
    over_http = both.http("POST", "/encode", json={"queries": ["zo", "bakoli"]}).json()
    answer, _ = both.call("Encode", pb.EncodeRequest(queries=["zo", "bakoli"]))
    embeddings = np.array([row.values for row in answer.embeddings])
    assert embeddings == pytest.approx(np.array(over_http["embeddings"]))
    assert (answer.dim, answer.arm) == (DIM, "default")

    similar = {"doc_id": "d7", "k": 3}
    answer, _ = both.call("Similar", pb.SimilarRequest(**similar))
    over_http = both.http("POST", "/similar", json=similar).json()
    assert [hit.doc_id for hit in answer.results] == [hit["doc_id"] for hit in over_http["results"]]

    answer, _ = both.call("Get", pb.GetRequest(doc_id="d301"))
    assert (answer.doc_id, answer.title) == ("d301", "Title 301")


@pytest.mark.parametrize(
    ("method", "request_", "code", "reason", "field"),
    [
        ("Search", pb.SearchRequest(), "INVALID_ARGUMENT", "invalid", None),
        ("Search", pb.SearchRequest(query="x", k=0), "INVALID_ARGUMENT", "invalid", "k"),
        ("Search", pb.SearchRequest(query="x", k=51), "INVALID_ARGUMENT", "invalid", "k"),
        ("Search", pb.SearchRequest(query="x", filter={"no": 1}), "INVALID_ARGUMENT", "invalid", "filter"),
        ("Search", pb.SearchRequest(vector=[float("nan")] * DIM), "INVALID_ARGUMENT", "invalid", "vector.0"),
        ("Search", pb.SearchRequest(query="x", arm="é" * 128), "INVALID_ARGUMENT", "invalid", "arm"),
        ("Search", pb.SearchRequest(query="x" * 5000), "RESOURCE_EXHAUSTED", "too_large", None),
        ("Encode", pb.EncodeRequest(queries=["x"] * 257), "INVALID_ARGUMENT", "invalid", "queries"),
        ("Get", pb.GetRequest(), "INVALID_ARGUMENT", "invalid", "doc_id"),
        ("Get", pb.GetRequest(doc_id="no"), "NOT_FOUND", "not_found", None),
        ("Delete", pb.DeleteRequest(doc_ids=["x"]), "FAILED_PRECONDITION", "conflict", None),
        ("Upsert", pb.UpsertRequest(documents=[{}]), "FAILED_PRECONDITION", "conflict", None),
    ],
)
def test_a_refused_call_has_code_reason_and_field(both, method, request_, code, reason, field):
    _, context = both.call(method, request_)
    assert context.code is getattr(grpc.StatusCode, code)
    assert refusal(context) == (reason, field)
    assert len(context.details) > 8


def test_a_call_is_recorded_like_one_over_http(both):
    both.records.clear()
    both.call("Search", pb.SearchRequest(query="zo", k=2), x_request_id="a")
    both.call("Get", pb.GetRequest(doc_id="no"), x_request_id="b")
    (path, record, status), refused = both.records
    assert (path, status, record.request_id, record.search.query) == ("/search", 200, "a", "zo")
    assert len(record.answer["results"]) == 2
    assert refused == ("/documents/{doc_id:any}", RequestRecord("b", refused="not_found"), 404)


def test_admission_counts_http_and_grpc_together(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEY)
    admission = Admission(Limits(rate=0.001, burst=2), access.read_keys(str(path)))
    servicer = Servicer(SimpleNamespace(), admission)

    def call(**metadata: str) -> Call:
        context = Call(**metadata)
        asyncio.run(servicer.Get(pb.GetRequest(), grpc_context=context))
        return context

    for metadata in ({}, {"authorization": "Bearer wrong"}, {"authorization": ""}):
        assert call(**metadata).code is grpc.StatusCode.UNAUTHENTICATED
    key = f"Bearer {KEY}"
    assert (
        call(authorization=key).code is grpc.StatusCode.INVALID_ARGUMENT
    )  # it is admitted, and lacks the id of a document
    admission.admit(key.encode(), "elsewhere")  # over HTTP
    context = call(authorization=key)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    status = status_pb2.Status.FromString(context.trailing[DETAILS])
    retry = error_details_pb2.RetryInfo()
    assert status.details[-1].Unpack(retry)
    assert retry.retry_delay.seconds > 100


def test_a_fault_of_the_server_is_answered_without_details(caplog):
    servicer = Servicer(SimpleNamespace(), Admission(Limits()))
    context = Call()
    asyncio.run(servicer.Get(pb.GetRequest(doc_id="x"), grpc_context=context))
    assert context.code is grpc.StatusCode.INTERNAL
    assert refusal(context) == ("internal", None)
    assert "AttributeError" in caplog.text
    assert "AttributeError" not in context.details


def test_a_cancelled_call_is_recorded_as_499():
    records: list[int] = []
    service = SimpleNamespace(document=lambda _: asyncio.sleep(60))
    servicer = Servicer(
        service, Admission(Limits()), lambda path, state, status, seconds: records.append(status)
    )

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(servicer.Get(pb.GetRequest(doc_id="x"), grpc_context=Call()), 0.01)

    asyncio.run(give_up())
    assert records == [499]


def test_a_long_message_is_cut_to_fit_into_metadata():
    refused = RefusedError(422, "数" * 10_000, "文" * 10_000, retry_after_s=1)
    status = status_of(refused, "r" * 64)
    assert len(status.SerializeToString()) < 2500
    assert status.message.startswith("数数")


def test_documents_and_filters_are_converted_like_json():
    features = {"price": 3, "weight": 1.5, "tags": ["a", None], "deep": {"x": True}, "huge": 1e300}
    document = pb.Document(doc_id="d", title="t", features={**features, "doc_id": "other"})
    body = validate_request(pb.UpsertRequest(documents=[document]), messages.UpsertRequest)
    assert body.documents == [{**features, "doc_id": "d", "title": "t"}]
    assert isinstance(body.documents[0]["price"], int)
    request = pb.SearchRequest(query="x", filter={"price": {"min": 3, "max": 4.5}, "topic": ["a"]})
    fields_ = validate_request(request, messages.SearchRequest)
    assert messages.index_filter(fields_.filter) == {"price": {"min": 3, "max": 4.5}, "topic": ["a"]}
