"""A server started like from the command line: versions change under load, replicas die, it shuts down."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import replicas_here
from google.rpc import status_pb2
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from pair import DIM, built
from replicas_here import PAUSE_S, TRIES, free_port, hits, kill, processes

import listeners
from scalingnote.encode.encoder import Encoder
from scalingnote.search.searcher import Searcher
from scalingnote.serve import app, launch
from scalingnote.serve.grpc import scalingnote_pb2 as pb
from scalingnote.serve.grpc.scalingnote_pb2_grpc import ScalingNoteStub
from scalingnote.serve.grpc.servicer import DETAILS
from scalingnote.storage.artifact import Artifact

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of a busy machine
QUERY = "bakoli menura"
KEY = "a-key-of-sixteen-or-more"
BEARER = {"authorization": f"Bearer {KEY}"}
Expected = Callable[[Artifact], list[str]]


@pytest.fixture(scope="module")
def other_index(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Return another version, in which the same query has other results."""
    return built(tmp_path_factory.mktemp("other"), corpus_seed=1)


@pytest.fixture(scope="module")
def expected(query_tower: Artifact) -> Expected:
    """Return a function that searches for the query in this process."""
    embedding = Encoder.load(query_tower.directory("query")).encode_queries([QUERY])
    return lambda index: [hit.doc_id for hit in Searcher.open(index.uri).search(embedding, k=5)[0]]


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def access_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[str, list[Any]]]:
    """Yield the URL of a collector of traces, and the list of its spans."""
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
            exported = ExportTraceServiceRequest.FromString(body)
            received.extend(
                s for of in exported.resource_spans for scope in of.scope_spans for s in scope.spans
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


@pytest.fixture(scope="module")
def server(
    index: Artifact,
    query_tower: Artifact,
    grpc_port: int,
    access_log: Path,
    spans: tuple[str, list[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[psutil.Popen]:
    """Yield a server in a separate process and cluster, with replicas for the encoder and for each shard."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    knobs = {
        "host": "0.0.0.0",
        "port": 0,
        "grpc_port": grpc_port,
        "api_keys": str(keys),
        "access_log": str(access_log),
        "deadline_s": 20,
        "deployments": {"encoder": {"num_replicas": 1}, "searcher": {"num_replicas": 1}},
        "shards_per_searcher": 1,
        "state": str(tmp_path_factory.mktemp("state")),
    }
    program = f"""
import sys
from scalingnote.serve import app, artifacts, launch
from scalingnote.run.service_config import AppArgs
served = artifacts.find(AppArgs(index={index.uri!r}, query_tower={query_tower.uri!r}, serve={knobs!r}))
sys.exit(launch.run(served, app.bind(served)))
"""
    command = [sys.executable, "-c", program]
    root = Path(app.__file__).parents[2]
    traced = {
        "RAY_worker_niceness": "0",
        "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH": "scalingnote.serve.telemetry:otlp",
        "RAY_SERVE_TRACING_SAMPLING_RATIO": "0",  # only requests with a sampled traceparent are traced
        "OTEL_EXPORTER_OTLP_ENDPOINT": spans[0],
        "OTEL_BSP_SCHEDULE_DELAY": "200",  # milliseconds; the default is five seconds
    }
    process = psutil.Popen(
        command,
        cwd=root,
        env={**without_ray(os.environ), **traced},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for member in [*process.children(recursive=True), process] if process.is_running() else []:
            member.kill()
        process.wait()
        process.stdout.close()


def without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the token of this process's cluster."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}


@pytest.fixture(scope="module")
def url(server: psutil.Popen) -> str:
    return next(line for line in server.stdout if line.startswith("http://")).split()[0]


def post(url: str, **body: Any) -> tuple[int, Any]:
    return replicas_here.post(url, BEARER, **body)


def test_the_server_returns_the_results_of_the_searcher(url, index, expected):
    status, answer = post(f"{url}/search", query=QUERY, k=5)
    assert (status, hits(answer)) == (200, expected(index))
    assert (answer["shards"], answer["shards_answered"]) == (2, 2)
    status, answer = post(f"{url}/v1/embeddings", model="scalingnote", input=[QUERY])
    assert (status, len(answer["data"][0]["embedding"])) == (200, DIM)
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/info", headers={"x-request-id": "mine", **BEARER})
    ) as info:
        assert info.headers.get_all("x-request-id") == [
            "mine"
        ]  # only the one of Serve, not a second one of ours


def test_grpc_gives_the_answers_of_http(url, grpc_port, access_log, index, expected):
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        stub = ScalingNoteStub(channel)
        metadata = [("application", launch.APPLICATION_NAME), ("x-request-id", "mine"), *BEARER.items()]
        answer, call = stub.Search.with_call(pb.SearchRequest(query=QUERY, k=5), metadata=metadata)
        assert [hit.doc_id for hit in answer.results] == expected(index)
        assert answer.shards_answered == answer.shards == 2
        assert ("x-request-id", "mine") in call.trailing_metadata()
        assert stub.Get(pb.GetRequest(doc_id="d301"), metadata=metadata).title == "Title 301"
        with pytest.raises(grpc.RpcError) as refused:
            stub.Get(pb.GetRequest(doc_id="no/thing"), metadata=metadata)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert "no/thing" in refused.value.details()
    details = dict(refused.value.trailing_metadata())[DETAILS]
    assert status_pb2.Status.FromString(details).message == refused.value.details()
    (log,) = access_log.glob("*.jsonl")
    while '"mine"' not in log.read_text():  # it is flushed once a second
        time.sleep(0.1)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (mine,) = [line for line in lines if line["request_id"] == "mine"]
    assert (mine["path"], mine["status"], mine["k"]) == ("/search", 200, 5)


def test_a_traced_search_has_a_span_for_each_step(url, spans):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {
        "content-type": "application/json",
        "traceparent": f"00-{trace_id}-b7ad6b7169203331-01",
    } | BEARER
    body = json.dumps({"query": QUERY}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/search", body, headers)) as answer:
        request_id = json.load(answer)["request_id"]

    def mine() -> dict[str, Any]:
        return {span.name: span for span in spans[1] if span.trace_id.hex() == trace_id}

    def parents() -> list[Any]:
        """Return the span of the request, which ends after its steps and may be in a later batch."""
        return [span for span in spans[1] if span.span_id == mine()["search"].parent_span_id]

    while not (mine().keys() >= {"encode", "search"} and parents()):
        time.sleep(0.1)
    encode, search = mine()["encode"], mine()["search"]
    (request,) = parents()
    assert encode.parent_span_id == request.span_id
    output = {each.key: each.value.string_value for each in request.attributes}
    assert output["scalingnote.request_id"] == request_id
    assert request.start_time_unix_nano <= encode.start_time_unix_nano < encode.end_time_unix_nano
    assert encode.end_time_unix_nano == search.start_time_unix_nano < request.end_time_unix_nano
    assert {span.trace_id.hex() for span in spans[1] if span.name == "search"} == {trace_id}


def test_no_listener_serves_clients_without_a_key_or_token(url, server):
    network = listeners.network_address()
    rows = listeners.examine(server, network, client_s=10)
    answers = {(row["process"], row["from the network"]) for row in rows}
    assert ("gcs_server", "closed") in answers  # Ray itself listens on loopback
    assert ("ray::ProxyActor", "refused") in answers
    assert ("a Ray client", "closed") in answers
    assert not [row for row in rows if "OPEN" in (row["from the network"], row["from loopback"])]
    port = url.rpartition(":")[2]
    for path, status in {"/admin/index": 401, "/info": 401, "/healthz": 200}.items():
        assert listeners.request(network, int(port), "GET", path)[0] == status


def test_a_change_of_versions_fails_and_mixes_no_answers(url, index, other_index, expected):
    expected_ids = {each.digest[:12]: expected(each) for each in (index, other_index)}
    assert len({tuple(ids) for ids in expected_ids.values()}) == 2
    counts, stop = Counter[str](), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            status, answer = post(f"{url}/search", query=QUERY, k=5)
            right = status == 200 and hits(answer) == expected_ids[answer["index_version"]]
            counts[answer["index_version"] if right else f"{status} {answer}"] += 1

    load = [threading.Thread(target=ask) for _ in range(3)]
    for thread in load:
        thread.start()
    try:
        for uri in (other_index.uri, index.uri, other_index.uri):
            status, answer = post(f"{url}/admin/index/activate", uri=uri)
            assert (status, answer["versions"][0]["uri"]) == (200, uri)
            time.sleep(0.3)
        status, answer = post(f"{url}/admin/index/roll_back")
        assert (status, answer["active"]) == (200, index.digest[:12])
        assert [version["active"] for version in answer["versions"]] == [True, False]
    finally:
        stop.set()
        for thread in load:
            thread.join()
    assert counts.keys() == expected_ids.keys()


def test_a_missing_index_is_not_activated(url, index, tmp_path):
    status, answer = post(f"{url}/admin/index/activate", uri=f"{tmp_path}/nothing")
    assert (status, answer["error"]["field"]) == (422, "uri")
    status, answer = post(f"{url}/admin/index/activate", version="nothing")
    assert (status, answer["error"]["field"]) == (422, "version")
    assert post(f"{url}/search", query=QUERY)[1]["index_version"] == index.digest[:12]


def test_shards_are_missing_until_a_killed_searcher_restarts(url, server, index, expected):
    assert len(kill("IndexSearcher-001", of=server)) == 1
    for _ in range(TRIES):
        status, answer = post(f"{url}/search", query=QUERY, k=5)
        assert status == 200
        if answer["shards_answered"] == 1:
            assert all(int(doc_id.removeprefix("d")) < 210 for doc_id in hits(answer))
        else:
            assert hits(answer) == expected(index)
        if processes("IndexSearcher-001", server) and answer["shards_answered"] == 2:
            break
        time.sleep(PAUSE_S)
    assert answer["shards_answered"] == 2


def test_a_signal_ends_the_server_and_its_processes(server, url):
    family = server.children(recursive=True)
    assert any("raylet" in member.name() for member in family)
    server.terminate()  # the signal of process managers, for which Ray has its own handler
    assert server.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
