"""A shuffle through files: tables are scattered into buckets by key, and a bucket is gathered again.

A file is named after its bucket and the slice of work that wrote it, so a task that is retried replaces
its own files and nothing is lost or doubled. No row passes through the driver, and memory is bounded by
one slice on the way in and one bucket on the way out, however large the whole.
"""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table


def bucket_of(keys: pa.Array | pa.ChunkedArray, buckets: int) -> Int64[ndarray, " rows"]:
    """The bucket of every key (strings or integers): the same on every machine, uniform over keys."""
    return np.asarray(hash_of(keys) % np.uint64(buckets), dtype=np.int64)


def hash_of(keys: pa.Array | pa.ChunkedArray) -> UInt64[ndarray, " rows"]:
    """A hash of every key: the same on every machine, and not the one of Python, which changes.

    DataError where a key is null.
    """
    if keys.null_count:
        raise DataError(f"{keys.null_count} of {len(keys)} keys are null: leave out rows that have no key")
    if isinstance(keys, pa.ChunkedArray):  # joined, text would have to fit into one chunk
        return np.concatenate([np.empty(0, np.uint64), *map(hash_of, keys.chunks)])
    if pa.types.is_integer(keys.type):
        return _siphash(keys.to_numpy(zero_copy_only=False))
    coded = pc.dictionary_encode(keys)  # each distinct key is hashed once
    hashes = _siphash(np.asarray(coded.dictionary, dtype=object))
    return hashes[coded.indices.to_numpy(zero_copy_only=False)]  # type: ignore[no-any-return]


def _siphash(values: ndarray) -> UInt64[ndarray, " values"]:
    hashes: ndarray = pd.util.hash_array(values, categorize=False)  # in C
    return hashes


def scatter(table: pa.Table, bucket: Int64[ndarray, " rows"], *, target: str, name: str) -> None:
    """Write the rows of each bucket to ``{target}/{bucket}/{name}.parquet``, in the order they have."""
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    order = np.argsort(bucket, kind="stable")
    found, starts = np.unique(bucket[order], return_index=True)
    stops = [*starts.tolist(), len(order)][1:]
    for number, start, stop in zip(found.tolist(), starts.tolist(), stops, strict=True):
        rows = table.take(pa.array(order[start:stop]))
        uri = fs.join(target, f"{number:05d}", f"{name}.parquet")
        write_table(uri, rows, use_dictionary=texts)


def gather(target: str, bucket: int, *, schema: pa.Schema) -> pa.Table:
    """All rows of a bucket, slice after slice in the order of their names; empty when none came."""
    tables = [pq.read_table(fs.open_input(uri)) for uri in _files(target, bucket)]
    return pa.concat_tables([schema.empty_table(), *(table.select(schema.names) for table in tables)])


def rows_in(target: str, bucket: int) -> int:
    """How many rows a bucket holds; only the ends of its files are read."""
    return sum(pq.read_metadata(fs.open_input(uri)).num_rows for uri in _files(target, bucket))


def _files(target: str, bucket: int) -> list[str]:
    """Whole files only: a writer that was killed may have left a pending one."""
    folder = fs.join(target, f"{bucket:05d}")
    return [fs.join(folder, name) for name in fs.list_files(folder) if name.endswith(".parquet")]
