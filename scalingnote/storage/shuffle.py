"""Resumable tasks over parts, such as slices of an artifact, and a shuffle between them through files.

Tables are scattered into buckets by key, and a bucket is gathered again. A task processes a part: a slice
(some parts of an artifact), a bucket, or anything with a name. It names its files after its part, so that a
repeated task replaces them. Its record, JSON values, is written last: after any number of kills, a run keeps
the existing records and repeats the other tasks. No row passes through the driver. The caller decides where
and in which order tasks run (an :data:`Executor`).

A task scatters into one file with a few record batches for each bucket, so a bucket costs about two ranged
reads of each file. :func:`slices` makes at most about MAX_SLICES slices, larger ones instead of more: a
shuffle into 1,000 buckets takes at most 8 million reads. A bucket may contain a key with a tenth of all rows:
:func:`stream` reads it in tables of at most ROWS_PER_BATCH rows; :func:`gather`, which joins them, is for
keys that were aggregated before the scatter.

A killed shuffle of Ray Data (read_parquet, repartition by key, write_parquet) starts from the beginning. Here
only running tasks are repeated, and a row takes less time and memory.
"""

import json
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.ipc
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.core.errors import DataError, PartsFailedError
from scalingnote.core.log import Progress, get_logger
from scalingnote.core.parts import Executor, PartStage
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.manifest import Part, write_file, write_table

ROWS_PER_SLICE = 1 << 18
MAX_SLICES = 1 << 12  # of an artifact; with more rows, slices are larger
ROWS_PER_BATCH = 1 << 16
# Scattered files that a process keeps open: a quarter of its limit, because Ray's workers may open many too.
# A task that reads more files than this for a bucket opens each again for the next bucket.
_MAX_OPEN_FILES = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4, 256)
_INDEX = b"buckets"  # metadata of a scattered file: the bucket and the rows of each batch, as int64
BYTE_SLICES = 64  # number of slices of a table that is cut by bytes, within the limits of a slice
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 32 << 20, 512 << 20
JsonRecord = dict[str, Any]  # JSON values
NumberedSlice = tuple[int, list[str]]  # its number and its parts
NamedPart = tuple[str, Any]  # its name and the part as the stage knows it
T = TypeVar("T")


def bucket_of(keys: pa.Array | pa.ChunkedArray, buckets: int) -> Int64[ndarray, " rows"]:
    """Compute the bucket of every key (strings or integers): uniform over keys, the same on every machine."""
    return np.asarray(hash_of(keys) % np.uint64(buckets), dtype=np.int64)


