"""Input files: their division into slices, their raw rows, and the rows that were rejected.

    path, pattern -> File -> FileSlice (a range of bytes of lines, or of row groups of Parquet) -> RawRow

Every row is in one slice, and slices are in the order of the input: files by name, then rows. A raw row is a
dict, or an UnreadableRow with the reason why its line cannot be decoded.
"""

import glob
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import REJECTED
from scalingnote.storage.shuffle import MAX_SLICES, JsonRecord, group_by_size

SLICE_BYTES = 64 << 20  # of input, uncompressed
SHOWN_CHARS = 200  # of a rejected row
KEPT_PER_REASON = 100  # rejected rows
MARKDOWN = ".md"
_COUNTERS = ("rejected", "repaired", "left_out", "counts")


@dataclass(frozen=True)
class File:
    """One input file."""

    uri: str
    size: int
    changed: int  # modification time, so that results of an older version are not reused

    @property
    def is_parquet(self) -> bool:
        """Whether the file is Parquet, by its name."""
        return self.uri.endswith(".parquet")

    @property
    def is_markdown(self) -> bool:
        """Whether the file is Markdown, by its name: one document, with that name as its id."""
        return self.uri.endswith(MARKDOWN)


@dataclass(frozen=True)
class FileSlice:
    """The lines of a file that start in the bytes [start, stop), or its row groups [start, stop)."""

    file: File
    start: int
    stop: int
    size: int  # bytes, uncompressed


def whole(file: File) -> FileSlice:
    """Return one slice for a complete file of lines."""
    return FileSlice(file, 0, file.size, file.size)


def find_files(path: str, suffixes: tuple[str, ...] = (".jsonl", ".parquet")) -> list[File]:
    """Find the files at `path`, sorted; DataError if there is none, or one of another type.

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
        infos_below = [info for info in filesystem.get_file_info(selector) if info.type == pafs.FileType.File]
        by_name = {info.path[len(inside) :].strip("/"): info for info in infos_below}
        pattern = _pattern(path[len(base) :].strip("/"))
        infos = {name: info for name, info in by_name.items() if pattern.fullmatch(name)}
    if not infos:
        raise DataError(f"no file at {path}: check the path")
    files = [
        File(fs.join(base, name) if name else base, info.size, info.mtime_ns or 0)
        for name, info in sorted(infos.items())
    ]
    if wrong_uris := [file.uri for file in files if not file.uri.endswith(suffixes)]:
        kinds = " nor ".join(suffixes)
        known_suffix = next(
            (suffix for file in files for suffix in suffixes if file.uri.endswith(suffix)), None
        )
        example = f", such as '{base}/**/*{known_suffix}'" if known_suffix else ""
        raise DataError(f"{wrong_uris[0]} is neither {kinds}: convert it or narrow the path{example}")
    return files


def _pattern(glob: str) -> re.Pattern[str]:
    if not glob:
        return re.compile(r"(?:[^._/][^/]*/)*[^._/][^/]*")
    text = re.escape(glob).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.compile(text)


def cut(files: Sequence[File], *, limit: int | None = None) -> list[FileSlice]:
    """Divide files into slices of at most `limit` bytes, if row groups of Parquet are not larger.

    By default, the limit is SLICE_BYTES, or more if there would be more than about MAX_SLICES slices.
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
    """Read the footer of a Parquet file; DataError for another file."""
    try:
        with fs.open_input(uri) as source:
            return pq.read_metadata(source)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{uri} is not a Parquet file ({error}): check the path") from None


def lines(uri: str, start: int, stop: int) -> Iterator[bytes]:
    """Yield the lines of a file that begin in [start, stop), with their line ends."""
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

RawRow = dict[str, Any]


@dataclass(frozen=True)
class UnreadableRow:
    """A row that could not be decoded: its beginning and the reason."""

    row: str
    reason: str


RawRows = Iterable[RawRow | UnreadableRow]


@dataclass(frozen=True)
class FileRows:
    """The raw rows of a slice of a file; each iteration reads them again, in any process."""

    part: FileSlice
    read: Callable[[FileSlice], RawRows]
    columns: frozenset[str] | None = None  # that rows may have; None: those that occur in some row

    def __iter__(self) -> Iterator[RawRow | UnreadableRow]:
        return iter(self.read(self.part))


