"""The collect stage on a small shop: 40 queries, 60 documents in groups of three, a click log."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from in_process import KilledSteps, run_without_ray, without_ray
from row_files import table_of
from scalingnote.core import topk
from scalingnote.core.bm25 import BM25, document_texts
from scalingnote.core.config import Config, Resources
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.datasets.splits import find_held_out
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Draft
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES, SCORES
from scalingnote.triplets.collect import job, triplet_parts
from scalingnote.triplets.collect.job import run
from scalingnote.triplets.collect.triplets import (
    click_evidence,
    hash_fraction,
    one_hop_triplets,
    ranking_evidence,
)
from scalingnote.triplets.config import (
    AssociationConfig,
    BM25Ranker,
    CollectConfig,
    CrossEncoderConfig,
    ScoreTable,
    Statistics,
)
from scalingnote.triplets.planner import job as planner_job

WORDS = ["lamp", "sofa", "desk", "chair", "shelf", "rug", "bed", "mirror", "stool", "vase", "plant", "clock"]
WORDS += ["frame", "bench", "crate"]
TEST_QUERIES = {"q3", "q17"}
# One worker, because a second one would take longer to start than the work takes.
ONE_HOP = CollectConfig(
    top_k=2,
    top_t=12,
    parts=4,
    validation_fraction=0.3,
    association=None,
    decontamination=False,
    resources=Resources(workers=1),
)
# In a shop with few words all are frequent: importances are near 0, and caps must choose among equal ones.
CONFIG = ONE_HOP.model_copy(
    update={"association": AssociationConfig(click_threshold=0, relevance_threshold=0, max_associates=1)}
)
PLANNER = Statistics(fields=("title",))


def make_dataset(uri, *, impressions=True, scores=False):
    draft = Draft(str(uri), kind="dataset", config=Config(), parents={})
    # Every fifteenth text is the same: these queries are associated by clicks and by relevance.
    text = [f"{WORDS[i % 15]} {WORDS[i * 7 % 15 - 1]} shop item" for i in range(60)]
    documents = [(f"d{i}", text[i], "home", f"model {i}", f"g{i // 3}") for i in range(60)]
    draft.write_table("documents/part-00000.parquet", table_of(DOCUMENTS, documents[:30]))
    draft.write_table("documents/part-00001.parquet", table_of(DOCUMENTS, documents[30:]))
    split = {f"q{i}": "test" if f"q{i}" in TEST_QUERIES else "train" for i in range(40)}
    draft.write_table(
        "queries.parquet", table_of(QUERIES, [(q, text[int(q[1:])], s) for q, s in split.items()])
    )
    draft.write_table("qrels.parquet", table_of(QRELS, [(f"q{i}", f"d{i}", 1) for i in range(40)]))
    if impressions:
        log = [
            ("s", None, f"q{i}", f"d{(i + 7 * rank) % 60}", rank + 1, not rank or not (i + rank) % 9, 0, None)
            for i in range(40)
            for rank in range(6)
        ]
        log += [("s", None, "stranger", "d1", 1, True, 0, None)]
        draft.write_table("impressions.parquet", table_of(IMPRESSIONS, log))
    if scores:
        score_rows = [(f"q{i}", f"d{(i * 5 + j) % 60}", float(-j)) for i in range(40) for j in range(15)]
        draft.write_table("scores.parquet", table_of(SCORES, score_rows))
    return draft.commit(counts={}, simulated_clicks=impressions)


TEST_DOCUMENTS = {f"d{i}" for i in (3, 4, 5, 15, 16, 17)}  # the groups of d3 and d17


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("shop") / "dataset")


@pytest.fixture(scope="module")
def planner(dataset, tmp_path_factory):
    output = str(tmp_path_factory.mktemp("planner") / "p")
    return run_without_ray(planner_job.run, PLANNER, dataset=dataset.uri, output=output)


@pytest.fixture(scope="module")
def one_hop(dataset, planner, tmp_path_factory):
    output = str(tmp_path_factory.mktemp("one-hop") / "a")
    return run_without_ray(run, ONE_HOP, dataset=dataset.uri, planner=planner.uri, output=output)


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("scored") / "dataset", scores=True)


@pytest.fixture(scope="module")
def multi_hop(scored, planner, tmp_path_factory):
    output = str(tmp_path_factory.mktemp("multi-hop") / "a")
    return run_without_ray(run, CONFIG, dataset=scored.uri, planner=planner.uri, output=output)


def test_documents_of_test_queries_are_held_out(tmp_path, dataset):
    assert set(find_held_out(dataset)["doc_id"].to_pylist()) == TEST_DOCUMENTS
    rows = [
        ("d0", "Straße  one", "", "Holds\na text", None),
        ("d1", "strasse one", "topic", "holds a TEXT", None),  # the same text under another id
        ("d2", "Straße one", "", "holds another text", None),
        ("d3", "", "", "", None),
        ("d4", "", "", "judged", None),
        ("d5", "", "", "judged", None),  # a document that answers no test query
        ("d6", "", "", "Straße one holds a text", "g"),  # equal when the fields are joined
        ("d7", "", "", "other", "g"),  # in the group of a document that is held out only by its text
        ("d8", "", "", "", ""),  # an empty group is not a group
    ]

    def held_out(name: str, **info: bool) -> pa.Table:
        draft = Draft(str(tmp_path / name), kind="dataset", config=Config(), parents={})
        for part in range(2):
            draft.write_table(f"documents/part-{part:05d}.parquet", table_of(DOCUMENTS, rows[part::2]))
        draft.write_table("queries.parquet", table_of(QUERIES, [("q", "x", "test"), ("r", "y", "train")]))
        judgements = [("q", "d0", 1), ("q", "d3", 1), ("q", "d4", 0), ("r", "d5", 1)]
        draft.write_table("qrels.parquet", table_of(QRELS, judgements))
        return find_held_out(draft.commit(counts={}, **info))

    excluded = held_out("by-group")
    assert sorted(excluded["doc_id"].to_pylist()) == ["d0", "d1", "d3", "d6"]
    assert sum(excluded["by_text"].to_pylist()) == 2
    assert len(held_out("by-time", hold_out_documents=False)) == 0


def test_one_hop_triplets_follow_clicks_and_ranks(dataset, one_hop):
    artifact = one_hop
    assert artifact.manifest.info["simulated_clicks"] is True
    assert artifact.manifest.info["ranking_model"] == "bm25"
    rows = artifact.table("triplets").to_pylist()
    clicked = clicks(dataset)
    answers = {}
    for row in artifact.table("answers").to_pylist():
        answers.setdefault(row["query_id"], set()).add(row["positive"])
    splits = {}
    for row in rows:
        check(row, clicked)
        assert (clicked[row["query_id"]] - TEST_DOCUMENTS) | {row["positive"]} <= answers[row["query_id"]]
        assert not answers[row["query_id"]] & set(row["negatives"])
        assert (row["hop"], row["via"]) == ("one", None)
        if row["source"] == "click":
            assert row["positive"] in clicked[row["query_id"]]
        splits.setdefault(row["query_id"], set()).add(row["split"])
    assert all(len(split) == 1 for split in splits.values())
    assert set.union(*splits.values()) == {"train", "validation"}

    counts = artifact.counts
    assert counts["triplets"] == len(rows) == counts["train"] + counts["validation"]
    assert counts["click_one"] == sum(row["source"] == "click" for row in rows) > 38
    assert counts["relevance_one"] == sum(row["source"] == "relevance" for row in rows) > 30
    assert counts["pairs"] == len({(row["query_id"], row["positive"]) for row in rows})
    assert counts["documents"] == len({doc for row in rows for doc in (row["positive"], *row["negatives"])})
    assert 2 <= counts["ignored_rows"] + counts["held_out_rows"] < 60
    assert (counts["held_out_documents"], counts["held_out_by_text"]) == (len(TEST_DOCUMENTS), 0)
    for name in artifact.names("triplets/"):
        keys = [(r["query_id"], r["source"], r["positive"]) for r in artifact.table(name).to_pylist()]
        assert keys == sorted(keys)


def clicks(dataset):
    clicked = {}
    for row in dataset.table("impressions").to_pylist():
        if row["clicked"]:
            clicked.setdefault(row["query_id"], set()).add(row["doc_id"])
    return clicked


def check(row, clicked):
    """Check the properties of every triplet, from the evidence of any query."""
    assert row["query_id"] not in TEST_QUERIES
    documents = {row["positive"], *row["negatives"]}
    assert not documents & TEST_DOCUMENTS
    assert len(row["negatives"]) <= 1
    assert row["positive"] not in row["negatives"]
    assert not clicked[row["query_id"]] & set(row["negatives"])
    assert row["weight"] == 1.0


def test_multi_hop_triplets_are_those_of_associates(scored, multi_hop):
    dataset, artifact = scored, multi_hop
    rows = artifact.table("triplets").to_pylist()
    clicked = clicks(dataset)
    one_hop = {(r["query_id"], r["source"], r["positive"]): r["negatives"] for r in rows if r["hop"] == "one"}
    multi_hop_rows = [row for row in rows if row["hop"] == "multi"]
    assert {row["source"] for row in multi_hop_rows} == {"click", "relevance"}
    for row in multi_hop_rows:
        check(row, clicked)
        assert one_hop[row["via"], row["source"], row["positive"]] == row["negatives"]
        assert row["positive"] not in clicked[row["query_id"]]
        # Both queries of an association are in one split.
        split = "validation" if hash_fraction(row["via"], seed=CONFIG.seed) < 0.3 else "train"
        assert row["split"] == split
    assert artifact.counts["multi_across_split"] > 0
    assert len(multi_hop_rows) == artifact.counts["click_multi"] + artifact.counts["relevance_multi"]
    page = fs.read_bytes(artifact.file("statistics.md")).decode()
    assert "**Clicks are simulated.**" in page
    assert "multi across split" in page


def test_scores_of_the_dataset_replace_bm25(planner, tmp_path, monkeypatch):
    without_ray(monkeypatch)
    dataset = make_dataset(tmp_path / "dataset", impressions=False, scores=True)
    config = ONE_HOP.model_copy(update={"sources": ("relevance",)})
    artifact = run(config, dataset=dataset.uri, planner=planner.uri, output=str(tmp_path / "triplets"))
    assert artifact.manifest.info["ranking_model"] == "scores"
    assert artifact.manifest.info["simulated_clicks"] is False
    allowed = [f"d{i}" for i in range(60) if f"d{i}" not in TEST_DOCUMENTS]
    for row in artifact.table("triplets").to_pylist():
        i = int(row["query_id"][1:])
        ranking = [doc for doc in (f"d{(i * 5 + j) % 60}" for j in range(15)) if doc in allowed]
        assert row["positive"] == ranking[0]
        expected = [-float(next(j for j in range(15) if d == f"d{(i * 5 + j) % 60}")) for d in docs_of(row)]
        assert row["scores"] == expected
        assert set(row["negatives"]) <= set(ranking[CONFIG.top_k : CONFIG.top_t])


def docs_of(row):
    return [row["positive"], *row["negatives"]]


def check_cut(other, multi_hop):
    """Check that an artifact with more parts has the same triplets, also if a cap chooses among equals."""
    assert other.counts["relevance_pairs_left_out"] > 0
    assert other.names("triplets/") != multi_hop.names("triplets/")
    one, two = map(sorted_rows, (multi_hop, other))
    assert pa.compute.sum(pa.compute.equal(one["hop"], "multi")).as_py() > 10
    assert one.equals(two)


def test_triplets_do_not_depend_on_the_number_of_parts(scored, planner, multi_hop, tmp_path):
    config = CONFIG.model_copy(update={"parts": 7})
    output = str(tmp_path / "other")
    check_cut(run_without_ray(run, config, dataset=scored.uri, planner=planner.uri, output=output), multi_hop)


@pytest.mark.slow
def test_triplets_do_not_depend_on_the_number_of_workers(cluster, scored, planner, multi_hop, tmp_path):
    config = CONFIG.model_copy(update={"parts": 7, "resources": Resources(workers=2)})
    output = str(tmp_path / "other")
    check_cut(run(config, dataset=scored.uri, planner=planner.uri, output=output), multi_hop)


def test_few_rows_make_one_part_and_a_large_log_more(dataset, monkeypatch):
    config, ranker = ONE_HOP.model_copy(update={"parts": None}), BM25Ranker()
    rows = 40 + 241 + 40 * 12
    cases = ((1 << 17, 1 << 22, 1), (300, 1 << 22, 3), (10, 1 << 22, 8), (10, 50, -(-rows // 50)))
    for small, large, parts in cases:
        monkeypatch.setattr(job, "SMALL_BUCKET_ROWS", small)
        monkeypatch.setattr(job, "MAX_BUCKET_ROWS", large)
        assert job._parts(config, dataset, ranker) == parts, (small, large, rows)
    assert job._parts(ONE_HOP, dataset, ranker) == -(-rows // 50)  # more than its 4 parts


def sorted_rows(triplets):
    order = [(name, "ascending") for name in ("query_id", "source", "hop", "positive")]
    return triplets.table("triplets").sort_by(order)


@pytest.mark.slow
def test_a_missing_cross_encoder_is_a_config_error(cluster, dataset, planner, tmp_path):
    wrong = ONE_HOP.model_copy(update={"ranker": CrossEncoderConfig(path=str(tmp_path / "nothing"))})
    with pytest.raises(ConfigError, match="nothing"):
        run(wrong, dataset=dataset.uri, planner=planner.uri, output=str(tmp_path / "wrong"))


SHARDS = {
    "scalingnote.storage.shuffle.ROWS_PER_SLICE": 30,  # a shard of each part
    "scalingnote.triplets.collect.ranking.SHARDS_PER_SEARCH": 1,
    "scalingnote.triplets.collect.ranking.GROUP_QUERIES": 6,
    "scalingnote.triplets.collect.ranking.SCORED_QUERIES": 3,
    "scalingnote.encode.lexical.words.TEXTS_PER_BUCKET": 25,
}


def test_after_kills_in_every_step_no_finished_item_is_repeated(dataset, planner, tmp_path, monkeypatch):
    config = CONFIG.model_copy(update={"decontamination": True})
    monkeypatch.setattr(triplet_parts, "MAX_MULTI_HOP", 1)
    without_ray(monkeypatch)
    uninterrupted = run(config, dataset=dataset.uri, planner=planner.uri, output=str(tmp_path / "whole"))
    for name, value in SHARDS.items():
        monkeypatch.setattr(name, value)
    steps = KilledSteps(monkeypatch, "scalingnote.triplets.collect.job", "scalingnote.encode.lexical.words")
    output = str(tmp_path / "b")
    resumed = steps.finish(lambda: run(config, dataset=dataset.uri, planner=planner.uri, output=output))
    assert resumed.digest == uninterrupted.digest
    assert {"count", "shards", "search", "rank", "one-hop", "mutual", "finish", "words"} <= steps.killed
    assert {"shards 0", "shards 1", "search 7"} <= set(steps.done)
    assert set(steps.done.values()) == {1}


def test_a_cross_encoder_scores_the_candidates_of_bm25(dataset, planner, tmp_path, monkeypatch):
    class Scorer:
        """A score that depends only on the texts of the pair."""

        def __init__(self, config):
            self._seed = config.batch_size

        def score(self, queries, documents):
            pairs = zip(queries, documents, strict=True)
            return np.array([hash_fraction("|".join(pair), seed=self._seed) for pair in pairs], np.float32)

    without_ray(monkeypatch)
    monkeypatch.setattr("scalingnote.triplets.collect.transformer_models.PairScorer", Scorer)
    ranker = CrossEncoderConfig(path="any", candidates=14)
    config = ONE_HOP.model_copy(update={"ranker": ranker, "sources": ("relevance",)})
    artifact = run(config, dataset=dataset.uri, planner=planner.uri, output=str(tmp_path / "whole"))
    table = dataset.table("documents")
    table = table.filter(pa.array([name not in TEST_DOCUMENTS for name in table["doc_id"].to_pylist()]))
    names, texts = table["doc_id"].to_pylist(), document_texts(table)
    bm25, rows = BM25.build(texts), artifact.table("triplets").to_pylist()
    assert len(rows) > 30
    for row in rows:
        (candidates,) = topk.select(bm25.scores(row["query"])[None], k=14)
        pair_queries = [row["query"]] * 14
        scores = Scorer(ranker).score(pair_queries, [texts[i] for i in candidates])
        score_of = {names[i]: score for i, score in zip(candidates, scores, strict=True)}
        assert row["positive"] == max(sorted(score_of), key=score_of.get)
        assert row["scores"] == [pytest.approx(score_of[name]) for name in docs_of(row)]
    for name, value in SHARDS.items():
        monkeypatch.setattr(name, value)
    sharded = run(config, dataset=dataset.uri, planner=planner.uri, output=str(tmp_path / "cut"))
    assert sharded.digest == artifact.digest


def test_missing_evidence_is_an_error_before_any_work(planner, tmp_path):
    dataset = make_dataset(tmp_path / "dataset", impressions=False)
    for update, message in (
        ({}, r"collect\.sources"),
        ({"sources": ("relevance",), "ranker": ScoreTable()}, r"collect\.ranker"),
    ):
        config = CONFIG.model_copy(update=update)
        with pytest.raises(DataError, match=message):
            run(config, dataset=dataset.uri, planner=planner.uri, output=str(tmp_path / "triplets"))


def test_missing_negatives_and_unknown_queries_are_counted():
    log = table_of(
        IMPRESSIONS,
        [
            ("s", None, query, doc, 1, clicked, 0, dwell)
            for query, doc, clicked, dwell in (
                ("q", "a", True, 9.0), ("q", "b", None, None), ("r", "c", True, None), ("x", "a", True, None),
                ("q", "d", True, 2.0),
            )
        ],
    )  # fmt: skip
    config = CollectConfig(sources=("click",), validation_fraction=0)
    triplets, known, counts = one_hop_triplets(
        click_evidence(log, min_dwell_s=5.0), pa.array(["q", "r"]), config=config
    )
    assert triplets.to_pylist() == [
        {"row": 0, "positive": "a", "negatives": ["b"], "source": "click", "scores": None},
        {"row": 1, "positive": "c", "negatives": [], "source": "click", "scores": None},
    ]
    assert [tuple(row.values()) for row in known.to_pylist()] == [
        (0, "a", True), (0, "d", True), (0, "b", False), (1, "c", True),
    ]  # fmt: skip
    assert counts == {"ignored_rows": 1, "short_of_negatives": 1}
    nothing = click_evidence(log.slice(0, 0), min_dwell_s=0.0)
    triplets, known, counts = one_hop_triplets(nothing, pa.array([], pa.string()), config=config)
    assert (len(triplets), len(known), counts) == (0, 0, {"ignored_rows": 0})


def test_rankings_without_a_score_are_left_out():
    scores = pa.table({"query_id": ["q"] * 3, "doc_id": list("abc"), "score": [1.0, None, float("nan")]})
    scores = scores.set_column(2, "score", scores["score"].cast(pa.float32()))
    assert ranking_evidence(scores)["doc_id"].to_pylist() == ["a"]
