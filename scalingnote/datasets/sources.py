"""The data sets by name: their descriptions and readers, and documents of any of them, one at a time.

All rows are read in one way; a `Quarantine` receives the unusable ones with their reasons:

    config -> read -> Source: slices of files -> tables.read_tables -> column_checks.check_table -> valid rows

Slices of Parquet are read by columns, other files row by row. A reader in :mod:`readers` finds the files and,
by their first rows (:mod:`file_heads`, :mod:`layouts`), the columns; it does not read tables itself.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.datasets import python_docs, readers
from scalingnote.datasets.column_checks import check_table
from scalingnote.datasets.config import AnyDataset
from scalingnote.datasets.input_files import InputSlice, Quarantine, RawRow, Source
from scalingnote.datasets.tables import read_tables, table_format

log = get_logger("datasets")
SUMMARIES = {
    "python_docs": "documentation of the installed Python packages; queries are docstrings' first sentences",
    "beir": "a directory in the BEIR layout",
    "msmarco": "files in the MS MARCO passage layout",
    "columns": "JSON-lines or Parquet files with a column mapping",
    "texts": "documents without queries: JSON lines, Parquet, tabs, text lines, folders of them",
    "logs": "a platform's documents and impression log, of any size, split by time",
}


def read(config: AnyDataset) -> Source:
    """Find the slices of the data set of a config."""
    by_kind: dict[str, Callable[[Any], Source]] = {
        "python_docs": python_docs.read,
        "beir": readers.read_beir,
        "msmarco": readers.read_msmarco,
        "columns": readers.read_columns,
        "texts": readers.read_texts,
        "logs": readers.read_logs,
    }
    return by_kind[config.name](config)


def read_texts(
    path: str | Path,
    columns: Mapping[str, str] = MappingProxyType({}),
    *,
    quarantine: Quarantine | None = None,
) -> Iterator[RawRow]:
    """Read the documents of a file, of a folder or of a named data set, one at a time.

    Args:
        path: see :func:`readers.text_slices`; or the name of a data set that needs no settings.
        columns: our names -> those of the file.
        quarantine: counts the rejected rows by reason: broken JSON, invalid UTF-8, no text, a repeated id. A
            summary is also logged after the last row.

    Returns:
        Rows with the strings doc_id, title and content; title or content may be empty, not both.

    Raises:
        DataError: at once if there is no file at `path`, a file is of another type or has no clear text
            column; after the last row if no row had a text.
    """
    return _checked_texts(_text_slices(str(path), columns), str(path), quarantine or Quarantine())


def _text_slices(path: str, columns: Mapping[str, str]) -> list[InputSlice]:
    if Path(path).exists() or path not in SUMMARIES:
        return readers.text_slices(path, columns)
    if columns:
        raise DataError(f"{path} is a data set with known columns: leave {[*columns.values()]} out")
    try:
        config = TypeAdapter[AnyDataset](AnyDataset).validate_python({"name": path})
    except ValidationError:
        raise DataError(f"the data set {path!r} needs settings: give the path of its files instead") from None
    return list(read(config).tables["documents"])


def _checked_texts(slices: list[InputSlice], path: str, quarantine: Quarantine) -> Iterator[RawRow]:
    features = pa.schema([])
    form, seen_ids = table_format("documents", features), set[str]()
    for rows in slices:
        for table in read_tables(rows, form, quarantine=quarantine):
            valid = check_table(table, "documents", features=features, quarantine=quarantine)
            for row in valid.select(["doc_id", "title", "content"]).to_pylist():
                if row["doc_id"] in seen_ids:
                    quarantine.reject("documents", row, "duplicate doc_id")
                else:
                    seen_ids.add(row["doc_id"])
                    yield row
    reasons = {
        key.removeprefix("documents: "): n
        for key, n in quarantine.rejected.most_common()
        if key.startswith("documents: ")
    }
    summary = ", ".join(f"{reason} ({n:,})" for reason, n in reasons.items())
    if not seen_ids:
        raise DataError(f"{path} has no text: {summary or 'it has no rows'}")
    if reasons:
        log.warning(
            "%s: %d texts, %d rows set aside: %s", path, len(seen_ids), sum(reasons.values()), summary
        )
