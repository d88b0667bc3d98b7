"""Input files: cut into slices of work, read as raw rows; and the rows that were rejected.

    path, pattern -> File -> FileSlice (a range of bytes of lines, or of row groups of Parquet) -> Row

Every row is in one slice, and slices are in the order of the input: files by name, then rows. A raw row is a
dict, or the reason why its line cannot be decoded.
"""

import csv
import glob
import hashlib
import io
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import REJECTED
from scalingnote.storage.shuffle import MAX_SLICES, JsonRecord, group_by_size

SLICE_BYTES = 64 << 20  # of input, uncompressed
SHOWN_CHARS = 200  # of a rejected row
KEPT_PER_REASON = 1000  # rejected rows
HEAD_BYTES = 1 << 18  # of a JSON-lines file, from which its columns are inferred
_ROWS_PER_BATCH = 4096


@dataclass(frozen=True)
class File:
    """One input file."""

    uri: str
    size: int
    changed: int  # modification time, so that results of an older version are not reused

    @property
    def is_parquet(self) -> bool:
        """Whether it is Parquet, by its name."""
        return self.uri.endswith(".parquet")


@dataclass(frozen=True)
class FileSlice:
    """The lines of a file that start in the bytes [start, stop), or its row groups [start, stop)."""

    file: File
    start: int
    stop: int
    size: int  # bytes, uncompressed


def whole(file: File) -> FileSlice:
    """A whole file of lines as one slice."""
    return FileSlice(file, 0, file.size, file.size)


def find_files(path: str, suffixes: tuple[str, ...] = (".jsonl", ".parquet")) -> list[File]:
    """The files at `path`, sorted; DataError if there is none, or one of another type.

    `path` is a file, a directory, or a pattern of ``*`` and ``?``. Below a directory, names that start with
    ``.`` or ``_`` (markers of other systems) are skipped.
    """
    path = fs.absolute(path).rstrip("/")
    fixed = re.split(r"[*?]", path, maxsplit=1)[0]
    base = path if fixed == path else fixed.rsplit("/", 1)[0]
    filesystem, inside = fs.resolve(base)
    top = filesystem.get_file_info(inside)
    if top.type == pafs.FileType.File:
        infos = {"": top}
    else:
        selector = pafs.FileSelector(inside, recursive=True, allow_not_found=True)
        listed = [info for info in filesystem.get_file_info(selector) if info.type == pafs.FileType.File]
        named = {info.path[len(inside) :].strip("/"): info for info in listed}
        pattern = _pattern(path[len(base) :].strip("/"))
        infos = {name: info for name, info in named.items() if pattern.fullmatch(name)}
    if not infos:
        raise DataError(f"no file at {path}: check the path")
    files = [
        File(fs.join(base, name) if name else base, info.size, info.mtime_ns or 0)
        for name, info in sorted(infos.items())
    ]
    if wrong := [file.uri for file in files if not file.uri.endswith(suffixes)]:
        kinds = " nor ".join(suffixes)
        raise DataError(f"{wrong[0]} is neither {kinds}: convert it or narrow the path")
    return files


def _pattern(glob: str) -> re.Pattern[str]:
    if not glob:
        return re.compile(r"(?:[^._/][^/]*/)*[^._/][^/]*")
    text = re.escape(glob).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.compile(text)


