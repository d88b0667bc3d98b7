"""New documents get the embeddings and codes that the offline stages would give them, one or many at once."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.numpy import save

import tiny
from in_process import without_ray
from scalingnote.cli.main import main
from scalingnote.core.config import load
from scalingnote.core.errors import DataError
from scalingnote.datasets.config import NewDocuments, TableFile
from scalingnote.datasets.readers import read_documents
from scalingnote.encode import job as encoding
from scalingnote.encode.config import BM25Config, EncodeConfig, Fleet, IngestConfig
from scalingnote.encode.engines import load_document_encoder, load_document_prompt
from scalingnote.encode.lexical import job as lexical
from scalingnote.fuse.config import DocumentSide, Feature
from scalingnote.fuse.feature_encoding import fit
from scalingnote.fuse.fusion import DocumentFusion
from scalingnote.fuse.networks import DocumentNetwork, SemanticIdEmbedding
from scalingnote.models import backbone, dual_encoder
from scalingnote.quantize import kmeans
from scalingnote.run import ingest, pipeline
from scalingnote.run.config import RunConfig
from scalingnote.run.ingest import DocumentFlow, documents_table
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact, Draft, open_artifact
from scalingnote.storage.schema import DOCUMENT_COLUMNS, SPARSE

DIM, COUNT = 16, 40
CLOSE = {"rtol": 0, "atol": 2e-3}  # embeddings are stored in float16
BRAND = (Feature(kind="categorical", column="brand"),)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """A run's artifacts, made by the stages' own functions."""
    folder = tmp_path_factory.mktemp("run")
    dataset = tiny.dataset(str(folder / "dataset"), count=COUNT)
    learnt = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    draft = Draft(str(folder / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    made = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=DIM, tokenizer_json=learnt, seed=0
    )
    made.save(Path(draft.path("document")))
    towers = draft.commit(counts={})
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        embeddings = encoding.run(
            EncodeConfig(), dataset=dataset.uri, dual_encoder=towers.uri, output=str(folder / "embeddings")
        )
    matrix = arrow.to_numpy(embeddings.table("embeddings")["summary"])
    codebooks = kmeans.fit(matrix, levels=3, codes=8, seed=0)
    draft = Draft(str(folder / "ids"), kind="semantic_ids", config=tiny.Nothing(), parents={})
    draft.write_bytes("codebooks.safetensors", save({"codebooks": codebooks}))
    return {"towers": towers, "embeddings": embeddings, "semantic_ids": draft.commit(counts={})}


@pytest.fixture(scope="module")
def fused(
    run: dict[str, Artifact], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Artifact, DocumentFusion]:
    """The embeddings with networks beside them, as the stage `fuse` leaves them."""
    brands = pa.table({"brand": ["a", "b", "a"]})
    config = DocumentSide(features=BRAND)
    codebooks = torch.randn(3, 8, DIM, generator=torch.Generator().manual_seed(0))
    encodings = fit(BRAND, brands)
    network = DocumentNetwork(config, encodings, semantic_ids=SemanticIdEmbedding(codebooks))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3)  # the gate, shut at the start, is open
    fusion = DocumentFusion(network)
    draft = Draft(
        str(tmp_path_factory.mktemp("fused") / "fused"), kind="embeddings", config=tiny.Nothing(), parents={}
    )
    for name in run["embeddings"].table_parts("embeddings"):
        draft.write_table(name, run["embeddings"].table(name))
    fusion.save(Path(draft.path("document_fusion")))
    return draft.commit(counts={}), fusion


def test_a_single_document_is_encoded_as_among_all_others(run):
    flow = DocumentFlow.load(run["towers"], run["semantic_ids"], run["embeddings"])
    bulk = run["embeddings"].table("embeddings")
    matrix = arrow.to_numpy(bulk["summary"])
    for row in (0, 17, COUNT - 1):
        ready = flow(pa.Table.from_pylist([tiny.document_rows()[row]]))
        assert not ready.rejected
        assert ready.table["doc_id"][0] == bulk["doc_id"][row]
        assert ready.table["content_hash"][0] == bulk["content_hash"][row]
        assert ready.table.schema.field("summary").type == bulk.schema.field("summary").type
        single = arrow.to_numpy(ready.table["summary"])
        np.testing.assert_allclose(single[0], matrix[row], **CLOSE)
        codes = np.array(ready.table["codes"].to_pylist())
        np.testing.assert_array_equal(codes, kmeans.encode_nearest(single, flow.codebooks))


def test_words_weigh_as_in_the_collection(run, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    dataset = run["embeddings"].manifest.parents["dataset"]["uri"]
    words = lexical.run(BM25Config(), dataset=dataset, output=str(tmp_path / "bm25"))
    flow = DocumentFlow.load(run["towers"], run["semantic_ids"], run["embeddings"], words)
    bulk, offline = open_artifact(dataset, kind="dataset").table("documents"), words.table("terms")
    found = flow(bulk).table
    for name in SPARSE.names:
        assert found[name].to_pylist() == offline[name].to_pylist()
    row = {**bulk.slice(0, 1).to_pylist()[0], "title": "", "topic": "", "content": "unheardof"}
    assert flow(pa.Table.from_pylist([row], schema=bulk.schema)).table["terms"].to_pylist() == [[]]


def test_what_was_fused_is_fused_again(run, fused):
    embeddings, fusion = fused
    documents = pa.Table.from_pylist([{**row, "brand": "b"} for row in tiny.document_rows(3)])
    plain = DocumentFlow.load(run["towers"], run["semantic_ids"], run["embeddings"])(documents).table
    ready = DocumentFlow.load(run["towers"], run["semantic_ids"], embeddings)(documents).table
    codes = np.array(plain["codes"].to_pylist())
    expected = fusion.fuse(documents, arrow.to_numpy(plain["summary"]), codes)
    found = arrow.to_numpy(ready["summary"])
    np.testing.assert_allclose(found, expected, **CLOSE)
    assert np.abs(found - arrow.to_numpy(plain["summary"])).max() > 0.01


def test_texts_that_are_written_lose_the_spaces_at_their_ends():
    schema = pa.schema({name: pa.string() for name in DOCUMENT_COLUMNS})
    table, rejected = documents_table([{"doc_id": "a", "title": " a ", "content": "\tb  c\n"}], schema)
    assert not rejected
    assert table.to_pylist() == [{"doc_id": "a", "title": "a", "topic": None, "content": "b  c"}]


def test_a_folder_of_markdown_is_ingested(run, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    (tmp_path / "notes" / "deep").mkdir(parents=True)
    (tmp_path / "notes" / "one.md").write_text("# First\n\nword one")
    (tmp_path / "notes" / "deep" / "two.md").write_text("word two")
    like = tiny.dataset(str(tmp_path / "like"), count=8)
    new = ingest.describe_file(str(tmp_path / "notes"), {}, like=like, made_by={"content": "text"})
    ready = ingest.run(IngestConfig(), new, **run, output=ingest.output_uri(str(tmp_path), new))
    assert sorted(ready.table("ready")["doc_id"].to_pylist()) == ["deep/two.md", "one.md"]
    (tmp_path / "notes" / "one.md").rename(tmp_path / "notes" / "other.md")
    assert ingest.output_uri(str(tmp_path), new) not in ready.uri
    with pytest.raises(DataError, match="is Markdown: it has no columns to name"):
        ingest.run(
            IngestConfig(),
            ingest.describe_file(str(tmp_path / "notes"), {"content": "text"}, like=like),
            **run,
            output=str(tmp_path / "columns"),
        )


def test_a_file_is_ingested_and_bad_rows_are_reported(run, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    rows = tiny.document_rows(20)
    rows[3]["title"] = "word " * 90  # more than the model reads, less than the intake cuts off
    rows[5]["content"] = "word " * 900  # read as far as the model reads
    lines = [*(json.dumps(row) for row in rows), "{not json", json.dumps({"doc_id": "empty"})]
    (tmp_path / "new.jsonl").write_text("\n".join(lines))
    new = ingest.describe_file(
        str(tmp_path / "new.jsonl"), {}, like=tiny.dataset(str(tmp_path / "like"), count=8)
    )
    new = new.model_copy(update={"documents_per_part": 8})
    config = IngestConfig(resources=Fleet(workers=2))
    ready = ingest.run(config, new, **run, output=str(tmp_path / "taken"))
    assert (ready.counts["documents"], ready.counts["rejected"]) == (19, 1)
    assert 0 < ready.counts["cut_texts"] < 19
    assert ready.counts["lost_tokens"] > 800
    assert ready.table("rejected")["row"].to_pylist() == [rows[3]["doc_id"]]
    flow = DocumentFlow(
        load_document_encoder(run["towers"], 8192),
        load_document_prompt(run["towers"]),
        np.zeros((1, 2, DIM), np.float32),
    )
    expected = flow(pa.Table.from_pylist([row for row in rows if len(row["title"]) < 90])).table
    assert ready.table("ready")["doc_id"].to_pylist() == expected["doc_id"].to_pylist()
    found = arrow.to_numpy(ready.table("ready")["summary"])
    np.testing.assert_allclose(found, arrow.to_numpy(expected["summary"]), **CLOSE)
    assert ingest.run(config, new, **run, output=str(tmp_path / "taken")).digest == ready.digest
    before = ingest.output_uri("runs/x", new)
    (tmp_path / "new.jsonl").write_text(lines[0])
    assert ingest.output_uri("runs/x", new) != before

    (tmp_path / "bad.jsonl").write_text(json.dumps(rows[3]))
    bad = NewDocuments(documents=TableFile(path=str(tmp_path / "bad.jsonl")))
    with pytest.raises(DataError, match="none of 1 documents"):
        ingest.run(config, bad, **run, output=str(tmp_path / "bad"))


def test_from_the_command_line(run, tmp_path, monkeypatch, capsys):
    without_ray(monkeypatch)
    found = {
        "dataset": tiny.dataset(str(tmp_path / "like"), count=8),
        "dual_encoder": run["towers"],
        "semantic_ids": run["semantic_ids"],
        "embeddings": run["embeddings"],
    }
    made_by = load(RunConfig, ["configs/quickstart/medquad.yaml"])
    monkeypatch.setattr(pipeline, "load_run", lambda _: made_by)
    monkeypatch.setattr(pipeline, "locate", lambda _, kind: found[kind])
    rows = [{**row, "name": row["title"]} for row in tiny.document_rows(3)]
    for row in rows:
        del row["title"]
    (tmp_path / "new.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["ingest", str(tmp_path / "new.jsonl"), "--run", str(tmp_path)]
    assert main([*words, "--title-column", "name", "--set", "resources.workers=1"]) == 0
    assert "3 documents, 0 set aside" in capsys.readouterr().out
    for wrong, message in (("title", "give OURS=THEIRS"), ("title=name", "give --id-column")):
        assert main([*words, "--column", wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_file_is_read_as_the_runs_own_was(run, tmp_path):
    like = tiny.dataset(str(tmp_path / "like"), count=8)
    own = {"content": "inhalt", "title": "name"}
    new = {"docid": "7", "inhalt": "long words", "lang": "de"}
    (tmp_path / "new.jsonl").write_text(json.dumps(new))
    described = ingest.describe_file(str(tmp_path / "new.jsonl"), {}, like=like, made_by=own)
    assert described.documents.columns == {"content": "inhalt"}  # it has no column of titles
    (row,) = read_documents(described).rows("documents")
    assert row == {"doc_id": "7", "content": "long words"}
    described = ingest.describe_file(str(tmp_path / "new.jsonl"), {"content": "lang"}, like=like, made_by=own)
    assert described.documents.columns == {"content": "lang"}
