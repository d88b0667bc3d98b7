"""Every bad row is set aside with its reason, and good rows are kept."""

import json
from collections import Counter
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

from row_files import write_lines
from scalingnote.datasets import column_checks
from scalingnote.datasets.column_checks import CHECKED, check_table, query_ids
from scalingnote.datasets.input_files import (
    KEPT_PER_REASON,
    SHOWN_CHARS,
    File,
    Quarantine,
    whole,
)
from scalingnote.datasets.tables import column_schema, named_rows, read_tables, table_format
from scalingnote.storage.artifact import read_table

NO_FEATURES = pa.schema([])
DOCUMENT = {"doc_id": "d", "title": "A title", "topic": "topic", "content": "Some content.", "group": "g"}
IMPRESSION = {
    "session_id": "s",
    "user_id": "u",
    "query": "two words",
    "doc_id": "d",
    "position": 1,
    "clicked": True,
    "timestamp": 1_700_000_000,
    "dwell_s": 2.5,
}
GOOD = {
    "documents": DOCUMENT,
    "queries": {"query_id": "q", "query": "words", "split": "test"},
    "impressions": IMPRESSION,
    "scores": {"query_id": "q", "doc_id": "d", "score": 0.5},
    "qrels": {"query_id": "q", "doc_id": "d", "relevance": 2},
    "users": {"user_id": "u"},
}


def check_rows(table, rows, features=NO_FEATURES):
    """Check rows that are read one by one."""
    quarantine = Quarantine()
    form = table_format(table, features)
    tables = [
        check_table(each, table, features=features, quarantine=quarantine)
        for each in read_tables(rows, form, quarantine=quarantine)
    ]
    return pa.concat_tables(tables), quarantine


def check_json(tmp_path, table, rows):
    """Write rows to a JSON-lines file and check them."""
    path = write_lines(
        tmp_path / "rows.jsonl", *(row + b"\n" if isinstance(row, bytes) else row for row in rows)
    )
    names = {name for row in rows if isinstance(row, dict) for name in row}
    part = whole(File(str(path), path.stat().st_size, 0))
    return check_rows(table, named_rows(part, {name: name for name in sorted(names)}))


def check_columns(table, columns, features=NO_FEATURES):
    """Check Arrow columns."""
    quarantine = Quarantine()
    return check_table(pa.table(columns), table, features=features, quarantine=quarantine), quarantine


BAD = [
    ("queries", {"query_id": None}, "no query_id"),
    ("queries", {"query": " \t"}, "empty query"),
    ("queries", {"split": "validation"}, "split 'validation' is neither train nor test"),
    ("users", {"user_id": " "}, "no user_id"),
    ("documents", {"doc_id": None}, "no doc_id"),
    ("documents", {"doc_id": " "}, "no doc_id"),
    ("documents", {"doc_id": 1.5}, "doc_id is of type float"),
    ("documents", {"doc_id": True}, "doc_id is of type bool"),
    ("documents", {"doc_id": "a\x00b"}, "doc_id with control characters"),
    ("documents", {"doc_id": "a\ud800b"}, "doc_id with control characters"),
    ("documents", {"doc_id": "x" * 257}, "doc_id longer than 256 characters"),
    ("documents", {"title": " ", "content": None}, "no text"),
    ("documents", {"title": "t" * 513}, "title longer than 512 characters"),
    ("documents", {"title": ["t"]}, "title is of type list, not text"),
    ("documents", {"content": 7}, "content is of type int, not text"),
    ("impressions", {"session_id": ""}, "no session_id"),
    ("impressions", {"user_id": " "}, "no user_id"),
    ("impressions", {"position": 0}, "position is not 1 or above"),
    ("impressions", {"position": 1.5}, "position is not 1 or above"),
    ("impressions", {"position": 2**31}, "position is not 1 or above"),
    ("impressions", {"position": None}, "position is not a number"),
    ("impressions", {"position": "first"}, "position is not a number"),
    ("impressions", {"position": [1]}, "position is not a number"),
    ("impressions", {"position": float("inf")}, "position is not finite"),
    ("impressions", {"clicked": None}, "clicked is neither true nor false"),
    ("impressions", {"clicked": "yes"}, "clicked is neither true nor false"),
    ("impressions", {"clicked": 2}, "clicked is neither true nor false"),
    ("impressions", {"clicked": []}, "clicked is neither true nor false"),
    ("impressions", {"timestamp": None}, "timestamp is not a number"),
    ("impressions", {"timestamp": float("nan")}, "timestamp is not finite"),
    ("impressions", {"dwell_s": "long"}, "dwell_s is not a number"),
    ("impressions", {"dwell_s": float("nan")}, "dwell_s is not finite"),
    ("scores", {"score": None}, "score is not a number"),
    ("scores", {"score": "nan"}, "score is not finite"),
    ("scores", {"doc_id": ""}, "no doc_id"),
    ("qrels", {"relevance": "many"}, "relevance is not a number"),
    ("qrels", {"relevance": 0.5}, "relevance is not a whole number"),
    ("qrels", {"relevance": 2**31}, "relevance is not a whole number"),
]


