"""One bad row never loses the others: each kind of bad row has a named outcome, and good rows stay."""

import json

import pyarrow as pa
import pytest

from scalingnote.datasets import row_checks
from scalingnote.datasets.config import Columns, DatasetConfig
from scalingnote.datasets.job import run
from scalingnote.datasets.raw_rows import KEPT_PER_REASON, SHOWN_CHARS, Quarantine, json_lines
from scalingnote.errors import DataError
from scalingnote.storage.schema import IMPRESSIONS

GOOD = {"doc_id": "good", "title": "A title", "topic": "topic", "content": "Some content."}


def take(rows, **settings):
    quarantine = Quarantine()
    kept = list(
        row_checks.documents(
            rows, config=DatasetConfig(**settings), features=pa.schema([]), quarantine=quarantine
        )
    )
    return kept, quarantine


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"doc_id": "x", "title": " ", "content": None}, "no text"),
        ({"title": "t", "content": "c"}, "no doc_id"),
        ({"doc_id": " ", "content": "c"}, "no doc_id"),
        ({"doc_id": 1.5, "content": "c"}, "doc_id is of type float"),
        ({"doc_id": "a\x00b", "content": "c"}, "doc_id with control characters"),
        ({**GOOD, "content": "another"}, "duplicate doc_id"),
        ({"doc_id": "x", "title": "t" * 513, "content": "c"}, "title longer than 512 characters"),
        ({"doc_id": "x", "title": ["t"], "content": "c"}, "title is of type list, not text"),
        ({"doc_id": "x", "content": b"\xff\xfe"}, "invalid UTF-8"),
    ],
)
def test_a_bad_document_is_set_aside_with_its_reason(bad, reason):
    kept, quarantine = take([GOOD, bad, {**GOOD, "doc_id": "after"}])
    assert [row["doc_id"] for row in kept] == ["good", "after"]
    assert quarantine.rejected == {f"documents: {reason}": 1}
    assert quarantine.table().column("reason").to_pylist() == [reason]


def test_long_content_is_cut_and_counted():
    kept, quarantine = take([{**GOOD, "content": "x" * 1_000_000}], max_content_chars=1000)
    assert kept[0]["content"] == "x" * 1000
    assert quarantine.repaired == {"content_truncated": 1}
    assert not quarantine.rejected


def test_characters_that_no_table_carries_are_replaced():
    kept, quarantine = take([{**GOOD, "title": "a\x00b", "content": json.loads('"half \\ud800 pair"')}])
    assert (kept[0]["title"], kept[0]["content"]) == ("a b", "half \ufffd pair")
    assert quarantine.repaired == {"control_characters_blanked": 1, "lone_surrogates_replaced": 1}
    pa.Table.from_pylist(kept)  # Arrow takes it


def test_a_feature_that_is_none_loses_its_value_alone():
    features = pa.schema({"brand": pa.string(), "stock": pa.int64(), "price": pa.float64()})
    odd = [
        {"stock": 10**30},
        {"stock": 1.5},
        {"stock": 2.0},
        {"brand": 2020},
        {"brand": b"\xff"},
        {"price": 10**400},
        {"price": 1.5, "brand": "acme"},
    ]
    rows = [{**GOOD, "doc_id": str(n), **values} for n, values in enumerate(odd)]
    quarantine = Quarantine()
    kept = list(row_checks.documents(rows, config=DatasetConfig(), features=features, quarantine=quarantine))
    assert [row["doc_id"] for row in kept] == [row["doc_id"] for row in rows]
    assert [row["stock"] for row in kept] == [None, None, 2, None, None, None, None]
    assert [(row["brand"], row["price"]) for row in kept] == [(None, None)] * 6 + [("acme", 1.5)]
    assert not quarantine.rejected
    assert quarantine.repaired == {
        "feature_stock_dropped": 2,
        "feature_brand_dropped": 2,
        "feature_price_dropped": 1,
    }


def test_group_defaults_to_the_document_itself():
    assert [row["group"] for row in take([GOOD, {**GOOD, "doc_id": 7, "group": "g"}])[0]] == ["good", "g"]


def test_queries():
    rows = [
        {"query_id": "1", "query": "  two \n words "},
        {"query_id": "1", "query": "again"},
        {"query_id": "2", "query": " \t"},
        {"query_id": "3", "query": "x", "split": "validation"},
        {"query_id": 4, "query": "number", "split": "test"},
    ]
    quarantine = Quarantine()
    kept = list(row_checks.queries(rows, quarantine=quarantine))
    assert kept == [
        {"query_id": "1", "query": "two words", "split": ""},
        {"query_id": "4", "query": "number", "split": "test"},
    ]
    assert quarantine.rejected == {
        "queries: duplicate query_id": 1,
        "queries: empty query": 1,
        "queries: split 'validation' is neither train nor test": 1,
    }


