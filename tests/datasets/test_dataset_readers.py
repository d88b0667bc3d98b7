"""Files in, tables out: the generic readers on tiny files, the registered sets on their real files."""

import contextlib
import http.server
import json
import os
import threading
import urllib.error
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from scalingnote.datasets import config as configs
from scalingnote.datasets import sources
from scalingnote.datasets.config import AnyDataset, Beir, Columns, MsMarco, TableFile
from scalingnote.datasets.file_formats import table_rows
from scalingnote.datasets.job import run
from scalingnote.datasets.public_datasets import strip_html
from scalingnote.datasets.raw_rows import csv_rows, delimited_lines
from scalingnote.errors import ArtifactError, ConfigError, DataError
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES


def splits(artifact):
    return dict(
        zip(*(artifact.table("queries.parquet")[c].to_pylist() for c in ("query", "split")), strict=True)
    )


def write_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows)
    )


def test_beir(tmp_path):
    write_lines(
        tmp_path / "corpus.jsonl",
        {"_id": "1", "title": "One", "text": "first"},
        {"_id": "2", "title": "", "text": "second"},
        b'{"_id": "3", "text": "\xff"}\n',
        {"_id": "4", "title": "no text field"},
    )
    queries = [{"_id": n, "text": f"query {n}"} for n in ("a", "b", "c")]
    write_lines(tmp_path / "queries.jsonl", *queries)
    write_lines(tmp_path / "qrels" / "train.tsv", b"query-id\tcorpus-id\tscore\na\t1\t1\n")
    write_lines(tmp_path / "qrels" / "test.tsv", b"query-id\tcorpus-id\tscore\nb\t2\t2\nb\t9\t1\nbroken\n")
    artifact = run(Beir(path=str(tmp_path), click_model=None), output=str(tmp_path / "out"))
    assert splits(artifact) == {"query a": "train", "query b": "test"}
    assert artifact.counts["documents"] == 2
    assert artifact.counts["impressions"] == 0
    assert artifact.names("impressions") == []
    assert artifact.manifest.info["rejected_by_reason"] == {
        "documents: invalid UTF-8": 1,
        "documents: not in the source's format: KeyError 'text'": 1,
        "qrels: 1 fields, expected 3": 1,
        "qrels: unknown doc_id": 1,
    }
    assert artifact.table("rejected.parquet").num_rows == 4


def test_msmarco(tmp_path):
    write_lines(tmp_path / "collection.tsv", b"1\tfirst passage\n2\tsecond passage\n3\n")
    write_lines(tmp_path / "queries.tsv", *(f"q{n}\tquery {n}\n".encode() for n in range(40)))
    write_lines(tmp_path / "qrels.tsv", *(f"q{n} 0 {1 + n % 2} 1\n".encode() for n in range(40)))
    config = MsMarco(
        collection=str(tmp_path / "coll*.tsv"),
        train_queries=str(tmp_path / "queries.tsv"),
        train_qrels=str(tmp_path / "qrels.tsv"),
        test_fraction=0.5,
        seed=1,
    )
    artifact = run(config, output=str(tmp_path / "out"))
    table = artifact.table("documents")
    assert table.to_pylist()[0] == {
        "doc_id": "1",
        "title": "",
        "topic": "",
        "content": "first passage",
        "group": "1",
    }
    # Queries that share a document share a split.
    assert len({splits(artifact)[f"query {n}"] for n in range(0, 40, 2)}) == 1
    with pytest.raises(ValueError, match="come together"):
        MsMarco(collection="x", train_queries="y")