@dataclass(frozen=True)
class FileColumns:
    """A slice of a Parquet file, which is read by columns (our name -> the file's)."""

    part: FileSlice
    columns: Mapping[str, str]
    first: int | None = None  # number of the first row, if rows without an id are numbered


# Input of one task from a table; a list has rows that are not in a file.
InputSlice = FileRows | FileColumns | list[RawRow | UnreadableRow]


@dataclass(frozen=True)
class Source:
    """The slices of each table of a data source, documents first; columns are named as in ``storage.schema``.

    A query may have a `split`; otherwise the split is drawn by group. `features` are the types of further
    document columns, in addition to the five of all documents. `profile` are the types of user columns other
    than the id. The `notes` are stored in the manifest.
    """

    tables: Mapping[str, Sequence[InputSlice]]
    features: pa.Schema = field(default_factory=lambda: pa.schema([]))
    profile: pa.Schema = field(default_factory=lambda: pa.schema([]))
    notes: dict[str, Any] = field(default_factory=dict)

    def rows(self, table: str) -> Iterator[RawRow | UnreadableRow]:
        """Yield the rows of a table that is read row by row."""
        for rows in self.tables.get(table, ()):
            assert not isinstance(rows, FileColumns)
            yield from rows

    def parts(self, tables: Collection[str] | None = None) -> list[FileSlice]:
        """List the slices of files, of all tables or of some."""
        names = (name for name in self.tables if tables is None or name in tables)
        return [rows.part for name in names for rows in self.tables[name] if not isinstance(rows, list)]


def rename(row: RawRow | UnreadableRow, columns: Mapping[str, str]) -> RawRow | UnreadableRow:
    """Rename the columns of a row (`columns`: ours -> the file's); an unreadable row stays as it is."""
    if isinstance(row, UnreadableRow):
        return row
    return {ours: row[column] for ours, column in columns.items() if column in row}


def readable_rows(rows: RawRows) -> Iterator[RawRow]:
    """Yield only readable rows, for a second read of a file whose unreadable rows are counted elsewhere."""
    return (row for row in rows if isinstance(row, dict))


def text_id(text: str, *, prefix: str) -> str:
    """Compute an id that is equal for equal texts, ignoring case."""
    return f"{prefix}-{hashlib.sha256(text.casefold().encode('utf-8', 'replace')).hexdigest()[:16]}"


def json_lines(piece: FileSlice) -> Iterator[RawRow | UnreadableRow]:
    """Yield the JSON object of each line that is not blank."""
    for line in lines(piece.file.uri, piece.start, piece.stop):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except UnicodeDecodeError:
            yield UnreadableRow(_beginning(line), "invalid UTF-8")
        except (ValueError, RecursionError):  # RecursionError: lists in lists, some thousand levels deep
            yield UnreadableRow(_beginning(line), "invalid JSON")
        else:
            yield value if isinstance(value, dict) else UnreadableRow(_beginning(line), "not a JSON object")


def delimited_lines(
    piece: FileSlice, *, columns: Sequence[str], separator: str = "\t", header: bool = False
) -> Iterator[RawRow | UnreadableRow]:
    """Yield lines of fields without quoting (TREC, MS MARCO); `separator` " " means any white space."""
    for number, line in enumerate(lines(piece.file.uri, piece.start, piece.stop), min(piece.start, 1)):
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


def parquet_rows(piece: FileSlice, *, columns: Sequence[str]) -> Iterator[RawRow]:
    """Yield the rows of a slice of a Parquet file, with one batch in memory at a time."""
    with fs.open_input(piece.file.uri) as source:
        groups = range(piece.start, piece.stop)
        for batch in pq.ParquetFile(source).iter_batches(8192, row_groups=groups, columns=list(columns)):
            yield from batch.to_pylist()


def match_files(pattern: str) -> list[Path]:
    """Find the files and folders of a path or glob (`**`: any folders), sorted; DataError if none."""
    paths = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
    if not paths:
        raise DataError(f"no file at {pattern}: check the path")
    return paths


