"""The data sets by name, and a user's own documents by path.

:func:`read_texts` is for commands that need documents only. It takes

    FILE.jsonl, FILE.parquet   columns `content` or `text`, optional `title`; `doc_id`, `_id` or `id`
    FILE.txt                   one text per line
    a folder                   in the BEIR layout: its corpus.jsonl
    a name                     of a data set that needs no settings, e.g. medquad

A path may be a glob pattern. A row without an id is named by its number.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from scalingnote.datasets import (
    download,
    file_formats,
    public_chinese,
    public_english,
    python_docs,
    row_checks,
)
from scalingnote.datasets.config import AnyDataset, DatasetConfig, Texts
from scalingnote.datasets.download import Description
from scalingnote.datasets.raw_rows import (
    FileRows,
    FileSlice,
    Quarantine,
    Row,
    Rows,
    SlicedRows,
    Source,
    UnreadableRow,
    cut,
    delimited_lines,
    find_files,
    json_lines,
    lines,
    match_files,
    parquet_batches,
    parquet_footer,
    readable_rows,
)
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs

log = get_logger("datasets")
TEXT_SUFFIXES = (".jsonl", ".parquet", ".txt")
_ID_COLUMNS = ("doc_id", "_id", "id")
_TEXT_COLUMNS = ("content", "text")
_SCHEMA_ROWS = 1000  # first rows of a JSON-lines file, from which its columns are inferred

_PYTHON_DOCS = Description(
    "python_docs",
    "documentation of the installed Python packages; queries are docstrings' first sentences",
    languages="en",
    licence="each package's own",
    downloaded=False,
)
_DOWNLOADED = {
    source.about.name: source
    for source in (
        public_english.MEDQUAD,
        public_english.STACKEXCHANGE_DEVOPS,
        public_english.CHORUS_ICECAT,
        public_chinese.ZH_READING_TITLES,
        public_chinese.ZH_MEDICAL_QA,
        public_chinese.DUREADER_DEMO_ZH,
    )
}
_USER_FILES = (
    Description("beir", "a directory in the BEIR layout", downloaded=False),
    Description("msmarco", "files in the MS MARCO passage layout", downloaded=False),
    Description("columns", "JSON-lines or Parquet files with a column mapping", downloaded=False),
    Description(
        "texts",
        "documents alone, without queries: JSON lines, Parquet, text lines, a BEIR folder",
        downloaded=False,
    ),
    Description(
        "logs", "a platform's documents and impression log, of any size, split by time", downloaded=False
    ),
)
_DESCRIPTIONS = {
    about.name: about
    for about in (_PYTHON_DOCS, *(source.about for source in _DOWNLOADED.values()), *_USER_FILES)
}


def names() -> list[str]:
    """The names of all data sets, those that need no settings first."""
    return list(_DESCRIPTIONS)


def describe(name: str) -> Description:
    """The description of a data set; ConfigError for an unknown name."""
    if name not in _DESCRIPTIONS:
        raise ConfigError(f"no data set {name!r}: choose one of {', '.join(names())}")
    return _DESCRIPTIONS[name]


def available(name: str) -> bool:
    """Whether `name` can be read without a download."""
    return not describe(name).downloaded or download.locate(name, _DOWNLOADED[name].files) is not None


def fetch(name: str) -> Path:
    """The directory of a public data set, which is downloaded if it is not yet there."""
    if not describe(name).downloaded:
        raise ConfigError(
            f"{name} has nothing to fetch: its files are named in the config, or it is built in"
        )
    source = _DOWNLOADED[name]
    return download.fetch(name, files=source.files, remotes=source.remotes, convert=source.convert)


def read(config: AnyDataset) -> Source:
    """Raw rows of the data set that a config names."""
    if config.name in _DOWNLOADED:
        return _DOWNLOADED[config.name].read(fetch(config.name))
    readers: dict[str, Callable[[Any], Source]] = {
        "python_docs": python_docs.read,
        "beir": file_formats.read_beir,
        "msmarco": file_formats.read_msmarco,
        "columns": file_formats.read_columns,
        "texts": _read_texts_config,
    }
    return readers[config.name](config)


# --- documents without queries ---------------------------------------------------------------------------


def read_texts(path: str | Path, *, quarantine: Quarantine | None = None) -> Iterator[Row]:
    """Documents of a file, of a BEIR folder or of a named data set, one at a time.

    Args:
        path: see the docstring of this module.
        quarantine: counts the rejected rows by reason: broken JSON, invalid UTF-8, no text, a repeated id. A
            summary is also logged once all rows are read.

    Returns:
        Rows with the strings doc_id, title and content; title or content may be empty, not both.

    Raises:
        DataError: at once if nothing is at `path`, or if a file is of another type or has no column of texts;
            after the last row if there was no text at all.
    """
    return _checked_texts(_text_rows(str(path)), str(path), quarantine or Quarantine())


def _read_texts_config(config: Texts) -> Source:
    """The same rows for the stage `prepare`, which checks and counts them itself."""
    return Source(documents=_text_rows(config.path))


def _text_rows(path: str) -> Rows:
    """Raw rows under our column names."""
    if not Path(path).exists() and path in names():
        return read(_config_of(path)).documents
    files = [
        file
        for match in match_files(path)
        for file in (match_files(str(match / "corpus.jsonl")) if match.is_dir() else [match])
    ]
    if wrong := [file for file in files if file.suffix not in TEXT_SUFFIXES]:
        raise DataError(f"{wrong[0]} is none of {', '.join(TEXT_SUFFIXES)}: convert it or rename it")
    columns = {fs.absolute(str(file)): _column_names(file) for file in files}
    for name, have in columns.items():
        # Without a readable row at its start, a file is judged row by row.
        if have and not {*_TEXT_COLUMNS, "title"} & set(have):
            raise DataError(
                f"{name} has no column `content` or `text`, only {have}: rename the column of texts"
            )
    pieces = cut([found for name in columns for found in find_files(name, TEXT_SUFFIXES)])
    slices, first = [], 1
    for number, piece in enumerate(pieces, 1):
        have = columns[piece.file.uri]
        slices.append(FileRows(piece, partial(_numbered_texts, have=have, first=first)))
        if number < len(pieces):  # the number of a row is the id of one without: earlier rows are counted
            first += _count_rows(piece)
    return SlicedRows(tuple(slices))


def _count_rows(piece: FileSlice) -> int:
    if piece.file.is_parquet:
        footer = parquet_footer(piece.file.uri)
        return sum(int(footer.row_group(n).num_rows) for n in range(piece.start, piece.stop))
    return sum(1 for line in lines(piece.file.uri, piece.start, piece.stop) if line.strip())


def _numbered_texts(piece: FileSlice, *, have: list[str], first: int) -> Iterator[Row | UnreadableRow]:
    return (_renamed(row, number) for number, row in enumerate(_file_rows(piece, have), first))


def _config_of(name: str) -> AnyDataset:
    try:
        return TypeAdapter[AnyDataset](AnyDataset).validate_python({"name": name})
    except ValidationError:
        raise DataError(f"the data set {name!r} needs settings: give the path of its files instead") from None


def _column_names(file: Path) -> list[str]:
    if file.suffix == ".parquet":
        return list(parquet_footer(str(file)).schema.to_arrow_schema().names)
    if file.suffix == ".txt":
        return ["content"]
    first = readable_rows(itertools.islice(json_lines(file), _SCHEMA_ROWS))
    return list(dict.fromkeys(name for row in first for name in row))


def _file_rows(piece: FileSlice, have: list[str]) -> Rows:
    if piece.file.is_parquet:
        return _parquet_bytes(piece, [n for n in (*_ID_COLUMNS, "title", *_TEXT_COLUMNS) if n in have])
    if piece.file.uri.endswith(".txt"):
        return delimited_lines(piece, columns=("content",), separator="\n")
    return json_lines(piece)


def _parquet_bytes(piece: FileSlice, columns: list[str]) -> Iterator[Row]:
    """Rows with strings as bytes, so that invalid UTF-8 rejects one row and not the batch."""
    for batch in parquet_batches(piece, columns):
        yield from pa.table({name: _as_bytes(batch[name]) for name in columns}).to_pylist()


def _as_bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return column.cast(pa.large_binary()) if text else column


def _renamed(row: Row | UnreadableRow, number: int) -> Row | UnreadableRow:
    if isinstance(row, UnreadableRow):
        return row
    doc_id = next((row[name] for name in _ID_COLUMNS if row.get(name) not in (None, "", b"")), str(number))
    if isinstance(doc_id, bytes):
        doc_id = doc_id.decode("utf-8", "backslashreplace")
    content = next((row[name] for name in _TEXT_COLUMNS if row.get(name) is not None), None)
    return {"doc_id": doc_id, "title": row.get("title"), "content": content}


def _checked_texts(rows: Rows, path: str, quarantine: Quarantine) -> Iterator[Row]:
    count = 0
    for row in row_checks.documents(
        rows, config=DatasetConfig(), features=pa.schema([]), quarantine=quarantine
    ):
        count += 1
        yield {name: row[name] for name in ("doc_id", "title", "content")}
    reasons = {
        key.removeprefix("documents: "): n
        for key, n in quarantine.rejected.most_common()
        if key.startswith("documents: ")
    }
    summary = ", ".join(f"{reason} ({n:,})" for reason, n in reasons.items())
    if not count:
        raise DataError(f"{path} has no text: {summary or 'it has no rows'}")
    if reasons:
        log.warning("%s: %d texts, %d rows set aside: %s", path, count, sum(reasons.values()), summary)