def test_columns_of_users_and_vectors(tmp_path):
    write_lines(
        tmp_path / "notes.jsonl",
        *({"doc_id": f"d{n}", "title": f"note {n}", "image": [n, 0.5] if n else "none"} for n in range(4)),
    )
    write_lines(tmp_path / "queries.jsonl", {"query_id": "q", "query": "note"})
    odd = [{"query_id": "q", "doc_id": doc_id} for doc_id in (1.5, "half \ud800", ["d1"], None)]
    write_lines(tmp_path / "qrels.jsonl", {"query_id": "q", "doc_id": "d1"}, *odd)
    users = [{"uid": "ann", "age": 30}, {"uid": "ben", "age": "old"}, {"uid": "ann", "age": 31}, {"age": 9}]
    write_lines(tmp_path / "users.jsonl", *users)
    config = Columns(
        **{name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("queries", "qrels")},
        documents={"path": str(tmp_path / "notes.jsonl")},
        users={"path": str(tmp_path / "users.jsonl"), "columns": {"user_id": "uid"}},
        features={"image": "vector"},
        profile={"age": "int64"},
        test_fraction=0.0,
    )
    artifact = run(config, output=str(tmp_path / "out"))
    assert artifact.table("users").to_pylist() == [
        {"user_id": "ann", "age": 30},
        {"user_id": "ben", "age": None},
    ]
    assert artifact.table("documents")["image"].to_pylist() == [None, [1, 0.5], [2, 0.5], [3, 0.5]]
    reasons = artifact.manifest.info["rejected_by_reason"]
    assert reasons == {
        "qrels: doc_id is of type float": 1,
        "qrels: doc_id is of type list": 1,
        "qrels: doc_id with control characters": 1,
        "qrels: no doc_id": 1,
        "users: duplicate user_id": 1,
        "users: no user_id": 1,
    }


def test_columns(tmp_path):
    write_lines(
        tmp_path / "notes.jsonl",
        *({"id": n, "heading": f"note {n}", "body": "b", "likes": n, "by": "x"} for n in range(9)),
    )
    pq.write_table(
        pa.table({"qid": ["a", "b"], "text": ["alpha", "beta"], "split": ["train", "test"]}),
        tmp_path / "q.parquet",
    )
    pq.write_table(pa.table({"query_id": ["a", "b"], "doc_id": ["1", "2"]}), tmp_path / "qrels.parquet")
    exposure = {
        "session_id": "s",
        "query_id": "a",
        "doc_id": "3",
        "position": 1,
        "clicked": True,
        "timestamp": 5,
    }
    write_lines(tmp_path / "log.jsonl", exposure, {**exposure, "position": -1})
    config = Columns(
        documents={
            "path": str(tmp_path / "notes.jsonl"),
            "columns": {"doc_id": "id", "title": "heading", "content": "body"},
        },
        queries={"path": str(tmp_path / "q.parquet"), "columns": {"query_id": "qid", "query": "text"}},
        qrels={"path": str(tmp_path / "qrels.parquet")},
        impressions={"path": str(tmp_path / "log.jsonl")},
        features={"likes": "int64", "by": "string"},
        documents_per_part=4,
    )
    artifact = run(config, output=str(tmp_path / "out"))
    documents = artifact.table("documents")
    assert documents.schema.names == [*DOCUMENTS.names, "likes", "by"]
    assert documents["likes"].to_pylist() == list(range(9))
    assert len(artifact.names("documents/")) == 3
    assert artifact.table("qrels.parquet")["relevance"].to_pylist() == [1, 1]
    assert artifact.table("impressions.parquet").num_rows == 1  # the data's own: nothing is simulated
    assert not artifact.manifest.info["simulated_clicks"]
    assert splits(artifact) == {"alpha": "train", "beta": "test"}
    wrong = config.model_copy(
        update={
            "queries": configs.TableFile(
                path=str(tmp_path / "qrels.parquet"), columns={"query": "q", "typo": "x"}
            )
        }
    )
    with pytest.raises(DataError, match="typo"):
        run(wrong, output=str(tmp_path / "other"))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_mapping_to_a_column_that_is_not_there_is_refused(form, tmp_path):
    path = tmp_path / f"rows.{form}"
    rows = [{"query_id": "q", "doc_id": f"d{n}", "Label": n} for n in range(3)]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_lines(path, *rows)
    names = ["query_id", "doc_id", "relevance"]
    with pytest.raises(DataError, match=rf"rows\.{form} has no column \['label'\].*'Label'.*map it"):
        table_rows(TableFile(path=str(path), columns={"relevance": "label"}), names)
    mapped = TableFile(path=str(path), columns={"relevance": "Label"})
    given = list(table_rows(mapped, names, absent={"relevance": 1}))
    assert [row["relevance"] for row in given] == [0, 1, 2]
    given = list(table_rows(TableFile(path=str(path)), names, absent={"relevance": 1}))
    assert [row["relevance"] for row in given] == [1, 1, 1]


def test_a_grade_that_one_row_lacks_is_not_made_up(tmp_path):
    write_lines(tmp_path / "rows.jsonl", {"doc_id": "a", "relevance": 0}, {"doc_id": "b"})
    rows = table_rows(
        TableFile(path=str(tmp_path / "rows.jsonl")), ["doc_id", "relevance"], absent={"relevance": 1}
    )
    assert list(rows) == [{"doc_id": "a", "relevance": 0}, {"doc_id": "b"}]