def _beginning(line: bytes) -> str:
    return line[:400].decode("utf-8", "backslashreplace").rstrip()


class Quarantine:
    """Counts of rejected, repaired, omitted and written rows of one task, or of all of them.

    The first rejected rows of each table and reason are kept.
    """

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        self.repaired: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._rows: list[dict[str, str]] = []
        self._kept: Counter[tuple[str, str]] = Counter()

    def reject(self, table: str, row: Any, reason: str) -> None:
        """Set a row aside."""
        self._add_examples(table, reason, [row], count=1)

    def reject_where(self, table: str, reason: str, rows: pa.Table, which: Bool[ndarray, " rows"]) -> None:
        """Set the rows aside for which `which` is true."""
        numbers = np.flatnonzero(which)
        if len(numbers):
            first = printable_rows(rows.take(pa.array(numbers[:KEPT_PER_REASON])))
            self._add_examples(table, reason, first, count=len(numbers))

    def _add_examples(self, table: str, reason: str, first: Sequence[Any], *, count: int) -> None:
        self.rejected[f"{table}: {reason}"] += count
        room = KEPT_PER_REASON - self._kept[table, reason]
        examples = [{"table": table, "row": shown_row(row), "reason": reason} for row in first[:room]]
        self._kept[table, reason] += len(examples)
        self._rows += examples

    def store(self, uri: str) -> JsonRecord:
        """Write the kept rows to `uri`, and return the counts as JSON values for :meth:`add`."""
        if self._rows:
            write_table(uri, pa.Table.from_pylist(self._rows, schema=REJECTED))
        counts = {name: dict(getattr(self, name)) for name in _COUNTERS}
        return counts | {"kept": uri if self._rows else None}

    def add(self, stored: JsonRecord) -> None:
        """Add the stored counts and rows of another quarantine, with rows that come later."""
        for name in _COUNTERS:
            getattr(self, name).update(stored[name])
        for row in read_table(stored["kept"]).to_pylist() if stored["kept"] else ():
            key = (row["table"], row["reason"])
            if self._kept[key] < KEPT_PER_REASON:
                self._kept[key] += 1
                self._rows.append(row)

    def reasons(self, *, of: str = "") -> str:
        """Format the most frequent reasons, of all tables or of one, as the end of an error message."""
        counted = Counter({reason: n for reason, n in self.rejected.items() if reason.startswith(of)})
        most_frequent = ", ".join(f"{count:,} x {reason}" for reason, count in counted.most_common(3))
        return f"; set aside: {most_frequent}" if most_frequent else ""

    def table(self) -> pa.Table:
        """Return a limited number of rows of each table and reason (REJECTED), sorted by them."""
        rows = sorted(self._rows, key=lambda row: (row["table"], row["reason"]))
        return pa.Table.from_pylist(rows, schema=REJECTED)


def shown_row(row: str | dict[str, Any]) -> str:
    """Return the beginning of a rejected row, as text that can be stored."""
    if not isinstance(row, str):
        # A long value is cut before it is formatted: a row may have a megabyte.
        row = repr({key: v[:SHOWN_CHARS] if isinstance(v, str | bytes) else v for key, v in row.items()})
    return row[:SHOWN_CHARS].encode("utf-8", "backslashreplace").decode()


def printable_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Convert rows to Python values that can be printed, also invalid UTF-8 and out-of-range timestamps."""
    columns = {}
    for name in table.column_names:
        column = plain_column(table, name)
        if pa.types.is_timestamp(column.type):
            columns[name] = column.cast(pa.string()).to_pylist()
        elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            raw = column.cast(pa.binary()).to_pylist()
            columns[name] = [None if v is None else v.decode("utf-8", "backslashreplace") for v in raw]
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain_column(rows: pa.Table, name: str) -> pa.Array:
    """Return a column as one array of a plain type; nulls if the table has no such column."""
    if name not in rows.column_names:
        return pa.nulls(len(rows))
    column = rows[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # zero chunks stay a ChunkedArray
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.binary()) if pa.types.is_large_binary(column.type) else column
