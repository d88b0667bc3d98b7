"""A service of an index in a bucket: each searcher maps the documents of its shards, the gateway none."""

import logging
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pair import table
from ray import serve
from real_server import call, free_port

from scalingnote.index.shard import DocumentStore, documents_file
from scalingnote.run.service_config import AppArgs
from scalingnote.serve import app, artifacts, launch
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact

TEXTS = ("title", "topic", "snippet", "semantic_id")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # of a busy machine


@pytest.fixture(scope="module")
def bucket(s3_port: int) -> Iterator[str]:
    """Yield the URI of an empty bucket."""
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=s3_port, verbose=False)
    server.start()
    boto3.client("s3").create_bucket(Bucket="served")
    yield "s3://served"
    server.stop()


@pytest.fixture(scope="module")
def url(
    cluster: None, bucket: str, index: Artifact, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Yield the URL of a gateway with two searchers of one shard each."""
    for file in Path(index.uri).rglob("*"):
        if file.is_file():
            fs.write_bytes(f"{bucket}/index/{file.relative_to(index.uri)}", file.read_bytes())
    knobs = {
        "port": free_port(),
        "deadline_s": 60,
        "shards_per_searcher": 1,
        "deployments": {"searcher": {"num_replicas": 1}, "encoder": {"num_replicas": 0}},
    }
    tower = table(f"{tmp_path_factory.mktemp('student')}/student")
    args = {"index": f"{bucket}/index", "query_tower": tower.uri, "serve": knobs}
    served = artifacts.find(AppArgs.model_validate(args))
    yield launch.start(served, app.bind(served))
    serve.delete(launch.APPLICATION_NAME)
    serve.shutdown()


def mapped_documents() -> dict[str, set[int]]:
    """Return for each replica, by its name, the shards with documents that it has mapped."""
    shards: dict[str, set[int]] = {}
    for process in psutil.Process().children(recursive=True):
        name = "".join(process.cmdline())
        if "ServeReplica" in name:
            paths = [each.path for each in process.memory_maps()]
            part = name.partition("scalingnote:")[2].partition(".")[0]
            shards[part] = {n for n in (0, 1) if any(path.endswith(documents_file(n)) for path in paths)}
    return shards


def test_answers_have_the_documents_of_their_searchers(url: str, index: Artifact):
    _, answer = call(url, "/search", query="bakoli menura", k=20, explain=True)
    assert (answer["degraded"], len(answer["results"])) == ([], 20)
    assert {hit["explain"]["shard"] for hit in answer["results"]} == {0, 1}
    store = DocumentStore.open(index)
    for hit in answer["results"]:
        assert {name: hit[name] for name in TEXTS} == {name: store.get(hit["doc_id"])[name] for name in TEXTS}
    assert call(url, "/documents/d7") == (200, store.get("d7"))
    assert call(url, "/healthz")[1]["status"] == "ok"
    assert mapped_documents() == {"Gateway": set(), "IndexSearcher-000": {0}, "IndexSearcher-001": {1}}
