"""Which files make up the log, whether their columns fit, and the slices of work they are cut into.

A file whose columns cannot fit is refused here, by name, before any work is spent. What single rows hold is
the business of `checks`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from scalingnote.datasets.config import Logs, TableFile
from scalingnote.datasets.logs import tables
from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs

_FIXED = ("query", "query_id", "relevance")
_SNIFFED = 1 << 18  # bytes of a JSON-lines file that tell its columns


@dataclass(frozen=True)
class Slice:
    """What one task reads: some row groups of a Parquet file, or a range of bytes of a JSON-lines file.

    Slices are numbered in the order of the input: tables, then files by name, then rows.
    """

    number: int
    table: str
    uri: str
    columns: dict[str, str]  # our name -> the file's
    start: int  # first row group, or first byte
    stop: int
    size: int  # bytes, uncompressed
    changed: int  # when the file was written: what was made of an older one must not be taken for this one's


class _File(NamedTuple):
    table: str
    uri: str
    size: int
    changed: int


class _Found(NamedTuple):
    columns: dict[str, str]
    cuts: list[tuple[int, int, int]]  # start, stop, bytes


def plan(config: Logs) -> list[Slice]:
    """Every slice of every table; DataError names the file and the column that do not fit."""
    given: dict[str, TableFile | None] = {name: getattr(config, name) for name in tables.NAMES}
    files = [_File(name, *found) for name, table in given.items() if table for found in find(table.path)]
    with ThreadPoolExecutor(16) as pool:  # one footer in an object store is one wait
        inspected = _named_alike(files, list(pool.map(lambda file: _inspect(file, config), files)))
    slices = [
        Slice(0, file.table, file.uri, found.columns, *cut, file.changed)
        for file, found in zip(files, inspected, strict=True)
        for cut in found.cuts
    ]
    return [replace(piece, number=number) for number, piece in enumerate(slices)]


def find(path: str) -> Iterator[tuple[str, int, int]]:
    """URI, bytes and time of the files at `path`, sorted: a file, a directory, a pattern of ``*`` and ``?``.

    Below a directory, names that start with ``.`` or ``_`` (marks other systems leave) are passed over.
    """
    path = fs.absolute(path).rstrip("/")
    fixed = re.split(r"[*?]", path, maxsplit=1)[0]
    base = path if fixed == path else fixed.rsplit("/", 1)[0]
    filesystem, inside = fs.resolve(base)
    top = filesystem.get_file_info(inside)
    if top.type == pafs.FileType.File:
        found = {"": top}
    else:
        selector = pafs.FileSelector(inside, recursive=True, allow_not_found=True)
        listed = [info for info in filesystem.get_file_info(selector) if info.type == pafs.FileType.File]
        named = {info.path[len(inside) :].strip("/"): info for info in listed}
        wanted = _pattern(path[len(base) :].strip("/"))
        found = {name: info for name, info in named.items() if wanted.fullmatch(name)}
    if not found:
        raise DataError(f"no file at {path}: check the path")
    for name, info in sorted(found.items()):
        uri = fs.join(base, name) if name else base
        if not uri.endswith((".jsonl", ".parquet")):
            raise DataError(f"{uri} is neither .jsonl nor .parquet: convert it or narrow the path")
        yield uri, info.size, info.mtime_ns or 0


def _pattern(glob: str) -> re.Pattern[str]:
    if not glob:
        return re.compile(r"(?:[^._/][^/]*/)*[^._/][^/]*")
    text = re.escape(glob).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.compile(text)


def _inspect(file: _File, config: Logs) -> _Found:
    mapping: dict[str, str] = getattr(config, file.table).columns
    kinds = tables.kinds(config, file.table)
    unknown = sorted(set(mapping) - set(kinds))
    if unknown:
        raise DataError(f"{file.uri}: columns maps {unknown}, which are none of {list(kinds)}")
    theirs = {name: mapping.get(name, name) for name in kinds}
    limit = config.slice_mb << 20
    look = _look_at_parquet if file.uri.endswith(".parquet") else _look_at_json
    seen, wrong, found = look(file, theirs, kinds, limit)
    lacking = tables.missing(config, file.table, seen) if found.cuts else []
    lacking += [name for name in mapping if name not in seen and name not in lacking]
    if lacking:
        shown = [theirs.get(name, name) for name in lacking]
        raise DataError(f"{file.uri} ({file.table}) has no column {shown}: map it under {file.table}.columns")
    for name, kind in wrong.items():
        raise DataError(
            f"{file.uri} ({file.table}): column {theirs[name]!r} is of type {kind}, but {name} is "
            f"{tables.describe(kinds[name])}: convert it, or map another column"
        )
    return found


_Look = tuple[set[str], dict[str, str], _Found]  # our names seen, those of a wrong type, and the rest


def _look_at_parquet(file: _File, theirs: dict[str, str], kinds: dict[str, tables.Kind], limit: int) -> _Look:
    """Slices are runs of row groups of up to `limit` bytes; one larger row group is one slice."""
    try:
        with fs.open_input(file.uri) as source:
            reader = pq.ParquetFile(source)
            schema, metadata = reader.schema_arrow, reader.metadata
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{file.uri} is not a Parquet file: {error}") from None
    columns = {name: column for name, column in theirs.items() if column in schema.names}
    types = {name: schema.field(column).type for name, column in columns.items()}
    wrong = {name: str(kind) for name, kind in types.items() if not tables.fits(kind, kinds[name])}
    cuts: list[tuple[int, int, int]] = []
    for number in range(metadata.num_row_groups):
        size = metadata.row_group(number).total_byte_size
        if cuts and cuts[-1][2] + size <= limit:
            cuts[-1] = (cuts[-1][0], number + 1, cuts[-1][2] + size)
        else:
            cuts.append((number, number + 1, size))
    return set(columns), wrong, _Found(columns, cuts)


def _look_at_json(file: _File, theirs: dict[str, str], kinds: dict[str, tables.Kind], limit: int) -> _Look:
    """Slices are ranges of `limit` bytes. The first lines tell the columns; an optional one may be rare."""
    with fs.open_input(file.uri) as source:
        head = source.read(_SNIFFED)
    lines = head.split(b"\n") if len(head) == file.size else head.split(b"\n")[:-1]
    rows = [row for line in lines if (row := _object(line)) is not None]
    if not rows and any(line.strip() for line in lines):
        raise DataError(f"{file.uri} opens with no JSON object: one on each line is expected")
    types = {
        name: {type(row[column]) for row in rows if row.get(column) is not None}
        for name, column in theirs.items()
    }
    wrong = {
        name: " and ".join(sorted(kind.__name__ for kind in found))
        for name, found in types.items()
        if not tables.fits_json(found, kinds[name])
    }
    seen = {name for name, column in theirs.items() if not rows or any(column in row for row in rows)}
    # What a query is called by, and whether grades are given, must not change within a file; other columns
    # may turn up later.
    columns = {n: column for n, column in theirs.items() if n in seen or n not in _FIXED}
    starts = range(0, file.size, limit)
    cuts = [(start, min(start + limit, file.size), min(limit, file.size - start)) for start in starts]
    return seen, wrong, _Found(columns, cuts)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _named_alike(files: Sequence[_File], inspected: Sequence[_Found]) -> list[_Found]:
    """A log calls its queries by an id of its own in every file, or by their text in every file."""
    pairs = [(file, found) for file, found in zip(files, inspected, strict=True) if found.cuts]
    named = {file.uri: "query_id" in found.columns for file, found in pairs if file.table == "impressions"}
    if len(set(named.values())) > 1:
        bare = next(uri for uri, has in named.items() if not has)
        raise DataError(f"{bare} has no column query_id, other impressions have: one query would become two")
    by_id = any(named.values())
    for file, found in pairs:
        if by_id and file.table in ("scores", "qrels") and "query_id" not in found.columns:
            raise DataError(
                f"{file.uri} ({file.table}) has no column query_id, but the impressions call queries by it: "
                "add it here, or leave it out there"
            )
    return [found if by_id or "query" not in found.columns else _by_text(found) for found in inspected]


def _by_text(found: _Found) -> _Found:
    return found._replace(columns={name: c for name, c in found.columns.items() if name != "query_id"})
