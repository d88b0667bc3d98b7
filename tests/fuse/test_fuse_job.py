"""The stage: clicks in, final embeddings and both sides' networks out, the same after a kill."""

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from safetensors import numpy as safetensors

import tiny
from in_process import without_ray
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.fuse import job, prepare
from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.feature_store import User
from scalingnote.fuse.fusion import DocumentFusion, QueryFusion
from scalingnote.fuse.impressions import SCHEMA, training_rows
from scalingnote.fuse.prepare import FusedCorpus, read_part
from scalingnote.index.job import _require_same_origin
from scalingnote.models import backbone, dual_encoder
from scalingnote.quantize.kmeans import encode_nearest, fit
from scalingnote.quantize.semantic_id import suffixes, to_table
from scalingnote.storage import schema
from scalingnote.storage.arrow import to_arrow, to_matrix, to_numpy
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table
from scalingnote.triplets.planner.planner import WORD_COUNTS

DOCUMENTS, PER_PART, DIM, USERS = 60, 24, 16, 12
FEATURES = [{"kind": "categorical", "column": "brand"}, {"kind": "numeric", "column": "price"}]
CONFIG = {
    "document": {"features": FEATURES, "id_buckets": 64},
    "query": {"profile": FEATURES[:1], "crosses": ["brand"], "history": 5},
    "losses": {"matryoshka": [8, DIM], "skipped": 2},
    "optimizer": {"peak_lr": 0.02},
    "global_batch": 16,
    "epochs": 10,
    "parts": 3,
    "resources": {"workers": 0},
    "writers": {"workers": 1},
    "precision": "float32",
}


@dataclass(frozen=True)
class Inputs:
    uris: dict[str, str]
    embeddings: np.ndarray


