"""The stage reads clicks and writes final embeddings and both networks, the same after a kill."""

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from safetensors import numpy as safetensors

import tiny
from in_process import run_without_ray, without_ray
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.fuse import job, prepare
from scalingnote.fuse.config import FuseConfig
from scalingnote.fuse.feature_store import Event, StoreConfig, User, open_store
from scalingnote.fuse.fusion import DocumentFusion, QueryFusion
from scalingnote.fuse.impressions import SCHEMA, training_rows
from scalingnote.fuse.prepare import FusedCorpus, read_part
from scalingnote.index.job import _require_same_origin
from scalingnote.models import backbone, dual_encoder
from scalingnote.quantize.kmeans import encode_nearest, fit
from scalingnote.quantize.semantic_id import suffixes, to_table
from scalingnote.search.query_path import Personal, QueryPath
from scalingnote.storage import schema
from scalingnote.storage.arrow import to_arrow, to_matrix, to_numpy
from scalingnote.storage.artifact import Artifact, Draft, open_artifact, read_table
from scalingnote.triplets.planner import planner
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

    def open(self, kind: str) -> Artifact:
        return open_artifact(self.uris[kind], kind=kind)


def write_parts(draft: Draft, table: str, rows: pa.Table) -> None:
    for number, start in enumerate(range(0, DOCUMENTS, PER_PART)):
        draft.write_table(f"{table}/part-{number:05d}.parquet", rows.slice(start, PER_PART))


