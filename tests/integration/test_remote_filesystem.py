"""Stages on a remote filesystem, with a local S3 endpoint as the object store."""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from in_process import without_ray
from scalingnote.core.config import Config, Resources
from scalingnote.index import job as index_job
from scalingnote.index.config import IndexConfig
from scalingnote.quantize import job as quantize_job
from scalingnote.quantize.config import QuantizeConfig
from scalingnote.search.searcher import Searcher
from scalingnote.storage import filesystem as fs
from scalingnote.storage import object_store
from scalingnote.storage.artifact import Draft, open_artifact
from scalingnote.storage.lease import Lease
from synthetic_corpus import Corpus, queries

QUANTIZE = QuantizeConfig(levels=2, codes=16, sample_documents=200, resources=Resources(workers=1))
INDEX = IndexConfig(nlist=4)
SIZES = [120, 90]


@pytest.fixture(scope="module")
def bucket(cluster: None, s3_port: int) -> Iterator[str]:
    """Start a store, and yield the URI of an empty bucket that this process and Ray's workers reach."""
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=s3_port, verbose=False)
    server.start()
    boto3.client("s3").create_bucket(Bucket="corpus")
    yield "s3://corpus"
    server.stop()


def test_stages_give_the_same_artifacts_on_s3_and_on_disk(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(base: str) -> tuple[Corpus, dict[str, str], list[str]]:
        corpus = Corpus.build(base, sizes=SIZES, dim=16)
        ids = quantize_job.run(QUANTIZE, embeddings=corpus.uris["embeddings"], output=f"{base}/ids")
        uris = {**corpus.uris, "semantic_ids": ids.uri}
        index = index_job.run(INDEX, **uris, output=f"{base}/index")
        return corpus, {"ids": ids.digest, "index": index.digest}, index.names()

    corpus, there, names = run(f"{bucket}/run")
    with monkeypatch.context() as patch:
        without_ray(patch)
        _, here, _ = run(str(tmp_path))
    assert there == here
    assert sorted([*names, "manifest.json"]) == list(
        fs.list_files(f"{bucket}/run/index")
    )  # unfinished work is deleted
    again = quantize_job.run(QUANTIZE, embeddings=corpus.uris["embeddings"], output=f"{bucket}/run/ids")
    assert again.digest == there["ids"]

    probes = queries(corpus.matrix, 5)
    remote, local = Searcher.open(f"{bucket}/run/index"), Searcher.open(f"{tmp_path}/index")
    assert remote.search(probes, k=5) == local.search(probes, k=5)
    first = remote.search(probes, k=1)[0][0]
    assert first.document["doc_id"] == first.doc_id


@pytest.fixture
def requests(bucket: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the requests that the store answers, as METHOD or METHOD range."""
    from moto.moto_server import werkzeug_app

    recorded: list[str] = []
    answer = werkzeug_app.DomainDispatcherApplication.__call__

    def counted(self: object, environ: dict[str, str], start: object) -> object:
        recorded.append(f"{environ['REQUEST_METHOD']} {environ.get('HTTP_RANGE', '')}".strip())
        return answer(self, environ, start)

    monkeypatch.setattr(werkzeug_app.DomainDispatcherApplication, "__call__", counted)
    # Leases are renewed every few seconds, also by drafts of other tests: these requests must not count.
    monkeypatch.setattr(Lease, "renew", lambda self: None)
    return recorded


def test_a_part_takes_one_request_to_write_and_one_to_read(bucket: str, requests: list[str]) -> None:
    table = pa.table({"doc_id": [f"d{n}" for n in range(100)], "n": range(100)})
    draft = Draft(f"{bucket}/requests", kind="rows", config=Config(), parents={})
    requests.clear()
    draft.write_table("rows.parquet", table)
    assert requests == ["PUT"]
    artifact = draft.commit(counts={})
    requests.clear()
    assert open_artifact(artifact.uri, kind="rows").table("rows").equals(table)
    assert [name.split()[0] for name in requests] == ["GET", "GET"]  # the manifest and the part


def test_an_artifact_takes_eleven_requests(bucket: str, requests: list[str]) -> None:
    draft = Draft(f"{bucket}/draft", kind="rows", config=Config(), parents={})
    assert len(requests) == 6
    requests.clear()
    artifact = draft.commit(counts={})
    assert len(requests) == 5
    # The requests to write the manifest and delete the work come later.
    assert artifact.manifest.info["usage"]["requests"] == 6 + 2


def test_a_large_file_is_read_by_ranges_in_parallel(
    bucket: str, requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "RANGE_BYTES", 10)
    data = bytes(range(205))
    fs.write_bytes(f"{bucket}/large/shard", data)
    requests.clear()
    assert fs.read_bytes(f"{bucket}/large/shard") == data
    ranges = {f"GET bytes={start}-{min(start + 9, 204)}" for start in range(0, 205, 10)}
    assert sorted(requests) == sorted(ranges)  # the first answer has the size
    monkeypatch.setattr(object_store, "SMALL_BYTES", 10)
    with fs.open_input(f"{bucket}/large/shard") as file:
        assert file.size() == 205
        assert file.read_at(30, 150) == data[150:180]
        file.seek(200)
        assert file.read() == data[200:]
    assert fs.checksum(f"{bucket}/large/shard") == hashlib.sha256(data).hexdigest()
    assert fs.list_files(f"{bucket}/large") == {"shard": 205}


def test_an_uploaded_folder_is_downloaded_without_stale_copies(bucket: str, tmp_path: Path) -> None:
    source, uri = tmp_path / "tower", f"{bucket}/{tmp_path.name}"
    (source / "query").mkdir(parents=True)
    for version in ("1", "22"):
        (source / "query" / "tower.json").write_text(version)
        fs.upload(source, uri)
        assert fs.list_files(uri) == {"query/tower.json": len(version)}
        copy = fs.download(uri, ["query/tower.json"], version=fs.checksum(f"{uri}/query/tower.json"))
        assert (copy / "query/tower.json").read_text() == version
    fs.delete(uri)
    assert not fs.exists(f"{uri}/query/tower.json")
    assert not fs.list_files(uri)
    fs.write_bytes(uri, b"")
    assert fs.read_bytes(uri) == b""


def test_folder_markers_of_pyarrow_are_not_files(bucket: str) -> None:
    filesystem, path = fs.resolve(f"{bucket}/marked/_work/ray")
    filesystem.create_dir(path, recursive=True)
    fs.write_bytes(f"{bucket}/marked/_work/ray/state", b"")
    assert fs.list_files(f"{bucket}/marked") == {"_work/ray/state": 0}
    fs.delete(f"{bucket}/marked/_work")
    assert fs.list_files(f"{bucket}/marked") == {}
    assert filesystem.get_file_info(path).type.name == "NotFound"
