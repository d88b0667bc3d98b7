"""The queries a teacher answers, each once, taken out of triplets by way of files.

    triplets, generated ─deal─► buckets by query ─settle─► pieces of at most so many queries

A generated query goes to the bucket of its source, so that what is said of the source is known there. Memory
is bounded by a slice on the way in and a bucket on the way out; a step that is done again writes the same
files again, and neither the slices nor the buckets change which queries come out.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.storage import exchange, slices
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, write_table
from scalingnote.storage.slices import Slice

BUCKET_ROWS = 1 << 20
QUERY = pa.schema({"query_id": pa.string(), "query": pa.string(), "split": pa.string()})
GENERATED = pa.schema({"query_id": pa.string(), "query": pa.string(), "source_query_id": pa.string()})
TABLES = {"triplets": QUERY, "generated": GENERATED}
Piece = dict[str, Any]  # "name" of a file below the folder, and its "rows"


def buckets(triplets: Artifact) -> int:
    """How many buckets keep each of them below BUCKET_ROWS rows, or near it."""
    names = [name for table in TABLES for name in triplets.table_parts(table)]
    rows = sum(triplets.manifest.parts[name].rows or slices.ROWS_PER_SLICE for name in names)
    return max(-(-rows // BUCKET_ROWS), 1)


def deal(item: Slice, *, triplets: Artifact, folder: str, buckets: int) -> int:
    """Scatter the queries of a slice; returns how many it has."""
    number, parts = item
    rows = 0
    for table, schema in TABLES.items():
        found = [
            _distinct(triplets.table(part, schema.names))
            for part in parts
            if part.startswith((f"{table}/", f"{table}."))
        ]
        if found:
            whole = pa.concat_tables(found)
            bucket = exchange.bucket_of(
                whole["source_query_id" if table == "generated" else "query_id"], buckets
            )
            exchange.scatter(whole, bucket, target=fs.join(folder, "dealt", table), name=f"{number:05d}")
            rows += len(whole)
    return rows


def settle(bucket: int, *, folder: str, rows_per_piece: int) -> list[Piece]:
    """Write the queries of a bucket, each once: those of triplets by id, and generated ones."""
    dealt = {
        table: _distinct(exchange.gather(fs.join(folder, "dealt", table), bucket, schema=schema))
        for table, schema in TABLES.items()
    }
    queries = chosen(dealt["triplets"], dealt["generated"])
    pieces = []
    for number, start in enumerate(range(0, len(queries), rows_per_piece)):
        name = f"{bucket:05d}-{number:05d}"
        piece = queries.slice(start, rows_per_piece)
        write_table(piece_uri(folder, name), piece)
        pieces.append({"name": name, "rows": len(piece)})
    return pieces


def piece_uri(folder: str, name: str) -> str:
    """Where :func:`settle` wrote a piece."""
    return fs.join(folder, "queries", f"{name}.parquet")


def chosen(asked: pa.Table, generated: pa.Table) -> pa.Table:
    """Queries of triplets and the generated ones that may teach: all but those near a validation query.

    These would make its measure too good.
    """
    asked = asked.sort_by("query_id").select(QUERY.names)
    validation = asked.filter(pc.equal(asked["split"], "validation"))["query_id"].combine_chunks()
    kept = generated.filter(pc.invert(pc.is_in(generated["source_query_id"], value_set=validation)))
    split = pa.array(["train"] * len(kept), pa.string())
    return pa.concat_tables([asked, kept.select(["query_id", "query"]).append_column("split", split)])


def _distinct(table: pa.Table) -> pa.Table:
    """The first row of each query, in the order in which they come."""
    others: Sequence[str] = [name for name in table.column_names if name != "query_id"]
    firsts = table.group_by("query_id", use_threads=False).aggregate([(name, "first") for name in others])
    return firsts.rename_columns({f"{name}_first": name for name in others}).select(table.column_names)
