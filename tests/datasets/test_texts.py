"""A user's own texts: all formats, rejected rows, and errors."""

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from row_files import write_lines
from scalingnote.core.errors import DataError
from scalingnote.datasets import job, sources
from scalingnote.datasets.config import Texts
from scalingnote.datasets.input_files import Quarantine, Source
from scalingnote.datasets.sources import read_texts


def document(doc_id, title, content):
    return {"doc_id": doc_id, "title": title, "content": content}


def test_json_lines_are_read(tmp_path):
    rows = [
        {"id": "x", "title": "One", "text": "first"},
        {"id": 7, "text": "second"},
        {"text": "third", "title": None},
        {"title": "only a title"},
    ]
    assert list(read_texts(write_lines(tmp_path / "a.jsonl", *rows))) == [
        document("x", "One", "first"),
        document("7", "", "second"),
        document("3", "", "third"),
        document("4", "only a title", ""),
    ]


def test_u2028_does_not_end_a_line(tmp_path):
    row = {"_id": "a", "title": "One", "text": "first\u2028second\u2029third\x85fourth"}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [document["content"] for document in read_texts(path)] == ["first\u2028second\u2029third fourth"]


def test_ids_with_slashes_and_paths_in_devanagari(tmp_path):
    ids = ["https://example.org/a?b=c#d", "द्वारा/लेख १", "a b", "12#0"]
    folder = tmp_path / "हिन्दी लेख" / "v1.0"
    path = write_lines(
        folder / "corpus.jsonl", *({"_id": doc_id, "text": f"text of {doc_id}"} for doc_id in ids)
    )
    for source in (path, folder, f"{tmp_path}/हि*/v1.0"):
        assert [row["doc_id"] for row in read_texts(source)] == ids


def test_beir_folder_without_queries(tmp_path):
    write_lines(tmp_path / "corpus.jsonl", {"_id": "d1", "title": "One", "text": "first"})
    assert list(read_texts(str(tmp_path))) == [document("d1", "One", "first")]


def test_text_lines_are_read(tmp_path):
    path = write_lines(
        tmp_path / "a.txt", "﻿first\twith a tab\r\n".encode(), b"\n", b"second, caf\xc3\xa9", b"\n"
    )
    assert list(read_texts(path)) == [
        document("1", "", "first\twith a tab"),
        document("2", "", "second, café"),
    ]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_is_read(tmp_path, kind):
    pq.write_table(
        pa.table({"text": pa.array(["one", None, "two"], kind), "n": [1, 2, 3]}), tmp_path / "a.parquet"
    )
    quarantine = Quarantine()
    documents = list(read_texts(tmp_path / "a.parquet", quarantine=quarantine))
    assert documents == [document("1", "", "one"), document("3", "", "two")]
    assert quarantine.rejected == {"documents: no text": 1}


def test_rejected_rows_are_counted_and_logged(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("scalingnote"), "propagate", True)
    good = {"doc_id": "a", "text": "good"}
    path = write_lines(tmp_path / "a.jsonl", good, b"{\n", good, {"doc_id": "c", "text": 3})
    quarantine = Quarantine()
    assert [row["content"] for row in read_texts(path, quarantine=quarantine)] == ["good"]
    assert quarantine.rejected == {
        "documents: invalid JSON": 1,
        "documents: duplicate doc_id": 1,
        "documents: content is of type int, not text": 1,
    }
    assert "1 texts, 3 rows set aside" in caplog.text


def test_wrong_files_are_errors_before_any_row_is_read(tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {
        tmp_path / "missing.jsonl": "no file at",
        tmp_path / "empty": "no file at",
        write_lines(tmp_path / "in/a.csv", b"text\n"): r"neither \.jsonl nor \.parquet nor \.tsv nor \.txt",
        write_lines(tmp_path / "in/b.parquet", b"PAR1 not really"): "is not a Parquet file",
        "beir": "needs settings",
    }
    for path, message in cases.items():
        with pytest.raises(DataError, match=message):
            read_texts(path)
    with pytest.raises(DataError, match="with known columns"):
        read_texts("python_docs", {"content": "answer"})


def test_input_without_text_is_an_error(tmp_path):
    with pytest.raises(DataError, match="it has no rows"):
        list(read_texts(write_lines(tmp_path / "a.jsonl")))
    with pytest.raises(DataError, match=r"no text \(2\), invalid JSON \(1\)"):
        list(read_texts(write_lines(tmp_path / "b.jsonl", {"text": ""}, b"{\n", {"text": " "})))


def test_a_named_data_set_is_read(monkeypatch):
    rows = [{"doc_id": "a", "title": "One", "topic": "", "content": "first", "group": "a"}]
    monkeypatch.setattr(sources, "read", lambda config: Source({"documents": [rows]}))
    assert list(read_texts("python_docs")) == [document("a", "One", "first")]


def markdown_folder(folder: Path) -> Path:
    (folder / "guide").mkdir(parents=True)
    (folder / "readme.md").write_text("\ufeff# Read me first #\n\nOne text.\n")
    (folder / "guide" / "keys.md").write_text("Some words.\n\n## Keys\n\nMore.\n")
    (folder / "guide" / "bare.md").write_text("No heading at all.\n")
    (folder / "guide" / "broken.md").write_bytes(b"\xff\xfe\x00")
    return folder


def test_a_markdown_file_is_a_document(tmp_path):
    folder = markdown_folder(tmp_path / "docs")
    dataset = job.run(Texts(path=str(folder)), output=str(tmp_path / "dataset"))
    documents = dataset.table("documents").select(["doc_id", "title", "content"]).to_pylist()
    assert documents == [
        {"doc_id": "guide/bare.md", "title": "bare", "content": "No heading at all."},
        {"doc_id": "guide/keys.md", "title": "Keys", "content": "Some words.\n\n## Keys\n\nMore."},
        {"doc_id": "readme.md", "title": "Read me first", "content": "One text."},
    ]
    assert dataset.manifest.info["rejected_by_reason"] == {"documents: invalid UTF-8": 1}
    globbed = job.run(Texts(path=f"{folder}/guide/*.md"), output=str(tmp_path / "globbed"))
    assert globbed.table("documents")["doc_id"].to_pylist() == ["bare.md", "keys.md"]


@pytest.mark.parametrize("other", ["more.jsonl", "picture.png"])
def test_markdown_and_other_files_are_an_error_with_a_pattern(tmp_path, other):
    folder = markdown_folder(tmp_path / "docs")
    (folder / other).write_text('{"text": "a"}\n')
    with pytest.raises(DataError) as raised:
        job.run(Texts(path=str(folder)), output=str(tmp_path / "dataset"))
    pattern = str(raised.value).split("'")[1]
    dataset = job.run(Texts(path=pattern), output=str(tmp_path / "matched"))
    assert dataset.table("documents")["doc_id"].to_pylist() == ["guide/bare.md", "guide/keys.md", "readme.md"]