@pytest.mark.parametrize(("table", "fault", "reason"), BAD)
def test_a_bad_row_is_rejected_with_its_reason(tmp_path, table, fault, reason):
    good = GOOD[table]
    rows = [good, {**good, **fault}, good]
    valid_rows, quarantine = check_json(tmp_path, table, rows)
    assert len(valid_rows) == 2
    assert dict(quarantine.rejected) == {f"{table}: {reason}": 1}
    assert quarantine.table()["reason"].to_pylist() == [reason]


def test_queries_and_times_may_be_texts(tmp_path):
    rows = [
        IMPRESSION,
        {**IMPRESSION, "query": " \u3000 "},
        {**IMPRESSION, "query": None},
        {**IMPRESSION, "timestamp": "yesterday"},
        {**IMPRESSION, "timestamp": "2023-11-14T22:13:20Z"},
    ]
    valid_rows, quarantine = check_json(tmp_path, "impressions", rows)
    assert valid_rows["timestamp"].to_pylist() == [datetime(2023, 11, 14, 22, 13, 20)] * 2
    assert dict(quarantine.rejected) == {
        "impressions: empty query": 2,
        "impressions: timestamp is neither a number nor ISO 8601 text": 1,
    }
    valid_rows, quarantine = check_json(tmp_path, "scores", [{"query": " ", "doc_id": "d", "score": 1.0}])
    assert dict(quarantine.rejected) == {"scores: empty query": 1}
    valid_rows, quarantine = check_json(
        tmp_path, "impressions", [IMPRESSION | {"query_id": name} for name in ("7", None)]
    )
    assert valid_rows["query_id"].to_pylist() == ["7"]
    assert dict(quarantine.rejected) == {"impressions: no query_id": 1}


def test_unreadable_lines_are_rejected_and_others_kept(tmp_path):
    deep = b"[" * 100_000
    lines = [DOCUMENT, b'{"doc_id": "\xff"}', b'{"doc_id": ', deep, b"[1]", b"", {**DOCUMENT, "doc_id": "e"}]
    valid_rows, quarantine = check_json(tmp_path, "documents", lines)
    assert valid_rows["doc_id"].to_pylist() == ["d", "e"]
    assert dict(quarantine.rejected) == {
        "documents: invalid UTF-8": 1,
        "documents: invalid JSON": 2,
        "documents: not a JSON object": 1,
    }


