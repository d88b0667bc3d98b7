"""Your own files: JSON lines or Parquet in, with a mapping from our column names to theirs."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.datasets.config import Columns, NewDocuments, TableFile
from scalingnote.datasets.rows import Row, Rows, Source, Unreadable, files, json_lines, parquet
from scalingnote.errors import DataError
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES, SCORES, USERS

TYPES = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "vector": pa.list_(pa.float32()),
}
_OPENING = 1 << 18  # bytes of a JSON-lines file that tell its columns
_OPTIONAL = {"title", "topic", "content", "group", "split", "user_id"}


def read(config: Columns, directory: Path | None = None) -> Source:
    """Tables as the config maps them. Qrels without a relevance column are all of relevance 1."""
    features = pa.schema({name: TYPES[kind] for name, kind in config.features.items()})
    profile = pa.schema({name: TYPES[kind] for name, kind in config.profile.items()})

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
    """Documents alone."""
    features = pa.schema({name: TYPES[kind] for name, kind in config.features.items()})
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
) -> Iterator[Row | Unreadable]:
    """Rows under our names. DataError, before any is read, for a mapping that names what is not there.

    Parquet files must have the columns in `needs`; by default those are all ids. `absent` has the values of
    columns that a file does not have at all.
    """
    unknown = sorted(set(file.columns) - set(names))
    if unknown:
        raise DataError(f"{file.path}: columns maps {unknown}, which are none of {list(names)}")
    theirs = {name: file.columns.get(name, name) for name in names}
    inputs: list[tuple[Path, list[str]]] = []
    for path in files(file.path):
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
) -> Iterator[Row | Unreadable]:
    for path, present in inputs:
        given = {name: value for name, value in absent.items() if theirs.get(name) not in (None, *present)}
        rows = parquet(path, columns=present) if path.suffix == ".parquet" else json_lines(path)
        for row in rows:
            if isinstance(row, dict):
                row = given | {name: row[their] for name, their in theirs.items() if their in row}
            yield row


def _present(path: Path, theirs: Mapping[str, str], needed: Sequence[str]) -> list[str]:
    """The mapped columns that a file has; DataError where it lacks one of `needed`, our names."""
    if path.suffix == ".parquet":
        have, where = pq.read_schema(path).names, ""
    else:
        have, where = _opening(path), f" in its first {_OPENING >> 10} kB"
        if not have:  # nothing that could be judged by
            return []
    missing = [theirs[name] for name in needed if theirs[name] not in have]
    if missing:
        raise DataError(f"{path} has no column {missing}{where}, only {have}: map it under `columns`")
    return [their for their in dict.fromkeys(theirs.values()) if their in have]


def _opening(path: Path) -> list[str]:
    """Columns of the first JSON objects, in the order they turn up."""
    have: dict[str, None] = {}
    read = 0
    for row in json_lines(path):
        if isinstance(row, dict):
            have |= dict.fromkeys(row)
            read += len(repr(row))
        if read > _OPENING:
            break
    return list(have)
