"""Resumable tasks over slices of an artifact, and a shuffle between them through files.

Tables are scattered into buckets by key, and a bucket is gathered again. A task processes a slice (some parts
of an artifact) or a bucket. It names its files after the bucket and its own number, so that a repeated task
replaces its files, and writes its record last: a run after a kill keeps the records it finds and repeats the
other tasks. No row passes through the driver, and memory is bounded by one slice or one bucket. The caller
decides where and in which order tasks run (:data:`TaskRunner`).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.errors import DataError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Part, write_table

ROWS_PER_SLICE = 1 << 18
BYTE_SLICES = 64  # that a table is cut into by bytes, within the limits of a slice
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 32 << 20, 512 << 20
JsonRecord = dict[str, Any]  # JSON values
NumberedSlice = tuple[int, list[str]]  # its number and its parts
# Runs a task for every item, in any order and in any process; the built-in `map` runs them in this process.
TaskRunner = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
T = TypeVar("T")
R = TypeVar("R")  # JSON values


def bucket_of(keys: pa.Array | pa.ChunkedArray, buckets: int) -> Int64[ndarray, " rows"]:
    """The bucket of every key (strings or integers): uniform over keys, the same on every machine."""
    return np.asarray(hash_of(keys) % np.uint64(buckets), dtype=np.int64)


def hash_of(keys: pa.Array | pa.ChunkedArray) -> UInt64[ndarray, " rows"]:
    """A hash of every key (strings or integers), the same on every machine; DataError for a null key."""
    if keys.null_count:
        raise DataError(f"{keys.null_count} of {len(keys)} keys are null: leave out rows that have no key")
    if isinstance(keys, pa.ChunkedArray):  # by chunk, since one chunk of text holds at most 2 GiB
        return np.concatenate([np.empty(0, np.uint64), *map(hash_of, keys.chunks)])
    if pa.types.is_integer(keys.type):
        return _siphash(keys.to_numpy(zero_copy_only=False))
    coded = pc.dictionary_encode(keys)  # each distinct key is hashed once
    hashes = _siphash(np.asarray(coded.dictionary, dtype=object))
    return hashes[coded.indices.to_numpy(zero_copy_only=False)]  # type: ignore[no-any-return]


def _siphash(values: ndarray) -> UInt64[ndarray, " values"]:
    # Python's own hash of strings differs between processes.
    hashes: ndarray = pd.util.hash_array(values, categorize=False)
    return hashes


def scatter(table: pa.Table, bucket: Int64[ndarray, " rows"], *, target: str, name: str) -> None:
    """Write the rows of each bucket to ``{target}/{bucket}/{name}.parquet``; their order is kept."""
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    order = np.argsort(bucket, kind="stable")
    numbers, starts = np.unique(bucket[order], return_index=True)
    stops = [*starts.tolist(), len(order)][1:]
    for number, start, stop in zip(numbers.tolist(), starts.tolist(), stops, strict=True):
        rows = table.take(pa.array(order[start:stop]))
        uri = fs.join(target, f"{number:05d}", f"{name}.parquet")
        write_table(uri, rows, use_dictionary=texts)


def gather(target: str, bucket: int, *, schema: pa.Schema) -> pa.Table:
    """All rows of a bucket, file by file in the order of their names; empty if there are none."""
    tables = [pq.read_table(fs.open_input(uri)) for uri in _files(target, bucket)]
    return pa.concat_tables([schema.empty_table(), *(table.select(schema.names) for table in tables)])


def count_rows(target: str, bucket: int) -> int:
    """The number of rows of a bucket; only the footers of its files are read."""
    return sum(pq.read_metadata(fs.open_input(uri)).num_rows for uri in _files(target, bucket))


def _files(target: str, bucket: int) -> list[str]:
    """Complete files only: a writer that was killed may have left a pending file."""
    folder = fs.join(target, f"{bucket:05d}")
    return [fs.join(folder, name) for name in fs.list_files(folder) if name.endswith(".parquet")]


# --- resumable tasks ---------------------------------------------------------------------------------------


def slices(artifact: Artifact, *tables: str, rows: int | None = None) -> list[list[str]]:
    """Group the parts of tables, in order, into slices of at most `rows` rows; a larger part is a slice.

    `rows` is ROWS_PER_SLICE by default; tasks that hold narrow rows can take more.
    """
    limit = ROWS_PER_SLICE if rows is None else rows
    names = [name for table in tables for name in artifact.table_parts(table)]
    known = [artifact.manifest.parts[name].rows for name in names]
    sizes = [limit if size is None else size for size in known]
    return [[names[place] for place in group] for group in group_by_size(sizes, limit=limit)]


def slices_by_bytes(artifact: Artifact, table: str) -> list[list[str]]:
    """Group the parts of a table, in order, into slices of about equal bytes, for tasks that scan it all.

    There are about BYTE_SLICES of them, fewer of a small table and more of a large one.
    """
    names = artifact.table_parts(table)
    sizes = [artifact.manifest.parts[name].bytes for name in names]
    limit = min(max(sum(sizes) // BYTE_SLICES, MIN_SLICE_BYTES), MAX_SLICE_BYTES)
    return [[names[place] for place in group] for group in group_by_size(sizes, limit=limit)]


def group_by_size(sizes: Sequence[int], *, limit: int) -> list[list[int]]:
    """Group the indices of `sizes`, in order, so that each group sums to at most `limit` if possible."""
    groups: list[list[int]] = []
    left = -1
    for index, size in enumerate(sizes):
        if size > left:
            groups.append([])
            left = limit
        groups[-1].append(index)
        left -= size
    return groups


def run_slices(
    name: str,
    task: Callable[[tuple[int, T]], R],
    slices: Sequence[T],
    *,
    folder: str,
    each: TaskRunner,
    room: str,
    unit: str = "slices",
    rows: Sequence[int] | None = None,
) -> list[R]:
    """Run a task for every slice that has no record yet.

    Args:
        name: of the task; its records are in ``{folder}/done/{name}``.
        task: (number, slice) -> record, which is JSON values. A slice may be any work item.
        slices: the work items.
        folder: work directory.
        each: runs the tasks.
        room: name of the logger.
        unit: name of the work items in the log.
        rows: number of each work item's rows, which progress counts; None: it counts work items.

    Returns:
        The records of all slices, in order.
    """
    records = fs.join(folder, "done", name)
    done = set(fs.list_files(records))
    todo = [(number, parts) for number, parts in enumerate(slices) if _file(number) not in done]
    if todo and done:
        get_logger(room).info("resuming: %d of %d tasks of %r are done", len(done), len(slices), name)
    sizes = [1] * len(slices) if rows is None else rows
    left = sum(sizes[number] for number, _ in todo)
    with Progress(room, total=sum(sizes), done=sum(sizes) - left, unit=f"{unit} ({name})") as progress:
        for number in each(partial(_recorded, task=task, folder=records), todo) if todo else ():
            progress.advance(sizes[number])
    return [json.loads(fs.read_bytes(fs.join(records, _file(i)))) for i in range(len(slices))]


def write_tables(folder: str, tables: Mapping[str, pa.Table]) -> list[Any]:
    """Write the tables that have rows; returns their names and parts as JSON values."""
    return [
        (name, asdict(write_table(fs.join(folder, name), table.combine_chunks())))
        for name, table in tables.items()
        if len(table)
    ]


def named_parts(files: Iterable[Any]) -> list[tuple[str, Part]]:
    """The names and parts that :func:`write_tables` returned, read back from JSON."""
    return [(name, Part(**part)) for name, part in files]


def _recorded(item: tuple[int, T], *, task: Callable[[tuple[int, T]], R], folder: str) -> int:
    """Run a task, return its number; its record is written last: it exists only for finished tasks."""
    record = task(item)
    fs.write_bytes(fs.join(folder, _file(item[0])), json.dumps(record).encode())
    return item[0]


def _file(number: int) -> str:
    return f"{number:05d}.json"