@pytest.mark.parametrize(
    ("table", "extra", "reason"),
    [
        ("qrels", {"query_id": "?", "relevance": 1}, "unknown query_id"),
        ("qrels", {"doc_id": "?", "relevance": 1}, "unknown doc_id"),
        ("qrels", {"relevance": "many"}, "relevance is not a number"),
        ("qrels", {"relevance": 0.5}, "relevance is not a whole number"),
        ("qrels", {"relevance": 10**400}, "relevance is not finite"),
        ("scores", {"score": "nan"}, "score is not finite"),
        ("impressions", {"position": 0, "clicked": True}, "position is not 1 or above"),
        ("impressions", {"position": 1, "clicked": "yes"}, "clicked is neither true nor false"),
        ("impressions", {"position": 1, "clicked": 1, "timestamp": 0}, "no session_id"),
    ],
)
def test_a_bad_pair_is_set_aside_with_its_reason(table, extra, reason):
    quarantine = Quarantine()
    row = {"query_id": "q", "doc_id": "d", **extra}
    assert not list(row_checks.pairs(table, [row], query_ids=["q"], doc_ids=["d"], quarantine=quarantine))
    assert quarantine.rejected == {f"{table}: {reason}": 1}


def test_a_time_is_in_seconds_and_of_this_calendar():
    given = {"query_id": "q", "doc_id": "d", "session_id": "s", "position": 1, "clicked": True}
    second = 1_700_000_000.5
    times = [second, 1e3 * second, int(1e9 * second), 1e17, 1e308, -1e12, 253_402_300_799.99997]
    quarantine = Quarantine()
    rows = [{**given, "timestamp": time} for time in times]
    kept = list(row_checks.pairs("impressions", rows, query_ids=["q"], doc_ids=["d"], quarantine=quarantine))
    table = pa.Table.from_pylist(kept, schema=IMPRESSIONS)
    years = [time.year for time in table["timestamp"].to_pylist()]
    assert years == [2023, 9999]
    ((reason, count),) = quarantine.rejected.items()
    assert count == 5
    assert "timestamp is not in the years 1 to 9999: give seconds" in reason


def test_a_judgement_given_twice_counts_once():
    quarantine = Quarantine()
    rows = [{"query_id": "q", "doc_id": "d", "relevance": n} for n in ("2", 3)]
    kept = list(row_checks.pairs("qrels", rows, query_ids=["q"], doc_ids=["d"], quarantine=quarantine))
    assert kept == [{"query_id": "q", "doc_id": "d", "relevance": 2}]
    assert quarantine.rejected == {"qrels: duplicate query and document": 1}


def test_a_row_that_is_set_aside_is_no_duplicates_first():
    quarantine = Quarantine()
    rows = [{"query_id": "q", "doc_id": "d", "relevance": n} for n in (None, 2)]
    kept = list(row_checks.pairs("qrels", rows, query_ids=["q"], doc_ids=["d"], quarantine=quarantine))
    assert kept == [{"query_id": "q", "doc_id": "d", "relevance": 2}]
    documents = [{"doc_id": "d", "title": "t", "group": group} for group in (7, "7")]
    features = pa.schema([])
    kept = list(
        row_checks.documents(documents, config=DatasetConfig(), features=features, quarantine=quarantine)
    )
    assert [row["group"] for row in kept] == ["7"]
    assert not [reason for reason in quarantine.rejected if "duplicate" in reason]


def test_unreadable_lines_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    deep = b"[" * 100_000
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n{"a": \n' + deep + b'\n[1]\n\n{"a": 2}\n')
    rows = list(json_lines(path))
    assert [row if isinstance(row, dict) else row.reason for row in rows] == [
        {"a": 1},
        "invalid UTF-8",
        "invalid JSON",
        "invalid JSON",
        "not a JSON object",
        {"a": 2},
    ]


def test_the_quarantine_counts_all_and_keeps_a_few():
    quarantine = Quarantine()
    for _ in range(KEPT_PER_REASON + 5):
        quarantine.reject("documents", {"content": "x" * 10**5}, "no text")
    assert quarantine.rejected["documents: no text"] == KEPT_PER_REASON + 5
    assert quarantine.table().num_rows == KEPT_PER_REASON
    assert len(quarantine.table()["row"][0].as_py()) <= SHOWN_CHARS


def test_nothing_usable_is_an_error_that_says_why(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"doc_id": "1", "title": ""}\n')
    (tmp_path / "q.jsonl").write_text('{"query_id": "1", "query": "x"}\n')
    config = Columns(
        documents={"path": str(tmp_path / "d.jsonl")},
        queries={"path": str(tmp_path / "q.jsonl")},
        qrels={"path": str(tmp_path / "q.jsonl")},
    )
    with pytest.raises(DataError, match="no usable document; set aside: 1 x documents: no text"):
        run(config, output=str(tmp_path / "out"))
    (tmp_path / "d.jsonl").write_text('{"doc_id": "1", "title": "now there"}\n')
    with pytest.raises(DataError, match="no query with a relevant document"):
        run(config, output=str(tmp_path / "out"))