def test_only_rows_with_invalid_utf8_are_rejected():
    binary = pa.array([b"fine", b"\xff\xfe", b"also \xe4\xb8\xad"] * 3)
    # A column that is marked as UTF-8 and has other bytes.
    marked_utf8 = pa.Array.from_buffers(pa.string(), len(binary), binary.buffers())
    for column in (binary, marked_utf8, binary.cast(pa.large_binary())):
        valid_rows, quarantine = check_columns("documents", {"doc_id": list(range(9)), "title": column})
        assert valid_rows["doc_id"].to_pylist() == [str(n) for n in range(9) if n % 3 != 1]
        assert dict(quarantine.rejected) == {"documents: invalid UTF-8": 3}
        assert "\\xff" in quarantine.table()["row"][0].as_py()


def test_good_rows_get_our_types(tmp_path):
    valid_rows, quarantine = check_json(
        tmp_path, "impressions", [IMPRESSION, {**IMPRESSION, "user_id": None, "dwell_s": None}]
    )
    assert valid_rows.schema == CHECKED["impressions"]
    assert not quarantine.rejected
    first, second = valid_rows.to_pylist()
    assert first == {
        **{
            name: IMPRESSION[name]
            for name in ("session_id", "user_id", "query", "doc_id", "position", "clicked")
        },
        "query_id": query_ids(pa.array(["two words"]))[0].as_py(),
        "timestamp": datetime(2023, 11, 14, 22, 13, 20),
        "dwell_s": 2.5,
    }
    assert (second["user_id"], second["dwell_s"]) == (None, None)


def test_documents_are_repaired_and_counted(tmp_path):
    rows = [
        {"doc_id": 7, "title": " a\x00b ", "content": "x" * 20_001},
        {"doc_id": "8", "title": "t", "content": "half \ud800 pair", "group": " "},
    ]
    valid_rows, quarantine = check_json(tmp_path, "documents", rows)
    assert valid_rows.to_pylist() == [
        {"doc_id": "7", "title": "a b", "topic": "", "content": "x" * 20_000, "group": "7"},
        {"doc_id": "8", "title": "t", "topic": "", "content": "half \ufffd pair", "group": "8"},
    ]
    assert not quarantine.rejected
    assert dict(quarantine.repaired) == dict.fromkeys(
        ("control_characters_blanked", "lone_surrogates_replaced", "content_truncated"), 1
    )


def test_features_have_their_type_or_are_null():
    features = {"price": "float64", "stock": "int64", "new": "bool", "maker": "string", "absent": "string"}
    columns = {
        "doc_id": ["a", "b"],
        "title": ["t", "t"],
        "price": ["1.5", "cheap"],
        "stock": [3, None],
        "new": [1, 7],
        "maker": [None, " M "],
    }
    valid_rows, quarantine = check_columns("documents", columns, column_schema(features))
    assert valid_rows.select(list(features)).to_pylist() == [
        {"price": 1.5, "stock": 3, "new": True, "maker": None, "absent": None},
        {"price": None, "stock": None, "new": None, "maker": "M", "absent": None},
    ]
    assert dict(quarantine.repaired) == {"feature_price_dropped": 1, "feature_new_dropped": 1}


def test_only_invalid_values_of_features_are_dropped():
    features = column_schema({"brand": "string", "stock": "int64", "price": "float64", "image": "vector"})
    odd = [
        {"stock": 10**30},
        {"stock": 1.5},
        {"stock": 2**60 + 1, "image": [1, 0.5]},
        {"brand": 2020},
        {"price": "dear", "image": "none"},
        {"price": 1.5, "brand": "acme"},
    ]
    rows = [{**DOCUMENT, "doc_id": str(n), **values} for n, values in enumerate(odd)]
    valid_rows, quarantine = check_rows("documents", rows, features)
    assert valid_rows["doc_id"].to_pylist() == [row["doc_id"] for row in rows]
    assert valid_rows["stock"].to_pylist() == [None, None, 2**60 + 1, None, None, None]
    assert valid_rows["image"].to_pylist() == [None, None, [1, 0.5], None, None, None]
    assert valid_rows["brand"].to_pylist()[-2:] == [None, "acme"]
    assert valid_rows["price"].to_pylist()[-2:] == [None, 1.5]
    assert not quarantine.rejected
    faults = {"stock": 2, "brand": 1, "price": 1, "image": 1}
    assert quarantine.repaired == {f"feature_{name}_dropped": n for name, n in faults.items()}