def test_an_unfinished_run_leaves_nothing_to_its_successor(tmp_path):
    write_lines(tmp_path / "queries.jsonl", {"query_id": "q", "query": "one"})
    write_lines(tmp_path / "qrels.jsonl", {"query_id": "q", "doc_id": "gone"})
    write_lines(tmp_path / "docs.jsonl", *({"doc_id": f"d{n}", "title": "t"} for n in range(10)))
    config = Columns(
        **{name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("queries", "qrels")},
        documents={"path": str(tmp_path / "docs.jsonl")},
        documents_per_part=2,
    )
    with pytest.raises(DataError, match="no query with a relevant document remains"):
        run(config, output=str(tmp_path / "out"))
    write_lines(tmp_path / "qrels.jsonl", {"query_id": "q", "doc_id": "d1"})
    write_lines(tmp_path / "docs.jsonl", *({"doc_id": f"d{n}", "title": "t"} for n in range(6)))
    artifact = run(config, output=str(tmp_path / "out"))
    assert artifact.counts["documents"] == artifact.table("documents").num_rows == 6


def test_a_subset_leaves_out_without_rejecting(tmp_path):
    write_lines(
        tmp_path / "d.jsonl", *({"doc_id": n, "title": f"t{n}", "group": f"g{n // 2}"} for n in range(100))
    )
    write_lines(tmp_path / "q.jsonl", *({"query_id": n, "query": f"q{n}"} for n in range(100)))
    write_lines(tmp_path / "r.jsonl", *({"query_id": n, "doc_id": n} for n in range(100)))
    files = {
        name: {"path": str(tmp_path / f"{short}.jsonl")}
        for name, short in (("documents", "d"), ("queries", "q"), ("qrels", "r"))
    }
    artifact = run(Columns(**files, max_documents=40, max_queries=30), output=str(tmp_path / "out"))
    assert artifact.counts["documents"] == 40
    assert artifact.counts["queries"] == 30
    assert artifact.counts["rejected"] == 0
    assert artifact.manifest.info["left_out"] == {"documents": 60, "queries": 70, "qrels": 70}
    groups = artifact.table("documents")["group"].to_pylist()
    assert len(set(groups)) == 20  # whole groups
    assert set(artifact.table("qrels.parquet")["doc_id"].to_pylist()) <= set(
        artifact.table("documents")["doc_id"].to_pylist()
    )


def test_a_finished_data_set_is_returned_and_another_is_refused(tmp_path):
    write_lines(tmp_path / "d.jsonl", {"doc_id": "1", "title": "t"})
    write_lines(tmp_path / "q.jsonl", {"query_id": "1", "query": "q", "doc_id": "1"})
    files = {
        name: {"path": str(tmp_path / f"{short}.jsonl")}
        for name, short in (("documents", "d"), ("queries", "q"), ("qrels", "q"))
    }
    first = run(Columns(**files), output=str(tmp_path / "out"))
    (tmp_path / "d.jsonl").unlink()
    assert run(Columns(**files), output=str(tmp_path / "out")).digest == first.digest
    with pytest.raises(ArtifactError, match="already holds another"):
        run(Columns(**files, seed=1), output=str(tmp_path / "out"))


def test_the_union_is_told_apart_by_name():
    adapter = TypeAdapter(AnyDataset)
    for name in sources.names():
        needed = {
            "beir": {"path": "x"},
            "msmarco": {"collection": "x", "test_queries": "y", "test_qrels": "z"},
            "columns": {"documents": {"path": "d"}, "queries": {"path": "q"}, "qrels": {"path": "r"}},
            "logs": {"documents": {"path": "d"}, "impressions": {"path": "i"}},
            "texts": {"path": "x"},
        }.get(name, {})
        assert adapter.validate_python({"name": name, **needed}).name == name
    with pytest.raises(ConfigError, match="choose one of python_docs"):
        sources.describe("nothing")


def test_offline_says_what_to_do(tmp_path, monkeypatch):
    def refuse(request, timeout):
        raise urllib.error.URLError("network unreachable")

    monkeypatch.delenv("SCALINGNOTE_DATA", raising=False)
    monkeypatch.setenv("SCALINGNOTE_CACHE", str(tmp_path))
    monkeypatch.setattr(sources.urllib.request, "urlopen", refuse)
    assert not sources.available("medquad")
    assert sources.available("python_docs")
    with pytest.raises(DataError, match=r"archive/577bd37.*network unreachable.*\$SCALINGNOTE_DATA/medquad/"):
        sources.fetch("medquad")


