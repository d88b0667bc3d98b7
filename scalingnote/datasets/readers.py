"""Readers of a user's files: mapped columns, logs, layouts of BEIR and MS MARCO, texts, and TREC files."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.datasets.column_checks import MAX_TITLE_CHARS
from scalingnote.datasets.config import Beir, Columns, Logs, MsMarco, NewDocuments, TableFile, Texts
from scalingnote.datasets.file_heads import head_rows
from scalingnote.datasets.input_files import (
    MARKDOWN,
    SLICE_BYTES,
    File,
    FileColumns,
    FileRows,
    FileSlice,
    InputSlice,
    RawRow,
    RawRows,
    Source,
    UnreadableRow,
    cut,
    delimited_lines,
    find_files,
    json_lines,
    lines,
    match_files,
    parquet_footer,
    readable_rows,
    rename,
    whole,
)
from scalingnote.datasets.layouts import FileLayout, find_layouts, tell
from scalingnote.datasets.tables import (
    TableFormat,
    column_schema,
    column_slices,
    find_columns,
    named_rows,
    table_format,
)
from scalingnote.storage import filesystem as fs
from scalingnote.storage import trec
from scalingnote.storage.schema import DOCUMENTS, QRELS
from scalingnote.storage.shuffle import group_by_size

log = get_logger("datasets")
DOCUMENT_SUFFIXES = (".jsonl", ".parquet", ".tsv")
NEW_SUFFIXES = (*DOCUMENT_SUFFIXES, MARKDOWN)  # of new documents for an index
TEXT_SUFFIXES = (*DOCUMENT_SUFFIXES, ".txt", MARKDOWN)  # of documents that may have no ids
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", re.MULTILINE)
_TEXT_COLUMNS = ("doc_id", "title", "content")
_NO_FEATURES = pa.schema([])
# Columns that every file of a table must have.
_REQUIRED = {
    "queries": ["query_id", "query"],
    "qrels": ["query_id", "doc_id"],
    "impressions": ["session_id", "query_id", "doc_id", "position", "clicked", "timestamp"],
    "scores": ["query_id", "doc_id", "score"],
    "users": ["user_id"],
}
_REQUIRED_BY_TEXT = {  # in a log
    "impressions": ["session_id", "query", "doc_id", "position", "clicked", "timestamp"],
    "scores": ["doc_id", "score", "query or query_id"],
    "qrels": ["doc_id", "query or query_id"],
}


# --- tables of columns ------------------------------------------------------------------------------------


def read_columns(config: Columns) -> Source:
    """Find the tables of a column mapping. Qrels without a relevance column all have relevance 1."""
    features, profile = column_schema(config.features), column_schema(config.profile)
    tables: dict[str, Sequence[InputSlice]] = {"documents": _documents(config.documents, features)}
    for table, required in _REQUIRED.items():
        if file := getattr(config, table):
            form = table_format(table, profile if table == "users" else _NO_FEATURES)
            # Other tables refer to queries only by their ids.
            names = [name for name in form.kinds if name != "query" or table == "queries"]
            tables[table] = column_slices(find_columns(file, form.of_columns(names), required))
    return Source(tables, features, profile)


def read_documents(config: NewDocuments) -> Source:
    """Find documents without queries, in a table or in files of Markdown."""
    features, path = column_schema(config.features), config.documents.path
    if any(file.is_markdown for file in find_files(path, NEW_SUFFIXES)):
        if config.documents.columns:
            raise DataError(f"{path} is Markdown, which has no columns: leave `columns` out")
        return Source({"documents": text_slices(path, {})}, features)
    return Source({"documents": _documents(config.documents, features)}, features)


def _documents(file: TableFile, features: pa.Schema) -> list[InputSlice]:
    names = [*DOCUMENTS.names, *features.names]
    if unknown := sorted(set(file.columns) - set(names)):
        raise DataError(f"{file.path}: columns maps {unknown}, which are not in {names}")
    return document_slices(find_layouts(find_files(file.path, DOCUMENT_SUFFIXES), file.columns, names=names))


def document_slices(layouts: Mapping[File, FileLayout], *, numbered: bool = False) -> list[InputSlice]:
    """Return slices of documents under our names; if `numbered`, rows without an id get their number."""
    tell(layouts)
    pieces = cut([*layouts])
    counts = map(count_rows, pieces[:-1]) if numbered else repeat(0)
    numbers: Iterable[int | None] = accumulate(counts, initial=1) if numbered else repeat(None)
    slices: list[InputSlice] = []
    for piece, first in zip(pieces, numbers, strict=False):
        layout = layouts[piece.file]
        by_row = partial(_rows_of, layout=layout, first=first)
        in_columns = FileColumns(piece, dict(layout.columns), first)
        slices.append(in_columns if piece.file.is_parquet else FileRows(piece, by_row))
    return slices


def count_rows(piece: FileSlice) -> int:
    """Count the rows of a slice; blank lines do not count."""
    if piece.file.is_parquet:
        footer = parquet_footer(piece.file.uri)
        return sum(int(footer.row_group(n).num_rows) for n in range(piece.start, piece.stop))
    return sum(1 for line in lines(piece.file.uri, piece.start, piece.stop) if line.strip())


def _rows_of(piece: FileSlice, *, layout: FileLayout, first: int | None) -> Iterator[RawRow | UnreadableRow]:
    for place, row in enumerate(head_rows(piece, layout.head, [*layout.columns.values()])):
        ours = layout.row(row) if isinstance(row, dict) else row
        if isinstance(ours, dict) and first is not None and ours.get("doc_id") in (None, ""):
            ours["doc_id"] = str(first + place)
        yield ours


def read_logs(config: Logs) -> Source:
    """Find the tables of a log, in which all files identify queries by ids, or all by texts."""
    features = column_schema(config.features)
    tables: dict[str, Sequence[InputSlice]] = {"documents": _documents(config.documents, features)}
    evidence: dict[str, dict[File, dict[str, str]]] = {}
    for table, required in _REQUIRED_BY_TEXT.items():
        if file := getattr(config, table):
            dwell = ["dwell_s"] if table == "impressions" and config.min_dwell_s else []
            evidence[table] = find_columns(file, table_format(table, _NO_FEATURES), [*required, *dwell])
    _name_queries(evidence)
    tables |= {table: column_slices(columns) for table, columns in evidence.items()}
    return Source(tables, features)


def _name_queries(columns: Mapping[str, dict[File, dict[str, str]]]) -> None:
    """Remove query_id from the columns of all files with texts, unless impressions have it."""
    has_ids = {
        file.uri: "query_id" in columns_of_file for file, columns_of_file in columns["impressions"].items()
    }
    if len(set(has_ids.values())) > 1:
        without_id = next(uri for uri, has_id in has_ids.items() if not has_id)
        raise DataError(
            f"{without_id} has no column query_id, other impressions have: one query would become two"
        )
    for table, files in columns.items():
        for file, columns_of_file in files.items():
            if any(has_ids.values()) and "query_id" not in columns_of_file:
                raise DataError(
                    f"{file.uri} ({table}) has no column query_id, but the impressions identify queries by "
                    "it: add it here, or leave it out there"
                )
            if not any(has_ids.values()) and "query" in columns_of_file:
                columns_of_file.pop("query_id", None)


# --- files that other stages read row by row --------------------------------------------------------------


def table_rows(
    file: TableFile, names: Sequence[str], *, needs: Sequence[str] | None = None
) -> list[FileRows]:
    """Return slices of a file or glob with our column names; columns are checked before any row is read.

    Args:
        file: the path, and the mapping from our column names to those of the file.
        names: our columns; a column that the mapping leaves out has the same name in the file.
        needs: columns that files must have; by default all required ids.

    Raises:
        DataError: no file, another file type, or a mapped or required column that is missing.
    """
    ids = [name for name in names if name.endswith("_id") and name != "user_id"]
    columns = find_columns(
        file, TableFormat("", dict.fromkeys(names, "any")), ids if needs is None else needs
    )
    return [named_rows(piece, columns[piece.file]) for piece in cut([*columns])]


# --- BEIR (Thakur et al. 2021) ---------------------------------------------------------------------------


def read_beir(config: Beir) -> Source:
    """Find the tables of a directory in the BEIR layout.

        corpus.jsonl    {"_id": ..., "title": ..., "text": ...}
        queries.jsonl   {"_id": ..., "text": ...}
        qrels/*.tsv     a header, then query-id <tab> corpus-id <tab> score

    Training queries come from qrels/train.tsv, test queries from qrels/test.tsv (else dev.tsv). If only one
    of them exists, `test_fraction` draws the split. A query in both splits is for test.
    """
    judged = _beir_qrels_files(config.path)
    corpus, queries = (find_files(fs.join(config.path, name)) for name in ("corpus.jsonl", "queries.jsonl"))
    columns = {"doc_id": "_id", "content": "text"}
    layouts = find_layouts(corpus, columns, names=(*_TEXT_COLUMNS, "topic"))
    return Source(
        {
            "documents": document_slices(layouts),
            "queries": _slice_files(queries, partial(_beir_queries, judged=judged)),
            "qrels": _slice_files(list(judged.values()), _beir_qrels),
        }
    )


def _slice_files(files: Sequence[File], read: Callable[[FileSlice], RawRows]) -> list[FileRows]:
    return [FileRows(piece, read) for piece in cut(files)]


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


def _beir_queries(piece: FileSlice, *, judged: Mapping[str, File]) -> Iterator[RawRow | UnreadableRow]:
    """Yield the judged queries: BEIR has the queries of all splits in one file."""
    ids = {
        split: {row["query_id"] for row in readable_rows(_beir_qrels(whole(file)))}
        for split, file in judged.items()
    }

    judged_ids = set().union(*ids.values())
    for row in json_lines(piece):
        query = rename(row, {"query_id": "_id", "query": "text"})
        if isinstance(query, dict) and "query_id" in query:
            query_id = str(query["query_id"])
            if query_id not in judged_ids:
                continue
            split = ("test" if query_id in ids["test"] else "train") if len(judged) == 2 else ""
            query |= {"query_id": query_id, "split": split}
        yield query


def _beir_qrels(piece: FileSlice) -> Iterator[RawRow | UnreadableRow]:
    return delimited_lines(piece, columns=("query_id", "doc_id", "relevance"), header=True)


# --- MS MARCO (Bajaj et al. 2016) ------------------------------------------------------------------------

_ANY_SUFFIX = ("",)


def read_msmarco(config: MsMarco) -> Source:
    """Find the tables of files in the MS MARCO layout; each path may be a glob.

        collection      pid <tab> passage, docid <tab> url <tab> title <tab> body, or the JSON lines of v2
        queries         query_id <tab> query
        qrels           query_id 0 doc_id relevance (TREC), separated by any white space

    If only one split is given, `test_fraction` divides it.
    """
    splits = {
        "train": (config.train_queries, config.train_qrels),
        "test": (config.test_queries, config.test_qrels),
    }
    given_splits = {split: (q, r) for split, (q, r) in splits.items() if q is not None and r is not None}
    # Test first: if a query is in both splits, its second occurrence is rejected as a duplicate.
    queries = [
        slice_rows
        for split, (pattern, _) in sorted(given_splits.items())
        for slice_rows in _slice_files(
            find_files(pattern, _ANY_SUFFIX),
            partial(_msmarco_queries, split=split if len(given_splits) == 2 else ""),
        )
    ]
    judgements = partial(
        delimited_lines, columns=("query_id", "iteration", "doc_id", "relevance"), separator=" "
    )
    judged = [file for _, pattern in given_splits.values() for file in find_files(pattern, _ANY_SUFFIX)]
    collection = find_files(config.collection, _ANY_SUFFIX)
    layouts = find_layouts(collection, {}, names=_TEXT_COLUMNS, tabs=True)
    return Source(
        {
            "documents": document_slices(layouts),
            "queries": queries,
            "qrels": _slice_files(judged, judgements),
        }
    )


def _msmarco_queries(piece: FileSlice, *, split: str) -> Iterator[RawRow | UnreadableRow]:
    for row in delimited_lines(piece, columns=("query_id", "query")):
        yield row | {"split": split} if isinstance(row, dict) and split else row


# --- documents without queries ---------------------------------------------------------------------------


def read_texts(config: Texts) -> Source:
    """Find documents without queries."""
    columns = {str(ours): theirs for ours, theirs in config.columns.items()}
    return Source({"documents": text_slices(config.path, columns)})


def text_slices(path: str, columns: Mapping[str, str]) -> list[InputSlice]:
    """Return slices of documents under our column names, from files of one of TEXT_SUFFIXES.

    Of a folder in the layout of BEIR, only the corpus is read. A line of a .txt file is a text; a .md file is
    a document. A row without an id gets its number as id.

    Args:
        path: file, folder or glob.
        columns: our names (doc_id, title, content) -> those of the files, if :mod:`layouts` cannot find them.

    Raises:
        DataError: there is no file, a file has no clear text column, or a folder's files differ in columns.
    """
    all_layouts: dict[File, FileLayout] = {}
    markdown: list[File] = []
    for match in match_files(path):
        corpus = match / "corpus.jsonl"
        files = find_files(str(corpus if corpus.is_file() else match), TEXT_SUFFIXES)
        if markdown_files := [file for file in files if file.is_markdown]:
            if len(markdown_files) < len(files):
                raise DataError(
                    f"{match} has Markdown and other files: choose one kind, such as '{match}/**/*.md'"
                )
            markdown += markdown_files
            continue
        layouts = find_layouts(files, columns, names=_TEXT_COLUMNS, numbered=True)
        one, *others = layouts.values()
        if other := next((each for each in others if not each.is_like(one)), None):
            raise DataError(
                f"{match} has files of different columns: {one.head.uri}: {one}; and {other.head.uri}: "
                f"{other}. Select those of the documents by a pattern, such as FOLDER/part-*.jsonl"
            )
        all_layouts |= layouts
    rows = document_slices(all_layouts, numbered=True) if all_layouts else []
    return [*(_markdown_slices(markdown, path) if markdown else []), *rows]


