"""Files of the work directory read back, and streams of rows written as parts of a given length."""

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table


def read(uri: str, columns: list[str] | None = None) -> pa.Table:
    """One Parquet file, or some columns of it."""
    with fs.open_input(uri) as source:
        return pq.ParquetFile(source).read(columns)


def files(work: str, target: str, bucket: int) -> list[str]:
    """What the slices sent to a bucket of `target`, in the order of the slices."""
    folder = fs.join(work, target, f"{bucket:05d}")
    return [fs.join(folder, name) for name in fs.list_files(folder)]


def write(
    tables: Iterable[pa.Table], name: str, *, rows_per_part: int, output: str
) -> dict[str, dict[str, Any]]:
    """Write all rows to ``{name}-00000.parquet``, ...; returns what :class:`Part` holds of each."""
    written = {}
    for number, rows in enumerate(_pieces(tables, rows_per_part)):
        part = f"{name}-{number:05d}.parquet"
        written[part] = vars(write_table(fs.join(output, part), rows))
    return written


def _pieces(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """The same rows in tables of `size`, the last one shorter; holds one of them and one that was given."""
    waiting: list[pa.Table] = []
    for table in tables:
        start = 0
        while start < len(table):
            room = size - sum(map(len, waiting))
            waiting.append(table.slice(start, room))
            start += room
            if sum(map(len, waiting)) == size:
                yield pa.concat_tables(waiting)
                waiting = []
    if waiting:
        yield pa.concat_tables(waiting)
