"""The mine stage on a tiny corpus, with a query tower of random weights and documents near their queries."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import tiny
from in_process import without_ray
from scalingnote.core.config import Resources
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.datasets.splits import held_out_documents
from scalingnote.encode.encoder import Encoder
from scalingnote.models import backbone, dual_encoder
from scalingnote.storage import arrow, trec
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.triplets.config import MineConfig
from scalingnote.triplets.mine import job

DIM = 16
ONE = Resources(workers=1)  # a second worker would take longer to start than the work takes


@pytest.fixture(scope="module")
def parents(tmp_path_factory) -> dict[str, Artifact]:
    root = tmp_path_factory.mktemp("mine")
    dataset = tiny.dataset(str(root / "dataset"))
    triplets = tiny.triplets(str(root / "triplets"), dataset)
    texts = [" ".join(row.values()) for row in tiny.document_rows()]
    tokenizer_json = backbone.train_tokenizer(texts, vocabulary=400)
    draft = Draft(str(root / "towers"), kind="dual_encoder", config=tiny.Nothing(), parents={})
    tower = dual_encoder.build_tower(
        tiny.query_tower(), role="query", dim=DIM, tokenizer_json=tokenizer_json, seed=0
    )
    tower.save(Path(draft.path("query")))
    towers = draft.commit(counts={})

    queries = dataset.table("queries")["query"].to_pylist()
    noise = np.random.default_rng(0).normal(size=(len(queries), DIM)).astype(np.float32)
    near = arrow.l2_normalize(Encoder(tower).encode_queries(queries)) + 0.2 * arrow.l2_normalize(noise)
    draft = Draft(str(root / "embeddings"), kind="embeddings", config=tiny.Nothing(), parents={})
    doc_ids = dataset.table("documents")["doc_id"]
    part = pa.table({"doc_id": doc_ids, "summary": arrow.to_arrow(arrow.l2_normalize(near))})
    draft.write_table("embeddings/part-00000.parquet", part)
    embeddings = draft.commit(counts={"documents": len(part)})
    return {"dataset": dataset, "triplets": triplets, "dual_encoder": towers, "embeddings": embeddings}


def uris(parents: dict[str, Artifact]) -> dict[str, str]:
    return {kind: artifact.uri for kind, artifact in parents.items()}


def test_negatives_are_documents_that_the_towers_rank_high(cluster, parents, tmp_path):
    config = MineConfig(resources=ONE, first_rank=3, last_rank=6, max_score_ratio=None)
    mined = job.run(config, **uris(parents), output=str(tmp_path / "a"))
    assert mined.counts["triplets"] == parents["triplets"].counts["triplets"]
    assert mined.manifest.info["simulated_clicks"] is True

    before, after = (artifact.table("triplets").to_pylist() for artifact in (parents["triplets"], mined))
    embeddings = parents["embeddings"].table("embeddings")
    held_out = set(held_out_documents(parents["dataset"]).to_pylist())
    encoder = Encoder.load(parents["dual_encoder"].directory("query"))
    matrix = arrow.to_numpy(embeddings["summary"])
    assert [{**row, "negatives": []} for row in after] == [{**row, "negatives": []} for row in before]
    for row in after:
        scores = matrix @ encoder.encode_queries([row["query"]])[0]
        ranking = [embeddings["doc_id"][i].as_py() for i in np.argsort(-scores)]
        window = [doc_id for doc_id in ranking if doc_id not in held_out][2:6]
        assert set(row["negatives"]) <= {*window} - {row["positive"]}


def test_any_run_file_can_be_mined(parents, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    rows = parents["triplets"].table("triplets").to_pylist()
    run = {
        row["query_id"]: [
            (row["positive"], 2.0),
            ("d008", 1.5),
            *[("d001", 1.0)] * (row["positive"] != "d001"),
        ]
        for row in rows
    }
    trec.write_run(str(tmp_path / "run.trec"), run, tag="bm25")
    config = MineConfig(
        resources=ONE, runs=(str(tmp_path / "run.trec"),), first_rank=2, last_rank=2, max_score_ratio=0.6
    )
    mined = job.run(config, **uris(parents), output=str(tmp_path / "mined"))
    # d008 is a test document, so d001 is second; it has half of the positive's score.
    negatives_of = {row["query_id"]: row["negatives"] for row in mined.table("triplets").to_pylist()}
    assert {tuple(negatives) for query_id, negatives in negatives_of.items() if query_id != "q001"} == {
        ("d001",)
    }
    assert mined.counts["kept"] == 1  # d001 answers q001


def test_a_run_file_with_other_contents_is_refused_before_work(parents, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    path, output = tmp_path / "run.trec", tmp_path / "mined"
    rows = parents["triplets"].table("triplets").to_pylist()
    trec.write_run(str(path), {row["query_id"]: [("d001", 1.0)] for row in rows}, tag="bm25")
    window = {"first_rank": 1, "last_rank": 1, "max_score_ratio": None}
    config = MineConfig(resources=ONE, runs=(str(path),), **window)
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    for wrong in (("0" * 64,), (right, right)):
        with pytest.raises(ConfigError, match=rf"mine\.runs have sha256 {right}, not {wrong[0]}"):
            job.run(config.model_copy(update={"runs_sha256": wrong}), **uris(parents), output=str(output))
    assert not output.exists()
    with_checksum = config.model_copy(update={"runs_sha256": (right,)})
    artifact = job.run(with_checksum, **uris(parents), output=str(output))
    assert job.run(config, **uris(parents), output=str(output)).digest == artifact.digest
    path.write_text(path.read_text().replace("d001", "d002"))
    with pytest.raises(ArtifactError, match="other settings or inputs"):
        job.run(config, **uris(parents), output=str(output))


def test_nothing_to_mine_is_an_error(parents, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    rows = parents["triplets"].table("triplets").to_pylist()
    trec.write_run(
        str(tmp_path / "run.trec"), {row["query_id"]: [(row["positive"], 1.0)] for row in rows}, tag="right"
    )
    config = MineConfig(resources=ONE, runs=(str(tmp_path / "run.trec"),), first_rank=1, last_rank=3)
    with pytest.raises(DataError, match="widen first_rank"):
        job.run(config, **uris(parents), output=str(tmp_path / "none"))