def dataset(uri: str) -> Artifact:
    """Users who click their brand, whatever the query; documents d000 and d001 belong to a test query."""
    rng = np.random.default_rng(0)
    draft = Draft(uri, kind="dataset", config=tiny.Nothing(), parents={})
    documents = [
        {**row, "brand": f"b{i % 4}", "price": None if i % 9 == 0 else float(i)}
        for i, row in enumerate(tiny.document_rows(DOCUMENTS))
    ]
    layout = pa.schema([*schema.DOCUMENTS, ("brand", pa.string()), ("price", pa.float64())])
    for number, start in enumerate(range(0, DOCUMENTS, PER_PART)):
        part = pa.Table.from_pylist(documents[start : start + PER_PART], schema=layout)
        draft.write_table(f"documents/part-{number:05d}.parquet", part)
    queries = [
        {"query_id": f"q{i}", "query": documents[i]["title"], "split": "test" if i < 2 else "train"}
        for i in range(10)
    ]
    draft.write_table("queries.parquet", pa.Table.from_pylist(queries, schema=schema.QUERIES))
    qrels = [{"query_id": f"q{i}", "doc_id": f"d{i:03d}", "relevance": 1} for i in range(10)]
    draft.write_table("qrels.parquet", pa.Table.from_pylist(qrels, schema=schema.QRELS))
    impressions = []
    for session in range(150):
        user = int(rng.integers(USERS))
        for position, doc in enumerate(rng.choice(DOCUMENTS, 6, replace=False), 1):
            impressions.append(
                {
                    "session_id": f"s{session}",
                    "user_id": f"u{user}" if user else None,
                    "query_id": f"q{rng.integers(1, 10)}" if position == 1 else impressions[-1]["query_id"],
                    "doc_id": f"d{doc:03d}",
                    "position": position,
                    "clicked": bool(doc % 4 == user % 4),
                    "timestamp": dt.datetime(2024, 1, 1) + dt.timedelta(minutes=session),
                }
            )
    draft.write_table("impressions.parquet", pa.Table.from_pylist(impressions, schema=schema.IMPRESSIONS))
    users = [{"user_id": f"u{i}", "brand": None if i == 1 else f"b{i % 4}"} for i in range(1, USERS)]
    draft.write_table("users.parquet", pa.Table.from_pylist(users))
    return draft.commit(counts={"documents": DOCUMENTS})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    base = tmp_path_factory.mktemp("inputs")
    source = dataset(f"{base}/dataset")
    titles = [row["title"] for row in tiny.document_rows(DOCUMENTS)]
    draft = Draft(f"{base}/tower", kind="dual_encoder", config=tiny.Nothing(), parents={"dataset": source})
    learnt = backbone.train_tokenizer(titles, vocabulary=300)
    made = dual_encoder.build_tower(tiny.query_tower(), role="query", dim=DIM, tokenizer_json=learnt, seed=0)
    made.save(Path(draft.path("query")))
    towers = draft.commit(counts={})
    draft = Draft(f"{base}/planner", kind="planner", config=tiny.Nothing(), parents={"dataset": source})
    words = sorted({word for title in titles for word in title.split()})
    counts = pa.table({WORD_COUNTS.names[0]: words, WORD_COUNTS.names[1]: [2] * len(words)}).cast(WORD_COUNTS)
    draft.write_table("words.parquet", counts)
    draft.write_json("planner.json", {"config": {"kind": "statistics"}, "texts": DOCUMENTS})
    planner = draft.commit(counts={})
    matrix = np.random.default_rng(1).standard_normal((DOCUMENTS, DIM)).astype(np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    codebooks = fit(matrix, levels=2, codes=4, seed=0)
    codes = encode_nearest(matrix, codebooks)
    draft = Draft(f"{base}/embeddings", kind="embeddings", config=tiny.Nothing(), parents={"dataset": source})
    ids = [f"d{i:03d}" for i in range(DOCUMENTS)]
    starts = range(0, DOCUMENTS, PER_PART)
    for number, start in enumerate(starts):
        rows = slice(start, start + PER_PART)
        table = pa.table(
            {"doc_id": ids[rows], "title": to_arrow(-matrix[rows]), "summary": to_arrow(matrix[rows])}
        )
        draft.write_table(f"embeddings/part-{number:05d}.parquet", table)
    embeddings = draft.commit(counts={"documents": DOCUMENTS})
    parents = {"embeddings": embeddings}
    draft = Draft(f"{base}/semantic_ids", kind="semantic_ids", config=tiny.Nothing(), parents=parents)
    draft.write_bytes("codebooks.safetensors", safetensors.save({"codebooks": codebooks}))
    named = to_table(pa.chunked_array([pa.array(ids)]), codes, suffixes(pa.array(ids)))
    for number, start in enumerate(starts):
        draft.write_table(f"codes/part-{number:05d}.parquet", named.slice(start, PER_PART))
    found = (source, planner, embeddings, draft.commit(counts={}), towers)
    return Inputs({artifact.manifest.kind: artifact.uri for artifact in found}, matrix)


def config(**more: object) -> FuseConfig:
    return FuseConfig.model_validate({**CONFIG, **more})


@pytest.fixture(scope="module")
def fused(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return job.run(config(), **inputs.uris, output=f"{tmp_path_factory.mktemp('fused')}/fused")


def test_the_artifact_is_one_of_embeddings_in_the_same_parts(fused: Artifact, inputs: Inputs):
    found = open_artifact(fused.uri, kind="embeddings")
    plain = open_artifact(inputs.uris["embeddings"], kind="embeddings")
    assert found.names("embeddings/") == plain.names("embeddings/")
    for name in plain.names("embeddings/"):
        one, other = found.table(name), plain.table(name)
        assert one.schema == other.schema
        assert one.drop_columns("summary") == other.drop_columns("summary")
    final = to_numpy(found.table("embeddings")["summary"])
    np.testing.assert_allclose(np.linalg.norm(final, axis=1), 1, atol=1e-5)
    assert np.abs(final - inputs.embeddings).max() > 0.05
    _require_same_origin(found, open_artifact(inputs.uris["semantic_ids"], kind="semantic_ids"))
    curve = found.read_json("curve.json")
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    assert not list(Path(fused.uri).glob("_work*"))


def test_what_test_queries_show_is_in_no_history_and_no_share_of_clicks(
    fused: Artifact, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_ray(monkeypatch)
    source = open_artifact(inputs.uris["dataset"], kind="dataset")
    prepare.write_clicks(config(parts=1), source, [], folder=str(tmp_path))
    seen = [row for row in source.table("impressions").to_pylist() if row["doc_id"] not in ("d000", "d001")]
    usable = pa.Table.from_pylist([row for row in seen if row["query_id"] != "q1"], schema=schema.IMPRESSIONS)
    wanted = training_rows(usable.select(SCHEMA.names), last=5, skipped=2)
    clicks = read_table(f"{tmp_path}/clicks/00000.arrow")
    for name in ("query", "history"):
        assert clicks[name].to_pylist() == wanted[name].to_pylist()
    assert fused.counts["clicks"] == len(wanted) < sum(row["clicked"] for row in seen)
    assert fused.counts["clicks_left_out"] == 0
    named, counts = np.unique(to_matrix(wanted["group"])[:, 0], return_counts=True)
    shares = read_table(f"{tmp_path}/shares.arrow")["share"].to_numpy()
    known = read_table(f"{tmp_path}/named.arrow")["hash"].to_numpy()
    np.testing.assert_allclose(shares[np.searchsorted(known, named)], counts / counts.sum())
    assert shares.sum() == pytest.approx(1)


def test_one_document_by_the_saved_network_is_the_bulk_row(fused: Artifact, inputs: Inputs):
    fusion = DocumentFusion.load(fused.directory(job.DOCUMENT_SIDE))
    row = tiny.document_rows(DOCUMENTS)[30]
    document = pa.table({"doc_id": [row["doc_id"]], "brand": ["b2"], "price": [30.0]})
    codes = (
        open_artifact(inputs.uris["semantic_ids"], kind="semantic_ids").table("codes")["codes"][30].as_py()
    )
    alone = fusion.fuse(document, inputs.embeddings[30:31], np.array([codes]))
    np.testing.assert_allclose(alone, to_numpy(fused.table("embeddings")["summary"])[30:31], atol=1e-6)


def test_what_users_like_is_found_for_them(fused: Artifact, inputs: Inputs):
    """Profiles and histories of one brand move a query towards that brand's documents."""
    queries = QueryFusion.load(fused.directory(job.QUERY_SIDE))
    final = to_numpy(fused.table("embeddings")["summary"])
    plain = inputs.embeddings[:8]
    ids = (
        open_artifact(inputs.uris["semantic_ids"], kind="semantic_ids")
        .table("codes")["semantic_id"]
        .to_pylist()
    )
    brands = np.arange(DOCUMENTS) % 4
    gains = []
    for brand in range(4):
        fan = User({"brand": f"b{brand}"}, tuple(ids[10 + brand : 50 : 4]))
        gain = (queries.fuse(plain, users=[fan] * 8) - plain) @ final.T
        gains.append(gain[:, brands == brand].mean() - gain[:, brands != brand].mean())
    assert min(gains) > 0
    assert np.mean(gains) > 0.1
    assert queries.fuse(plain, users=[User()] * 8).tobytes() == plain.tobytes()


def test_a_killed_run_goes_on_where_it_was_and_ends_the_same(
    fused: Artifact, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_ray(monkeypatch)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    output = f"{tmp_path}/fused"
    for name in ("launch", "_fuse"):  # after preparing, then after training
        with monkeypatch.context() as patch:
            patch.setattr(job, name, die)
            with pytest.raises(KeyboardInterrupt):
                job.run(config(), **inputs.uris, output=output)
    with monkeypatch.context() as patch:
        patch.setattr(job, "launch", die)  # what is trained is not trained again
        again = job.run(config(), **inputs.uris, output=output)
    assert again.digest == fused.digest
    assert job.run(config(), **inputs.uris, output=output).digest == fused.digest


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"document": {"features": [{"kind": "numeric", "column": "prize"}]}}, "no column 'prize'"),
        ({"query": {"profile": [{"kind": "numeric", "column": "age"}]}}, "no column 'age'"),
    ],
)
def test_a_feature_that_is_not_there_is_refused(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knobs, says: str
):
    without_ray(monkeypatch)
    with pytest.raises(ConfigError, match=says):
        job.run(config(**knobs), **inputs.uris, output=f"{tmp_path}/fused")


