"""Files of a user, cut into slices of work: ranges of bytes of lines, or of row groups of Parquet.

Every row is in one slice, and slices are in the order of the input: files by name, then rows.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs
from scalingnote.storage.shuffle import MAX_SLICES

SLICE_BYTES = 64 << 20  # of input, uncompressed
T = TypeVar("T")
Cut = tuple[int, int, int]  # start, stop, bytes of a slice


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


def whole(file: File) -> FileSlice:
    """A whole file of lines as one slice."""
    return FileSlice(file, 0, file.size)


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


def cut(files: Sequence[File]) -> list[FileSlice]:
    """Slices of about SLICE_BYTES; larger ones if there would be more than about MAX_SLICES."""
    limit = max(SLICE_BYTES, sum(file.size for file in files) // MAX_SLICES)

    def cuts(file: File) -> list[Cut]:
        if file.is_parquet:
            return row_group_cuts(parquet_footer(file.uri), limit)
        return byte_cuts(file.size, limit)

    found = zip(files, fs.map_files(cuts, files), strict=True)
    return [FileSlice(file, start, stop) for file, ranges in found for start, stop, _ in ranges]


def byte_cuts(size: int, limit: int) -> list[Cut]:
    """Ranges of `limit` bytes."""
    starts = range(0, size, limit)
    return [(start, min(start + limit, size), min(limit, size - start)) for start in starts]


def row_group_cuts(footer: pq.FileMetaData, limit: int) -> list[Cut]:
    """Runs of row groups of up to `limit` bytes; a larger row group is a slice of its own."""
    cuts: list[Cut] = []
    for number in range(footer.num_row_groups):
        size = footer.row_group(number).total_byte_size
        if cuts and cuts[-1][2] + size <= limit:
            cuts[-1] = (cuts[-1][0], number + 1, cuts[-1][2] + size)
        else:
            cuts.append((number, number + 1, size))
    return cuts


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