def _markdown_slices(files: Sequence[File], path: str) -> list[InputSlice]:
    """Return slices of documents that are files, with ids from their paths and titles from first headings."""
    fixed_path = re.split(r"[*?\[]", fs.absolute(path), maxsplit=1)[0]
    base = (fixed_path if Path(path).is_dir() else fixed_path.rpartition("/")[0]).rstrip("/") + "/"
    log.info(
        "%s: each of %s files is a document, its id from the path, its title from the first heading",
        path,
        f"{len(files):,}",
    )
    slices: list[InputSlice] = []
    for group in group_by_size([file.size for file in files], limit=SLICE_BYTES):
        group_files = [files[number] for number in group]
        # If files were added, removed or changed, the slice differs, so that it is read again.
        size, newest = sum(file.size for file in group_files), max(file.changed for file in group_files)
        part = whole(File(group_files[0].uri, size, newest))
        slices.append(FileRows(part, partial(_markdown_rows, files=group_files, base=base)))
    return slices


def _markdown_rows(_: FileSlice, *, files: Sequence[File], base: str) -> Iterator[RawRow | UnreadableRow]:
    for file in files:
        name = file.uri.removeprefix(base)
        try:
            text = fs.read_bytes(file.uri).decode("utf-8-sig")
        except UnicodeDecodeError:
            yield UnreadableRow(name, "invalid UTF-8")
            continue
        heading = _HEADING.search(text)
        title, content = PurePosixPath(name).stem, text
        if heading and len(heading[1]) <= MAX_TITLE_CHARS:
            title = heading[1]
            content = text if text[: heading.start()].strip() else text[heading.end() :]
        yield {"doc_id": name, "title": title, "content": content}