def hash_of(keys: pa.Array | pa.ChunkedArray) -> UInt64[ndarray, " rows"]:
    """Hash every key (strings or integers), the same on every machine; DataError for a null key."""
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
    """Write the rows, by bucket, to ``{target}/{name}.arrow``; the order within a bucket is kept."""
    if not len(table):
        return
    (rows,) = table.combine_chunks().to_batches()
    order = np.argsort(bucket, kind="stable")
    numbers, starts = np.unique(bucket[order], return_index=True)
    bounds = pairwise([*starts.tolist(), len(order)])
    ranges = [
        (number, first, min(first + ROWS_PER_BATCH, stop))
        for number, (start, stop) in zip(numbers.tolist(), bounds, strict=True)
        for first in range(start, stop, ROWS_PER_BATCH)
    ]
    index = np.array([(number, stop - first) for number, first, stop in ranges], np.int64)
    layout = rows.schema.with_metadata({_INDEX: index.tobytes()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, layout, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for _, first, stop in ranges:
            writer.write_batch(rows.take(pa.array(order[first:stop])))
    write_file(fs.join(target, f"{name}.arrow"), sink.getvalue().to_pybytes())


def stream(target: str, bucket: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield all rows of a bucket in tables of at most ROWS_PER_BATCH, in the order of its files' names."""
    return (rows for _, rows in named_stream(target, bucket, columns))


def named_stream(
    target: str, bucket: int, columns: Sequence[str] | None = None
) -> Iterator[tuple[str, pa.Table]]:
    """Yield the tables of :func:`stream`, each with the name of the task that scattered it."""
    for name, file in _files(target, columns):
        for number in np.flatnonzero(file.buckets == bucket).tolist():
            rows = pa.Table.from_batches([file.reader.get_batch(number)]).replace_schema_metadata()
            yield name, rows if columns is None else rows.select(columns)


def gather(target: str, bucket: int, *, schema: pa.Schema) -> pa.Table:
    """Read all rows of a bucket as one table; empty if there are none."""
    return pa.concat_tables([schema.empty_table(), *stream(target, bucket, schema.names)])


class _Scattered(NamedTuple):
    reader: Any  # of record batches
    buckets: Int64[ndarray, " batches"]  # of each batch


def _files(target: str, columns: Sequence[str] | None) -> Iterator[tuple[str, _Scattered]]:
    """Yield the complete files by name: a killed writer may have left a pending file."""
    filesystem, path = fs.resolve(target)
    entries = filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
    for info in sorted(entries, key=lambda info: str(info.base_name)):
        if info.extension == "arrow":
            uri, version = fs.join(target, info.base_name), (info.size, info.mtime_ns)
            file = _open(uri, version, tuple(columns) if columns else None)
            yield info.base_name.removesuffix(".arrow"), file


@lru_cache(maxsize=_MAX_OPEN_FILES)
def _open(uri: str, version: tuple[int, int], columns: tuple[str, ...] | None) -> _Scattered:
    """Open a file; each process reads its footer once. `version` changes when a task is repeated."""
    source = fs.open_input(uri)
    reader = pa.ipc.open_file(source)
    index = np.frombuffer(reader.schema.metadata[_INDEX], np.int64).reshape(-1, 2)
    if columns is not None and set(columns) != set(reader.schema.names):
        fields = sorted(map(reader.schema.get_field_index, columns))
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
    return _Scattered(reader, index[:, 0])


# --- resumable tasks ---------------------------------------------------------------------------------------


def slices(artifact: Artifact, *tables: str, rows: int | None = None) -> list[list[str]]:
    """Group the parts of tables, in order, into slices of at most `rows` rows; a larger part is a slice.

    `rows` is ROWS_PER_SLICE by default; tasks with narrow rows in memory can take more. It is raised if there
    would be more than about MAX_SLICES slices.
    """
    limit = ROWS_PER_SLICE if rows is None else rows
    names = [name for table in tables for name in artifact.table_parts(table)]
    row_counts = [artifact.manifest.parts[name].rows for name in names]
    sizes = [limit if size is None else size for size in row_counts]
    limit = max(limit, -(-sum(sizes) // MAX_SLICES))
    return [[names[place] for place in group] for group in group_by_size(sizes, limit=limit)]


def slices_by_bytes(artifact: Artifact, table: str) -> list[list[str]]:
    """Group the parts of a table, in order, into slices of about equal bytes, for tasks that scan the table.

    There are about BYTE_SLICES slices; fewer for a small table and more for a large one.
    """
    names = artifact.table_parts(table)
    sizes = [artifact.manifest.parts[name].bytes for name in names]
    limit = min(max(sum(sizes) // BYTE_SLICES, MIN_SLICE_BYTES), MAX_SLICE_BYTES)
    return [[names[place] for place in group] for group in group_by_size(sizes, limit=limit)]


def group_by_size(sizes: Sequence[int], *, limit: int) -> list[list[int]]:
    """Group the indices of `sizes`, in order, so that each group sums to at most `limit` if possible."""
    groups: list[list[int]] = []
    remaining = -1
    for index, size in enumerate(sizes):
        if size > remaining:
            groups.append([])
            remaining = limit
        groups[-1].append(index)
        remaining -= size
    return groups


def run_slices(
    name: str,
    task: PartStage | Callable[[tuple[int, T]], Any],
    slices: Sequence[T],
    *,
    folder: str,
    each: Executor,
    section: str,
    unit: str = "slices",
    rows: Sequence[int] | None = None,
) -> list[Any]:
    """Run a task for every slice that has no record yet; return the records of all slices, in order.

    Args:
        name: of the task; its records are in ``{folder}/done/{name}``.
        task: (number, slice) -> record, which is JSON values. A slice may be any work item.
        slices: the work items.
        folder: work directory.
        each: runs the tasks.
        section: name of the logger.
        unit: name of the work items in the log.
        rows: number of rows of each work item, which progress lines count; None: they count work items.
    """
    numbered = {f"{number:05d}": (number, item) for number, item in enumerate(slices)}
    records, _ = run_parts(
        task,
        numbered,
        folder=fs.join(folder, "done", name),
        executor=each,
        section=section,
        unit=f"{unit} ({name})",
        rows=None if rows is None else dict(zip(numbered, rows, strict=True)),
    )
    return [*records.values()]


def run_parts(
    stage: PartStage | Callable[[Any], Any],
    parts: Mapping[str, Any],
    *,
    folder: str,
    executor: Executor,
    section: str,
    unit: str,
    rows: Mapping[str, int] | None = None,
    max_failed: int = 0,
    report: Callable[[Any], object] | None = None,
    underway: Callable[[], int] | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Process every part that has no record yet.

    Args:
        stage: returns the record of a part, which is JSON values.
        parts: by name; a ``/`` in a name becomes ``-`` in the name of the record's file.
        folder: of the records.
        executor: processes the parts.
        section: name of the logger.
        unit: name of the things that progress lines count.
        rows: name -> number of rows of each part, which progress lines count; None: they count parts.
        max_failed: number of parts that may be set aside because they fail at every try, if others succeed.
        report: receives the record of each part that this run processes; returns a note for progress lines.
        underway: returns the rows that this run has processed, including those of unfinished parts.

    Returns:
        The records of all parts, in the order of `parts`; and the parts that were set aside, with the reason.

    Raises:
        PartsFailedError: after all other parts, if more than `max_failed` parts or all of them failed.
        ScalingNoteError: raised by the stage.
    """
    texts = _read_records(folder, parts)
    todo = [(name, part) for name, part in parts.items() if name not in texts]
    if todo and texts:
        get_logger(section).info("resuming: %d of %d %s are done", len(texts), len(parts), unit)
    sizes = dict.fromkeys(parts, 1) if rows is None else rows
    remaining, total = sum(sizes[name] for name, _ in todo), sum(sizes[name] for name in parts)
    failed: dict[str, str] = {}
    with Progress(section, total=total, done=total - remaining, unit=unit, underway=underway) as progress:
        try:
            for name, text in executor(_keep_records(stage, folder), todo) if todo else ():
                texts[name] = text
                progress.advance(sizes[name], note=report(json.loads(text)) if report else "")
        except PartsFailedError as error:
            failed = {todo[number][0]: reason for number, reason in error.reasons.items()}
            if len(failed) > max_failed or not texts:
                raise
    return {name: json.loads(texts.pop(name)) for name in parts if name not in failed}, failed


def _keep_records(
    stage: PartStage | Callable[[Any], Any], folder: str
) -> PartStage | Callable[[NamedPart], Any]:
    """Extend a stage to named parts: it also writes the record of each, and returns name and record."""
    if not isinstance(stage, PartStage):
        return partial(_process, task=stage, folder=folder)
    return replace(
        stage, read=partial(_read, read=stage.read), write=partial(_write, write=stage.write, folder=folder)
    )


def _process(part: NamedPart, *, task: Callable[[Any], Any], folder: str) -> tuple[str, str]:
    return _write_record(part, task(part[1]), folder)


def _read(part: NamedPart, *, read: Callable[[Any], Any]) -> Any:
    return read(part[1])


def _write(part: NamedPart, result: Any, *, write: Callable[[Any, Any], Any], folder: str) -> tuple[str, str]:
    return _write_record(part, write(part[1], result), folder)


def _write_record(part: NamedPart, record: Any, folder: str) -> tuple[str, str]:
    text = json.dumps(record)
    fs.write_bytes(_record_file(folder, part[0]), text.encode())
    return part[0], text


def _read_records(folder: str, parts: Mapping[str, Any]) -> dict[str, str | bytes]:
    """Read the existing records of parts as text, by name."""
    present = {fs.join(folder, name) for name in fs.list_files(folder)}
    files = {name: file for name in parts if (file := _record_file(folder, name)) in present}
    return dict(zip(files, fs.map_files(fs.read_bytes, [*files.values()]), strict=True))


def _record_file(folder: str, name: str) -> str:
    return fs.join(folder, name.replace("/", "-") + ".json")


def write_tables(folder: str, tables: Mapping[str, pa.Table]) -> list[Any]:
    """Write the tables that have rows, and return their names and parts as JSON values."""
    return [
        (name, asdict(write_table(fs.join(folder, name), table.combine_chunks())))
        for name, table in tables.items()
        if len(table)
    ]


def named_parts(files: Iterable[Any]) -> list[tuple[str, Part]]:
    """Convert the JSON values of :func:`write_tables` back to names and parts."""
    return [(name, Part(**part)) for name, part in files]
