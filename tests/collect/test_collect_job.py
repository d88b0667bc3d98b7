"""A small shop: 40 queries, 60 documents in groups of three, a click log, and a few test queries."""

import pyarrow as pa
import pytest

from scalingnote.collect.assemble import assemble, exposures, rankings
from scalingnote.collect.config import CollectConfig
from scalingnote.collect.job import run, trainable
from scalingnote.config import Config
from scalingnote.errors import DataError
from scalingnote.storage.artifact import Draft
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES, SCORES

WORDS = ["lamp", "sofa", "desk", "chair", "shelf", "rug", "bed", "mirror", "stool", "vase", "plant", "clock"]
WORDS += ["frame", "bench", "crate"]
TEST_QUERIES = {"q3", "q17"}
CONFIG = CollectConfig(top_k=2, top_t=12, parts=3, validation_fraction=0.3)


def table(schema, rows):
    columns = zip(*rows, strict=True) if rows else [[]] * len(schema)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def make_dataset(uri, *, impressions=True, scores=False):
    draft = Draft(str(uri), kind="dataset", config=Config(), parents={})
    text = [f"{WORDS[i % 15]} {WORDS[i * 7 % 15]} {WORDS[i * 4 % 11]} item" for i in range(60)]
    documents = [(f"d{i}", text[i], "home", f"model {i}", f"g{i // 3}") for i in range(60)]
    draft.write_table("documents/part-00000.parquet", table(DOCUMENTS, documents[:30]))
    draft.write_table("documents/part-00001.parquet", table(DOCUMENTS, documents[30:]))
    split = {f"q{i}": "test" if f"q{i}" in TEST_QUERIES else "train" for i in range(40)}
    draft.write_table("queries.parquet", table(QUERIES, [(q, text[int(q[1:])], s) for q, s in split.items()]))
    draft.write_table("qrels.parquet", table(QRELS, [(f"q{i}", f"d{i}", 1) for i in range(40)]))
    if impressions:
        log = [
            ("s", None, f"q{i}", f"d{(i + 7 * rank) % 60}", rank + 1, rank == 0 or (i + rank) % 9 == 0, 0)
            for i in range(40)
            for rank in range(6)
        ]
        log += [("s", None, "q0", "unknown", 9, True, 0), ("s", None, "stranger", "d1", 1, True, 0)]
        draft.write_table("impressions.parquet", table(IMPRESSIONS, log))
    if scores:
        ranked = [(f"q{i}", f"d{(i * 5 + j) % 60}", float(-j)) for i in range(40) for j in range(15)]
        draft.write_table("scores.parquet", table(SCORES, ranked))
    return draft.commit(counts={}, simulated_clicks=impressions)


TEST_DOCUMENTS = {f"d{i}" for i in (3, 4, 5, 15, 16, 17)}  # the groups of d3 and d17


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("shop") / "dataset")


def test_trainable_leaves_out_test_queries_and_their_groups(dataset):
    known = trainable(dataset)
    assert set(known.documents.to_pylist()) == {f"d{i}" for i in range(60)} - TEST_DOCUMENTS
    assert not TEST_QUERIES & set(known.queries["query_id"].to_pylist())
    assert len(known.queries) == 38


def test_documents_without_a_group_stand_alone(tmp_path):
    draft = Draft(str(tmp_path / "dataset"), kind="dataset", config=Config(), parents={})
    documents = [("d0", "", "", "", None), ("d1", "", "", "", None), ("d2", "", "", "", "")]
    draft.write_table("documents/part-00000.parquet", table(DOCUMENTS, documents))
    draft.write_table("queries.parquet", table(QUERIES, [("q", "x", "test")]))
    draft.write_table("qrels.parquet", table(QRELS, [("q", "d0", 1), ("q", "d2", 0)]))
    assert trainable(draft.commit(counts={})).documents.to_pylist() == ["d1", "d2"]