# --- slices of TREC files: a task returns only the rows of requested queries ------------------------------

RUN_ROWS = pa.schema(
    {"query_id": pa.string(), "doc_id": pa.string(), "score": pa.float64(), "rank": pa.float64()}
)


def find_trec_slices(uri: str) -> list[FileSlice]:
    """Return slices of a TREC file of any name; DataError if there is none."""
    return cut(find_files(uri, _ANY_SUFFIX))


def read_qrels_slice(piece: FileSlice, *, query_ids: pa.Array) -> pa.Table:
    """Read the judgements (QRELS) of some queries in a slice of a TREC file."""
    return _of_queries(QRELS, trec.qrels_rows(*_named_lines(piece)), query_ids)


def read_run_slice(piece: FileSlice, *, query_ids: pa.Array | None = None) -> pa.Table:
    """Read the results (RUN_ROWS) of some queries, or of all, in a slice of a TREC file."""
    return _of_queries(RUN_ROWS, (row for _, *row in trec.run_rows(*_named_lines(piece))), query_ids)


def _named_lines(piece: FileSlice) -> tuple[Iterator[bytes], str]:
    name = f"{piece.file.uri}, from byte {piece.start:,}" if piece.start else piece.file.uri
    return lines(piece.file.uri, piece.start, piece.stop), name


def _of_queries(schema: pa.Schema, rows: Iterable[Sequence[Any]], query_ids: pa.Array | None) -> pa.Table:
    columns = [*zip(*rows, strict=True)] or [()] * len(schema)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    return table if query_ids is None else table.filter(pc.is_in(table["query_id"], value_set=query_ids))