def dataset(uri: str) -> Artifact:
    """Build a dataset of users who click their brand for any query; d000 and d001 belong to a test query."""
    rng = np.random.default_rng(0)
    draft = Draft(uri, kind="dataset", config=tiny.Nothing(), parents={})
    documents = [
        {**row, "brand": f"b{i % 4}", "price": None if i % 9 == 0 else float(i)}
        for i, row in enumerate(tiny.document_rows(DOCUMENTS))
    ]
    layout = pa.schema([*schema.DOCUMENTS, ("brand", pa.string()), ("price", pa.float64())])
    write_parts(draft, "documents", pa.Table.from_pylist(documents, schema=layout))
    queries = [
        {"query_id": f"q{i}", "query": documents[i]["title"], "split": "test" if i < 2 else "train"}
        for i in range(10)
    ]
    qrels = [{"query_id": f"q{i}", "doc_id": f"d{i:03d}", "relevance": 1} for i in range(10)]
    impressions = []
    for session in range(150):
        user = int(rng.integers(USERS))
        documents = rng.choice(DOCUMENTS, 6, replace=False)
        shown = {"session_id": f"s{session}", "user_id": f"u{user}" if user else None}
        shown["timestamp"] = dt.datetime(2024, 1, 1) + dt.timedelta(minutes=session)
        shown["query_id"] = f"q{rng.integers(1, 10)}"
        impressions += [
            {**shown, "doc_id": f"d{doc:03d}", "position": position, "clicked": bool(doc % 4 == user % 4)}
            for position, doc in enumerate(documents, 1)
        ]
    logs = {"queries": queries, "qrels": qrels, "impressions": impressions}
    for table, rows in logs.items():
        columns = getattr(schema, table.upper())
        draft.write_table(f"{table}.parquet", pa.Table.from_pylist(rows, schema=columns))
    users = [{"user_id": f"u{i}", "brand": None if i == 1 else f"b{i % 4}"} for i in range(1, USERS)]
    draft.write_table("users.parquet", pa.Table.from_pylist(users))
    return draft.commit(counts={"documents": DOCUMENTS})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    base = tmp_path_factory.mktemp("inputs")

    def draft(kind: str, **parents: Artifact) -> Draft:
        return Draft(f"{base}/{kind}", kind=kind, config=tiny.Nothing(), parents=parents)

    source = dataset(f"{base}/dataset")
    titles = [row["title"] for row in tiny.document_rows(DOCUMENTS)]
    towers, planner = draft("dual_encoder", dataset=source), draft("planner", dataset=source)
    tokenizer_json = backbone.train_tokenizer(titles, vocabulary=300)
    tower = dual_encoder.build_tower(
        tiny.query_tower(), role="query", dim=DIM, tokenizer_json=tokenizer_json, seed=0
    )
    tower.save(Path(towers.path("query")))
    words = sorted({word for title in titles for word in title.split()})
    planner.write_table("words.parquet", pa.table([words, [2] * len(words)], schema=WORD_COUNTS))
    planner.write_json("planner.json", {"config": {"kind": "statistics"}, "texts": DOCUMENTS})
    matrix = np.random.default_rng(1).standard_normal((DOCUMENTS, DIM)).astype(np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    codebooks = fit(matrix, levels=2, codes=4, seed=0)
    plain, ids = draft("embeddings", dataset=source), pa.array([f"d{i:03d}" for i in range(DOCUMENTS)])
    views = {"doc_id": ids, "title": to_arrow(-matrix), "summary": to_arrow(matrix)}
    write_parts(plain, "embeddings", pa.table(views))
    embeddings = plain.commit(counts={"documents": DOCUMENTS})
    semantic_ids = draft("semantic_ids", embeddings=embeddings)
    semantic_ids.write_bytes("codebooks.safetensors", safetensors.save({"codebooks": codebooks}))
    codes = encode_nearest(matrix, codebooks)
    write_parts(semantic_ids, "codes", to_table(pa.chunked_array([ids]), codes, suffixes(ids)))
    artifacts = [source, embeddings, *(each.commit(counts={}) for each in (planner, semantic_ids, towers))]
    return Inputs({artifact.manifest.kind: artifact.uri for artifact in artifacts}, matrix)


def config(**more: object) -> FuseConfig:
    return FuseConfig.model_validate({**CONFIG, **more})


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


@pytest.fixture(scope="module")
def fused(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    output = f"{tmp_path_factory.mktemp('fused')}/fused"
    return run_without_ray(job.run, config(), **inputs.uris, output=output)


def test_the_artifact_has_embeddings_in_the_same_parts(fused: Artifact, inputs: Inputs):
    artifact = open_artifact(fused.uri, kind="embeddings")
    plain = inputs.open("embeddings")
    assert artifact.names("embeddings/") == plain.names("embeddings/")
    for name in plain.names("embeddings/"):
        one, other = artifact.table(name), plain.table(name)
        assert one.schema == other.schema
        assert one.drop_columns("summary") == other.drop_columns("summary")
    final = to_numpy(artifact.table("embeddings")["summary"])
    np.testing.assert_allclose(np.linalg.norm(final, axis=1), 1, atol=1e-5)
    assert np.abs(final - inputs.embeddings).max() > 0.05
    _require_same_origin(artifact, inputs.open("semantic_ids"))
    curve = artifact.read_json("curve.json")
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    assert not list(Path(fused.uri).glob("_work*"))


def test_impressions_of_test_queries_are_not_trained_on(fused: Artifact, inputs: Inputs, tmp_path: Path):
    source = inputs.open("dataset")
    prepare.write_clicks(config(parts=1), source, [], folder=str(tmp_path))
    visible = [
        row for row in source.table("impressions").to_pylist() if row["doc_id"] not in ("d000", "d001")
    ]
    usable = pa.Table.from_pylist(
        [row for row in visible if row["query_id"] != "q1"], schema=schema.IMPRESSIONS
    )
    expected = training_rows(usable.select(SCHEMA.names), last=5, skipped=2)
    clicks = read_table(f"{tmp_path}/clicks/00000.arrow")
    for name in ("query", "history"):
        assert clicks[name].to_pylist() == expected[name].to_pylist()
    assert fused.counts["clicks"] == len(expected) < sum(row["clicked"] for row in visible)
    assert fused.counts["clicks_left_out"] == 0
    clicked, counts = np.unique(to_matrix(expected["group"])[:, 0], return_counts=True)
    shares = read_table(f"{tmp_path}/shares.arrow")["share"].to_numpy()
    hashes = read_table(f"{tmp_path}/named.arrow")["hash"].to_numpy()
    np.testing.assert_allclose(shares[np.searchsorted(hashes, clicked)], counts / counts.sum())
    assert shares.sum() == pytest.approx(1)


def test_the_saved_network_fuses_one_document_like_the_stage(fused: Artifact, inputs: Inputs):
    fusion = DocumentFusion.load(fused.directory(job.DOCUMENT_SIDE))
    row = tiny.document_rows(DOCUMENTS)[30]
    document = pa.table({"doc_id": [row["doc_id"]], "brand": ["b2"], "price": [30.0]})
    codes = inputs.open("semantic_ids").table("codes")["codes"][30].as_py()
    single = fusion.fuse(document, inputs.embeddings[30:31], np.array([codes]))
    np.testing.assert_allclose(single, to_numpy(fused.table("embeddings")["summary"])[30:31], atol=1e-6)


def test_queries_of_users_move_towards_their_brand(fused: Artifact, inputs: Inputs):
    """Profiles and histories of one brand move a query towards the documents of that brand."""
    queries = QueryFusion.load(fused.directory(job.QUERY_SIDE))
    final = to_numpy(fused.table("embeddings")["summary"])
    plain = inputs.embeddings[:8]
    ids = inputs.open("semantic_ids").table("codes")["semantic_id"].to_pylist()
    brands = np.arange(DOCUMENTS) % 4
    gains = []
    for brand in range(4):
        fan = User({"brand": f"b{brand}"}, tuple(ids[10 + brand : 50 : 4]))
        gain = (queries.fuse(plain, users=[fan] * 8) - plain) @ final.T
        gains.append(gain[:, brands == brand].mean() - gain[:, brands != brand].mean())
    assert min(gains) > 0
    assert np.mean(gains) > 0.1
    assert queries.fuse(plain, users=[User()] * 8).tobytes() == plain.tobytes()


def test_a_query_path_answers_known_users_personally(fused: Artifact, inputs: Inputs, tmp_path: Path):
    store = open_store(StoreConfig(url=f"sqlite:{tmp_path}/users.db"))
    ids = inputs.open("semantic_ids").table("codes")["semantic_id"]
    clicks = [Event(f"e{row}", "fan", float(row), ids[row].as_py()) for row in range(10, 50, 4)]
    store.write([Event("p", "fan", 1.0, profile={"brand": "b2"}), *clicks])
    encoder = QueryEncoder(inputs.open("dual_encoder").directory("query"))
    words = planner.load(inputs.open("planner"))
    fusion = QueryFusion.load(fused.directory(job.QUERY_SIDE))
    path, query = QueryPath(encoder, None, Personal(fusion, store, words)), tiny.document_rows(10)[3]["title"]
    plain = QueryPath(encoder)([query])[0]
    fan, stranger, anonymous = path([query] * 3, ["fan", "a stranger", None])
    assert [each.personalised for each in (fan, stranger, anonymous)] == [True, False, False]
    np.testing.assert_allclose(np.linalg.norm(fan.embedding), 1, atol=1e-5)
    assert float((fan.embedding @ plain.embedding.T).item()) < 0.999
    for each in (stranger, anonymous):
        np.testing.assert_allclose(each.embedding, plain.embedding, atol=1e-6)


def test_a_killed_run_resumes_and_has_the_same_result(
    fused: Artifact, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    output = f"{tmp_path}/fused"
    for name in ("launch", "_fuse"):  # after the preparation, then after the training
        with monkeypatch.context() as patch:
            patch.setattr(job, name, die)
            with pytest.raises(KeyboardInterrupt):
                job.run(config(), **inputs.uris, output=output)
    with monkeypatch.context() as patch:
        patch.setattr(job, "launch", die)  # the networks are not trained again
        resumed = job.run(config(), **inputs.uris, output=output)
    assert resumed.digest == fused.digest
    assert job.run(config(), **inputs.uris, output=output).digest == fused.digest


def test_unsuitable_inputs_are_refused(inputs: Inputs, fused: Artifact, tmp_path: Path):
    missing = [{"kind": "numeric", "column": "prize"}]
    silent = tiny.dataset(f"{tmp_path}/silent").uri
    plain = {"document": {}, "query": {}}
    cases: list[tuple] = [
        (ConfigError, "no column 'prize' in documents", {"document": {"features": missing}}, {}),
        (ConfigError, "no column 'prize' in users", {"query": {"profile": missing}}, {}),
        (ConfigError, "has no such table", {"document": {}}, {"dataset": silent}),
        (ConfigError, "pass a student or a dual_encoder", {}, {"dual_encoder": None}),
        (ArtifactError, "re-run quantize", {}, {"embeddings": fused.uri}),
        (DataError, "no impressions", plain, {"dataset": silent}),
    ]
    for number, (error, message, knobs, uris) in enumerate(cases):
        with pytest.raises(error, match=message):
            job.run(config(**knobs), **{**inputs.uris, **uris}, output=f"{tmp_path}/{number}")


def test_a_document_that_was_not_encoded_is_left_out(inputs: Inputs, tmp_path: Path):
    source = inputs.open("embeddings")
    draft = Draft(f"{tmp_path}/fewer", kind="embeddings", config=tiny.Nothing(), parents={})
    (part, *_) = source.names("embeddings/")
    table = source.table(part)
    draft.write_table(part, table.filter(pc.not_equal(table["doc_id"], "d003")))
    corpus = FusedCorpus(inputs.open("dataset"), draft.commit(counts={}), inputs.open("semantic_ids"))
    complete, fewer = (read_part(c, part, ["brand"]) for c in (corpus._replace(embeddings=source), corpus))
    kept_rows = [row for row in range(PER_PART) if row != 3]
    assert fewer[0].equals(complete[0].take(kept_rows))
    for some, every in zip(fewer[1:], complete[1:], strict=True):
        np.testing.assert_array_equal(some, every[kept_rows])


def test_crosses_name_discrete_features_of_the_profile():
    with pytest.raises(ValueError, match="crosses name"):
        config(query={"crosses": ["country"]})
