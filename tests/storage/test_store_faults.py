"""S3 and GCS with faults: responses are lost, requests fail or are late; the artifacts are equal."""

import itertools
import json
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from scalingnote.core.config import Config
from scalingnote.core.errors import ArtifactError
from scalingnote.storage import filesystem as fs
from scalingnote.storage import lease, object_store, shuffle
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.lease import Lease

SLICES = 6
MANY = 4  # seeds of each store
SIGNED = "AWS4-HMAC-SHA256 Credential=anyone/20260101/us-east-1/s3/aws4_request, SignedHeaders=, Signature="
Answer = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Generations:
    """moto's S3 as Google's XML API: each object has a generation, and a conditional write states it."""

    def __init__(self, store: Answer) -> None:
        self.store, self.lock = store, threading.Lock()
        self.numbers, self.held = itertools.count(1), dict[str, int]()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        environ["HTTP_AUTHORIZATION"] = SIGNED  # moto requires a signature of Amazon's form, with any owner
        with self.lock:
            expected = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
            if expected is not None and int(expected) != self.held.get(path, 0):
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start("412 Precondition Failed", [])
                return []
            responses: list[Any] = []
            body = list(self.store(environ, lambda *arguments: responses.append(arguments)))
            status, headers = responses[0][:2]
            if status[0] == "2" and method == "PUT":
                self.held[path] = next(self.numbers)
            if method == "DELETE":
                self.held.pop(path, None)
            start(status, [*headers, ("x-goog-generation", str(self.held.get(path, 0)))])
            return body


