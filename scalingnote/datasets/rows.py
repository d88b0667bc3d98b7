"""Raw rows on their way in: files are streamed as bytes, each line becomes a dict or says why it cannot."""

import csv
import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.errors import DataError

Row = dict[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A row that could not be decoded: its beginning, and why."""

    row: str
    reason: str


Rows = Iterable[Row | Unreadable]


@dataclass(frozen=True)
class Source:
    """What a reader hands over: raw rows of each table, named as in ``storage.schema``.

    A query may carry a `split` of its own; without one, the split is drawn by group. `features` types the
    document columns beyond the five that every document has, `profile` those of users beyond their id. `rank`
    orders documents for a subset (smallest first); without it, whole groups are kept in the order of a seeded
    hash. `rejected` are losses known only once the rows have been read (a package that crashed).
    """

    documents: Rows
    queries: Rows
    qrels: Rows = ()
    impressions: Rows = ()
    scores: Rows = ()
    users: Rows = ()
    features: pa.Schema = field(default_factory=lambda: pa.schema([]))
    profile: pa.Schema = field(default_factory=lambda: pa.schema([]))
    rank: Callable[[Row], Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def mapped(rows: Rows, rename: Callable[[Row], Row]) -> Iterator[Row | Unreadable]:
    """Rows in our columns; one that lacks a field is set aside, unreadable ones pass through."""
    for row in rows:
        if isinstance(row, Unreadable):
            yield row
            continue
        try:
            yield rename(row)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            yield Unreadable(repr(row)[:400], f"not in the source's format: {type(error).__name__} {error}")


def readable(rows: Rows) -> Iterator[Row]:
    """Only the rows that could be read: for a table drawn from a file whose losses another one reports."""
    return (row for row in rows if isinstance(row, dict))


def text_id(text: str, *, prefix: str) -> str:
    """An id that equal texts share, whatever their case."""
    return f"{prefix}-{hashlib.sha256(text.casefold().encode('utf-8', 'replace')).hexdigest()[:16]}"


def first_of_each(rows: Iterable[Row], key: str) -> Iterator[Row]:
    """Rows whose `key` was not met before."""
    met: set[str] = set()
    for row in rows:
        if row[key] not in met:
            met.add(row[key])
            yield row


def first_sentence(text: str, *, max_chars: int = 120) -> str:
    """The opening sentence, English or Chinese; a title for texts that have none."""
    end = re.search(r"[。！？\n]|[.!?](?=\s|$)", text.strip())
    return text.strip()[: end.end() if end else None][:max_chars].strip()


def json_lines(path: Path) -> Iterator[Row | Unreadable]:
    """Objects of a JSON-lines file."""
    for line in _lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except UnicodeDecodeError:
            yield Unreadable(_shown(line), "invalid UTF-8")
        except ValueError:
            yield Unreadable(_shown(line), "invalid JSON")
        else:
            yield value if isinstance(value, dict) else Unreadable(_shown(line), "not a JSON object")


def separated(
    path: Path, *, columns: Sequence[str], separator: str = "\t", header: bool = False
) -> Iterator[Row | Unreadable]:
    """Lines of plain fields without quoting (TREC and MS MARCO files); `separator` " " is any white space."""
    for number, line in enumerate(_lines(path)):
        if (header and number == 0) or not line.strip():
            continue
        try:
            # A byte-order mark would become part of the first id.
            text = line.decode("utf-8" if number else "utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError:
            yield Unreadable(_shown(line), "invalid UTF-8")
            continue
        fields = text.split() if separator == " " else text.split(separator)
        if len(fields) == len(columns):
            yield dict(zip(columns, fields, strict=True))
        else:
            yield Unreadable(_shown(line), f"{len(fields)} fields, expected {len(columns)}")


def quoted(path: Path, *, encoding: str = "utf-8") -> Iterator[Row | Unreadable]:
    """Rows of a CSV file with a header; bytes that `encoding` cannot read lose their row only."""
    marked = "utf-8-sig" if encoding == "utf-8" else encoding  # spreadsheets write a byte-order mark
    with path.open(encoding=marked, errors="surrogateescape", newline="") as stream:
        for row in csv.DictReader(stream):
            text = "".join(value for value in row.values() if isinstance(value, str))
            if None in row or None in row.values():
                yield Unreadable(text.encode("utf-8", "replace").decode(), "wrong number of fields")
            elif any("\udc80" <= character <= "\udcff" for character in text):
                yield Unreadable(text.encode("utf-8", "replace").decode(), f"invalid {encoding.upper()}")
            else:
                yield dict(row)


def parquet(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Row | Unreadable]:
    """Rows of a Parquet file, a batch in memory at a time."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(8192, columns=list(columns) if columns else None):
            yield from batch.to_pylist()


def files(pattern: str) -> list[Path]:
    """Files of a path or glob, sorted; DataError when there is none."""
    found = sorted(Path(path) for path in glob.glob(pattern))
    if not found:
        raise DataError(f"no file at {pattern}: check the path")
    return found


def _lines(path: Path) -> Iterator[bytes]:
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise DataError(f"no file at {path}: check the path") from None
    with stream:
        yield from stream


def _shown(line: bytes) -> str:
    return line[:400].decode("utf-8", "backslashreplace").rstrip()