def test_job(cluster, dataset, tmp_path):
    artifact = run(CONFIG, dataset=dataset.uri, output=str(tmp_path / "a"))
    again = run(CONFIG, dataset=dataset.uri, output=str(tmp_path / "b"))
    assert artifact.digest == again.digest
    assert artifact.manifest.info["simulated_clicks"] is True
    assert artifact.manifest.info["ranking_model"] == "bm25"

    rows = artifact.table("triplets").to_pylist()
    clicked = {}
    for row in dataset.table("impressions.parquet").to_pylist():
        if row["clicked"]:
            clicked.setdefault(row["query_id"], set()).add(row["doc_id"])
    splits = {}
    for row in rows:
        assert row["query_id"] not in TEST_QUERIES
        seen = {row["positive"], *row["negatives"]}
        assert not seen & TEST_DOCUMENTS
        assert "unknown" not in seen
        assert len(row["negatives"]) == 1
        assert row["positive"] not in row["negatives"]
        assert not clicked[row["query_id"]] & set(row["negatives"])
        if row["source"] == "click":
            assert row["positive"] in clicked[row["query_id"]]
        splits.setdefault(row["query_id"], set()).add(row["split"])
    assert all(len(split) == 1 for split in splits.values())
    assert set.union(*splits.values()) == {"train", "validation"}

    counts = artifact.counts
    assert counts["triplets"] == len(rows) == counts["train"] + counts["validation"]
    assert counts["click"] == sum(row["source"] == "click" for row in rows) > 38
    assert counts["relevance"] == sum(row["source"] == "relevance" for row in rows) > 30
    assert counts["rows"] == 242
    assert 2 <= counts["ignored_rows"] < 50
    for name in artifact.names("triplets/"):
        keys = [(r["query_id"], r["source"], r["positive"]) for r in artifact.table(name).to_pylist()]
        assert keys == sorted(keys)


def test_given_scores_replace_bm25(cluster, tmp_path):
    dataset = make_dataset(tmp_path / "dataset", impressions=False, scores=True)
    config = CONFIG.model_copy(update={"sources": ("relevance",)})
    artifact = run(config, dataset=dataset.uri, output=str(tmp_path / "triplets"))
    assert artifact.manifest.info["ranking_model"] == "scores"
    assert artifact.manifest.info["simulated_clicks"] is False
    allowed = [f"d{i}" for i in range(60) if f"d{i}" not in TEST_DOCUMENTS]
    for row in artifact.table("triplets").to_pylist():
        i = int(row["query_id"][1:])
        ranking = [doc for doc in (f"d{(i * 5 + j) % 60}" for j in range(15)) if doc in allowed]
        assert row["positive"] == ranking[0]
        assert set(row["negatives"]) <= set(ranking[CONFIG.top_k : CONFIG.top_t])


def test_clicks_without_a_log_are_refused_before_work(tmp_path):
    dataset = make_dataset(tmp_path / "dataset", impressions=False)
    with pytest.raises(DataError, match=r"collect\.sources"):
        run(CONFIG, dataset=dataset.uri, output=str(tmp_path / "triplets"))


def test_assemble_counts_what_lacks_negatives():
    log = pa.table({"query_id": ["q", "q", "r"], "doc_id": ["a", "b", "c"], "clicked": [True, None, True]})
    queries = pa.table({"query_id": ["q", "r"], "query": ["x", "y"]})
    config = CollectConfig(sources=("click",), validation_fraction=0)
    rows, counts = assemble(exposures(log), queries, config=config)
    assert rows.to_pylist() == [
        {
            "query_id": "q",
            "query": "x",
            "positive": "a",
            "negatives": ["b"],
            "source": "click",
            "split": "train",
        }
    ]
    assert counts == {"triplets": 1, "click": 1, "train": 1, "without_negatives": 1}


def test_rankings_without_a_score_say_nothing():
    scores = pa.table({"query_id": ["q"] * 3, "doc_id": list("abc"), "score": [1.0, None, float("nan")]})
    scores = scores.set_column(2, "score", scores["score"].cast(pa.float32()))
    assert rankings(scores)["doc_id"].to_pylist() == ["a"]


def test_assemble_of_no_evidence_is_an_empty_part():
    rows, counts = assemble(exposures(table(IMPRESSIONS, [])), table(QUERIES, []), config=CollectConfig())
    assert rows.num_rows == 0
    assert counts == {}
