"""Files are found, checked before any work, and divided into slices that have every row once."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from row_files import write_lines, write_tables
from scalingnote.core.errors import DataError
from scalingnote.datasets import input_files
from scalingnote.datasets.config import Logs
from scalingnote.datasets.input_files import File, Quarantine, cut, find_files
from scalingnote.datasets.input_files import lines as lines_of
from scalingnote.datasets.readers import read_logs
from scalingnote.datasets.tables import named_rows, read_tables, table_format

IMPRESSION = {
    "session_id": "s",
    "query": "two words",
    "doc_id": "d",
    "position": 1,
    "clicked": True,
    "timestamp": 1_700_000_000,
}
DOCUMENT = {"doc_id": "d", "title": "A title"}


FORM = table_format("impressions", pa.schema([]))


def slices_of(config):
    """Return the slices of all tables of a log."""
    return [rows for table in read_logs(config).tables.values() for rows in table]


def planned(tmp_path, *, documents=DOCUMENT, impressions=IMPRESSION, form="parquet", columns=None, **extra):
    """Write one file for each table of a log, and return its slices."""
    paths = {}
    for table, row in {"documents": documents, "impressions": impressions, **extra}.items():
        path = tmp_path / f"{table}.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist([row]), path)
        else:
            write_lines(path, row)
        paths[table] = {"path": str(path), "columns": (columns or {}).get(table, {})}
    return slices_of(Logs(**paths))


def test_find_files_in_folders_and_by_pattern(tmp_path):
    hidden = ("b/_temporary/0.parquet", "b/.1.parquet.crc", "b/_SUCCESS")
    for name in ("b/2.parquet", "b/1.parquet", "a.jsonl", *hidden):
        write_lines(tmp_path / name, b"x")
    base = str(tmp_path)

    def names(path):
        return [file.uri.removeprefix(base + "/") for file in find_files(path)]

    assert names(f"{base}/b") == names(f"{base}/b/") == ["b/1.parquet", "b/2.parquet"]
    assert names(base) == ["a.jsonl", "b/1.parquet", "b/2.parquet"]
    assert names(f"{base}/b/?.parquet") == ["b/1.parquet", "b/2.parquet"]
    assert names(f"{base}/*.jsonl") == ["a.jsonl"]
    assert names(f"{base}/**/2.parquet") == ["b/2.parquet"]
    assert names(f"{base}/a.jsonl") == ["a.jsonl"]
    with pytest.raises(DataError, match=r"no file at .*\*\.csv: check the path"):
        names(f"{base}/*.csv")
    with pytest.raises(DataError, match=r"_SUCCESS is neither \.jsonl nor \.parquet"):
        names(f"{base}/b/_S*")


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize(
    ("table", "row", "error"),
    [
        ("impressions", {**IMPRESSION, "clicked": "yes"}, r"'clicked' holds texts, but .* is true or false"),
        ("impressions", {**IMPRESSION, "timestamp": [1]}, "'timestamp' holds lists"),
        ("impressions", {**IMPRESSION, "doc_id": 1.5}, "'doc_id' holds numbers"),
        ("impressions", {**IMPRESSION, "query": 7}, "'query' holds whole numbers"),
        ("impressions", {k: v for k, v in IMPRESSION.items() if k != "query"}, r"has no column \['query'\]"),
        ("documents", {"doc_id": "d", "topic": "t"}, r"no column of texts by a known name"),
        (
            "documents",
            {"doc_id": "d", "title": "t", "inhalt": "i"},
            r"only 'doc_id', 'title', 'inhalt': choose",
        ),
        ("documents", {"title": "t"}, r"no column of ids by a known name"),
        ("scores", {"doc_id": "d", "score": 1.0}, r"scores\..* has no column \['query or query_id'\]"),
        ("qrels", {"query": "q", "relevance": 1}, r"qrels\..* has no column \['doc_id'\]"),
    ],
)
def test_a_file_with_wrong_columns_is_an_error_with_its_name(tmp_path, form, table, row, error):
    with pytest.raises(DataError, match=rf"{tmp_path}/{table}\.{form}") as caught:
        planned(tmp_path, form=form, **{table: row})
    caught.match(error)


def test_a_mapping_has_our_columns_and_those_of_the_file(tmp_path):
    renamed = {("q" if name == "query" else name): value for name, value in IMPRESSION.items()}
    slices = planned(tmp_path, impressions=renamed, columns={"impressions": {"query": "q"}})
    assert slices[-1].columns["query"] == "q"
    with pytest.raises(DataError, match=r"columns maps \['text'\], which are not in"):
        planned(tmp_path, columns={"impressions": {"text": "query"}})
    with pytest.raises(DataError, match=r"has no column \['uid'\]"):
        planned(tmp_path, columns={"impressions": {"user_id": "uid"}})


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_judgements_may_have_no_grade(tmp_path, form):
    for row in ({"query": "q", "doc_id": "d"}, {"query": "q", "doc_id": "d", "relevance": 2}):
        assert ("relevance" in planned(tmp_path, qrels=row, form=form)[-1].columns) == ("relevance" in row)


def test_a_file_of_another_format_is_an_error(tmp_path):
    documents = write_tables(tmp_path, documents=[DOCUMENT])
    (tmp_path / "i.parquet").write_bytes(b"PAR1 or so")
    (tmp_path / "i.jsonl").write_bytes(b"session_id,query\ns,q\n")
    for name, error in (
        ("i.parquet", "is not a Parquet file"),
        ("i.jsonl", "does not begin with a JSON object"),
    ):
        with pytest.raises(DataError, match=error):
            slices_of(Logs(**documents, impressions={"path": str(tmp_path / name)}))


def test_all_files_identify_queries_in_the_same_way(tmp_path):
    score = {"query": "q", "doc_id": "d", "score": 1.0}
    by_text = planned(tmp_path, scores={**score, "query_id": "7"})
    assert "query_id" not in by_text[-1].columns
    assert "query_id" in planned(tmp_path, scores={"query_id": "7", "doc_id": "d", "score": 1.0})[-1].columns
    with_id = {**IMPRESSION, "query_id": "7"}
    assert "query_id" in planned(tmp_path, impressions=with_id, scores={**score, "query_id": "7"})[-1].columns
    with pytest.raises(DataError, match=r"scores\.parquet .* has no column query_id, but the impressions"):
        planned(tmp_path, impressions=with_id, scores=score)
    write_lines(tmp_path / "two" / "1.jsonl", with_id)
    write_lines(tmp_path / "two" / "2.jsonl", IMPRESSION)
    config = Logs(**write_tables(tmp_path, documents=[DOCUMENT]), impressions={"path": str(tmp_path / "two")})
    with pytest.raises(DataError, match=r"2\.jsonl has no column query_id, other impressions have"):
        slices_of(config)


def test_a_dwell_threshold_needs_dwell_times(tmp_path):
    paths = write_tables(tmp_path, documents=[DOCUMENT], impressions=[IMPRESSION])
    assert len(slices_of(Logs(**paths))) == 2
    with pytest.raises(DataError, match=r"has no column \['dwell_s'\]"):
        slices_of(Logs(**paths, min_dwell_s=1.0))


def test_slices_are_ranges_of_row_groups(tmp_path, monkeypatch):
    path = tmp_path / "i.parquet"
    rows = pa.Table.from_pylist([{**IMPRESSION, "doc_id": f"{n:0200d}"} for n in range(30_000)])
    pq.write_table(rows, path, row_group_size=2000, use_dictionary=False)
    monkeypatch.setattr(input_files, "SLICE_BYTES", 1 << 20)
    documents = write_tables(tmp_path, documents=[DOCUMENT])
    slices = read_logs(Logs(**documents, impressions={"path": str(path)})).tables["impressions"]
    assert len(slices) > 4
    assert all(piece.part.size <= 1 << 20 for piece in slices)
    doc_ids = [
        doc_id
        for piece in slices
        for table in read_tables(piece, FORM, quarantine=Quarantine())
        for doc_id in table["doc_id"].to_pylist()
    ]
    assert doc_ids == rows["doc_id"].to_pylist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 20), st.booleans())
def test_every_line_is_in_one_byte_range(tmp_path_factory, lengths, step, ends):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    data = b"\n".join(bytes([97 + n % 26]) * length for n, length in enumerate(lengths))
    data += b"\n" if ends and data else b""
    path.write_bytes(data)
    pieces = cut([File(str(path), len(data), 0)], limit=step)
    assert b"".join(line for p in pieces for line in lines_of(p.file.uri, p.start, p.stop)) == data


def test_a_broken_line_does_not_change_other_rows(tmp_path):
    rows = [{**IMPRESSION, "doc_id": f"d{n}", "position": n + 1, "nested": {"x": n}} for n in range(60)]
    good_file, broken_file = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_lines(good_file, *rows)
    text = good_file.read_text().splitlines(keepends=True)
    broken_file.write_text(
        "".join([*text[:20], "{oops\n", "\n", *text[20:40], "{" * 9000 + "\n", *text[40:]])
    )
    columns = {name: name for name in IMPRESSION}

    def doc_ids(path, step):
        documents, quarantine = [], Quarantine()
        for part in cut([File(str(path), path.stat().st_size, 0)], limit=step):
            for table in read_tables(named_rows(part, columns), FORM, quarantine=quarantine):
                documents += zip(
                    table["doc_id"].to_pylist(), map(float, table["position"].to_pylist()), strict=True
                )
        return documents, dict(quarantine.rejected)

    expected = [(row["doc_id"], float(row["position"])) for row in rows]
    for step in (10**6, 701):
        assert doc_ids(good_file, step) == (expected, {})
        assert doc_ids(broken_file, step) == (expected, {"impressions: invalid JSON": 2})