def test_times_are_in_the_years_1_to_9999():
    times = [1_700_000_000.5, 1_700_000_000_500.0, 1e17, 1e308, -1e12, 253_402_300_799.9]
    valid_rows, quarantine = check_rows("impressions", [IMPRESSION | {"timestamp": time} for time in times])
    assert [time.year for time in valid_rows["timestamp"].to_pylist()] == [2023, 9999]
    reasons = Counter(quarantine.rejected)
    assert reasons.total() == 4
    assert sum(n for reason, n in reasons.items() if "not in the years 1 to 9999" in reason) >= 2


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        (pa.array([1_700_000_000_500, None]).cast(pa.timestamp("ms")), "s"),
        (pa.array([1_700_000_000_500_000_000, None]).cast(pa.timestamp("ns", "Asia/Shanghai")), "s"),
        (pa.array([1_700_000_000.5, None]), "s"),
        (pa.array([1_700_000_000_500, None]), "ms"),
        (pa.array([1_700_000_000_500_000, None]), "us"),
        (pa.array(["1700000000.5", None]), "s"),
        (pa.array(["2023-11-14T22:13:20.500Z", None]), "s"),
        (pa.array(["2023-11-15T06:13:20.5+08:00", None]), "s"),
        (pa.array(["2023-11-14 22:13:20.500000", None]).dictionary_encode(), "s"),
    ],
)
def test_all_forms_of_a_time_give_equal_milliseconds(column, unit):
    clock, problem = column_checks.time_column(pa.table({"t": column}), "t", unit=unit)
    assert clock.cast(pa.int64()).to_pylist() == [1_700_000_000_500, None]
    assert problem.to_pylist() == [None, "t is not a number"]


def test_query_ids_ignore_width_blanks_and_case():
    equal_texts = pa.array(["Two Words", " two\u3000 words\n", "ｔｗｏ\u00a0WORDS", None, "two  words"])
    ids = query_ids(equal_texts)
    assert ids.to_pylist() == [ids[0].as_py()] * 3 + [None] + [ids[0].as_py()]
    # The definition is public: BLAKE2b, 8 bytes, of the UTF-8 of the text. This value must never change.
    assert ids[0].as_py() == "b0ce94d70c1661cc"
    # Invisible characters and case do not make another query.
    pairs = [
        ("diabetes", "dia\u200bbetes"),
        ("nike shoes", "\ufeffni\u00adke shoes"),
        ("café", "cafe\u200d\u0301"),
        ("straße", "STRASSE"),
        ("ΟΔΟΣ", "οδος"),
    ]
    left, right = (query_ids(pa.array(texts)).to_pylist() for texts in zip(*pairs, strict=True))
    assert left == right
    assert len(set(left)) == len(pairs)


def test_the_quarantine_counts_all_and_keeps_first_rows(tmp_path):
    count = KEPT_PER_REASON + 5
    rows = pa.table({"content": ["x" * 10**4] * count, "n": list(range(count))})
    total = Quarantine()
    for number in range(3):
        quarantine = Quarantine()
        numbered = rows.append_column("task", pa.array([number] * count))
        quarantine.reject_where("documents", "no text", numbered, np.ones(count, bool))
        quarantine.repaired["m"] += 1
        quarantine.counts["documents"] += 2
        total.add(json.loads(json.dumps(quarantine.store(str(tmp_path / f"{number}.arrow")))))
    assert total.rejected == {"documents: no text": 3 * count}
    assert (total.repaired, total.counts) == ({"m": 3}, {"documents": 6})
    assert total.table() == read_table(str(tmp_path / "0.arrow"))
    assert total.table().num_rows == KEPT_PER_REASON
    assert len(total.table()["row"][0].as_py()) <= SHOWN_CHARS
