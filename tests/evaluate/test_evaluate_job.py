"""The evaluate stage on a tiny corpus, with a query tower with random weights and an inexact searcher."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from sklearn.metrics import roc_auc_score

import tiny
from in_process import without_ray
from scalingnote.core.config import validate
from scalingnote.core.errors import ArtifactError, ConfigError, DataError
from scalingnote.core.reports import markdown_text
from scalingnote.datasets.config import TableFile
from scalingnote.encode.encoder import Encoder
from scalingnote.evaluate import job, retrieval_methods, test_set
from scalingnote.evaluate.config import EvaluateConfig, Judgements
from scalingnote.evaluate.merge import comparison, merge_artifacts
from scalingnote.evaluate.report import lineage
from scalingnote.evaluate.test_set import QueryEmbeddings
from scalingnote.models import backbone, dual_encoder
from scalingnote.storage import arrow, trec
from scalingnote.storage.artifact import Draft
from trec_files import read_qrels, read_run

DIM = 16
CONFIG = EvaluateConfig(recall_at=(1, 10))


@dataclass(frozen=True)
class Hit:
    doc_id: str
    score: float


class ForgetfulSearcher:
    """Exact search of every `step`-th document from the shard's first, which never finds the best one."""

    def __init__(self, documents, doc_ids, *, shards, step):
        self.rows = range(*shards, len(doc_ids), step)
        self.documents, self.doc_ids = documents, doc_ids

    def search(self, queries, *, k):
        scores = queries @ self.documents.T
        order = np.argsort(-scores, axis=1, kind="stable")[:, 1 : k + 1]
        return [
            [Hit(self.doc_ids[i], float(row[i])) for i in best if i in self.rows]
            for row, best in zip(scores, order, strict=True)
        ]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Write artifacts of the earlier stages; embeddings of documents are near those of their queries."""
    root = tmp_path_factory.mktemp("world")
    dataset = tiny.dataset(str(root / "prepare/0"))
    texts = [" ".join(row.values()) for row in tiny.document_rows()]
    tokenizer = backbone.train_tokenizer(texts, vocabulary=400)

    artifacts = {"dataset": dataset}
    for seed, (stage, kind) in enumerate((("train", "dual_encoder"), ("distill", "student"))):
        draft = Draft(str(root / stage / "0"), kind=kind, config=tiny.Nothing(), parents={"dataset": dataset})
        tower = dual_encoder.build_tower(
            tiny.query_tower(), role="query", dim=DIM, tokenizer_json=tokenizer, seed=seed
        )
        tower.save(Path(draft.path("query")))
        artifacts[kind] = draft.commit(counts={})

    queries = dataset.table("queries.parquet")["query"].to_pylist()
    encoder = Encoder.load(artifacts["dual_encoder"].directory("query"))
    noise = np.random.default_rng(0).normal(size=(len(queries), DIM)).astype(np.float32)
    near = arrow.l2_normalize(
        arrow.l2_normalize(encoder.encode_queries(queries)) + 0.15 * arrow.l2_normalize(noise)
    )
    ids = dataset.table("documents")["doc_id"].to_pylist()
    parents = {"dataset": dataset, "dual_encoder": artifacts["dual_encoder"]}
    draft = Draft(str(root / "encode/0"), kind="embeddings", config=tiny.Nothing(), parents=parents)
    for number, start in enumerate(range(0, len(ids), 32)):
        part = {"doc_id": ids[start : start + 32], "summary": arrow.to_arrow(near[start : start + 32])}
        draft.write_table(f"embeddings/part-{number:05d}.parquet", pa.table(part))
    artifacts["embeddings"] = draft.commit(counts={"documents": len(ids)})
    parents = {"dataset": dataset, "embeddings": artifacts["embeddings"]}
    draft = Draft(str(root / "index/0"), kind="index", config=tiny.Nothing(), parents=parents)
    artifacts["index"] = draft.commit(counts={"bytes_per_vector": 20})
    return artifacts, ids, near, encoder


@pytest.fixture
def searcher(world, monkeypatch):
    _, ids, near, _ = world
    monkeypatch.setattr(
        retrieval_methods.Searcher,
        "open",
        classmethod(lambda *_, shards, **__: ForgetfulSearcher(near, ids, shards=shards, step=1)),
    )
    # A single shard is searched in this process, which has the replaced searcher.
    monkeypatch.setattr(retrieval_methods.shards, "open_layout", lambda _: SimpleNamespace(shards=1))


@pytest.fixture
def here(monkeypatch):
    without_ray(monkeypatch)


def uris(made, *kinds):
    return {kind: made[kind].uri for kind in kinds}


ALL = ("dataset", "dual_encoder", "embeddings", "index", "student")


def test_report(cluster, world, searcher, tmp_path):
    artifacts, ids, near, encoder = world
    artifact = job.run(CONFIG, **uris(artifacts, *ALL), output=str(tmp_path / "a"))
    report = artifact.read_json("report.json")
    about, results = (
        "dataset num_documents num_queries simulated_clicks",
        "methods index significance slices",
    )
    towers, cost = "contrastive_entropy distance queries_per_core_second", "seconds usage environment"
    assert set(report) == {*about.split(), *results.split(), *towers.split(), *cost.split()}
    assert (report["num_documents"], report["num_queries"]) == (96, 12)
    assert report["simulated_clicks"] is True
    assert set(report["methods"]) == {"scalingdual", "scalingnote", "scalingnote (index)", "bm25"}
    for row in report["methods"].values():
        assert set(row) == {"R@1", "R@10", "MRR@10", "MAP@100", "nDCG@10"}
    assert set(report["queries_per_core_second"]) == {"scalingdual", "scalingnote"}
    assert report["index"] == {
        "recall@10": pytest.approx(0.9),
        "recall@100": pytest.approx(95 / 96),
        "bytes_per_vector": 20,
    }
    assert set(report["seconds"]) == {"prepare", "train", "distill", "encode", "index"}
    assert set(report["usage"]) == set(report["seconds"])
    assert all(stats["requests"] > 0 for stats in report["usage"].values())

    # The run of the dual encoder is the ranking by a matrix product over the entire pool.
    test = test_set.load_test_set(artifacts["dataset"])
    scores = arrow.l2_normalize(encoder.encode_queries(test.queries)) @ near.T
    run = read_run(artifact.file("runs/scalingdual.trec"))
    for query_id, row in zip(test.query_ids, scores, strict=True):
        best = np.argsort(-row, kind="stable")[:100]
        assert [doc for doc, _ in run[query_id]] == [ids[i] for i in best]
        assert [s for _, s in run[query_id]] == pytest.approx(row[best].tolist(), abs=1e-6)
    right_queries = [q for q in test.query_ids if run[q][0][0] == "d" + q[1:]]
    assert report["methods"]["scalingdual"]["R@1"] == pytest.approx(len(right_queries) / 12)
    significance = report["significance"]
    assert significance["baseline"] == "scalingdual"
    assert set(significance["differences"]) == {"scalingnote", "scalingnote (index)", "bm25"}
    assert set(report["slices"]) == {"typos"}
    assert set(report["distance"]["splits"]) == {"test"}  # the lineage has no embeddings of a teacher
    assert report["distance"]["splits"]["test"]["queries"] == 12
    as_written, with_typos = report["slices"]["typos"]
    assert as_written["methods"] == report["methods"]
    assert with_typos["methods"]["bm25"]["nDCG@10"] < as_written["methods"]["bm25"]["nDCG@10"]
    table = artifact.table("per_query.parquet")
    assert table.num_rows == 4 * 12
    for name, row in report["methods"].items():
        method_rows = table.filter(pc.equal(table["method"], name))
        assert method_rows["query_id"].to_pylist() == test.query_ids
        assert pc.mean(method_rows["nDCG@10"]).as_py() == pytest.approx(row["nDCG@10"])
    entropy = report["contrastive_entropy"]
    assert (entropy["queries"], entropy["negatives"], entropy["temperature"]) == (12, 95, 0.05)
    assert set(entropy["methods"]) == {"scalingdual", "scalingnote"}
    logits = scores.astype(np.float64) / 0.05
    positives = [ids.index("d" + query_id[1:]) for query_id in test.query_ids]
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(12), positives]
    method_rows = table.filter(pc.equal(table["method"], "scalingdual"))["contrastive_entropy"]
    assert method_rows.to_pylist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert entropy["methods"]["scalingdual"] == pytest.approx(expected.mean(), abs=1e-4)
    assert table.filter(pc.equal(table["method"], "bm25"))["contrastive_entropy"].null_count == 12
    assert "## Contrastive entropy" in Path(artifact.file("report.md")).read_text()
    assert read_qrels(artifact.file("qrels.trec")) == test.qrels
    assert artifact.names("runs/") == [
        f"runs/{n}.trec" for n in ("bm25", "scalingdual", "scalingnote-index", "scalingnote")
    ]
    html = Path(artifact.file("report.html")).read_text()
    assert all(kind in html for kind in ALL)
    assert "<h2>Contrastive entropy</h2>" in html


def through_index(*_, test, **__):
    return {query_id: [("d001", 1.0)] for query_id in test.query_ids}


def record_tasks(log, *, kill_after=None):
    """Return a replacement of `job._keep` that logs each finished task and kills its process after some."""
    keep = job._keep

    def keep_and_log(item, *, task):
        uri = keep(item, task=task)
        with open(log, "a+") as stream:
            print(uri, file=stream, flush=True)
            stream.seek(0)
            tasks = len(stream.readlines())
        if tasks == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return uri

    return keep_and_log


KILLED = """
import json, sys
import pytest
from in_process import without_ray
from test_evaluate_job import CONFIG, job, record_tasks, retrieval_methods, through_index

