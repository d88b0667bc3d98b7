"""Pseudo-queries of a small dataset: distinct, without held-out queries, the same for any slices."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
from in_process import without_ray
from scalingnote.core.config import load, validate
from scalingnote.core.errors import ConfigError, DataError
from scalingnote.run import stages
from scalingnote.run.config import RunConfig
from scalingnote.storage.artifact import Artifact, Draft
from scalingnote.triplets.config import PseudoQueriesConfig, TextKind
from scalingnote.triplets.pseudo_queries import job, sampling

LONG = "One without an end" + 40 * " and on"
DOCUMENTS = [
    {"title": "Joining tensors", "content": "Joins tensors along a dimension. They need one shape."},
    {"title": "joining  TENSORS.", "content": "如何连接张量？它们需要相同的形状。"},
    {"title": "How do I split?", "content": "Asked by a test query above.\nMore."},
    {"title": "What is a stride?", "content": ""},
    {"title": "", "content": LONG},
    {"title": None, "content": None},
]
QUERIES = [
    ("t", "how do i  split", "test"),
    ("v", "What is a stride", "train"),
    ("q", "Concatenate", "train"),
]
ONE_EACH = PseudoQueriesConfig(count=None, mix={"title": 1, "first_sentence": 1}, validation_share=0)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    without_ray(monkeypatch)


@pytest.fixture
def dataset(tmp_path: Path) -> Artifact:
    return make(tmp_path / "dataset", DOCUMENTS)


def own_words(count: int) -> list[dict[str, Any]]:
    """Make documents in which all words end with the number of the document."""
    return [{"title": f"t{n}", "content": f"alpha{n} beta{n} gamma{n} delta{n}"} for n in range(count)]


def make(path: Path, documents: list[dict[str, Any]]) -> Artifact:
    draft = Draft(str(path), kind="dataset", config=tiny.Nothing(), parents={})
    layout = pa.schema({"doc_id": pa.string(), "title": pa.string(), "content": pa.string()})
    for number, row in enumerate(documents):
        table = pa.Table.from_pylist([{"doc_id": f"d{number}"} | row], schema=layout)
        draft.write_table(f"documents/part-{number:05d}.parquet", table)
    columns = zip(*QUERIES, strict=True)
    draft.write_table(
        "queries.parquet", pa.table([*map(list, columns)], names=["query_id", "query", "split"])
    )
    return draft.commit(counts={"documents": len(documents), "queries": len(QUERIES)})


@pytest.fixture
def triplets(tmp_path: Path) -> Artifact:
    draft = Draft(str(tmp_path / "triplets"), kind="triplets", config=tiny.Nothing(), parents={})
    rows = [{"query_id": "q", "query": "Concatenate", "split": "train"}]
    rows += [{"query_id": "v", "query": "What is a stride", "split": "validation"}]
    draft.write_table("triplets/part-00000.parquet", pa.Table.from_pylist(rows))
    return draft.commit(counts={"triplets": 2})


def texts(artifact: Artifact) -> dict[str, str]:
    table = artifact.table("queries")
    assert len(set(table["query_id"].to_pylist())) == len(table) == artifact.counts["queries"]
    return dict(zip(table["query"].to_pylist(), table["split"].to_pylist(), strict=True))


@pytest.mark.parametrize(("rows_per_slice", "rows_per_bucket"), [(100, 100), (1, 3)])
def test_texts_are_distinct_and_no_held_out_query_is_among_them(
    rows_per_slice: int,
    rows_per_bucket: int,
    dataset: Artifact,
    triplets: Artifact,
    tmp_path: Path,
    monkeypatch,
):
    monkeypatch.setattr("scalingnote.storage.shuffle.ROWS_PER_SLICE", rows_per_slice)
    monkeypatch.setattr(job, "MAX_BUCKET_TEXTS", rows_per_bucket)
    artifact = job.run(ONE_EACH, dataset=dataset.uri, triplets=triplets.uri, output=str(tmp_path / "out"))
    assert texts(artifact) == dict.fromkeys(
        (
            "Joining tensors",
            "Joins tensors along a dimension.",
            "如何连接张量？",
            "Asked by a test query above.",
            "One without an end" + 14 * " and on",  # 32 words
        ),
        "train",
    )
    assert artifact.counts["held_out"] == 2


def test_equal_seeds_draw_equal_texts_by_shares_of_kinds(dataset: Artifact, tmp_path: Path):
    config = PseudoQueriesConfig(count=200, mix={"window": 3, "question": 1})
    first, repeated, other = (
        job.run(config.model_copy(update={"seed": seed}), dataset=dataset.uri, output=str(tmp_path / name))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert texts(first) == texts(repeated) != texts(other)
    assert 60 < first.counts["drawn"] <= 200  # equal texts in a slice count once
    questions = [text for text in texts(first) if text.split()[0] in ("what", "how", "can", "is", "does")]
    assert 0 < len(questions) < len(texts(first)) / 2
    assert all(len(text.split()) <= 24 for text in texts(first))


def test_all_texts_of_a_document_are_in_one_split(tmp_path: Path):
    config = PseudoQueriesConfig(count=400, mix={"window": 1}, validation_share=0.2)
    dataset = make(tmp_path / "data", own_words(40))
    artifact = job.run(config, dataset=dataset.uri, output=str(tmp_path / "out"))
    by_document: dict[str, set[str]] = {}
    for text, split in texts(artifact).items():
        by_document.setdefault(text.split()[0].lstrip("abcdeghlmpt"), set()).add(split)
    assert all(len(splits) == 1 for splits in by_document.values())
    assert 0 < artifact.counts["validation"] < artifact.counts["queries"] / 2


def test_questions_of_a_chinese_document_are_chinese():
    title = "喀山红宝石足球俱乐部"
    content = "球队在随后的赛季中未能再有出彩表现。历史上曾两次夺得联赛冠军，主场位于喀山。"

    def draw_texts(kind: TextKind, title: str = title, content: str = content) -> list[str]:
        config = PseudoQueriesConfig(mix={kind: 1})
        return [*sampling.draw(0, title, content, config, per_document=100.0)]

    templates = [re.escape(line).replace(r"\{\}", ".+") for line in sampling.CHINESE_TEMPLATES]
    question = re.compile(f"({'|'.join(templates)})？?")
    assert all(map(question.fullmatch, draw_texts("question")))
    words = [word for text in draw_texts("keywords") for word in text.split()]
    assert all(len(word) == 2 and word in title + content for word in words)
    lengths = [len(text) for text in draw_texts("window")]
    assert 16 < max(lengths) <= 2 * 16
    questions = draw_texts("question", "Z 142", "兹林Z 142是一款飞机。")
    english = "|".join(re.escape(line).replace(r"\{\}", ".+") for line in sampling.ENGLISH_TEMPLATES)
    assert any(re.fullmatch(rf"({english})\??", text, re.IGNORECASE) for text in questions)  # of the title
    assert not any(
        re.fullmatch(rf"({english})\??", text, re.IGNORECASE) and "飞" in text for text in questions
    )


def test_real_queries_are_added_and_replace_equal_texts(dataset: Artifact, tmp_path: Path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"\xef\xbb\xbfJOINING tensors\nhow do i split?\n\xff\xfe broken\n\nnew one\n")
    config = ONE_EACH.model_copy(update={"train_queries": None, "query_log": str(log)})
    artifact = job.run(config, dataset=dataset.uri, output=str(tmp_path / "out"))
    assert {"JOINING tensors", "new one", "Concatenate", "What is a stride"} <= texts(artifact).keys()
    assert "Joining tensors" not in texts(artifact)
    assert "how do i split?" not in texts(artifact)
    assert (artifact.counts["real"], artifact.counts["unreadable"]) == (5, 2)
    few = ONE_EACH.model_copy(update={"train_queries": 1})
    assert job.run(few, dataset=dataset.uri, output=str(tmp_path / "few")).counts["real"] == 1


def test_logs_in_several_formats_and_a_missing_log(dataset: Artifact, tmp_path: Path):
    pq.write_table(pa.table({"query": ["from parquet", None]}), tmp_path / "log.parquet")
    (tmp_path / "queries.jsonl").write_text('{"_id": "q1", "text": "from BEIR \\ud83d"}\n')
    (tmp_path / "other.jsonl").write_text('{"q": "of an unknown name"}\n')

    def of_log(name: str) -> dict[str, str]:
        config = ONE_EACH.model_copy(update={"query_log": str(tmp_path / name)})
        return texts(job.run(config, dataset=dataset.uri, output=str(tmp_path / f"of-{name}")))

    assert "from parquet" in of_log("log.parquet")
    assert "from BEIR \ufffd" in of_log("queries.jsonl")
    with pytest.raises(ConfigError, match=r"no column .query. or .text., only \['q'\]"):
        of_log("other.jsonl")
    with pytest.raises(ConfigError, match=r"query_log: no file at .*nowhere\.txt"):
        of_log("nowhere.txt")


def test_documents_without_text_are_an_error(tmp_path: Path):
    empty = make(tmp_path / "data", [{"title": "", "content": " \n "}])
    with pytest.raises(DataError, match="none of 1 documents has a title or content"):
        job.run(ONE_EACH, dataset=empty.uri, output=str(tmp_path / "out"))


def test_a_published_model_with_pseudo_queries_has_no_triplets():
    config = Path(__file__).parents[2] / "configs/quickstart/python_docs.yaml"
    adopted = ["adopt.path=model", "pseudo_queries={}"]
    run = load(RunConfig, [config], adopted)
    names = [stage.name for stage in stages.of(run)]
    assert names[:6] == ["prepare", "adopt", "pseudo_queries", "teacher", "distill", "encode"]
    of = {stage.name: stage for stage in stages.of(run)}
    assert of["teacher"].reads == ("dual_encoder", "pseudo_queries")
    both = {stage.name: stage for stage in stages.of(load(RunConfig, [config], adopted[1:]))}
    assert both["teacher"].reads == ("dual_encoder", "triplets", "pseudo_queries")
    assert both["pseudo_queries"].reads == ("dataset", "triplets")
    with pytest.raises(ConfigError, match="leave pseudo_queries out"):
        validate(
            RunConfig,
            {"dataset": {"name": "python_docs"}, "cross_encoder": {}, "pseudo_queries": {}},
            source="test",
        )


def test_a_small_collection_holds_out_a_document(tmp_path: Path):
    """With 2 % of six documents there would be none, and a student could not be compared with its teacher."""
    config = PseudoQueriesConfig(count=60, mix={"window": 1})
    for number, held_out in ((6, True), (1, False)):
        dataset = make(tmp_path / f"{number}", own_words(number))
        artifact = job.run(config, dataset=dataset.uri, output=str(tmp_path / f"out-{number}"))
        assert (artifact.counts["validation"] > 0) is held_out
        assert artifact.counts["queries"] > artifact.counts["validation"]