class Faults:
    """A proxy between the client and the store: a share of requests fails, with faults drawn by a seed."""

    def __init__(self, store: Answer, uri: str) -> None:
        self.uri = uri  # of an empty bucket
        self.store, self.share, self.rng, self.seen = store, 0.0, random.Random(0), [""]
        self.lost = ""  # the response to the next write to a path with this end is lost
        self.lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path, write = environ["PATH_INFO"], environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE")
        with self.lock:
            fault = self.rng.choice(["500", "503", "late", "lost"]) if self.rng.random() < self.share else ""
            if self.lost and write and path.endswith(self.lost):
                fault, self.lost = "lost", ""
            self.seen.append(fault)
        if fault in ("500", "503"):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            code = "SlowDown" if fault == "503" else "InternalError"
            start(f"{fault} {code}", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code></Error>".encode()]
        answer = list(self.store(environ, start if not fault else lambda *_: None))
        if fault == "late":
            time.sleep(1.5 * object_store.REQUEST_TIMEOUT.total_seconds())
        if fault:  # the request succeeds, but its response is lost
            raise ConnectionAbortedError
        return answer


@pytest.fixture(scope="module", params=["s3", "gs"])
def faults(request: pytest.FixtureRequest) -> Iterator[tuple[Faults, int]]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    app: Answer = DomainDispatcherApplication(create_backend_app)
    faulty_store = Faults(
        app if request.param == "s3" else Generations(app), f"{request.param}://{request.param}faults"
    )
    server = make_server("127.0.0.1", 0, faulty_store, threaded=True)
    server.log = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield faulty_store, server.port
    server.shutdown()


@pytest.fixture
def store(faults: tuple[Faults, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faults]:
    """Return a store with an empty bucket, and retry without long back-off."""
    import boto3

    faulty_store, port = faults
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    account = {"gcs_base_url": endpoint, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setattr(object_store, "REQUEST_TIMEOUT", timedelta(seconds=0.6))
    pause = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=5), "base": 2}
    monkeypatch.setattr(object_store, "RETRY", {**object_store.RETRY, "backoff": pause})
    object_store._connect.cache_clear()
    boto3.client("s3").create_bucket(Bucket=faulty_store.uri.partition("://")[2])
    faulty_store.seen.clear()
    yield faulty_store
    faulty_store.share = 0.0
    object_store._connect.cache_clear()


def build(uri: str, *, killed_after: int = SLICES) -> Artifact | None:
    """Run a stage with a task per slice; if it is killed after some tasks, the next call resumes its work."""
    draft = Draft(uri, kind="rows", config=Config(), parents={})
    if draft.finished:
        return draft.existing()

    def task(item: tuple[int, int]) -> dict[str, Any]:
        if item[0] >= killed_after:
            raise KeyboardInterrupt
        table = pa.table({"n": range(item[1] * 10, item[1] * 10 + 10)})
        return {"tables": shuffle.write_tables(draft.uri, {f"rows/part-{item[0]:05d}.parquet": table})}

    try:
        records = shuffle.run_slices(
            "make", task, range(SLICES), folder=draft.work(), each=map, section="test"
        )
    except KeyboardInterrupt:
        draft._lease.release()
        return None
    for record in records:
        for name, part in shuffle.named_parts(record["tables"]):
            draft.register(name, part)
    return draft.commit(counts={"rows": SLICES * 10})


@pytest.mark.parametrize("seed", range(MANY))
def test_a_stage_on_a_faulty_store_is_resumed_without_loss(store: Faults, seed: int) -> None:
    expected = build(f"{store.uri}/whole-{seed}")
    store.rng, store.share = random.Random(seed), 0.15
    uri = f"{store.uri}/seed-{seed}"
    assert build(uri, killed_after=store.rng.randrange(SLICES)) is None
    with pytest.raises(ArtifactError, match="no finished"):
        open_artifact(uri, kind="rows")
    artifact = build(uri)
    store.share = 0.0
    assert any(store.seen)
    assert artifact is not None
    assert expected is not None
    again = open_artifact(uri, kind="rows")
    assert again.digest == artifact.digest == expected.digest
    assert again.table("rows")["n"].to_pylist() == list(range(SLICES * 10))
    assert set(fs.list_files(uri)) == {*again.names(), "manifest.json"}


@pytest.mark.parametrize("file", ["_work/lease", "manifest.json", "rows.parquet"])
def test_a_write_with_a_lost_response_is_recognized(store: Faults, file: str) -> None:
    store.lost = file
    draft = Draft(f"{store.uri}/lost-{file}", kind="rows", config=Config(), parents={})
    draft.write_table("rows.parquet", pa.table({"n": [1]}))
    artifact = draft.commit(counts={})
    assert "lost" in store.seen
    assert open_artifact(artifact.uri, kind="rows").digest == artifact.digest


def test_a_request_that_never_succeeds_is_an_oserror(store: Faults) -> None:
    store.share, store.rng = 1.0, random.Random(0)
    with pytest.raises(OSError, match=rf"{store.uri}/never: .*after 10 retries"):
        fs.write_bytes(f"{store.uri}/never", b"data")


RACE = """
import json, sys
from scalingnote.storage import filesystem as fs
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([fs.swap(f"{sys.argv[2]}/race/{n}", None, sys.argv[1].encode()) for n in range(40)]))
"""


def test_one_of_two_concurrent_writes_fails(store: Faults) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, name, store.uri],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in processes]
    for number, (first, second) in enumerate(zip(*results, strict=True)):
        assert first != second
        assert fs.read_bytes(f"{store.uri}/race/{number}") == (b"a" if first else b"b")


def test_one_of_two_processes_gets_an_expired_lease(store: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both read the same old lease; the write of the second one fails."""
    uri, old = f"{store.uri}/lease", json.dumps({"process": "x", "host": "elsewhere", "pid": 1, "beats": 1})
    fs.write_bytes(uri, old.encode())
    first, second = Lease(uri), Lease(uri)
    assert first._write(old.encode())
    with monkeypatch.context() as patch:
        patch.setattr(lease, "_PROCESS", "another")
        assert not second._write(old.encode())
        assert second.lost
    assert not first.lost
    other = json.dumps({"process": "y", "host": "elsewhere", "pid": 1, "beats": 1}).encode()
    fs.write_bytes(uri, other)
    assert first.lost
    assert not first._write(first._mine)
    assert fs.read_bytes(uri) == other


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_a_delete_with_a_lost_response_is_repeated(store: Faults, lost: str) -> None:
    folder = f"{store.uri}/folder"
    for name in ("a", "b", "c"):
        fs.write_bytes(f"{folder}/{name}", b"x")
    # S3 deletes a thousand objects in one request to the bucket, GCS one object per request.
    store.lost = "/s3faults" if store.uri.startswith("s3") else f"/folder/{lost}"
    fs.delete(folder)
    assert "lost" in store.seen
    assert fs.list_files(folder) == {}
