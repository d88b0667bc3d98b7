"""Readers of a user's own files: mapped columns, the layouts of BEIR and MS MARCO, texts, TREC files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.config import Beir, Columns, MsMarco, NewDocuments, TableFile
from scalingnote.datasets.layouts import TEXT_LINES, Layout, as_bytes, find_layouts, tell
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
DOCUMENT_SUFFIXES = (".jsonl", ".parquet", ".tsv")
TEXT_SUFFIXES = (*DOCUMENT_SUFFIXES, ".txt")  # of documents without ids, too


def column_schema(types: Mapping[str, str]) -> pa.Schema:
    """The schema of the features or profile of a config."""
    return pa.schema({name: COLUMN_TYPES[kind] for name, kind in types.items()})


def read_columns(config: Columns) -> Source:
    """Tables as the config maps them. Qrels without a relevance column all have relevance 1."""

    def optional(file: TableFile | None, names: Sequence[str], **more: Any) -> Rows:
        return table_rows(file, names, **more) if file else ()

    return Source(
        documents=_documents(config),
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
    return Source(_documents(config), features=column_schema(config.features))


def _documents(config: Columns | NewDocuments) -> SlicedRows:
    file, names = config.documents, [*DOCUMENTS.names, *config.features]
    _refuse_unknown(file, names)
    return _document_rows(find_layouts(find_files(file.path, DOCUMENT_SUFFIXES), file.columns, names=names))


def _refuse_unknown(file: TableFile, names: Sequence[str]) -> None:
    if unknown := sorted(set(file.columns) - set(names)):
        raise DataError(f"{file.path}: columns maps {unknown}, which are none of {list(names)}")


def _document_rows(layouts: Mapping[File, Layout], *, numbered: bool = False) -> SlicedRows:
    """Documents under our column names; a row without an id has none, or, if `numbered`, its number."""
    tell(layouts)
    pieces = cut([*layouts])
    counts = map(_count_rows, pieces[:-1]) if numbered else repeat(0)
    numbers: Iterable[int | None] = accumulate(counts, initial=1) if numbered else repeat(None)
    return SlicedRows(
        tuple(
            FileRows(piece, partial(_rows_of, layout=layouts[piece.file], first=first))
            for piece, first in zip(pieces, numbers, strict=False)
        )
    )


def _rows_of(piece: FileSlice, *, layout: Layout, first: int | None) -> Iterator[Row | UnreadableRow]:
    rows: Rows
    if piece.file.is_parquet:
        rows = _parquet_bytes(piece, [*dict.fromkeys(layout.columns.values())])
    elif fields := layout.head.fields:
        separator = "\n" if fields == TEXT_LINES else "\t"
        rows = delimited_lines(piece, columns=fields, separator=separator, header=layout.head.header)
    else:
        rows = json_lines(piece)
    for place, row in enumerate(rows):
        ours = layout.row(row) if isinstance(row, dict) else row
        if isinstance(ours, dict):
            doc_id = ours.get("doc_id")
            if isinstance(doc_id, bytes):
                doc_id = doc_id.decode("utf-8", "backslashreplace")
            if first is not None and doc_id in (None, ""):
                doc_id = str(first + place)
            ours["doc_id"] = doc_id
        yield ours


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
    _refuse_unknown(file, names)
    theirs = {name: file.columns.get(name, name) for name in names}
    files = find_files(file.path)

    ids = [name for name in names if name.endswith("_id") and name != "user_id"]

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
    have = columns_of(file)
    if not have:  # without a readable row, each row is judged by itself
        return []
    missing = [theirs[name] for name in needed if theirs[name] not in have]
    if missing:
        where = "" if file.is_parquet else f" in its first {HEAD_BYTES >> 10} kB"
        raise DataError(f"{file.uri} has no column {missing}{where}, only {have}: map it under `columns`")
    return [their for their in dict.fromkeys(theirs.values()) if their in have]


def columns_of(file: File) -> list[str]:
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

        collection      pid <tab> passage, docid <tab> url <tab> title <tab> body, or the JSON lines of v2
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
        documents=_document_rows(
            find_layouts(
                find_files(config.collection, _ANY_SUFFIX),
                {},
                names=("doc_id", "title", "content"),
                tabs=True,
            )
        ),
        queries=SlicedRows(tuple(queries)),
        qrels=_sliced(judged, trec),
    )


def _msmarco_queries(piece: FileSlice, *, split: str) -> Iterator[Row | UnreadableRow]:
    for row in delimited_lines(piece, columns=("query_id", "query")):
        yield row | {"split": split} if isinstance(row, dict) and split else row


# --- documents without queries ---------------------------------------------------------------------------


def text_rows(path: str, columns: Mapping[str, str]) -> SlicedRows:
    """Documents under our column names, from files of one of TEXT_SUFFIXES or a folder of them; a glob, too.

    Of a folder in the layout of BEIR, its corpus. A line of a .txt file is a text. A row without an id is
    named by its number.

    Args:
        path: file, folder or glob.
        columns: our names (doc_id, title, content) -> those of the files, where :mod:`layouts` is to be told.

    Raises:
        DataError: nothing is there, a file's text cannot be told, or a folder's files differ in columns.
    """
    found: dict[File, Layout] = {}
    for match in match_files(path):
        corpus = match / "corpus.jsonl"
        files = find_files(str(corpus if corpus.is_file() else match), TEXT_SUFFIXES)
        layouts = find_layouts(files, columns, names=("doc_id", "title", "content"), numbered=True)
        one, *others = layouts.values()
        if other := next((each for each in others if not each.is_like(one)), None):
            raise DataError(
                f"{match} has files of different columns: {one.head.uri}: {one}; and {other.head.uri}: "
                f"{other}. Name those of the documents by a pattern, such as FOLDER/part-*.jsonl"
            )
        found |= layouts
    return _document_rows(found, numbered=True)


def _count_rows(piece: FileSlice) -> int:
    if piece.file.is_parquet:
        footer = parquet_footer(piece.file.uri)
        return sum(int(footer.row_group(n).num_rows) for n in range(piece.start, piece.stop))
    return sum(1 for line in lines(piece.file.uri, piece.start, piece.stop) if line.strip())


def _parquet_bytes(piece: FileSlice, columns: list[str]) -> Iterator[Row]:
    """Rows with strings as bytes, so that invalid UTF-8 rejects one row and not the batch."""
    for batch in parquet_batches(piece, columns):
        yield from pa.table({name: as_bytes(batch[name]) for name in columns}).to_pylist()


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