without_ray(pytest.MonkeyPatch())
retrieval_methods._through_index = through_index
job._keep = record_tasks(sys.argv[2], kill_after=7)
job.run(CONFIG, **json.loads(sys.argv[1]))
"""


def test_a_run_after_a_kill_repeats_no_finished_task(world, monkeypatch, tmp_path):
    artifacts, *_ = world
    arguments = uris(artifacts, *ALL) | {"output": str(tmp_path / "report")}
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", KILLED, json.dumps(arguments), str(tmp_path / "log")]
    process = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    without_ray(monkeypatch)
    monkeypatch.setattr(retrieval_methods, "_through_index", through_index)
    with monkeypatch.context() as patch:
        patch.setattr(job, "_keep", record_tasks(tmp_path / "log"))
        resumed = job.run(CONFIG, **arguments)
    tasks = (tmp_path / "log").read_text().splitlines()
    assert len(tasks) == len(set(tasks)) > 7  # 7 until the kill
    # The result is that of a run without a kill.
    uninterrupted = job.run(CONFIG, **arguments | {"output": str(tmp_path / "whole")})
    assert resumed.table("per_query.parquet").equals(uninterrupted.table("per_query.parquet"))
    assert resumed.names() == uninterrupted.names()
    for name in resumed.names(suffix=".trec"):
        assert resumed.read_bytes(name) == uninterrupted.read_bytes(name)


def test_shards_are_searched_separately_and_merged_in_any_order(world, monkeypatch):
    artifacts, ids, near, encoder = world
    test = test_set.load_test_set(artifacts["dataset"])
    queries = arrow.l2_normalize(encoder.encode_queries(test.queries))

    def search(shards, each):
        searcher = partial(ForgetfulSearcher, near, ids, step=shards)
        opened = classmethod(lambda *_, shards, **__: searcher(shards=shards))
        monkeypatch.setattr(retrieval_methods.Searcher, "open", opened)
        layout = SimpleNamespace(shards=shards)
        monkeypatch.setattr(retrieval_methods.shards, "open_layout", lambda _: layout)
        return retrieval_methods._through_index(artifacts["index"], queries, test=test, k=9, each=each)

    expected = search(1, map)
    assert {len(hits) for hits in expected.values()} == {9}
    assert search(3, map) == expected
    assert search(3, lambda task, items: map(task, reversed(items))) == expected


def test_the_report_states_the_sample_of_exact_search(world, searcher, here, tmp_path, monkeypatch):
    artifacts, *_ = world
    monkeypatch.setattr(retrieval_methods, "MAX_EXACT_DOCUMENTS", 40)
    artifact = job.run(CONFIG, **uris(artifacts, *ALL), output=str(tmp_path / "report"))
    report = artifact.read_json("report.json")
    sample_size = report["sample"]["documents"]
    assert 40 < sample_size < 80  # including 12 judged documents
    assert report["num_documents"] == 96
    assert report["index"] == {"bytes_per_vector": 20}
    exact = {doc for hits in read_run(artifact.file("runs/scalingdual.trec")).values() for doc, _ in hits}
    lexical = {doc for hits in read_run(artifact.file("runs/bm25.trec")).values() for doc, _ in hits}
    through_index_run = read_run(artifact.file("runs/scalingnote-index.trec"))
    assert (
        len(exact | lexical)
        <= sample_size
        < len({doc for hits in through_index_run.values() for doc, _ in hits})
    )
    judged = {doc for grades in test_set.load_test_set(artifacts["dataset"]).qrels.values() for doc in grades}
    assert judged <= exact
    for name in ("report.md", "report.html"):
        assert f"a seeded sample of {sample_size} of 96 documents" in Path(artifact.file(name)).read_text()
    table = markdown_text(comparison(merge_artifacts([[artifact]]))[:2])
    rows = [re.split(r" *\| *", line) for line in table.splitlines()]
    column = {row[1]: row[2] for row in rows if len(row) > 3}
    expected = {"scalingdual": str(sample_size), "bm25": str(sample_size), "scalingnote (index)": "96"}
    assert expected.items() <= column.items()


def test_without_student_the_dual_encoder_is_served(world, searcher, here, tmp_path):
    artifacts, *_ = world
    update = {"bm25": False, "typos": 0.0, "tower_measures": False}
    config = CONFIG.model_copy(update=update)
    artifact = job.run(config, **uris(artifacts, *ALL[:4]), output=str(tmp_path / "report"))
    report = artifact.read_json("report.json")
    assert set(report["methods"]) == {"scalingdual", "scalingdual (index)"}
    assert report["slices"] == {}
    assert not {"auc", "reranking", "relaxed", "contrastive_entropy", "distance"} & set(report)


def test_files_of_the_user_are_measured(world, searcher, here, tmp_path):
    artifacts, ids, near, encoder = world
    test = test_set.load_test_set(artifacts["dataset"])
    judgements = [
        {"query_id": q, "text": None, "doc_id": d, "SAT": int(d[1:] == q[1:]), "REL": int(d[1:] <= q[1:])}
        for q in test.query_ids
        for d in ids[:20]
    ]
    judgements += [
        {"query_id": None, "text": "a new query", "doc_id": "nowhere", "SAT": 1, "REL": 0},
        {"SAT": 1},
    ]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judgements))
    candidates = {
        q: [(doc, 20.0 - i) for i, doc in enumerate([*ids[:20], "gone"])] for q in test.query_ids[:2]
    }
    trec.write_run(str(tmp_path / "given.trec"), candidates, tag="theirs")
    contents = {row["doc_id"]: row["content"] for row in artifacts["dataset"].table("documents").to_pylist()}
    answers = [{"query_id": q, "answers": [contents["d" + q[1:]].upper()]} for q in test.query_ids[:3]]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    config = CONFIG.model_copy(
        update={
            "judgements": Judgements(
                path=str(tmp_path / "judged.jsonl"), columns={"query": "text"}, labels=("SAT", "REL")
            ),
            "candidates": str(tmp_path / "given.trec"),
            "answers": TableFile(path=str(tmp_path / "answers.jsonl")),
        }
    )
    artifact = job.run(config, **uris(artifacts, *ALL[:4]), output=str(tmp_path / "report"))
    report = artifact.read_json("report.json")

    scores = arrow.l2_normalize(encoder.encode_queries(test.queries)) @ near.T
    auc = report["auc"]
    assert (auc["pairs"], auc["not_in_pool"], auc["unusable"]) == (240, 1, 1)
    for label in ("SAT", "REL"):
        expected = roc_auc_score([row[label] for row in judgements[:240]], scores[:, :20].ravel())
        assert auc["methods"]["scalingdual"][f"AUC-{label}"] == pytest.approx(expected)
    assert set(auc["methods"]) == {"scalingdual", "bm25"}

    reranking = report["reranking"]
    assert (reranking["queries"], reranking["candidates"], reranking["not_in_pool"]) == (2, 42, 2)
    assert set(reranking["methods"]) == {"as given", "scalingdual", "bm25"}
    run = read_run(artifact.file("reranked/scalingdual.trec"))
    for query_id, row in zip(test.query_ids[:2], scores, strict=False):
        best = np.argsort(-row[:20], kind="stable")
        assert [doc for doc, _ in run[query_id]] == [*(ids[i] for i in best), "gone"]

    relaxed = report["relaxed"]
    run_of_tower = read_run(artifact.file("runs/scalingdual.trec"))
    is_first = [run_of_tower[q][0][0] == "d" + q[1:] for q in test.query_ids[:3]]
    assert relaxed["queries"] == 3
    assert relaxed["methods"]["scalingdual"]["R@1"] == pytest.approx(np.mean(is_first))
    text = Path(artifact.file("report.md")).read_text()
    assert all(f"## {title}" in text for title in ("Judged pairs", "Re-ranking", "Answers found"))


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ({"student": "scalingdual"}, "has 'scalingdual' for both towers"),
        ({"student": "bm25"}, "has 'bm25', which is the name of another row"),
        ({"student": "s + bm25"}, r"has 's \+ bm25', which is the name of another row"),
        ({"dual_encoder": "teacher (index)"}, r"has 'teacher \(index\)'"),
    ],
)
def test_two_rows_with_the_same_name_are_refused(names: dict[str, str], match: str):
    with pytest.raises(ConfigError, match=match):
        validate(EvaluateConfig, {"names": names}, source="test")


def test_an_unknown_baseline_is_refused_before_the_search(world, tmp_path):
    artifacts, *_ = world
    config = CONFIG.model_copy(update={"baseline": "twinbert"})
    with pytest.raises(ConfigError, match="set one of scalingdual, scalingnote, "):
        job.run(config, **uris(artifacts, *ALL), output=str(tmp_path / "report"))


def test_a_tower_of_another_dimension_is_refused(world, monkeypatch, tmp_path):
    artifacts, *_ = world
    monkeypatch.setattr(
        job,
        "encode_queries",
        lambda _, queries, **__: {
            n: QueryEmbeddings(q, np.ones((len(q), 8), np.float32)) for n, q in queries.items()
        },
    )
    with pytest.raises(ArtifactError, match="gives 8 dimensions"):
        job.run(CONFIG, **uris(artifacts, *ALL), output=str(tmp_path / "report"))


def test_a_dataset_without_judged_test_queries_is_refused(tmp_path):
    queries = {"query_id": ["q"], "query": ["x"], "split": ["test"]}
    qrels = {"query_id": ["q"], "doc_id": ["d"], "relevance": [0]}
    tables = {"queries.parquet": queries, "qrels.parquet": qrels}
    with pytest.raises(DataError, match="none of 1 test queries"):
        test_set.load_test_set(tiny.artifact(tmp_path / "dataset", "dataset", tables))


def test_judgements_of_a_trec_file_replace_the_datasets(tmp_path):
    dataset = tiny.dataset(str(tmp_path / "dataset"))
    qrels = {"q008": {"d001": 2, "d002": 0}, "q001": {"d001": 1}, "q016": {"d001": 0}}
    trec.write_qrels(str(tmp_path / "qrels.trec"), qrels)
    test = test_set.load_test_set(dataset, judgements=str(tmp_path / "qrels.trec"))
    assert test.qrels == {"q008": qrels["q008"]}  # q001 is for training, q016 has no relevant document
    assert (len(test.queries), test.without_relevant) == (1, 11)
    trec.write_qrels(str(tmp_path / "qrels.trec"), {"7": {"d001": 1}})
    with pytest.raises(DataError, match=r"none of 12 .* in .*qrels\.trec: .* check their query"):
        test_set.load_test_set(dataset, judgements=str(tmp_path / "qrels.trec"))


def test_lineage_shows_deleted_artifacts(tmp_path):
    dataset = tiny.dataset(str(tmp_path / "prepare/0"), count=8)
    triplets = tiny.triplets(str(tmp_path / "collect@1/0"), dataset)
    for is_deleted in (False, True):
        stages = [(a.stage, a.artifact is None) for a in lineage([triplets])]
        assert stages == [("prepare", is_deleted), ("collect", False)]
        (tmp_path / "prepare/0/manifest.json").unlink(missing_ok=True)
