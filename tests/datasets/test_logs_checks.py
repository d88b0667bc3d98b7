"""Every bad row of a log is set aside with the reason that intake gives it, and takes no good row along."""

import json
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

from scalingnote.datasets import log_columns, row_checks
from scalingnote.datasets.config import Logs
from scalingnote.datasets.log_columns import CHECKED, MAX_EXAMPLES, PROBLEM, LogTally, check_table, query_ids
from scalingnote.datasets.log_inputs import LogSlice, read_slice
from scalingnote.datasets.raw_rows import SHOWN_CHARS, File, Quarantine, whole
from scalingnote.storage.artifact import read_table

CONFIG = Logs(documents={"path": "d"}, impressions={"path": "i"}, max_title_chars=50, max_content_chars=100)
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
    "impressions": IMPRESSION,
    "scores": {"query_id": "q", "doc_id": "d", "score": 0.5},
    "qrels": {"query_id": "q", "doc_id": "d", "relevance": 2},
}


def check_json(tmp_path, table, rows, config=CONFIG):
    """Rows through a JSON-lines file and the checks."""
    path = tmp_path / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    names = {name for row in rows if isinstance(row, dict) for name in row}
    part = whole(File(str(path), path.stat().st_size, 0))
    piece = LogSlice(0, table, part, {name: name for name in sorted(names)})
    tally = LogTally()
    tables = [
        check_table(read_rows, table, config=config, tally=tally)
        for read_rows in read_slice(piece, config=config, tally=tally)
    ]
    return pa.concat_tables(tables), tally


def check_columns(table, columns, config=CONFIG):
    """Arrow columns through the checks."""
    rows = pa.table(columns)
    tally = LogTally()
    return check_table(
        rows.append_column(PROBLEM, pa.nulls(len(rows), pa.string())), table, config=config, tally=tally
    ), tally


def intake_reason(table, row):
    """What intake, which reads row by row, has against a row."""
    quarantine = Quarantine()
    if table == "documents":
        list(row_checks.documents([row], config=CONFIG, features=pa.schema([]), quarantine=quarantine))
    else:
        row = {"query_id": "q", **row}
        list(row_checks.pairs(table, [row], query_ids=["q"], doc_ids=[row["doc_id"]], quarantine=quarantine))
    return dict(quarantine.rejected)


