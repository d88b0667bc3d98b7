"""Files between the steps of collect: rows are scattered to buckets, by query_id, doc_id or key.

A query is numbered by its bucket and its row in it, so that association works on integers alone. Every step
writes files whose names depend on its input alone: repeated after a crash, it writes the same files again.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int64, UInt64
from numpy import ndarray

from scalingnote.collect.config import CollectConfig
from scalingnote.collect.one_hop import condensed
from scalingnote.storage import filesystem as fs
from scalingnote.storage import shuffle
from scalingnote.storage.artifact import Artifact

ROW_BITS = 40  # of a query's number; the bits above are its bucket
QUERY = pa.schema({"query_id": pa.string(), "query": pa.string()})
Item = dict[str, Any]  # one slice or bucket, as JSON values
Counts = dict[str, int]


@dataclass(frozen=True)
class Context:
    """Input of all steps; equal for all of them, and small."""

    config: CollectConfig
    dataset: Artifact
    planner: Artifact
    held_out: pa.Array  # doc_ids excluded from training
    test_queries: pa.Array  # their texts
    work: str
    output: str

    def folder(self, name: str) -> str:
        """A file or folder of the work directory."""
        return fs.join(self.work, name)

    def bucket(self, number: int, table: str) -> str:
        """The file of a table of one bucket."""
        return fs.join(self.work, "bucket", f"{number:05d}", f"{table}.parquet")


def read_table(uri: str) -> pa.Table:
    """A whole Parquet file."""
    with fs.open_input(uri) as file:
        return pq.read_table(file)


def read_row_group(item: Item, columns: list[str] | None = None) -> pa.Table:
    """The row group of a dataset's file that an item names (``uri`` and ``group``)."""
    with fs.open_input(item["uri"]) as file:
        return pq.ParquetFile(file).read_row_group(item["group"], columns=columns)


def read_queries(bucket: int, context: Context) -> pa.Table:
    """The queries of a bucket, sorted by query_id: a query's row in it is part of its number."""
    return shuffle.gather(context.folder("queries"), bucket, schema=QUERY).sort_by("query_id")


def scatter_by(table: pa.Table, key: str, target: str, name: str, context: Context) -> None:
    """Write rows to buckets by the hash of a column; `name` is unique among the tables of `target`."""
    bucket = shuffle.bucket_of(table[key], context.config.parts)
    shuffle.scatter(table, bucket, target=context.folder(target), name=name)


def scatter_evidence(evidence: pa.Table, name: str, context: Context) -> Counts:
    """Write evidence, condensed, to buckets by query, without documents excluded from training."""
    allowed = evidence.filter(pc.invert(pc.is_in(evidence["doc_id"], value_set=context.held_out)))
    config = context.config
    scatter_by(
        condensed(allowed, most=config.max_evidence, seed=config.seed), "query_id", "evidence", name, context
    )
    return {"held_out_rows": len(evidence) - len(allowed)}


def query_numbers(bucket: int, rows: int) -> UInt64[ndarray, " rows"]:
    """The numbers of the first `rows` queries of a bucket."""
    return np.arange(rows, dtype=np.uint64) | np.uint64(bucket << ROW_BITS)


def rows_of_numbers(numbers: pa.ChunkedArray) -> Int64[ndarray, " queries"]:
    """The rows, within their buckets, of numbered queries."""
    values: UInt64[ndarray, " queries"] = numbers.to_numpy()
    return (values & np.uint64((1 << ROW_BITS) - 1)).astype(np.int64)


def buckets_of_numbers(numbers: pa.ChunkedArray) -> Int64[ndarray, " queries"]:
    """The buckets of numbered queries."""
    values: UInt64[ndarray, " queries"] = numbers.to_numpy()
    return (values >> np.uint64(ROW_BITS)).astype(np.int64)
