"""Teachers that provide only vectors: behind an endpoint, or in a file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

import scalingnote
import tiny
from embedding_server import Server
from in_process import without_ray
from published import folder
from scalingnote.cli import main as cli
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.encode.endpoint_client import ENDPOINT_KEY_VARIABLE
from scalingnote.run import pipeline
from scalingnote.storage import arrow

FEW = ("distill.epochs=4", "distill.global_batch=64", "distill.student.vocabulary=300")
TEXTS = [f"{row['title']} {row['content']}" for row in tiny.document_rows()]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)
    monkeypatch.delenv(ENDPOINT_KEY_VARIABLE, raising=False)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    rows = [{"id": r["doc_id"], "title": r["title"], "text": r["content"]} for r in tiny.document_rows()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    model = SentenceTransformer(str(folder(tmp_path)), device="cpu")
    embedding_server = Server(lambda texts: model.encode(list(texts), show_progress_bar=False))
    yield embedding_server
    embedding_server.shutdown()
    embedding_server.server_close()


def sets(*knobs: str) -> list[str]:
    return [word for knob in (*FEW, *knobs) for word in ("--set", knob)]


def word_vectors(texts: list[str]) -> np.ndarray:
    """Return the sum of a random vector per word, which a table can learn from vectors of texts."""
    of_word = {
        word: np.random.default_rng(list(word.encode())).standard_normal(16)
        for text in texts
        for word in text.split()
    }
    return np.array([sum(of_word[word] for word in text.split()) for text in texts], np.float32)


WORDS = tiny.words(np.random.default_rng(1), 40)
PASSAGES = [" ".join(np.random.default_rng(number).choice(WORDS, 8)) for number in range(200)]


def test_an_endpoint_teaches_like_its_folder(
    tmp_path: Path, docs: Path, server: Server, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    words = ["distill", "--endpoint", server.url(), "--model", "m", "--texts", str(docs), "--to", str(out)]
    words += ["--count", "300", *sets("pseudo_queries.validation_share=0.1")]
    assert cli.main([*words, "--index"]) == 0
    assert "into the space of m's document embeddings" in capsys.readouterr().out
    assert set(server.asked.values()) == {1}
    requested = server.asked.total()
    assert cli.main([*words, "--student", "static", "--index"]) == 0  # another student of the same vectors
    assert server.asked.total() == requested

    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    config = pipeline.load_run(f"{out}.run")
    lessons = pipeline.locate(config, "query_embeddings").table("embeddings")
    documents = pipeline.locate(config, "embeddings").table("embeddings")
    for texts, vectors in (
        (lessons["query"].to_pylist(), lessons["embedding"]),
        (TEXTS, documents["summary"]),
    ):
        np.testing.assert_allclose(arrow.to_numpy(vectors), model.encode(texts), atol=1e-4)
    static = SentenceTransformer(str(out), device="cpu")
    query = tiny.document_rows()[3]["title"]
    np.testing.assert_allclose(
        static.encode_query([query]), scalingnote.QueryEncoder(out).encode(query), atol=2e-3
    )
    assert cli.main(["search", query, "--run", f"{out}.run", "-k", "1"]) == 0
    assert query in capsys.readouterr().out
    with pytest.raises(ConfigError, match="only `scalingnote distill` and `run` call it"):
        scalingnote.Index(f"{out}.run", escalate=0.5)


def test_a_wrong_key_sends_no_text(
    tmp_path: Path, docs: Path, server: Server, capsys: pytest.CaptureFixture[str]
):
    words = ["distill", "--endpoint", server.url(), "--model", "m", "--texts", str(docs)]
    words += ["--to", str(tmp_path / "out"), *sets()]
    server.fault = lambda _: (401, {}, {"error": "no key"})
    assert cli.main(words) == 2
    assert f"needs a key: set {ENDPOINT_KEY_VARIABLE}" in capsys.readouterr().err
    assert cli.main([*words, "--max-requests", "1", "--count", "900"]) == 2
    assert "endpoint.max_requests is 1" in capsys.readouterr().err
    assert len(server.bodies) == 1


@pytest.mark.parametrize("form", ["parquet", "jsonl", "npy"])
def test_vectors_of_documents_teach_a_query_tower(form: str, tmp_path: Path):
    vectors, texts = word_vectors(PASSAGES), None
    file = tmp_path / f"given.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"text": PASSAGES, "embedding": arrow.to_arrow(vectors)}), file)
    elif form == "jsonl":
        rows = [{"passage": text, "emb": row.tolist()} for text, row in zip(PASSAGES, vectors, strict=True)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        np.save(file, vectors)
        texts = tmp_path / "texts.txt"
        texts.write_text("\n".join(PASSAGES))
    out = tmp_path / "out"
    tower = scalingnote.distill(texts=texts, vectors=file, to=out, student="static", overrides=FEW)
    encoded, expected = tower.encode(WORDS), arrow.l2_normalize(word_vectors(WORDS))
    assert float((encoded * expected).sum(axis=1).mean()) > 0.9
    library = SentenceTransformer(str(out), device="cpu")
    np.testing.assert_allclose(library.encode_query(WORDS), encoded, atol=2e-3)
    assert "encode_document" not in (out / "README.md").read_text()
    assert "overlap@10" in (out / "README.md").read_text()


def test_agreement_is_measured_on_queries_with_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, queries = tmp_path / "given.parquet", tmp_path / "queries.parquet"
    query_texts = [" ".join(text.split()[:3]) for text in PASSAGES]
    for path, texts in ((file, PASSAGES), (queries, query_texts)):
        pq.write_table(pa.table({"text": texts, "vector": word_vectors(texts).tolist()}), path)
    words = ["distill", "--vectors", str(file), "--queries", str(queries), "--to", str(tmp_path / "out")]
    assert cli.main([*words, *sets("vectors.validation_share=0.2")]) == 0
    output = capsys.readouterr().out
    assert "mean cosine to the teacher" in output
    measured = re.search(r"on (\d+) held-out texts; its share .* is unknown: .*; 0 rows set aside", output)
    assert measured is not None
    assert 20 < int(measured[1]) < 60  # a fifth of 200 queries, by their hashes; no text
    assert f"into the space of {file}'s vectors" in output


def test_unusable_vectors_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows: list[dict[str, Any]] = [
        {"text": text, "vector": row.tolist()} for text, row in zip(TEXTS, word_vectors(TEXTS), strict=True)
    ]
    bad = [
        {"text": TEXTS[0], "vector": [1.0] * 16},
        {"text": "three", "vector": [1.0] * 3},
        {"text": "nan", "vector": [float("nan")] * 16},
        {"text": "null", "vector": None},
        {"text": "words", "vector": ["a", "b"]},
        {"text": " ", "vector": [1.0] * 16},
    ]
    file = tmp_path / "given.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]) + "no json\n")
    assert cli.main(["distill", "--vectors", str(file), "--to", str(tmp_path / "out"), *sets()]) == 0
    output = capsys.readouterr().out
    assert "7 rows set aside: " in output
    for reason in (
        "a text that occurred before (1)",
        "a vector of another length than 16, the length of the first one (1)",
        "a vector that is 0, or has a value that is not a finite number (1)",
        "no vector (2)",
        "no text (1)",
        "invalid JSON (1)",
    ):
        assert reason in output


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        (
            {"text": ["a"], "vector": pa.array([None], pa.list_(pa.float32()))},
            {},
            "has no text with a vector; set aside: 1 x vectors: no vector",
        ),
        ({"text": ["a"], "size": [1]}, {}, "is not clear, there are none in 'text', 'size'"),
        ({"text": ["a"], "x": [[1.0]], "y": [[1.0]]}, {}, "there are several, 'x', 'y'"),
        ({"words": ["a"], "vector": [[1.0]]}, {}, "no column of texts by a known name"),
        ({"text": ["a"], "vector": [[1.0]]}, {"text_column": "words"}, r"has no column \['words'\]"),
        ({"text": ["a"], "vector": [[1.0]]}, {"count": 3}, "leave --count and --id-column out"),
        ({"text": ["a"], "vector": [[1.0]]}, {"student": "layers2"}, "no student 'layers2'"),
        ({"text": ["a"], "vector": [[1.0]]}, {"model": "m"}, "give one"),
        ({"text": ["a"], "vector": [[1.0]]}, {"texts": "t.txt"}, "has its own texts"),
    ],
)
def test_unusable_files_of_vectors_are_errors(
    columns: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
):
    pq.write_table(pa.table(columns), tmp_path / "given.parquet")
    with pytest.raises((ConfigError, DataError), match=reason):
        scalingnote.distill(vectors=tmp_path / "given.parquet", to=tmp_path / "out", **options)


def test_a_matrix_must_fit_its_texts(tmp_path: Path):
    file, texts = tmp_path / "given.npy", tmp_path / "texts.txt"
    texts.write_text("a\nb\n")

    def distill(**options: Any) -> None:
        scalingnote.distill(vectors=file, to=tmp_path / "out", **options)

    np.save(file, np.ones((3, 2)))
    with pytest.raises(DataError, match=r"has 3 rows, .* 2 texts"):
        distill(texts=texts)
    with pytest.raises(DataError, match="give the file of their texts, row by row"):
        distill()
    np.save(file, np.ones(3))
    with pytest.raises(DataError, match="holds 3 of float64: give a matrix"):
        distill(texts=texts)
    file.write_bytes(b"")
    with pytest.raises(DataError, match=r"is not a \.npy file of numbers"):
        distill(texts=texts)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        scalingnote.distill(vectors=tmp_path / "empty.jsonl", to=tmp_path / "out")