def remote(tmp_path, content=b"hello " * 1000, sha256=None):
    import hashlib

    source = tmp_path / "source.bin"
    source.write_bytes(content)
    return sources.Remote("file.bin", source.as_uri(), sha256 or hashlib.sha256(content).hexdigest())


def test_download_checks_converts_and_caches(tmp_path, monkeypatch):
    monkeypatch.delenv("SCALINGNOTE_DATA", raising=False)
    monkeypatch.setenv("SCALINGNOTE_CACHE", str(tmp_path / "cache"))
    asked = {"files": ["file.bin"], "remotes": [remote(tmp_path)], "convert": sources.copy_files}
    found = sources.fetch_files("thing", **asked)
    assert found == tmp_path / "cache" / "thing"
    assert (found / "file.bin").read_bytes() == b"hello " * 1000
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name != "downloads"] == ["thing"]
    (tmp_path / "source.bin").unlink()
    assert sources.fetch_files("thing", **asked) == found
    (tmp_path / "local" / "thing").mkdir(parents=True)
    (tmp_path / "local" / "thing" / "file.bin").touch()
    monkeypatch.setenv("SCALINGNOTE_DATA", str(tmp_path / "local"))
    assert sources.fetch_files("thing", **asked) == tmp_path / "local" / "thing"


def test_a_damaged_download_is_refused_and_forgotten(tmp_path):
    with pytest.raises(DataError, match=r"expected 0000.*: download it again, or do that"):
        sources.download(remote(tmp_path, sha256="0000"), tmp_path / "to", remedy="do that")
    assert list((tmp_path / "to").iterdir()) == []


def test_a_failed_conversion_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    monkeypatch.delenv("SCALINGNOTE_DATA", raising=False)
    monkeypatch.setenv("SCALINGNOTE_CACHE", str(tmp_path / "cache"))

    def broken(downloads, target):
        (target / "file.bin").touch()
        raise DataError("half way")

    with pytest.raises(DataError, match="half way"):
        sources.fetch_files("thing", files=["file.bin"], remotes=[remote(tmp_path)], convert=broken)
    assert sources.locate("thing", ["file.bin"]) is None


@pytest.fixture
def server():
    """A server on this machine; `answer(handler)` says what it does with a connection and gives its URL."""
    stack = contextlib.ExitStack()

    def answer(reply):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                reply(self)

            def log_message(self, *_):
                pass

        made = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        stack.callback(thread.join)
        stack.callback(made.shutdown)
        stack.callback(made.server_close)
        thread.start()
        return f"http://127.0.0.1:{made.server_port}/file.bin"

    with stack:
        yield answer


def test_a_download_cut_short_is_no_file_and_goes_on(tmp_path, server):
    content = b"hello " * 1000

    def reply(request):  # all it is asked for, but never more than 4,000 bytes before it closes
        start = int(request.headers.get("Range", "bytes=0-")[6:-1])
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        request.wfile.write(content[start : start + 4000])

    asked = sources.Remote("file.bin", server(reply), None)
    with pytest.raises(DataError, match=r"file\.bin sent 4,000 of 6,000 bytes: try again, or do that"):
        sources.download(asked, tmp_path, remedy="do that")
    assert not (tmp_path / "file.bin").exists()
    assert sources.download(asked, tmp_path, remedy="do that").read_bytes() == content


def test_a_cut_in_a_stream_of_chunks_says_what_to_do(tmp_path, server):
    def reply(request):
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"64\r\nhello")

    with pytest.raises(DataError, match=r"cannot download http.*IncompleteRead.*or do that"):
        sources.download(sources.Remote("file.bin", server(reply), None), tmp_path, remedy="do that")
    assert not (tmp_path / "file.bin").exists()


