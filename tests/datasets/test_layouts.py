"""Columns of users' documents: known names, chosen columns, and errors."""

import json
import logging
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from row_files import write_lines
from scalingnote.core.errors import DataError
from scalingnote.datasets import layouts, sources
from scalingnote.datasets.config import Columns, MsMarco, NewDocuments, TableFile, Texts
from scalingnote.datasets.file_heads import ID_NAMES, SUMMARY_NAMES, TEXT_NAMES
from scalingnote.datasets.input_files import Quarantine
from scalingnote.datasets.readers import read_documents
from scalingnote.datasets.sources import read_texts
from scalingnote.run.config import RunConfig

ONE = {"doc_id": "7", "title": "", "content": "long words"}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("scalingnote"), "propagate", True)
    caplog.set_level(logging.INFO)
    layouts._say.cache_clear()
    return caplog


def write(path, *rows):
    """Write rows in the format of the file's suffix."""
    if path.suffix == ".jsonl":
        return write_lines(path, *rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


PUBLIC = {
    "BEIR": {"_id": "7", "title": "One", "text": "long words", "metadata": {"lang": "en"}},
    "Pyserini": {"id": "7", "title": "One", "contents": "long words", "url": "u"},
    "Tevatron or MIRACL": {"docid": "7", "title": "One", "text": "long words"},
    "MS MARCO passages": {"pid": "7", "passage": "long words", "spans": "(0,4)", "docid": "D1"},
    "MS MARCO documents": {"docid": "7", "url": "u", "title": "One", "headings": "h", "body": "long words"},
    "MS MARCO segments": {"docid": "7", "url": "u", "title": "One", "segment": "long words", "start_char": 0},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_layouts_are_read_and_logged(tmp_path, told, name, suffix):
    row = PUBLIC[name]
    path = write(tmp_path / f"a.{suffix}", row)
    assert list(read_texts(path)) == [ONE | {"title": row.get("title", "")}]
    (line,) = [record.getMessage() for record in told.records if record.levelname == "INFO"]
    read_columns = {"_id", "id", "pid", "docid", "title", "text", "contents", "passage", "body", "segment"}
    unread = [column for column in row if column not in read_columns] + ["docid"] * (
        name == "MS MARCO passages"
    )
    assert line.startswith(
        f"{path}: text from {next(c for c, v in row.items() if v == 'long words')!r}, id from "
    )
    assert line.partition(" layout)")[0].endswith(f"({name}")
    assert line.partition("not read: ")[2] == ", ".join(map(repr, unread))


@pytest.mark.parametrize("column", [*TEXT_NAMES, *SUMMARY_NAMES])
def test_a_text_next_to_a_title_is_read(tmp_path, column):
    path = write(tmp_path / "a.jsonl", {"id": 7, "title": "One", column: "long words"})
    assert list(read_texts(path)) == [ONE | {"title": "One"}]


@pytest.mark.parametrize("column", ID_NAMES)
def test_ids_of_every_known_name_are_read(tmp_path, column):
    assert list(read_texts(write(tmp_path / "a.jsonl", {column: "7", "text": "long words"}))) == [ONE]


def test_the_passage_id_is_read_and_the_summary_is_not(tmp_path, told):
    row = {"docid": "D", "pid": "7", "url": "u", "body": "long words", "abstract": "short"}
    assert list(read_texts(write(tmp_path / "a.jsonl", row))) == [ONE]
    assert "text from 'body', id from 'pid', no title; not read: 'docid', 'url', 'abstract'" in told.text


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_unknown_columns_are_an_error_and_can_be_chosen(tmp_path, told, suffix):
    path = write(tmp_path / f"a.{suffix}", {"nr": 7, "title": "One", "inhalt": "long words", "kopf": "Eins"})
    with pytest.raises(DataError, match=r"only 'nr', 'title', 'inhalt', 'kopf': choose .*--text-column NAME"):
        read_texts(path)
    assert list(read_texts(path, {"content": "inhalt"})) == [ONE | {"doc_id": "1", "title": "One"}]
    assert "ids are numbers of rows, title from 'title'; not read: 'nr', 'kopf'" in told.text
    columns = {"content": "inhalt", "doc_id": "nr", "title": "kopf"}
    assert list(read_texts(path, columns)) == [ONE | {"title": "Eins"}]
    assert list(read_texts(path, {"content": "title"})) == [ONE | {"doc_id": "1", "content": "One"}]
    with pytest.raises(DataError, match=r"no column \['body'\].* only 'nr'"):
        read_texts(path, {"content": "body"})


def test_two_candidates_for_the_text_are_an_error(tmp_path):
    for first, second in (("text", "contents"), ("chunk", "document"), ("abstract", "description")):
        path = write(tmp_path / f"{first}.jsonl", {"id": "7", first: "long words", second: "other words"})
        with pytest.raises(DataError, match=f"may be the text, '{first}', '{second}': choose"):
            read_texts(path)
        assert list(read_texts(path, {"content": first})) == [ONE]
    blank = write(tmp_path / "b.jsonl", {"id": "7", "text": "", "contents": "long words", "body": None})
    assert list(read_texts(blank)) == [ONE]


def test_lists_and_objects_are_not_texts(tmp_path):
    for kind, value in (("lists", ["long", "words"]), ("objects", {"en": "long words"})):
        for suffix in ("jsonl", "parquet"):
            path = write(tmp_path / f"{kind}.{suffix}", {"id": "7", "title": "One", "contents": value})
            with pytest.raises(DataError, match=f"column 'contents' holds {kind}.*join the values"):
                read_texts(path)
    with pytest.raises(DataError, match="column '_id' holds objects, the id of a row"):
        read_texts(write(tmp_path / "mongo.jsonl", {"_id": {"$oid": "7"}, "text": "long words"}))


def test_a_number_in_a_text_column_is_not_read(tmp_path):
    row = {"id": "7", "title": "One", "chunk": 3}
    assert list(read_texts(write(tmp_path / "a.jsonl", row))) == [ONE | {"title": "One", "content": ""}]
    with pytest.raises(DataError, match="no column of texts by a known name"):
        read_texts(write(tmp_path / "b.jsonl", row | {"inhalt": "long words"}))
    assert list(read_texts(write(tmp_path / "c.jsonl", row | {"text": "long words"}))) == [
        ONE | {"title": "One"}
    ]


def test_a_title_at_the_beginning_of_contents_is_read_once(tmp_path):
    rows = [
        {"id": "1", "title": "One", "contents": "One\nlong words"},
        {"id": "2", "title": "One", "contents": "One long word"},
        {"id": "3", "contents": "Three\nlong words"},
    ]
    expected = [("One", "long words"), ("One", "One long word"), ("", "Three\nlong words")]
    for suffix in ("jsonl", "parquet"):
        documents = read_texts(write(tmp_path / f"a.{suffix}", *rows))
        assert [(row["title"], row["content"]) for row in documents] == expected


def test_blank_texts_are_logged_with_counts(tmp_path, told):
    rows = [{"id": str(n), "title": f"title {n}", "text": "" if n else "long words"} for n in range(20)]
    assert len(list(read_texts(write(tmp_path / "a.jsonl", *rows)))) == 20
    assert "column 'text' is empty in 19 of the first 20 rows" in told.text
    told.clear()
    titles = [{name: row[name] for name in ("id", "title")} for row in rows]
    assert len(list(read_texts(write(tmp_path / "b.jsonl", *titles)))) == 20
    assert "no text, id from 'id', title from 'title'" in told.text  # there are no other texts


def test_rows_with_other_columns_are_rejected(tmp_path):
    many = [
        {"id": str(n), "title": "One", "text": "word " * 300} for n in range(200)
    ]  # more than the first rows that are read
    stray = [
        {"id": "a", "title": "Two", "contents": "other words"},
        {"id": "b", "title": "Two", "inhalt": "other words"},
        {"docid": "c", "text": "other words"},
        {"id": "d", "title": "a title alone"},
        {"id": "1", "text": "the same id"},
    ]
    for rows in ([*many, *stray], [*stray, *many]):
        quarantine = Quarantine()
        documents = list(read_texts(write(tmp_path / "a.jsonl", *rows), quarantine=quarantine))
        assert len(documents) == 201
        assert quarantine.rejected["documents: duplicate doc_id"] == 1
        assert quarantine.rejected["documents: its text is not in the column of the first rows"] == 2
        assert quarantine.rejected["documents: its id is not in the column of the first rows"] == 1


@pytest.mark.parametrize(
    ("rows", "name", "title"),
    [
        ([("7", "long words"), ("8", "more words")], "MS MARCO passages", ""),
        ([("7", "One", "long words"), ("8", "Two", "more words")], "MS MARCO passages", "One"),
        ([("7", "u", "One", "long words"), ("8", "u", "Two", "more words")], "MS MARCO documents", "One"),
        ([("id", "text", "title"), ("7", "long words", "One"), ("8", "more words", "Two")], "", "One"),
    ],
)
def test_fields_between_tabs_with_and_without_a_header(tmp_path, told, rows, name, title):
    path = write(tmp_path / "collection.tsv", *rows, ("torn",))
    quarantine = Quarantine()
    first, second = read_texts(path, quarantine=quarantine)
    assert first == ONE | {"title": title}
    assert second["content"] == "more words"
    assert sum(quarantine.rejected.values()) == 1
    assert (f"({name} layout)" in told.text) == bool(name)


def test_fields_between_tabs_without_known_names_are_an_error(tmp_path):
    path = write(
        tmp_path / "a.tsv", ("nr", "kopf", "inhalt", "jahr", "ort"), ("7", "One", "long words", "1", "2")
    )
    with pytest.raises(DataError, match="begins with 5 fields between tabs"):
        read_texts(path)
    assert list(read_texts(path, {"content": "inhalt", "doc_id": "nr"})) == [ONE]


def test_files_of_a_folder_need_equal_layouts(tmp_path, told):
    folder = tmp_path / "corpus"
    for part in range(3):
        write(folder / f"{part}.jsonl", {"docid": str(part), "text": "long words", "year": part})
    write(folder / "3.parquet", {"docid": "3", "text": "long words", "year": 3})
    assert [row["doc_id"] for row in read_texts(folder)] == ["0", "1", "2", "3"]
    assert told.text.count("text from") == 1
    assert "0.jsonl and 3 more: text from 'text'" in told.text
    write(folder / "queries.jsonl", {"_id": "q", "text": "words"})
    with pytest.raises(
        DataError, match=r"0\.jsonl: text from 'text', id from 'docid'.*queries\.jsonl: text from"
    ):
        read_texts(folder)
    assert len(list(read_texts(f"{folder}/[0-9].*"))) == 4
    assert len(list(read_texts(f"{folder}/*"))) == 5  # a pattern reads each file by its own layout


def test_the_first_readable_row_may_be_late(tmp_path):
    path = tmp_path / "a.jsonl"
    rest = json.dumps({"docid": "7", "contents": "long words"})
    path.write_text("{" + "x" * 300_000 + "\n" + rest + "\n")
    assert list(read_texts(path)) == [ONE]


def test_a_column_with_invalid_utf8_is_a_text(tmp_path):
    text = pa.array([b"bad \xff", b"long words"]).view(pa.string())
    pq.write_table(pa.table({"docid": ["a", "7"], "contents": text}), tmp_path / "a.parquet")
    assert list(read_texts(tmp_path / "a.parquet")) == [ONE]


def test_other_sources_use_the_same_names(tmp_path, told):
    path = write(
        tmp_path / "a.jsonl", {"docid": 7, "title": "One", "body": "long words", "price": 2, "shop": "x"}
    )
    new = NewDocuments(documents=TableFile(path=str(path)), features={"price": "int64"})
    (row,) = read_documents(new).rows("documents")
    assert row == {"doc_id": 7, "title": "One", "content": "long words", "price": 2}
    assert "price from 'price' (MS MARCO documents layout); not read: 'shop'" in told.text
    judged = write(tmp_path / "judged.jsonl", {"query_id": "q", "query": "x", "doc_id": "7"})
    files = {name: {"path": str(judged)} for name in ("queries", "qrels")}
    mapped = Columns(documents={"path": str(path), "columns": {"content": "shop"}}, **files)
    (row,) = sources.read(mapped).rows("documents")
    assert row == {"doc_id": 7, "title": "One", "content": "x"}
    without = write(tmp_path / "b.jsonl", {"title": "One", "text": "long words"})
    with pytest.raises(DataError, match=r"no column of ids by a known name.*--id-column"):
        read_documents(NewDocuments(documents=TableFile(path=str(without))))
    features: dict[str, Any] = {"description": "string", "url": "string"}
    path = write(tmp_path / "c.jsonl", {"doc_id": "7", "title": "One", "description": "d", "url": "u"})
    (row,) = read_documents(NewDocuments(documents=TableFile(path=str(path)), features=features)).rows(
        "documents"
    )
    assert row == {"doc_id": "7", "title": "One", "description": "d", "url": "u"}


def test_msmarco_documents_may_be_in_any_file(tmp_path):
    path = tmp_path / "docs.txt"
    path.write_text("7\tu\tOne\tlong words\n")
    for name in ("queries", "qrels"):
        (tmp_path / name).write_text("")
    config = MsMarco(
        collection=str(path), train_queries=str(tmp_path / "queries"), train_qrels=str(tmp_path / "qrels")
    )
    assert list(sources.read(config).rows("documents")) == [ONE | {"title": "One"}]


def test_a_config_can_choose_columns():
    texts = Texts.model_validate({"path": "a.jsonl", "columns": {"content": "inhalt"}})
    assert texts.columns == {"content": "inhalt"}
    with pytest.raises(ValueError, match="columns"):
        RunConfig.model_validate({"dataset": {"name": "texts", "path": "a", "columns": {"body": "inhalt"}}})
