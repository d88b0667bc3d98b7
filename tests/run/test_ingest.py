"""New documents, one or many, get the embeddings and codes that the offline stages would give them."""

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
    """Build the artifacts of a run by the functions of its stages."""
    folder = tmp_path_factory.mktemp("run")
    dataset = tiny.dataset(str(folder / "dataset"), count=COUNT)
    tokenizer = backbone.train_tokenizer([row["content"] for row in tiny.document_rows()], vocabulary=400)
    draft = Draft(str(folder / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    tower = dual_encoder.build_tower(
        tiny.document_tower(), role="document", dim=DIM, tokenizer_json=tokenizer, seed=0
    )
    tower.save(Path(draft.path("document")))
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
    """Build embeddings with fusion networks, like the stage `fuse`."""
    brands = pa.table({"brand": ["a", "b", "a"]})
    config = DocumentSide(features=BRAND)
    codebooks = torch.randn(3, 8, DIM, generator=torch.Generator().manual_seed(0))
    encodings = fit(BRAND, brands)
    network = DocumentNetwork(config, encodings, semantic_ids=SemanticIdEmbedding(codebooks))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3)  # opens the gate, which is closed at the start
    fusion = DocumentFusion(network)
    draft = Draft(
        str(tmp_path_factory.mktemp("fused") / "fused"), kind="embeddings", config=tiny.Nothing(), parents={}
    )
    for name in run["embeddings"].table_parts("embeddings"):
        draft.write_table(name, run["embeddings"].table(name))
    fusion.save(Path(draft.path("document_fusion")))
    return draft.commit(counts={}), fusion


def test_a_single_document_is_encoded_like_in_the_corpus(run):
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


def test_words_get_the_weights_of_the_collection(run, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    dataset = run["embeddings"].manifest.parents["dataset"]["uri"]
    words = lexical.run(BM25Config(), dataset=dataset, output=str(tmp_path / "bm25"))
    flow = DocumentFlow.load(run["towers"], run["semantic_ids"], run["embeddings"], words)
    bulk, offline = open_artifact(dataset, kind="dataset").table("documents"), words.table("terms")
    encoded = flow(bulk).table
    for name in SPARSE.names:
        assert encoded[name].to_pylist() == offline[name].to_pylist()
    row = {**bulk.slice(0, 1).to_pylist()[0], "title": "", "topic": "", "content": "unheardof"}
    assert flow(pa.Table.from_pylist([row], schema=bulk.schema)).table["terms"].to_pylist() == [[]]


def test_new_documents_of_a_fused_run_are_fused(run, fused):
    embeddings, fusion = fused
    documents = pa.Table.from_pylist([{**row, "brand": "b"} for row in tiny.document_rows(3)])
    plain = DocumentFlow.load(run["towers"], run["semantic_ids"], run["embeddings"])(documents).table
    ready = DocumentFlow.load(run["towers"], run["semantic_ids"], embeddings)(documents).table
    codes = np.array(plain["codes"].to_pylist())
    expected = fusion.fuse(documents, arrow.to_numpy(plain["summary"]), codes)
    actual = arrow.to_numpy(ready["summary"])
    np.testing.assert_allclose(actual, expected, **CLOSE)
    assert np.abs(actual - arrow.to_numpy(plain["summary"])).max() > 0.01


def test_white_space_at_the_ends_of_texts_is_stripped():
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
    with pytest.raises(DataError, match="is Markdown, which has no columns"):
        ingest.run(
            IngestConfig(),
            ingest.describe_file(str(tmp_path / "notes"), {"content": "text"}, like=like),
            **run,
            output=str(tmp_path / "columns"),
        )


def test_a_file_is_ingested_and_bad_rows_are_reported(run, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    rows = tiny.document_rows(20)
    rows[3]["title"] = "word " * 90  # longer than the model reads, shorter than the limit of `prepare`
    rows[5]["content"] = "word " * 900  # cut at the limit of the model
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
    actual = arrow.to_numpy(ready.table("ready")["summary"])
    np.testing.assert_allclose(actual, arrow.to_numpy(expected["summary"]), **CLOSE)
    assert ingest.run(config, new, **run, output=str(tmp_path / "taken")).digest == ready.digest
    before = ingest.output_uri("runs/x", new)
    (tmp_path / "new.jsonl").write_text(lines[0])
    assert ingest.output_uri("runs/x", new) != before

    (tmp_path / "bad.jsonl").write_text(json.dumps(rows[3]))
    bad = NewDocuments(documents=TableFile(path=str(tmp_path / "bad.jsonl")))
    with pytest.raises(DataError, match="none of 1 documents"):
        ingest.run(config, bad, **run, output=str(tmp_path / "bad"))


def test_the_command_line_ingests_a_file(run, tmp_path, monkeypatch, capsys):
    without_ray(monkeypatch)
    artifacts = {
        "dataset": tiny.dataset(str(tmp_path / "like"), count=8),
        "dual_encoder": run["towers"],
        "semantic_ids": run["semantic_ids"],
        "embeddings": run["embeddings"],
    }
    last_run = load(RunConfig, ["configs/quickstart/medquad.yaml"])
    monkeypatch.setattr(pipeline, "load_run", lambda _: last_run)
    monkeypatch.setattr(pipeline, "locate", lambda _, kind: artifacts[kind])
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


def test_a_file_is_read_with_the_column_names_of_the_run(run, tmp_path):
    like = tiny.dataset(str(tmp_path / "like"), count=8)
    columns = {"content": "inhalt", "title": "name"}
    new = {"docid": "7", "inhalt": "long words", "lang": "de"}
    (tmp_path / "new.jsonl").write_text(json.dumps(new))
    description = ingest.describe_file(str(tmp_path / "new.jsonl"), {}, like=like, made_by=columns)
    assert description.documents.columns == {"content": "inhalt"}  # the file has no column of titles
    (row,) = read_documents(description).rows("documents")
    assert row == {"doc_id": "7", "content": "long words"}
    description = ingest.describe_file(
        str(tmp_path / "new.jsonl"), {"content": "lang"}, like=like, made_by=columns
    )
    assert description.documents.columns == {"content": "lang"}
