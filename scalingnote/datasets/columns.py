"""Your own files: JSON lines or Parquet in, with a mapping from our column names to theirs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

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
_OPTIONAL = {"title", "topic", "content", "group", "split", "user_id"}


def read(config: Columns, directory: Path | None = None) -> Source:
    """Tables as the config maps them. Qrels without a relevance column are all of relevance 1."""
    features = pa.schema({name: TYPES[kind] for name, kind in config.features.items()})
    profile = pa.schema({name: TYPES[kind] for name, kind in config.profile.items()})

    def optional(file: TableFile | None, schema: pa.Schema) -> Rows:
        return table_rows(file, schema.names) if file else ()

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
    file: TableFile, names: Sequence[str], *, needs: Sequence[str] | None = None
) -> Iterator[Row | Unreadable]:
    """Rows under our names; a mapping that names a column no table has is refused before anything is read.

    Parquet files must have the columns in `needs`; by default those are all ids.
    """
    unknown = sorted(set(file.columns) - set(names))
    if unknown:
        raise DataError(f"{file.path}: columns maps {unknown}, which are none of {list(names)}")
    paths = files(file.path)
    theirs = {name: file.columns.get(name, name) for name in names}
    for path in paths:
        if path.suffix not in (".jsonl", ".parquet"):
            raise DataError(f"{path} is neither .jsonl nor .parquet: convert it or rename it")
    return _renamed(paths, theirs, _ids(names) if needs is None else needs)


def _ids(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith("_id") and name not in _OPTIONAL]


def _renamed(
    paths: Sequence[Path], theirs: dict[str, str], needs: Sequence[str]
) -> Iterator[Row | Unreadable]:
    for path in paths:
        rows = (
            parquet(path, columns=_present(path, theirs, needs))
            if path.suffix == ".parquet"
            else json_lines(path)
        )
        for row in rows:
            if isinstance(row, dict):
                row = {name: row[their] for name, their in theirs.items() if their in row}
                if "relevance" in theirs:
                    row.setdefault("relevance", 1)
            yield row


def _present(path: Path, theirs: dict[str, str], needs: Sequence[str]) -> list[str]:
    """The mapped columns a Parquet file has; DataError for a missing one that no row can do without."""
    have = pq.read_schema(path).names
    missing = [name for name in needs if theirs[name] not in have]
    if missing:
        raise DataError(f"{path} has no column for {missing}, only {have}: map it under `columns`")
    return [their for their in dict.fromkeys(theirs.values()) if their in have]
