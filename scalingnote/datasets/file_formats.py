"""Readers of a user's own files: mapped columns, the layouts of BEIR and MS MARCO, texts, TREC files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.config import Beir, Columns, MsMarco, NewDocuments, TableFile
from scalingnote.datasets.raw_rows import (
    HEAD_BYTES,
    File,
    FileRows,
    FileSlice,
    Row,
    Rows,
    SlicedRows,
    Source,
    UnreadableRow,
    cut,
    delimited_lines,
    find_files,
    json_head,
    json_lines,
    lines,
    map_rows,
    match_files,
    parquet_batches,
    parquet_footer,
    parquet_rows,
    readable_rows,
    whole,
)
from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs
from scalingnote.storage import trec
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES, SCORES, USERS

COLUMN_TYPES = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "vector": pa.list_(pa.float32()),
}
TEXT_SUFFIXES = (".jsonl", ".parquet", ".txt")
_ID_COLUMNS = ("doc_id", "_id", "id")
_TEXT_COLUMNS = ("content", "text")
_OPTIONAL = {"title", "topic", "content", "group", "split", "user_id"}


def column_schema(types: Mapping[str, str]) -> pa.Schema:
    """The schema of the features or profile of a config."""
    return pa.schema({name: COLUMN_TYPES[kind] for name, kind in types.items()})


def read_columns(config: Columns) -> Source:
    """Tables as the config maps them. Qrels without a relevance column all have relevance 1."""

    def optional(file: TableFile | None, names: Sequence[str], **more: Any) -> Rows:
        return table_rows(file, names, **more) if file else ()

    return Source(
        documents=table_rows(config.documents, [*DOCUMENTS.names, *config.features]),
        queries=table_rows(config.queries, QUERIES.names),
        qrels=optional(config.qrels, QRELS.names, absent={"relevance": 1}),
        impressions=optional(config.impressions, IMPRESSIONS.names),
        scores=optional(config.scores, SCORES.names),
        users=optional(config.users, [*USERS.names, *config.profile]),
        features=column_schema(config.features),
        profile=column_schema(config.profile),
    )


def read_documents(config: NewDocuments) -> Source:
    """Documents without queries."""
    documents = table_rows(config.documents, [*DOCUMENTS.names, *config.features])
    return Source(documents, features=column_schema(config.features))


def table_rows(
    file: TableFile,
    names: Sequence[str],
    *,
    needs: Sequence[str] | None = None,
    absent: Mapping[str, Any] = MappingProxyType({}),
) -> SlicedRows:
    """Rows of a file or glob under our column names. The columns are checked before any row is read.

    Args:
        file: the path, and the mapping from our column names to those of the file.
        names: our columns; a column that the mapping leaves out has the same name in the file.
        needs: columns that Parquet files must have; by default all required ids.
        absent: default values for columns that a file does not have.

    Raises:
        DataError: no file, another file type, or a mapped or required column that is missing.
    """
    unknown = sorted(set(file.columns) - set(names))
    if unknown:
        raise DataError(f"{file.path}: columns maps {unknown}, which are none of {list(names)}")
    theirs = {name: file.columns.get(name, name) for name in names}
    files = find_files(file.path)

    ids = [name for name in names if name.endswith("_id") and name not in _OPTIONAL]

    def present(each: File) -> list[str]:
        by_default = (ids if needs is None else needs) if each.is_parquet else ()
        return _present(each, theirs, [*file.columns, *by_default])

    columns = dict(zip(files, fs.map_files(present, files), strict=True))
    read = partial(_renamed, theirs=theirs, absent=dict(absent))
    return SlicedRows(
        tuple(FileRows(piece, partial(read, present=columns[piece.file])) for piece in cut(files))
    )


def _renamed(
    piece: FileSlice, *, theirs: Mapping[str, str], present: Sequence[str], absent: Mapping[str, Any]
) -> Iterator[Row | UnreadableRow]:
    defaults = {name: value for name, value in absent.items() if theirs.get(name) not in (None, *present)}
    for row in parquet_rows(piece, columns=present) if piece.file.is_parquet else json_lines(piece):
        if isinstance(row, dict):
            row = defaults | {name: row[their] for name, their in theirs.items() if their in row}
        yield row


def _present(file: File, theirs: Mapping[str, str], needed: Sequence[str]) -> list[str]:
    """The mapped columns that a file has; DataError if it lacks one of `needed` (our names)."""
    have = _columns_of(file)
    if not have:  # without a readable row, each row is judged by itself
        return []
    missing = [theirs[name] for name in needed if theirs[name] not in have]
    if missing:
        where = "" if file.is_parquet else f" in its first {HEAD_BYTES >> 10} kB"
        raise DataError(f"{file.uri} has no column {missing}{where}, only {have}: map it under `columns`")
    return [their for their in dict.fromkeys(theirs.values()) if their in have]


def _columns_of(file: File) -> list[str]:
    """Columns of a Parquet file, or of the first JSON objects in the order of their first occurrence."""
    if file.is_parquet:
        return list(parquet_footer(file.uri).schema.to_arrow_schema().names)
    return list(dict.fromkeys(name for row in readable_rows(json_head(file)) for name in row))


# --- BEIR (Thakur et al. 2021) ---------------------------------------------------------------------------


def read_beir(config: Beir) -> Source:
    """A directory in the BEIR layout.

        corpus.jsonl    {"_id": ..., "title": ..., "text": ...}
        queries.jsonl   {"_id": ..., "text": ...}
        qrels/*.tsv     a header, then query-id <tab> corpus-id <tab> score

    Training queries come from qrels/train.tsv, test queries from qrels/test.tsv (else dev.tsv). If only one
    of them exists, `test_fraction` draws the split. A query in both splits is for test.
    """
    judged = _beir_qrels_files(config.path)
    queries = find_files(fs.join(config.path, "queries.jsonl"))
    return Source(
        documents=_sliced(find_files(fs.join(config.path, "corpus.jsonl")), _beir_documents),
        queries=_sliced(queries, partial(_beir_queries, judged=judged)),
        qrels=_sliced(list(judged.values()), _beir_qrels),
    )


def _sliced(files: Sequence[File], read: Callable[[FileSlice], Rows]) -> SlicedRows:
    return SlicedRows(tuple(FileRows(piece, read) for piece in cut(files)))


def _beir_qrels_files(path: str) -> dict[str, File]:
    candidates = {"train": ("train.tsv",), "test": ("test.tsv", "dev.tsv")}
    places = {
        split: [uri for name in names if fs.exists(uri := fs.join(path, "qrels", name))]
        for split, names in candidates.items()
    }
    judged = {split: find_files(uris[0], (".tsv",))[0] for split, uris in places.items() if uris}
    if not judged:
        raise DataError(f"no qrels/train.tsv, test.tsv or dev.tsv in {path}: check the path")
    return judged


def _beir_queries(piece: FileSlice, *, judged: Mapping[str, File]) -> Iterator[Row | UnreadableRow]:
    """Judged queries: BEIR keeps the queries of all splits in one file."""
    ids = {
        split: {row["query_id"] for row in readable_rows(_beir_qrels(whole(file)))}
        for split, file in judged.items()
    }

    def query(row: Row) -> Row:
        query_id = str(row["_id"])
        split = ("test" if query_id in ids["test"] else "train") if len(judged) == 2 else ""
        return {"query_id": query_id, "query": row["text"], "split": split}

    known = set().union(*ids.values())
    for row in map_rows(json_lines(piece), query):
        if isinstance(row, UnreadableRow) or row["query_id"] in known:
            yield row


def _beir_documents(piece: FileSlice) -> Iterator[Row | UnreadableRow]:
    def document(row: Row) -> Row:
        texts = {"title": row.get("title"), "topic": row.get("topic"), "content": row["text"]}
        return {"doc_id": row["_id"], **texts}

    return map_rows(json_lines(piece), document)


def _beir_qrels(piece: FileSlice) -> Iterator[Row | UnreadableRow]:
    return delimited_lines(piece, columns=("query_id", "doc_id", "relevance"), header=True)


# --- MS MARCO (Bajaj et al. 2016) ------------------------------------------------------------------------

_ANY_SUFFIX = ("",)


def read_msmarco(config: MsMarco) -> Source:
    """Files in the MS MARCO layout; each may be a glob.

        collection      doc_id <tab> content, or doc_id <tab> title <tab> content
        queries         query_id <tab> query
        qrels           query_id 0 doc_id relevance (TREC), separated by any white space

    If only one split is named, `test_fraction` divides it.
    """
    splits = {
        "train": (config.train_queries, config.train_qrels),
        "test": (config.test_queries, config.test_qrels),
    }
    named = {split: (q, r) for split, (q, r) in splits.items() if q is not None and r is not None}
    # Test first: of a query in both splits, the second occurrence is rejected as a duplicate.
    queries = [
        FileRows(piece, partial(_msmarco_queries, split=split if len(named) == 2 else ""))
        for split, (pattern, _) in sorted(named.items())
        for piece in cut(find_files(pattern, _ANY_SUFFIX))
    ]
    trec = partial(delimited_lines, columns=("query_id", "iteration", "doc_id", "relevance"), separator=" ")
    judged = [file for _, pattern in named.values() for file in find_files(pattern, _ANY_SUFFIX)]
    return Source(
        documents=_sliced(find_files(config.collection, _ANY_SUFFIX), _msmarco_documents),
        queries=SlicedRows(tuple(queries)),
        qrels=_sliced(judged, trec),
    )


def _msmarco_queries(piece: FileSlice, *, split: str) -> Iterator[Row | UnreadableRow]:
    for row in delimited_lines(piece, columns=("query_id", "query")):
        yield row | {"split": split} if isinstance(row, dict) and split else row


def _msmarco_documents(piece: FileSlice) -> Iterator[Row | UnreadableRow]:
    """Rows with as many columns as the first line of the file."""
    first = next(lines(piece.file.uri, 0, piece.file.size))
    title = [] if first.count(b"\t") == 1 else ["title"]
    return delimited_lines(piece, columns=["doc_id", *title, "content"])


# --- documents without queries ---------------------------------------------------------------------------


def text_rows(path: str) -> SlicedRows:
    """Documents under our column names, from files of one of TEXT_SUFFIXES or a BEIR folder; a glob, too.

    Columns are `content` or `text`, optionally `title`, and `doc_id`, `_id` or `id`; a line of a .txt file is
    a text. A row without an id is named by its number.
    """
    files: list[File] = []
    for match in match_files(path):
        files += find_files(str(match / "corpus.jsonl" if match.is_dir() else match), TEXT_SUFFIXES)
    columns = {file: ["content"] if file.uri.endswith(".txt") else _columns_of(file) for file in files}
    for file, have in columns.items():
        # Without a readable row at its start, a file is judged row by row.
        if have and not {*_TEXT_COLUMNS, "title"} & set(have):
            raise DataError(
                f"{file.uri} has no column `content` or `text`, only {have}: rename the column of texts"
            )
    pieces = cut(files)
    # The number of a row is the id of one without: earlier rows are counted.
    numbers = accumulate(map(_count_rows, pieces[:-1]), initial=1)
    return SlicedRows(
        tuple(
            FileRows(piece, partial(_numbered_texts, have=columns[piece.file], first=first))
            for piece, first in zip(pieces, numbers, strict=False)
        )
    )


def _count_rows(piece: FileSlice) -> int:
    if piece.file.is_parquet:
        footer = parquet_footer(piece.file.uri)
        return sum(int(footer.row_group(n).num_rows) for n in range(piece.start, piece.stop))
    return sum(1 for line in lines(piece.file.uri, piece.start, piece.stop) if line.strip())


def _numbered_texts(piece: FileSlice, *, have: list[str], first: int) -> Iterator[Row | UnreadableRow]:
    rows: Rows
    if piece.file.is_parquet:
        rows = _parquet_bytes(piece, [n for n in (*_ID_COLUMNS, "title", *_TEXT_COLUMNS) if n in have])
    elif piece.file.uri.endswith(".txt"):
        rows = delimited_lines(piece, columns=("content",), separator="\n")
    else:
        rows = json_lines(piece)
    return (_with_our_names(row, number) for number, row in enumerate(rows, first))


def _parquet_bytes(piece: FileSlice, columns: list[str]) -> Iterator[Row]:
    """Rows with strings as bytes, so that invalid UTF-8 rejects one row and not the batch."""
    for batch in parquet_batches(piece, columns):
        yield from pa.table({name: _as_bytes(batch[name]) for name in columns}).to_pylist()


def _as_bytes(column: pa.Array) -> pa.Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return column.cast(kind).cast(pa.large_binary()) if text else column


def _with_our_names(row: Row | UnreadableRow, number: int) -> Row | UnreadableRow:
    if isinstance(row, UnreadableRow):
        return row
    doc_id = next((row[name] for name in _ID_COLUMNS if row.get(name) not in (None, "", b"")), str(number))
    if isinstance(doc_id, bytes):
        doc_id = doc_id.decode("utf-8", "backslashreplace")
    content = next((row[name] for name in _TEXT_COLUMNS if row.get(name) is not None), None)
    return {"doc_id": doc_id, "title": row.get("title"), "content": content}


# --- slices of TREC files: only rows of the queries that are asked for leave a task ------------------------

RUN_ROWS = pa.schema(
    {"query_id": pa.string(), "doc_id": pa.string(), "score": pa.float64(), "rank": pa.float64()}
)


def find_trec_slices(uri: str) -> list[FileSlice]:
    """Slices of a TREC file, whatever its name; DataError if there is none."""
    return cut(find_files(uri, _ANY_SUFFIX))


def read_qrels_slice(piece: FileSlice, *, query_ids: pa.Array) -> pa.Table:
    """The judgements (QRELS) of some queries in a slice of a TREC file."""
    return _of_queries(QRELS, trec.qrels_rows(*_named_lines(piece)), query_ids)


def read_run_slice(piece: FileSlice, *, query_ids: pa.Array | None = None) -> pa.Table:
    """The results (RUN_ROWS) of some queries, or of all, in a slice of a TREC file."""
    return _of_queries(RUN_ROWS, (row for _, *row in trec.run_rows(*_named_lines(piece))), query_ids)


def _named_lines(piece: FileSlice) -> tuple[Iterator[bytes], str]:
    name = f"{piece.file.uri}, from byte {piece.start:,}" if piece.start else piece.file.uri
    return lines(piece.file.uri, piece.start, piece.stop), name


def _of_queries(schema: pa.Schema, rows: Iterable[Sequence[Any]], query_ids: pa.Array | None) -> pa.Table:
    columns = [*zip(*rows, strict=True)] or [()] * len(schema)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    return table if query_ids is None else table.filter(pc.is_in(table["query_id"], value_set=query_ids))
