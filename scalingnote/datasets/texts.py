"""A user's own texts, for commands that need nothing but documents: rows with an id, a title and a content.

    FILE.jsonl, FILE.parquet   columns `content` or `text`, optional `title`; `doc_id`, `_id` or `id`
    FILE.txt                   one text a line
    a folder                   in the BEIR layout: its corpus.jsonl
    a name                     of a data set that needs no settings, e.g. medquad

A path may be a glob pattern. A row without an id is named by its number.
"""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter, ValidationError

from scalingnote.datasets import intake, registry
from scalingnote.datasets.config import AnyDataset, DatasetConfig, Texts
from scalingnote.datasets.quarantine import Quarantine
from scalingnote.datasets.rows import Row, Rows, Source, Unreadable, files, json_lines, readable, separated
from scalingnote.errors import DataError
from scalingnote.log import get_logger

log = get_logger("datasets")
TYPES = (".jsonl", ".parquet", ".txt")
_IDS = ("doc_id", "_id", "id")
_TEXTS = ("content", "text")
_OPENING = 1000  # rows of a JSON-lines file that tell its columns


def read_texts(path: str | Path, *, quarantine: Quarantine | None = None) -> Iterator[Row]:
    """Documents of a file, of a BEIR folder or of a registered data set, one at a time.

    Args:
        path: see the head of this file.
        quarantine: counts the rows that are set aside, each with its reason: broken JSON, bytes that are not
            UTF-8, no text, an id that occurred before. They are also logged once all rows are read.

    Returns:
        Rows with the strings doc_id, title and content; title or content may be empty, not both.

    Raises:
        DataError: at once where nothing lies at `path`, where a file is of another type or has no column of
            texts; after the last row where there was no text at all.
    """
    return _checked(_raw(str(path)), str(path), quarantine or Quarantine())


def read(config: Texts, directory: Path | None = None) -> Source:
    """The rows of :func:`read_texts`, for the stage `prepare`, which checks and counts them itself."""
    return Source(documents=_raw(config.path), queries=())


def _raw(path: str) -> Rows:
    """Rows as the source has them, each in our columns."""
    if not Path(path).exists() and path in registry.names():
        return registry.read(_registered(path)).documents
    found = [
        file
        for place in files(path)
        for file in (files(str(place / "corpus.jsonl")) if place.is_dir() else [place])
    ]
    if wrong := [file for file in found if file.suffix not in TYPES]:
        raise DataError(f"{wrong[0]} is none of {', '.join(TYPES)}: convert it or rename it")
    columns = [(file, _columns(file)) for file in found]
    for file, names in columns:
        # A file whose opening has no readable row is judged by its rows.
        if names and not {*_TEXTS, "title"} & set(names):
            raise DataError(
                f"{file} has no column `content` or `text`, only {names}: rename the column of texts"
            )
    rows = (row for file, names in columns for row in _rows(file, names))
    return (_named(row, number) for number, row in enumerate(rows, 1))


def _registered(name: str) -> AnyDataset:
    try:
        return TypeAdapter[AnyDataset](AnyDataset).validate_python({"name": name})
    except ValidationError:
        raise DataError(f"the data set {name!r} needs settings: give the path of its files instead") from None


def _columns(file: Path) -> list[str]:
    if file.suffix == ".parquet":
        try:
            return list(pq.read_schema(file).names)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file} cannot be read as Parquet ({error}): check the file") from None
    if file.suffix == ".txt":
        return ["content"]
    return list(
        dict.fromkeys(name for row in readable(itertools.islice(json_lines(file), _OPENING)) for name in row)
    )


def _rows(file: Path, names: list[str]) -> Rows:
    if file.suffix == ".parquet":
        return _parquet(file, [name for name in (*_IDS, "title", *_TEXTS) if name in names])
    if file.suffix == ".txt":
        return separated(file, columns=("content",), separator="\n")
    return json_lines(file)


def _parquet(file: Path, names: list[str]) -> Iterator[Row]:
    """Rows with strings as bytes: text that is not UTF-8 costs its own row only."""
    with pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(8192, columns=names):
            yield from pa.table({name: _as_bytes(batch[name]) for name in names}).to_pylist()


def _as_bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return column.cast(pa.large_binary()) if text else column


def _named(row: Row | Unreadable, number: int) -> Row | Unreadable:
    if isinstance(row, Unreadable):
        return row
    doc_id = next((row[name] for name in _IDS if row.get(name) not in (None, "", b"")), str(number))
    if isinstance(doc_id, bytes):
        doc_id = doc_id.decode("utf-8", "backslashreplace")
    content = next((row[name] for name in _TEXTS if row.get(name) is not None), None)
    return {"doc_id": doc_id, "title": row.get("title"), "content": content}


def _checked(rows: Iterable[Row | Unreadable], path: str, quarantine: Quarantine) -> Iterator[Row]:
    sound = intake.documents(rows, config=DatasetConfig(), features=pa.schema([]), quarantine=quarantine)
    count = 0
    for row in sound:
        count += 1
        yield {name: row[name] for name in ("doc_id", "title", "content")}
    reasons = {
        key.removeprefix("documents: "): n
        for key, n in quarantine.rejected.most_common()
        if key.startswith("documents: ")
    }
    told = ", ".join(f"{reason} ({n:,})" for reason, n in reasons.items())
    if not count:
        raise DataError(f"{path} has no text: {told or 'it has no rows'}")
    if reasons:
        log.warning("%s: %d texts, %d rows set aside: %s", path, count, sum(reasons.values()), told)
