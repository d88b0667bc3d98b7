"""The Python interface and `scalingnote distill MODEL`: a model and texts become a query tower."""

import json
from dataclasses import replace
from pathlib import Path

import jaxtyping
import numpy as np
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

import scalingnote
import tiny
from in_process import without_ray
from published import folder
from scalingnote import api
from scalingnote.cli import main as cli
from scalingnote.core.errors import ConfigError, DataError, ScalingNoteError
from scalingnote.run import pipeline
from scalingnote.train.distillation import agreement

FEW = ("distill.epochs=2", "distill.global_batch=64", "pseudo_queries.validation_share=0.1")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "docs.jsonl"
    rows = [{"doc_id": r["doc_id"], "title": r["title"], "text": r["content"]} for r in tiny.document_rows()]
    lines = [json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join([*lines, b'{"text": "\xff broken"}', b"no json"]) + b"\n")
    return path


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


@pytest.mark.parametrize(
    ("student", "knobs"),
    [
        ("static", ()),
        ("table", ()),
        ("table", ("distill.student.attention=true", "distill.student.centring=0")),
    ],
)
def test_a_model_and_texts_become_a_query_encoder(
    tmp_path: Path, texts: Path, student: str, knobs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    model, overrides = folder(tmp_path), (*FEW, *knobs)
    tower = scalingnote.distill(
        model, texts, to=tmp_path / "out", student=student, count=400, overrides=overrides
    )
    queries = ["ba ko li", "", tiny.document_rows(1)[0]["title"]]
    vectors = tower.encode(queries)
    assert vectors.shape == (3, tower.dim)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert "| overlap@10 " in (tmp_path / "out" / "README.md").read_text()
    single = scalingnote.QueryEncoder(tmp_path / "out").encode(queries[0])
    np.testing.assert_allclose(single[0], vectors[0], atol=1e-6)
    np.testing.assert_array_equal(tower.encode("cut \ud83d"), tower.encode(["cut \ufffd"]))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it checks annotations only in tests
    for wrong in ([None], [float("nan")], None, 7):
        with pytest.raises(DataError, match=r"is nan of type float|is None of type|is not a list of texts"):
            tower.encode(wrong)
    # Pairs of tokens and attention need a module of ours, which the library imports if it is allowed to.
    needs_module = student != "static"
    library = SentenceTransformer(str(tmp_path / "out"), device="cpu", trust_remote_code=needs_module)
    np.testing.assert_allclose(library.encode_query(queries), vectors, atol=2e-3)
    published = SentenceTransformer(str(model), device="cpu")
    documents = ["ba ko", "li me nu"]
    np.testing.assert_allclose(
        library.encode_document(documents), published.encode_document(documents), atol=1e-5
    )


def test_the_command_reports_missing_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """With a few documents every ranking has the same ten; with one document no text is held out."""
    rows = tiny.document_rows(6)
    texts, out = tmp_path / "docs.txt", tmp_path / "out"
    words = ["distill", str(folder(tmp_path)), "--texts", str(texts), "--to", str(out), "--count", "60"]
    words += ["--set", "dataset.passages=null"]  # passages would be more than ten
    texts.write_text("\n".join(row["content"] for row in rows))
    assert cli.main([*words, "--set", "distill.epochs=1"]) == 0
    output = capsys.readouterr().out
    assert "mean cosine to the teacher" in output
    assert "top 10" not in output
    assert "overlap" not in (out / "README.md").read_text()
    texts.write_text(rows[0]["content"])
    assert cli.main([*words, "--run", str(tmp_path / "one.run"), "--set", "distill.epochs=1"]) == 0
    output = capsys.readouterr().out
    assert "agreement not measured: no text is held out" in output
    assert "cosine" not in output
    assert "Agreement" not in (out / "README.md").read_text()


def test_documents_are_indexed_in_the_same_command(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Batches, codes and index fit two dozen documents, with any recipe."""
    model, out = str(folder(tmp_path)), str(tmp_path / "out")
    words = ["distill", model, "--texts", str(texts), "--to", out, "--count", "300"]
    settings = ["--set", "distill.epochs=2", "--set", "pseudo_queries.validation_share=0.1"]
    assert cli.main([*words, *settings, "--index"]) == 0
    output = capsys.readouterr().out
    assert "mean cosine to the teacher" in output
    assert "2 rows set aside: invalid JSON (1), invalid UTF-8 (1)" in output
    assert f"scalingnote serve --run {out}.run" in output
    assert cli.main([*words, *settings]) == 0  # finished work is not repeated
    capsys.readouterr()
    config = pipeline.load_run(f"{out}.run")
    documents = pipeline.locate(config, "dataset").counts["documents"]
    assert config.distill is not None
    assert config.distill.global_batch < 300 / 8
    fitted = (config.quantize.codes, config.index.shards, config.index.family.kind)
    assert fitted == (documents // 4, 1, "flat")
    title = tiny.document_rows()[3]["title"]
    assert cli.main(["search", title, "--run", f"{out}.run", "-k", "2"]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0].endswith(title)
    assert "2 results; by embeddings and terms; load " in output

    index = scalingnote.Index(f"{out}.run")
    both = index.search(title, k=1)[0]
    assert both.title == index.search(title, k=1, dense_weight=0.0)[0].title == title
    assert both.score == pytest.approx(index.search(title, k=1, dense_weight=0.5)[0].score)
    teacher = scalingnote.Index(f"{out}.run", escalate=1.0)
    assert len(teacher.search(title, k=5, dense_weight=1.0)) == 5
    assert float((teacher.encode(title).embedding @ index.encode(title).embedding.T).item()) < 0.9999
    with pytest.raises(ConfigError, match=r"dense_weight is 1\.5"):
        index.search(title, dense_weight=1.5)
    single = scalingnote.Index(f"{out}.run")
    single.query_path = replace(single.query_path, sparse=None)
    with pytest.raises(ConfigError, match="have no terms"):
        single.search(title, dense_weight=0.5)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it checks annotations only in tests
    for wrong in (None, float("nan"), [title]):
        with pytest.raises(DataError, match=r"the query is .* of type"):
            index.search(wrong)
    assert index.search(f"{title} \ud83d") == index.search(f"{title} \ufffd")
    assert cli.main(["search", f"{title} \udcff", "--run", f"{out}.run", "-k", "2"]) == 0  # a byte of a shell
    measured = scalingnote.agreement(f"{out}.run")
    assert (measured.documents, measured.queries > 0) == (documents, True)
    kinds = ("dataset", "dual_encoder", "query_embeddings", "student")
    encoded = agreement.compare(**{kind: pipeline.locate(config, kind) for kind in kinds})
    # The embeddings of the index are float16.
    assert measured.measures() == pytest.approx(encoded.measures(), abs=0.02)
    assert measured.cosine == encoded.cosine


def test_samples_are_spread_over_a_collection():
    assert agreement._places(6, 1000).tolist() == [0, 1, 2, 3, 4, 5]
    places = agreement._places(1999, 1000)
    assert (len(places), places[-1]) == (1000, 1997)  # not the first thousand
    assert agreement._places(0, 1000).tolist() == []


def test_settings_of_the_caller_are_not_fitted(tmp_path: Path, texts: Path):
    overrides = ["distill.global_batch=64", "index.family.kind=ivf_sq8", "bm25=null", "quantize={codes: 9}"]
    plain = {"queries": None, "count": None, "seed": 0, "run_dir": None, "columns": {}}
    out = tmp_path / "out"
    config = api.run_config(folder(tmp_path), texts, to=out, student="static", overrides=overrides, **plain)
    names = {override.partition("=")[0] for override in overrides}
    fitted = api._size_by_texts(config, texts=100, documents=20, given=names, index=True)
    assert fitted == config.model_copy(update={"index": config.index.model_copy(update={"shards": 1})})
    many = api._size_by_texts(config, texts=10**6, documents=10**6, given={"index.shards"}, index=True)
    assert (many.distill, many.quantize, many.index) == (config.distill, config.quantize, config.index)
    assert many.bm25 is not None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"texts": "nowhere.jsonl"}, "nowhere"),
        ({"model": "no/such/model"}, "neither a folder nor a model"),
        ({"student": "tables"}, "choose one of table"),
        ({"texts": "empty.txt"}, "no text"),
    ],
)
def test_bad_input_is_an_error_before_any_work(
    tmp_path: Path, texts: Path, wrong: dict[str, str], message: str
):
    arguments = {"model": str(folder(tmp_path)), "texts": str(texts), "to": str(tmp_path / "out")}
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    wrong = {name: str(empty) if value == empty.name else value for name, value in wrong.items()}
    with pytest.raises(ScalingNoteError, match=message):
        scalingnote.distill(**(arguments | wrong))
    assert not (tmp_path / "out").exists()


def test_options_choose_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    documents = enumerate(tiny.document_rows())
    rows = [{"nr": n, "title": row["title"], "inhalt": row["content"]} for n, row in documents]
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    model, to = folder(tmp_path), tmp_path / "out"
    words = ["distill", str(model), "--texts", str(path), "--to", str(to), "--count", "300"]
    assert cli.main(words) == 2
    assert "only 'nr', 'title', 'inhalt': choose the column by --text-column" in capsys.readouterr().err
    assert not (tmp_path / "out.run").exists()
    column_options = {"text_column": "inhalt", "id_column": "nr"}
    overrides = [*FEW, "dataset.passages=null"]
    scalingnote.distill(model, path, to=to, count=300, overrides=overrides, **column_options)
    (manifest,) = (tmp_path / "out.run" / "prepare").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["config"]["columns"] == {"content": "inhalt", "doc_id": "nr"}
    (part,) = manifest.parent.glob("documents/*.parquet")
    table = pq.read_table(part)
    assert table["doc_id"].to_pylist() == [str(row["nr"]) for row in rows]
    assert table["content"].to_pylist() == [row["inhalt"] for row in rows]
    assert cli.main([*words, "--text-column", "inhalt", "--id-column", "nr", "--set", FEW[0]]) == 0


def test_a_small_model_becomes_the_query_tower_of_a_wide_one(tmp_path: Path, texts: Path):
    teacher = folder(tmp_path / "teacher", pooling=("mean", "cls"))  # embeddings of two states
    small = folder(tmp_path / "small")
    tower = scalingnote.distill(
        teacher, texts, to=tmp_path / "out", student=str(small), count=300, overrides=FEW
    )
    queries = ["ba ko li", tiny.document_rows(1)[0]["title"]]
    published = SentenceTransformer(str(teacher), device="cpu")
    assert tower.dim == published.get_embedding_dimension() == 64
    library = SentenceTransformer(str(tmp_path / "out"), device="cpu", trust_remote_code=True)
    np.testing.assert_allclose(library.encode_query(queries), tower.encode(queries), atol=1e-4)
    np.testing.assert_allclose(library.encode_document(queries), published.encode(queries), atol=1e-5)


def test_a_student_wider_than_its_teacher_is_an_error(tmp_path: Path, texts: Path):
    wide = (
        "{backbone: {kind: scratch, architecture: bert, layers: 1, hidden: 256, heads: 4, intermediate: 512}}"
    )
    overrides, small = (*FEW, f"distill.student={wide}"), str(folder(tmp_path / "small"))
    with pytest.raises(ConfigError, match=r"hidden states have 256 values.*Choose a narrower student"):
        scalingnote.distill(folder(tmp_path), texts, to=tmp_path / "out", student=small, overrides=overrides)
    assert not (tmp_path / "out.run").exists()