def test_what_cannot_be_converted_and_nothing_vouches_for_is_downloaded_again(tmp_path, monkeypatch):
    monkeypatch.delenv("SCALINGNOTE_DATA", raising=False)
    monkeypatch.setenv("SCALINGNOTE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "other.bin").write_bytes(b"no archive")
    vouched = remote(tmp_path)
    loose = sources.Remote("other.bin", (tmp_path / "other.bin").as_uri(), None)

    def convert(downloads, target):
        if (downloads / "other.bin").read_bytes() != b"archive":
            raise zipfile.BadZipFile
        sources.copy_files(downloads, target)

    asked = {"files": ["other.bin"], "remotes": [vouched, loose], "convert": convert}
    with pytest.raises(zipfile.BadZipFile):
        sources.fetch_files("thing", **asked)
    assert [path.name for path in (tmp_path / "cache" / "downloads" / "thing").iterdir()] == ["file.bin"]
    (tmp_path / "other.bin").write_bytes(b"archive")
    assert (sources.fetch_files("thing", **asked) / "other.bin").read_bytes() == b"archive"


def test_a_byte_order_mark_is_no_part_of_the_first_field(tmp_path):
    (tmp_path / "rows.tsv").write_bytes("\ufeffq1\tfirst\nq2\tsecond \ufeff\n".encode())
    rows = list(delimited_lines(tmp_path / "rows.tsv", columns=("query_id", "query")))
    assert [row["query_id"] for row in rows] == ["q1", "q2"]
    assert rows[1]["query"] == "second \ufeff"
    (tmp_path / "rows.csv").write_bytes("\ufeffquery_id,query\nq1,first\n".encode())
    assert list(csv_rows(tmp_path / "rows.csv")) == [{"query_id": "q1", "query": "first"}]


def test_html():
    assert strip_html("<p>a <code>if x &lt; 3</code></p>\n<p>&amp;b</p>") == "a if x < 3 &b"


@pytest.fixture
def real():
    if not os.environ.get("SCALINGNOTE_DATA"):
        pytest.skip("SCALINGNOTE_DATA is unset: the registered data sets are not on this machine")
    return Path(os.environ["SCALINGNOTE_DATA"])


REAL = {
    "medquad": (16_407, 14_345, "What is (are) Adult Acute Lymphoblastic Leukemia ?"),
    "stackexchange_devops": (4_968, 3_221, "How to order physical backup of S3 data?"),
    "chorus_icecat": (19_406, 116, "laptop"),
    "zh_reading_titles": (3_344, 12_415, "陸特和漢斯雷頓開創了哪一地區對梵語的學術研究？"),
    "zh_medical_qa": (7_244, 7_266, "高血压患者能吃党参吗？"),
    "dureader_demo_zh": (1_393, 200, "微信分享链接打开app"),
}


@pytest.mark.parametrize("name", REAL)
def test_registered_data_sets(name, real, tmp_path):
    documents, queries, sample = REAL[name]
    config = TypeAdapter(AnyDataset).validate_python(
        {"name": name, "click_model": {"sessions_per_query": 1, "results_per_session": 5}}
    )
    artifact = run(config, output=str(tmp_path / "out"))
    assert (artifact.counts["documents"], artifact.counts["queries"]) == (documents, queries)
    assert artifact.manifest.info["licence"]
    assert artifact.manifest.info["simulated_clicks"] == (name != "dureader_demo_zh")
    table = artifact.table("documents")
    assert table.schema.names[:5] == DOCUMENTS.names
    for part, schema in (("queries", QUERIES), ("qrels", QRELS), ("impressions", IMPRESSIONS)):
        # Names: Parquet has no seconds, so a timestamp comes back in milliseconds.
        assert artifact.table(f"{part}.parquet").schema.names == schema.names

    split = {row["query_id"]: row for row in artifact.table("queries.parquet").to_pylist()}
    assert sample in {row["query"] for row in split.values()}
    group_of = dict(zip(table["doc_id"].to_pylist(), table["group"].to_pylist(), strict=True))
    title_of = dict(zip(table["doc_id"].to_pylist(), table["title"].to_pylist(), strict=True))
    touched = {"train": set(), "test": set()}
    same = 0
    for row in artifact.table("qrels.parquet").to_pylist():
        if row["relevance"] > 0:
            touched[split[row["query_id"]]["split"]].add(group_of[row["doc_id"]])
            same += split[row["query_id"]]["query"] == title_of[row["doc_id"]]
    assert touched["train"]
    assert touched["test"]
    assert not touched["train"] & touched["test"]
    assert same <= 0.02 * queries  # a title that is the query would make the task void
    if artifact.manifest.info["simulated_clicks"]:
        exposed = set(artifact.table("impressions.parquet")["doc_id"].to_pylist())
        assert not {group_of[doc_id] for doc_id in exposed} & touched["test"]