def cut(files: Sequence[File], *, limit: int | None = None) -> list[FileSlice]:
    """Slices of at most `limit` bytes, if row groups of Parquet are not larger.

    By default, they have SLICE_BYTES, or more if there would be more than about MAX_SLICES.
    """
    size = limit or max(SLICE_BYTES, sum(file.size for file in files) // MAX_SLICES)
    return list(chain.from_iterable(fs.map_files(partial(_cut_file, limit=size), files)))


def _cut_file(file: File, *, limit: int) -> list[FileSlice]:
    if not file.is_parquet:
        ranges = [(start, min(start + limit, file.size)) for start in range(0, file.size, limit)]
        return [FileSlice(file, start, stop, stop - start) for start, stop in ranges]
    footer = parquet_footer(file.uri)
    sizes = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
    groups = group_by_size(sizes, limit=limit)
    return [FileSlice(file, group[0], group[-1] + 1, sum(sizes[n] for n in group)) for group in groups]


def parquet_footer(uri: str) -> pq.FileMetaData:
    """The footer of a Parquet file; DataError for another file."""
    try:
        with fs.open_input(uri) as source:
            return pq.read_metadata(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{uri} is not a Parquet file ({error}): check the path") from None


def lines(uri: str, start: int, stop: int) -> Iterator[bytes]:
    """The lines of a file whose first byte lies in [start, stop), with their ends."""
    # Read from one byte earlier: a newline there means that a line begins at `start`.
    position = max(start - 1, 0)
    buffered = min(max(stop - position, 1), fs.BLOCK_BYTES)
    with fs.open_input(uri) as source, io.BufferedReader(source, buffered) as stream:
        stream.seek(position)
        position += len(stream.readline()) if start else 0
        while position < stop and (line := stream.readline()):
            yield line
            position += len(line)


# --- raw rows ---------------------------------------------------------------------------------------------

Row = dict[str, Any]


@dataclass(frozen=True)
class UnreadableRow:
    """A row that could not be decoded: its beginning and the reason."""

    row: str
    reason: str


Rows = Iterable[Row | UnreadableRow]


@dataclass(frozen=True)
class FileRows:
    """The raw rows of a slice of a file, read again by each iteration, in any process."""

    part: FileSlice
    read: Callable[[FileSlice], Rows]

    def __iter__(self) -> Iterator[Row | UnreadableRow]:
        return iter(self.read(self.part))


@dataclass(frozen=True)
class SlicedRows:
    """The raw rows of a table in files, slice by slice."""

    slices: tuple[FileRows, ...]

    def __iter__(self) -> Iterator[Row | UnreadableRow]:
        return chain.from_iterable(self.slices)


def files_of(rows: Rows) -> tuple[FileRows, ...]:
    """The slices of a table in files; none for other rows."""
    return rows.slices if isinstance(rows, SlicedRows) else ()


@dataclass(frozen=True)
class Source:
    """The raw rows of each table of a data source; columns are named as in ``storage.schema``.

    Tables that are SlicedRows may be read in tasks, others in one process. A query may have a `split`;
    without one, the split is drawn by group. `features` are the types of document columns beyond the five
    that all of them have, `profile` those of user columns beyond the id. `rank` orders documents for a subset
    (smallest first); without it, whole groups are kept in the order of a seeded hash. The manifest has the
    `notes`.
    """

    documents: Rows
    queries: Rows = ()
    qrels: Rows = ()
    impressions: Rows = ()
    scores: Rows = ()
    users: Rows = ()
    features: pa.Schema = field(default_factory=lambda: pa.schema([]))
    profile: pa.Schema = field(default_factory=lambda: pa.schema([]))
    rank: Callable[[Row], Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


def map_rows(rows: Rows, rename: Callable[[Row], Row]) -> Iterator[Row | UnreadableRow]:
    """Rows under our column names; a row without a needed field becomes unreadable, unreadable rows pass."""
    return expand_rows(rows, lambda row: [rename(row)])


def expand_rows(rows: Rows, expand: Callable[[Row], Iterable[Row]]) -> Iterator[Row | UnreadableRow]:
    """The same for rows of a file that hold several of ours."""
    for row in rows:
        if isinstance(row, UnreadableRow):
            yield row
            continue
        try:
            yield from list(expand(row))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            yield UnreadableRow(
                repr(row)[:400], f"not in the source's format: {type(error).__name__} {error}"
            )


def readable_rows(rows: Rows) -> Iterator[Row]:
    """The rows that could be read: for a second table from a file whose unreadable rows are counted."""
    return (row for row in rows if isinstance(row, dict))


def text_id(text: str, *, prefix: str) -> str:
    """An id that is equal for equal texts, ignoring case."""
    return f"{prefix}-{hashlib.sha256(text.casefold().encode('utf-8', 'replace')).hexdigest()[:16]}"


def table_of(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table; only some of them are Python objects at the same time."""
    remaining, tables = iter(rows), [schema.empty_table()]
    while some := list(islice(remaining, _ROWS_PER_BATCH)):
        tables.append(pa.Table.from_pylist(some, schema))
    return pa.concat_tables(tables)


def distinct_rows(rows: Rows, key: str) -> Iterator[Row | UnreadableRow]:
    """The first row of each value of `key`; unreadable rows pass."""
    seen: set[str] = set()
    for row in rows:
        if isinstance(row, UnreadableRow):
            yield row
        elif row[key] not in seen:
            seen.add(row[key])
            yield row


def first_sentence(text: str, *, max_chars: int = 120) -> str:
    """The first sentence of an English or Chinese text: the title of texts without one."""
    end = re.search(r"[。！？\n]|[.!?](?=\s|$)", text.strip())
    return text.strip()[: end.end() if end else None][:max_chars].strip()


def json_lines(path: Path | FileSlice) -> Iterator[Row | UnreadableRow]:
    """Objects of a JSON-lines file."""
    return parsed_lines(_lines(path))


def json_head(file: File) -> list[Row | UnreadableRow]:
    """The objects in the first HEAD_BYTES of a JSON-lines file."""
    size = min(file.size, HEAD_BYTES)
    return list(json_lines(FileSlice(file, 0, size, size)))


def parsed_lines(lines: Iterable[bytes]) -> Iterator[Row | UnreadableRow]:
    """The JSON object of each line that is not blank."""
    for line in lines:
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except UnicodeDecodeError:
            yield UnreadableRow(_beginning(line), "invalid UTF-8")
        except (ValueError, RecursionError):  # the second of lists in lists, some thousand deep
            yield UnreadableRow(_beginning(line), "invalid JSON")
        else:
            yield value if isinstance(value, dict) else UnreadableRow(_beginning(line), "not a JSON object")


def delimited_lines(
    path: Path | FileSlice, *, columns: Sequence[str], separator: str = "\t", header: bool = False
) -> Iterator[Row | UnreadableRow]:
    """Lines of fields without quoting (TREC and MS MARCO files); `separator` " " means any white space."""
    opening = isinstance(path, Path) or path.start == 0
    for number, line in enumerate(_lines(path), 0 if opening else 1):
        if (header and number == 0) or not line.strip():
            continue
        try:
            # A byte-order mark would become part of the first id.
            text = line.decode("utf-8" if number else "utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError:
            yield UnreadableRow(_beginning(line), "invalid UTF-8")
            continue
        fields = text.split() if separator == " " else text.split(separator)
        if len(fields) == len(columns):
            yield dict(zip(columns, fields, strict=True))
        else:
            yield UnreadableRow(_beginning(line), f"{len(fields)} fields, expected {len(columns)}")


def csv_rows(path: Path, *, encoding: str = "utf-8") -> Iterator[Row | UnreadableRow]:
    """Rows of a CSV file with a header; bytes that `encoding` cannot decode reject their row only."""
    marked = "utf-8-sig" if encoding == "utf-8" else encoding  # spreadsheets write a byte-order mark
    with path.open(encoding=marked, errors="surrogateescape", newline="") as stream:
        for row in csv.DictReader(stream):
            text = "".join(value for value in row.values() if isinstance(value, str))
            if None in row or None in row.values():
                yield UnreadableRow(text.encode("utf-8", "replace").decode(), "wrong number of fields")
            elif any("\udc80" <= character <= "\udcff" for character in text):
                yield UnreadableRow(text.encode("utf-8", "replace").decode(), f"invalid {encoding.upper()}")
            else:
                yield dict(row)


def parquet_rows(path: Path | FileSlice, *, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Rows of a Parquet file, one batch in memory at a time."""
    for batch in parquet_batches(path, columns):
        yield from batch.to_pylist()


def parquet_batches(path: Path | FileSlice, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """The same rows as record batches."""
    groups = range(path.start, path.stop) if isinstance(path, FileSlice) else None
    uri = path.file.uri if isinstance(path, FileSlice) else str(path)
    with fs.open_input(uri) as source:
        yield from pq.ParquetFile(source).iter_batches(
            8192, row_groups=groups, columns=list(columns) if columns else None
        )


def match_files(pattern: str) -> list[Path]:
    """The files of a path or glob, sorted; DataError if there are none."""
    found = sorted(Path(path) for path in glob.glob(pattern))
    if not found:
        raise DataError(f"no file at {pattern}: check the path")
    return found


def _lines(path: Path | FileSlice) -> Iterator[bytes]:
    if isinstance(path, FileSlice):
        return lines(path.file.uri, path.start, path.stop)
    if not path.is_file():
        raise DataError(f"no file at {path}: check the path")
    return lines(str(path), 0, path.stat().st_size)


def _beginning(line: bytes) -> str:
    return line[:400].decode("utf-8", "backslashreplace").rstrip()


class Quarantine:
    """Counts rejected and repaired rows by reason, and keeps the first rejected rows of each reason."""

    def __init__(self, *, kept_per_reason: int = KEPT_PER_REASON) -> None:
        self.rejected: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()
        self._rows: list[dict[str, str]] = []
        # Number of rows still to be kept, by table and reason.
        self._remaining: defaultdict[tuple[str, str], int] = defaultdict(lambda: kept_per_reason)

    def reject(self, table: str, row: Any, reason: str) -> None:
        """Set a row aside."""
        self.reject_rows(table, [row], reason)

    def reject_rows(self, table: str, first: Sequence[Any], reason: str, *, count: int | None = None) -> None:
        """Set `count` rows aside, of which `first` are the first, by default all."""
        self.rejected[f"{table}: {reason}"] += len(first) if count is None else count
        kept = first[: self._remaining[table, reason]]
        self._remaining[table, reason] -= len(kept)
        self._rows += [{"table": table, "row": shown_row(row), "reason": reason} for row in kept]

    def store(self, uri: str) -> JsonRecord:
        """Write the rows that are kept to `uri`; returns the counts, as JSON values for :meth:`add`."""
        if self._rows:
            write_table(uri, self.table())
        kept = uri if self._rows else None
        return {"rejected": dict(self.rejected), "repaired": dict(self.repaired), "kept": kept}

    def add(self, stored: JsonRecord) -> None:
        """Add what another quarantine stored, whose rows come later."""
        self.rejected.update(stored["rejected"])
        self.repaired.update(stored["repaired"])
        for row in read_table(stored["kept"]).to_pylist() if stored["kept"] else ():
            if self._remaining[row["table"], row["reason"]]:
                self._remaining[row["table"], row["reason"]] -= 1
                self._rows.append(row)

    def reasons(self, *, of: str = "") -> str:
        """The most frequent reasons, or those of one table, as the end of an error message."""
        counted = Counter({reason: n for reason, n in self.rejected.items() if reason.startswith(of)})
        worst = ", ".join(f"{count:,} x {reason}" for reason, count in counted.most_common(3))
        return f"; set aside: {worst}" if worst else ""

    def table(self) -> pa.Table:
        """REJECTED: a limited number of rows of each reason, in the order of rejection."""
        return pa.Table.from_pylist(self._rows, schema=REJECTED)


def shown_row(row: str | dict[str, Any]) -> str:
    """The beginning of a rejected row, as text that can be stored."""
    if not isinstance(row, str):
        # A long value is cut before it is formatted: a row may hold a megabyte.
        row = repr({key: v[:SHOWN_CHARS] if isinstance(v, str | bytes) else v for key, v in row.items()})
    return row[:SHOWN_CHARS].encode("utf-8", "backslashreplace").decode()