BAD = [
    ("documents", {"doc_id": None}, "no doc_id"),
    ("documents", {"doc_id": " "}, "no doc_id"),
    ("documents", {"doc_id": 1.5}, "doc_id is of type float"),
    ("documents", {"doc_id": True}, "doc_id is of type bool"),
    ("documents", {"doc_id": "a\x00b"}, "doc_id with control characters"),
    ("documents", {"doc_id": "a\ud800b"}, "doc_id with control characters"),
    ("documents", {"doc_id": "x" * 257}, "doc_id longer than 256 characters"),
    ("documents", {"title": " ", "content": None}, "no text"),
    ("documents", {"title": "t" * 51}, "title longer than 50 characters"),
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
def test_a_bad_row_is_set_aside_in_the_words_of_intake(tmp_path, table, fault, reason):
    good = GOOD[table]
    bad = {**good, **fault}
    kept, tally = check_json(tmp_path, table, [good, bad, good])
    assert len(kept) == 2
    expected = intake_reason(table, bad)
    assert expected == {f"{table}: {reason}": 1}
    assert dict(tally.rejected) == expected
    assert tally.table()["reason"].to_pylist() == [name.split(": ", 1)[1] for name in expected]


def test_reasons_that_intake_has_no_words_for(tmp_path):
    rows = [
        IMPRESSION,
        {**IMPRESSION, "query": " \u3000 "},
        {**IMPRESSION, "query": None},
        {**IMPRESSION, "timestamp": "yesterday"},
        {**IMPRESSION, "timestamp": "2023-11-14T22:13:20Z"},
    ]
    kept, tally = check_json(tmp_path, "impressions", rows)
    assert kept["timestamp"].to_pylist() == [datetime(2023, 11, 14, 22, 13, 20)] * 2
    assert dict(tally.rejected) == {
        "impressions: empty query": 2,
        "impressions: timestamp is neither a number nor ISO 8601 text": 1,
    }
    kept, tally = check_json(tmp_path, "scores", [{"query": " ", "doc_id": "d", "score": 1.0}])
    assert dict(tally.rejected) == {"scores: empty query": 1}
    kept, tally = check_json(
        tmp_path, "impressions", [IMPRESSION | {"query_id": name} for name in ("7", None)]
    )
    assert kept["query_id"].to_pylist() == ["7"]
    assert dict(tally.rejected) == {"impressions: no query_id": 1}


def test_unreadable_lines_are_named_and_their_neighbours_kept(tmp_path):
    lines = [DOCUMENT, b'{"doc_id": "\xff"}', b'{"doc_id": ', b"[1]", b"", {**DOCUMENT, "doc_id": "e"}]
    kept, tally = check_json(tmp_path, "documents", lines)
    assert kept["doc_id"].to_pylist() == ["d", "e"]
    assert dict(tally.rejected) == {
        "documents: invalid UTF-8": 1,
        "documents: invalid JSON": 1,
        "documents: not a JSON object": 1,
    }


def test_bytes_that_are_not_utf8_lose_their_row_only():
    binary = pa.array([b"fine", b"\xff\xfe", b"also \xe4\xb8\xad"] * 3)
    # A column that promises UTF-8 and holds something else.
    promised = pa.Array.from_buffers(pa.string(), len(binary), binary.buffers())
    for column in (binary, promised, binary.cast(pa.large_binary())):
        kept, tally = check_columns("documents", {"doc_id": list(range(9)), "title": column})
        assert kept["doc_id"].to_pylist() == [str(n) for n in range(9) if n % 3 != 1]
        assert dict(tally.rejected) == {"documents: invalid UTF-8": 3}
        assert "\\xff" in tally.table()["row"][0].as_py()


def test_good_rows_come_out_typed(tmp_path):
    kept, tally = check_json(
        tmp_path, "impressions", [IMPRESSION, {**IMPRESSION, "user_id": None, "dwell_s": None}]
    )
    assert kept.schema == CHECKED["impressions"]
    assert not tally.rejected
    first, second = kept.to_pylist()
    assert first == {
        **{
            name: IMPRESSION[name]
            for name in ("session_id", "user_id", "query", "doc_id", "position", "clicked")
        },
        "query_id": query_ids(pa.array(["two words"]), fold_case=True)[0].as_py(),
        "timestamp": datetime(2023, 11, 14, 22, 13, 20),
        "dwell_s": 2.5,
    }
    assert (second["user_id"], second["dwell_s"]) == (None, None)


def test_documents_are_repaired_as_intake_repairs_them(tmp_path):
    rows = [
        {"doc_id": 7, "title": " a\x00b ", "content": "x" * 101},
        {"doc_id": "8", "title": "t", "content": "half \ud800 pair", "group": " "},
    ]
    kept, tally = check_json(tmp_path, "documents", rows)
    quarantine = Quarantine()
    expected = list(row_checks.documents(rows, config=CONFIG, features=pa.schema([]), quarantine=quarantine))
    assert kept.to_pylist() == expected
    assert dict(tally.repaired) == dict(quarantine.repaired)
    assert set(tally.repaired) == {
        "control_characters_blanked",
        "lone_surrogates_replaced",
        "content_truncated",
    }


def test_features_keep_their_type_or_are_dropped():
    features = {"price": "float64", "stock": "int64", "new": "bool", "maker": "string", "absent": "string"}
    config = CONFIG.model_copy(update={"features": features})
    columns = {
        "doc_id": ["a", "b"],
        "title": ["t", "t"],
        "price": ["1.5", "cheap"],
        "stock": [3, None],
        "new": [1, 7],
        "maker": [None, " M "],
    }
    kept, tally = check_columns("documents", columns, config)
    assert kept.select(list(features)).to_pylist() == [
        {"price": 1.5, "stock": 3, "new": True, "maker": None, "absent": None},
        {"price": None, "stock": None, "new": None, "maker": "M", "absent": None},
    ]
    assert dict(tally.repaired) == {"feature_price_dropped": 1, "feature_new_dropped": 1}


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
def test_a_time_is_the_same_however_it_is_written(column, unit):
    clock, problem = log_columns.time_column(pa.table({"t": column}), "t", unit=unit)
    assert clock.cast(pa.int64()).to_pylist() == [1_700_000_000_500, None]
    assert problem.to_pylist() == [None, "t is not a number"]


def test_a_query_is_one_whatever_its_width_blanks_and_case():
    same = pa.array(["Two Words", " two\u3000 words\n", "ｔｗｏ\u00a0WORDS", None, "two  words"])
    folded = query_ids(same, fold_case=True)
    assert folded.to_pylist() == [folded[0].as_py()] * 3 + [None] + [folded[0].as_py()]
    # The recipe is public: BLAKE2b, 8 bytes, of the UTF-8 of the text. This value must never change.
    assert folded[0].as_py() == "b0ce94d70c1661cc"
    assert len(set(query_ids(same, fold_case=False).drop_null().to_pylist())) == 3


def test_what_nobody_sees_and_what_case_hides_make_no_other_query():
    pairs = [
        ("diabetes", "dia\u200bbetes"),
        ("nike shoes", "\ufeffni\u00adke shoes"),
        ("café", "cafe\u200d\u0301"),
        ("straße", "STRASSE"),
        ("ΟΔΟΣ", "οδος"),
    ]
    left, right = (
        query_ids(pa.array(texts), fold_case=True).to_pylist() for texts in zip(*pairs, strict=True)
    )
    assert left == right
    assert len(set(left)) == len(pairs)
    as_typed = query_ids(pa.array(["straße", "strasse", "οδος", "οδοσ", "οδο\u200bς"]), fold_case=False)
    assert len(set(as_typed.to_pylist())) == 4


def test_a_tally_counts_all_and_keeps_the_first(tmp_path):
    rows = pa.table({"content": ["x" * 10**4] * (MAX_EXAMPLES + 5), "n": list(range(MAX_EXAMPLES + 5))})
    total = LogTally()
    for number in range(3):
        tally = LogTally()
        tally.reject_where(
            "documents",
            "no text",
            rows.append_column("task", pa.array([number] * len(rows))),
            np.ones(len(rows), bool),
        )
        tally.repaired["m"] += 1
        tally.counts["documents"] += 2
        total.add(json.loads(json.dumps(tally.store(str(tmp_path / f"{number}.arrow")))))
    assert total.rejected == {"documents: no text": 3 * (MAX_EXAMPLES + 5)}
    assert (total.repaired, total.counts) == ({"m": 3}, {"documents": 6})
    assert total.table() == read_table(str(tmp_path / "0.arrow"))
    assert total.table().num_rows == MAX_EXAMPLES
    assert len(total.table()["row"][0].as_py()) <= SHOWN_CHARS
