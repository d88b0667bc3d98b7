"""The readers on tiny files: tables, unusable input, subsets and repeats."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from row_files import write_lines, write_tables
from scalingnote.core.errors import DataError
from scalingnote.datasets import sources
from scalingnote.datasets.config import AnyDataset, Beir, Columns, MsMarco, TableFile
from scalingnote.datasets.input_files import delimited_lines, find_files, whole
from scalingnote.datasets.job import run
from scalingnote.datasets.readers import table_rows
from scalingnote.storage.schema import DOCUMENTS


def splits(artifact):
    return dict(
        zip(*(artifact.table("queries.parquet")[c].to_pylist() for c in ("query", "split")), strict=True)
    )


def test_a_beir_folder_is_read(tmp_path):
    write_lines(
        tmp_path / "corpus.jsonl",
        {"_id": "1", "title": "One", "text": "first"},
        {"_id": "2", "title": "", "text": "second"},
        b'{"_id": "3", "text": "\xff"}\n',
        {"_id": "4", "metadata": {"title": "no text field"}},
    )
    queries = [{"_id": n, "text": f"query {n}"} for n in ("a", "b", "c")]
    write_lines(tmp_path / "queries.jsonl", *queries)
    write_lines(tmp_path / "qrels" / "train.tsv", b"query-id\tcorpus-id\tscore\na\t1\t1\n")
    write_lines(tmp_path / "qrels" / "test.tsv", b"query-id\tcorpus-id\tscore\nb\t2\t2\nb\t9\t1\nbroken\n")
    artifact = run(Beir(path=str(tmp_path), click_model=None), output=str(tmp_path / "out"))
    assert splits(artifact) == {"query a": "train", "query b": "test"}
    assert artifact.counts["documents"] == 2
    assert artifact.counts["impressions"] == 0
    assert artifact.names("impressions") == []
    assert artifact.manifest.info["rejected_by_reason"] == {
        "documents: invalid UTF-8": 1,
        "documents: its text is not in the column of the first rows": 1,
        "qrels: 1 fields, expected 3": 1,
        "qrels: unknown doc_id": 1,
    }
    assert artifact.table("rejected.parquet").num_rows == 4


def test_msmarco_files_are_read(tmp_path):
    write_lines(tmp_path / "collection.tsv", b"1\tfirst passage\n2\tsecond passage\n3\n")
    write_lines(tmp_path / "queries.tsv", *(f"q{n}\tquery {n}\n".encode() for n in range(40)))
    write_lines(tmp_path / "qrels.tsv", *(f"q{n} 0 {1 + n % 2} 1\n".encode() for n in range(40)))
    config = MsMarco(
        collection=str(tmp_path / "coll*.tsv"),
        train_queries=str(tmp_path / "queries.tsv"),
        train_qrels=str(tmp_path / "qrels.tsv"),
        test_fraction=0.5,
        seed=1,
    )
    artifact = run(config, output=str(tmp_path / "out"))
    first = artifact.table("documents").to_pylist()[0]
    assert first == {"doc_id": "1", "title": "", "topic": "", "content": "first passage", "group": "1"}
    assert artifact.manifest.info["simulated_clicks"] is True
    assert artifact.manifest.info["click_model"] == "position"
    # Queries that share a document share a split.
    assert len({splits(artifact)[f"query {n}"] for n in range(0, 40, 2)}) == 1
    with pytest.raises(ValueError, match="come together"):
        MsMarco(collection="x", train_queries="y")


def test_profiles_and_vectors_are_read(tmp_path):
    odd = [{"query_id": "q", "doc_id": doc_id} for doc_id in (1.5, "half \ud800", ["d1"], None)]
    users = [{"uid": "ann", "age": 30}, {"uid": "ben", "age": "old"}, {"uid": "ann", "age": 31}, {"age": 9}]
    tables = write_tables(
        tmp_path,
        documents=[
            {"doc_id": f"d{n}", "title": f"note {n}", "image": [n, 0.5] if n else "none"} for n in range(4)
        ],
        queries=[{"query_id": "q", "query": "note"}],
        qrels=[{"query_id": "q", "doc_id": "d1"}, *odd],
        users=users,
    )
    tables["users"]["columns"] = {"user_id": "uid"}
    config = Columns(**tables, features={"image": "vector"}, profile={"age": "int64"}, test_fraction=0.0)
    artifact = run(config, output=str(tmp_path / "out"))
    assert artifact.table("users").to_pylist() == [
        {"user_id": "ann", "age": 30},
        {"user_id": "ben", "age": None},
    ]
    assert artifact.table("documents")["image"].to_pylist() == [None, [1, 0.5], [2, 0.5], [3, 0.5]]
    assert artifact.manifest.info["rejected_by_reason"] == {
        "qrels: doc_id is of type float": 1,
        "qrels: doc_id is of type list": 1,
        "qrels: doc_id with control characters": 1,
        "qrels: no doc_id": 1,
        "users: duplicate user_id": 1,
        "users: no user_id": 1,
    }


def test_mapped_columns_are_read(tmp_path):
    write_lines(
        tmp_path / "notes.jsonl",
        *({"id": n, "heading": f"note {n}", "body": "b", "likes": n, "by": "x"} for n in range(9)),
    )
    pq.write_table(
        pa.table({"qid": ["a", "b"], "text": ["alpha", "beta"], "split": ["train", "test"]}),
        tmp_path / "q.parquet",
    )
    pq.write_table(pa.table({"query_id": ["a", "b"], "doc_id": ["1", "2"]}), tmp_path / "qrels.parquet")
    exposure = {"session_id": "s", "query_id": "a", "doc_id": "3"}
    exposure |= {"position": 1, "clicked": True, "timestamp": 5}
    write_lines(tmp_path / "log.jsonl", exposure, {**exposure, "position": -1})
    config = Columns(
        documents={
            "path": str(tmp_path / "notes.jsonl"),
            "columns": {"doc_id": "id", "title": "heading", "content": "body"},
        },
        queries={"path": str(tmp_path / "q.parquet"), "columns": {"query_id": "qid", "query": "text"}},
        qrels={"path": str(tmp_path / "qrels.parquet")},
        impressions={"path": str(tmp_path / "log.jsonl")},
        features={"likes": "int64", "by": "string"},
        documents_per_part=4,
    )
    artifact = run(config, output=str(tmp_path / "out"))
    documents = artifact.table("documents")
    assert documents.schema.names == [*DOCUMENTS.names, "likes", "by"]
    assert documents["likes"].to_pylist() == list(range(9))
    assert len(artifact.names("documents/")) == 3
    assert artifact.table("qrels.parquet")["relevance"].to_pylist() == [1, 1]
    assert artifact.table("impressions.parquet").num_rows == 1  # impressions of the data: none are simulated
    assert not artifact.manifest.info["simulated_clicks"]
    assert splits(artifact) == {"alpha": "train", "beta": "test"}
    typo = TableFile(path=str(tmp_path / "qrels.parquet"), columns={"query": "q", "typo": "x"})
    with pytest.raises(DataError, match="typo"):
        run(config.model_copy(update={"queries": typo}), output=str(tmp_path / "other"))


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_mapping_to_a_missing_column_is_an_error(form, tmp_path):
    path = tmp_path / f"rows.{form}"
    rows = [{"query_id": "q", "doc_id": f"d{n}", "Label": n} for n in range(3)]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_lines(path, *rows)
    names = ["query_id", "doc_id", "relevance"]
    with pytest.raises(DataError, match=rf"rows\.{form} has no column \['label'\].*'Label'.*map it"):
        table_rows(TableFile(path=str(path), columns={"relevance": "label"}), names)
    mapped = TableFile(path=str(path), columns={"relevance": "Label"})
    (rows,) = table_rows(mapped, names)
    assert [row["relevance"] for row in rows] == [0, 1, 2]


def test_a_subset_omits_rows_without_rejecting_them(tmp_path):
    files = write_tables(
        tmp_path,
        documents=[{"doc_id": n, "title": f"t{n}", "group": f"g{n // 2}"} for n in range(100)],
        queries=[{"query_id": n, "query": f"q{n}"} for n in range(100)],
        qrels=[{"query_id": n, "doc_id": n} for n in range(100)],
    )
    artifact = run(Columns(**files, max_documents=40), output=str(tmp_path / "out"))
    assert artifact.counts["documents"] == 40
    assert artifact.counts["queries"] == 40
    assert artifact.counts["rejected"] == 0
    assert artifact.manifest.info["left_out"] == {"documents": 60, "queries": 60, "qrels": 60}
    groups = artifact.table("documents")["group"].to_pylist()
    assert len(set(groups)) == 20  # complete groups
    doc_ids = set(artifact.table("documents")["doc_id"].to_pylist())
    assert set(artifact.table("qrels.parquet")["doc_id"].to_pylist()) <= doc_ids


def test_unusable_input_is_an_error_with_reasons(tmp_path):
    def refused(files):
        with pytest.raises(DataError) as error:
            run(Columns(**files), output=str(tmp_path / "out"))
        return str(error.value)

    files = write_tables(
        tmp_path,
        documents=[{"doc_id": "1", "title": ""}],
        queries=[{"query_id": "1", "query": "x"}],
        qrels=[{"query_id": "1", "doc_id": "gone"}],
    )
    assert "no usable row of documents; set aside: 1 x documents: no text" in refused(files)
    write_tables(tmp_path, documents=[{"doc_id": "1", "title": "now there"}])
    assert re.search(r"no query with a relevant document remains; .* qrels: unknown doc_id", refused(files))
    write_tables(tmp_path, qrels=[{"query_id": "1"}])
    assert re.search(r"qrels\.jsonl \(qrels\) has no column \['doc_id'\] .*: map it under", refused(files))


def test_the_name_selects_the_class_of_a_data_set():
    adapter = TypeAdapter(AnyDataset)
    for name in sources.SUMMARIES:
        needed = {
            "beir": {"path": "x"},
            "msmarco": {"collection": "x", "test_queries": "y", "test_qrels": "z"},
            "columns": {"documents": {"path": "d"}, "queries": {"path": "q"}, "qrels": {"path": "r"}},
            "logs": {"documents": {"path": "d"}, "impressions": {"path": "i"}},
            "texts": {"path": "x"},
        }.get(name, {})
        assert adapter.validate_python({"name": name, **needed}).name == name


def test_a_byte_order_mark_is_not_part_of_a_field(tmp_path):
    (tmp_path / "rows.tsv").write_bytes("\ufeffq1\tfirst\nq2\tsecond \ufeff\n".encode())
    (file,) = find_files(str(tmp_path / "rows.tsv"), (".tsv",))
    piece = whole(file)
    rows = list(delimited_lines(piece, columns=("query_id", "query")))
    assert [row["query_id"] for row in rows] == ["q1", "q2"]
    assert rows[1]["query"] == "second \ufeff"
