"""Readers of a user's own files: JSON lines or Parquet with mapped columns, BEIR and MS MARCO layouts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.datasets.config import Beir, Columns, MsMarco, NewDocuments, TableFile
from scalingnote.datasets.raw_rows import (
    Row,
    Rows,
    Source,
    UnreadableRow,
    delimited_lines,
    json_lines,
    map_rows,
    match_files,
    parquet_rows,
    readable_rows,
)
from scalingnote.errors import DataError
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES, SCORES, USERS

COLUMN_TYPES = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "vector": pa.list_(pa.float32()),
}
_SCHEMA_BYTES = 1 << 18  # of a JSON-lines file, from which its columns are inferred
_OPTIONAL = {"title", "topic", "content", "group", "split", "user_id"}


def read_columns(config: Columns) -> Source:
    """Tables as the config maps them. Qrels without a relevance column all have relevance 1."""
    features = pa.schema({name: COLUMN_TYPES[kind] for name, kind in config.features.items()})
    profile = pa.schema({name: COLUMN_TYPES[kind] for name, kind in config.profile.items()})

    def optional(file: TableFile | None, schema: pa.Schema) -> Rows:
        return table_rows(file, schema.names, absent={"relevance": 1}) if file else ()

    return Source(
        documents=table_rows(config.documents, [*DOCUMENTS.names, *features.names]),
        queries=table_rows(config.queries, QUERIES.names),
        qrels=optional(config.qrels, QRELS),
        impressions=optional(config.impressions, IMPRESSIONS),
        scores=optional(config.scores, SCORES),
        users=table_rows(config.users, [*USERS.names, *profile.names]) if config.users else (),
        features=features,
        profile=profile,
    )


def read_documents(config: NewDocuments) -> Source:
    """Documents without queries."""
    features = pa.schema({name: COLUMN_TYPES[kind] for name, kind in config.features.items()})
    return Source(
        documents=table_rows(config.documents, [*DOCUMENTS.names, *features.names]),
        queries=(),
        features=features,
    )


def table_rows(
    file: TableFile,
    names: Sequence[str],
    *,
    needs: Sequence[str] | None = None,
    absent: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Row | UnreadableRow]:
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
    inputs: list[tuple[Path, list[str]]] = []
    for path in match_files(file.path):
        if path.suffix not in (".jsonl", ".parquet"):
            raise DataError(f"{path} is neither .jsonl nor .parquet: convert it or rename it")
        needed = list(file.columns)
        if path.suffix == ".parquet":
            needed += _ids(names) if needs is None else needs
        inputs.append((path, _present(path, theirs, needed)))
    return _renamed(inputs, theirs, absent)


def _ids(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith("_id") and name not in _OPTIONAL]


def _renamed(
    inputs: Sequence[tuple[Path, list[str]]], theirs: Mapping[str, str], absent: Mapping[str, Any]
) -> Iterator[Row | UnreadableRow]:
    for path, present in inputs:
        defaults = {name: value for name, value in absent.items() if theirs.get(name) not in (None, *present)}
        rows = parquet_rows(path, columns=present) if path.suffix == ".parquet" else json_lines(path)
        for row in rows:
            if isinstance(row, dict):
                row = defaults | {name: row[their] for name, their in theirs.items() if their in row}
            yield row


def _present(path: Path, theirs: Mapping[str, str], needed: Sequence[str]) -> list[str]:
    """The mapped columns that a file has; DataError if it lacks one of `needed` (our names)."""
    if path.suffix == ".parquet":
        have, where = pq.read_schema(path).names, ""
    else:
        have, where = _first_columns(path), f" in its first {_SCHEMA_BYTES >> 10} kB"
        if not have:  # without a readable row, each row is judged by itself
            return []
    missing = [theirs[name] for name in needed if theirs[name] not in have]
    if missing:
        raise DataError(f"{path} has no column {missing}{where}, only {have}: map it under `columns`")
    return [their for their in dict.fromkeys(theirs.values()) if their in have]


def _first_columns(path: Path) -> list[str]:
    """Columns of the first JSON objects, in the order of their first occurrence."""
    have: dict[str, None] = {}
    size = 0
    for row in json_lines(path):
        if isinstance(row, dict):
            have |= dict.fromkeys(row)
            size += len(repr(row))
        if size > _SCHEMA_BYTES:
            break
    return list(have)


# --- BEIR (Thakur et al. 2021) ---------------------------------------------------------------------------


def read_beir(config: Beir) -> Source:
    """A directory in the BEIR layout.

        corpus.jsonl    {"_id": ..., "title": ..., "text": ...}
        queries.jsonl   {"_id": ..., "text": ...}
        qrels/*.tsv     a header, then query-id <tab> corpus-id <tab> score

    Training queries come from qrels/train.tsv, test queries from qrels/test.tsv (else dev.tsv). If only one
    of them exists, `test_fraction` draws the split. A query in both splits is for test.
    """
    base = Path(config.path)
    judged = _beir_qrels_files(base)
    ids = {
        split: {row["query_id"] for row in readable_rows(_beir_qrels(path))} for split, path in judged.items()
    }
    is_split = len(judged) == 2

    def query(row: Row) -> Row:
        query_id = str(row["_id"])
        split = ("test" if query_id in ids["test"] else "train") if is_split else ""
        return {"query_id": query_id, "query": row["text"], "split": split}

    # BEIR keeps the queries of all splits in one file; queries of other splits are skipped.
    known = set().union(*ids.values())
    queries = map_rows(json_lines(base / "queries.jsonl"), query)
    return Source(
        documents=map_rows(json_lines(base / "corpus.jsonl"), _beir_document),
        queries=(row for row in queries if isinstance(row, UnreadableRow) or row["query_id"] in known),
        qrels=(row for path in judged.values() for row in _beir_qrels(path)),
    )


def _beir_qrels_files(base: Path) -> dict[str, Path]:
    candidates = {"train": ("train.tsv",), "test": ("test.tsv", "dev.tsv")}
    paths = {
        split: next((base / "qrels" / name for name in names if (base / "qrels" / name).is_file()), None)
        for split, names in candidates.items()
    }
    judged = {split: path for split, path in paths.items() if path is not None}
    if not judged:
        raise DataError(f"no qrels/train.tsv, test.tsv or dev.tsv in {base}: check the path")
    return judged


def _beir_document(row: Row) -> Row:
    return {
        "doc_id": row["_id"],
        "title": row.get("title"),
        "topic": row.get("topic"),
        "content": row["text"],
    }


def _beir_qrels(path: Path) -> Iterator[Row | UnreadableRow]:
    return delimited_lines(path, columns=("query_id", "doc_id", "relevance"), header=True)


# --- MS MARCO (Bajaj et al. 2016) ------------------------------------------------------------------------


def read_msmarco(config: MsMarco) -> Source:
    """Files in the MS MARCO layout; each may be a glob, and the collection is streamed.

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

    def queries() -> Iterator[Row | UnreadableRow]:
        # Test first: of a query in both splits, the second occurrence is rejected as a duplicate.
        for split, (pattern, _) in sorted(named.items()):
            for path in match_files(pattern):
                for row in delimited_lines(path, columns=("query_id", "query")):
                    if isinstance(row, dict) and len(named) == 2:
                        row["split"] = split
                    yield row

    def qrels() -> Iterator[Row | UnreadableRow]:
        for _, pattern in named.values():
            for path in match_files(pattern):
                yield from delimited_lines(
                    path, columns=("query_id", "iteration", "doc_id", "relevance"), separator=" "
                )

    return Source(documents=_msmarco_collection(config.collection), queries=queries(), qrels=qrels())


def _msmarco_collection(pattern: str) -> Iterator[Row | UnreadableRow]:
    for path in match_files(pattern):
        with path.open("rb") as stream:
            width = max((line.count(b"\t") + 1 for line in islice(stream, 1)), default=2)
        columns = ("doc_id", "content") if width == 2 else ("doc_id", "title", "content")
        yield from delimited_lines(path, columns=columns)