def test_inputs_that_do_not_belong_together_are_refused(
    inputs: Inputs, fused: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    without_ray(monkeypatch)
    with pytest.raises(ArtifactError, match="re-run quantize"):
        job.run(config(), **{**inputs.uris, "embeddings": fused.uri}, output=f"{tmp_path}/a")
    with pytest.raises(ConfigError, match="give a student or a dual_encoder"):
        job.run(
            config(), **{k: v for k, v in inputs.uris.items() if k != "dual_encoder"}, output=f"{tmp_path}/b"
        )
    silent = tiny.dataset(f"{tmp_path}/silent")
    sides = {"document": CONFIG["document"] | {"features": []}, "query": {"history": 5}}
    with pytest.raises(DataError, match="no impressions"):
        job.run(config(**sides), **{**inputs.uris, "dataset": silent.uri}, output=f"{tmp_path}/c")


def test_a_document_that_was_not_encoded_is_left_out(inputs: Inputs, tmp_path: Path):
    opened = {kind: open_artifact(inputs.uris[kind], kind=kind) for kind in ("dataset", "semantic_ids")}
    source = open_artifact(inputs.uris["embeddings"], kind="embeddings")
    draft = Draft(f"{tmp_path}/fewer", kind="embeddings", config=tiny.Nothing(), parents={})
    (part, *_) = source.names("embeddings/")
    table = source.table(part)
    draft.write_table(part, table.filter(pc.not_equal(table["doc_id"], "d003")))
    corpus = FusedCorpus(opened["dataset"], draft.commit(counts={}), opened["semantic_ids"])
    whole, found = (read_part(c, part, ["brand"]) for c in (corpus._replace(embeddings=source), corpus))
    kept = [row for row in range(PER_PART) if row != 3]
    assert found[0].equals(whole[0].take(kept))
    for some, every in zip(found[1:], whole[1:], strict=True):
        np.testing.assert_array_equal(some, every[kept])


def test_crosses_name_discrete_features_of_the_profile():
    with pytest.raises(ValueError, match="crosses name"):
        config(query={"crosses": ["country"]})
