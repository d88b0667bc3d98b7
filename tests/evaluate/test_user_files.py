"""Files of the user are checked before any search, and each error states what to do."""

import json

import numpy as np
import pytest

import tiny
from scalingnote.core.errors import DataError
from scalingnote.datasets.config import TableFile
from scalingnote.evaluate import test_set, user_files
from scalingnote.evaluate.config import Judgements
from scalingnote.storage import trec

TEST = test_set.TestSet(["q1", "q2"], ["one", "two"], {"q1": {"a": 1}, "q2": {"b": 2, "c": 0}}, 0)


def lines(path, rows) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_judgements_name_queries_by_text_or_id(tmp_path):
    rows = [
        {"query": "new", "doc_id": "a", "SAT": 1},
        {"query_id": "q1", "doc_id": 7, "SAT": 0},
        {"query_id": "q9", "doc_id": "a", "SAT": 0},
        {"query": "new", "doc_id": "b", "SAT": "good"},
        {"query": "new", "SAT": 1},
        {"query_id": "q1", "doc_id": 0, "SAT": 1},
        {"query": 2024, "doc_id": "a", "SAT": 0},
        {"query": ["new"], "doc_id": "a", "SAT": 0},
    ]
    path = lines(tmp_path / "judged.jsonl", rows)
    queries = {"query_id": ["q0", "q1"], "query": ["none", "one"]}
    dataset = tiny.artifact(tmp_path / "dataset", "dataset", {"queries.parquet": queries})
    labelled = user_files.read_judgements(Judgements(path=path, labels=("SAT",)), dataset)
    assert (labelled.queries, labelled.unusable) == (["new", "one", "2024"], 4)
    pairs = labelled.pairs.select(["query", "doc_id"]).to_pydict()
    assert pairs == {"query": ["new", "one", "one", "2024"], "doc_id": ["a", "7", "0", "a"]}
    assert labelled.values("SAT").tolist() == [1, 0, 1, 0]
    for invalid, labels, match in (
        (rows[:1], ("SAT",), r"SAT is 1 in all rows"),
        (rows, ("REL",), r"none of 8 rows .* REL: map its columns"),
    ):
        config = Judgements(path=lines(tmp_path / "bad.jsonl", invalid), labels=labels)
        with pytest.raises(DataError, match=match):
            user_files.read_judgements(config, dataset)


def test_judgements_of_the_test_set_need_two_grades():
    labelled = user_files.test_set_pairs(TEST)
    assert labelled.pairs.select(["query", "doc_id"]).to_pydict() == {
        "query": ["one", "two", "two"],
        "doc_id": ["a", "b", "c"],
    }
    assert labelled.values("relevance").tolist() == [1, 2, 0]
    assert user_files.test_set_pairs(test_set.TestSet(["q1"], ["one"], {"q1": {"a": 1, "b": 1}}, 0)) is None


def test_candidates_and_answers_of_other_queries_are_refused(tmp_path):
    trec.write_run(str(tmp_path / "run"), {"q2": [("a", 2.0)], "q7": [("b", 1.0)]}, tag="x")
    run, part = user_files.read_candidates(str(tmp_path / "run"), test=TEST)
    assert (run, part.queries, part.qrels) == ({"q2": [("a", 2.0)]}, ["two"], {"q2": TEST.qrels["q2"]})
    trec.write_run(str(tmp_path / "run"), {"q7": [("b", 1.0)]}, tag="x")
    with pytest.raises(DataError, match="for none of 2 test queries"):
        user_files.read_candidates(str(tmp_path / "run"), test=TEST)
    rows = [{"query_id": "q1", "answers": answers} for answers in ("x", ["y", " ", 1912], None, 7)]
    file = TableFile(path=lines(tmp_path / "answers.jsonl", rows))
    assert user_files.read_answers(file, test=TEST) == {"q1": ["x", "y", "1912", "7"]}
    file = TableFile(path=lines(tmp_path / "none.jsonl", [{"query_id": "q7", "answers": ["x"]}]))
    with pytest.raises(DataError, match="no answer to any of 2 test queries"):
        user_files.read_answers(file, test=TEST)


def test_an_answer_is_found_as_words_regardless_of_case():
    documents = [
        ("a", "The City of New  York, again"),
        ("b", "Newyork"),
        ("c", "他住在纽约市"),
        ("d", "York New"),
        ("e", "उसने दान दिया"),
        ("f", "उस दिन"),
        ("g", "ฉันอยู่ที่กรุงเทพมหานคร"),
    ]
    queries_of = dict.fromkeys("abcdefg", ("q", "empty"))
    qrels = user_files.answer_judgements(
        documents, queries_of=queries_of, answers={"q": ["new york", "纽约", "दान", "กรุงเทพ"], "empty": ["?"]}
    )
    assert qrels == {"q": {"a": 1, "c": 1, "e": 1, "g": 1}, "empty": {}}


def test_candidates_without_a_score_keep_their_order():
    run = {"q1": [("x", 3.0), ("a", 2.0), ("y", 1.0)], "q2": [("z", 2.0), ("b", 1.0)]}
    score_of = {"a": 0.5, "b": -0.5}
    part, runs = user_files.reranking_section(
        run,
        TEST,
        lambda _, pairs: {
            "some": np.array([score_of.get(doc, np.nan) for doc in pairs["doc_id"].to_pylist()]),
            "none": np.full(len(pairs), np.nan),
        },
        recall_at=(1,),
    )
    assert {q: [doc for doc, _ in hits] for q, hits in runs["some"].items()} == {
        "q1": ["a", "x", "y"],
        "q2": ["b", "z"],
    }
    assert [doc for doc, _ in runs["none"]["q1"]] == ["x", "a", "y"]
    assert (part["candidates"], part["not_in_pool"]) == (5, 5)
    assert part["methods"]["as given"]["R@1"] == 0
    assert part["methods"]["some"]["R@1"] == 1
