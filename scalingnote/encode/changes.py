"""What changed since an earlier corpus was encoded, found through files: what stays the same is copied.

    embeddings of then ─deal─┐
                             ├─► buckets of doc_ids ─settle─► groups of parts ─sort─► what each part copies
    documents of now   ─deal─┘                          └───► changes: added, changed, deleted

A document stays the same if its content hash does, wherever it lies. Memory is bounded by a slice on the way
in, and by a bucket or a group on the way out; every step that is done again writes the same files again.
"""

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scalingnote.encode.tokens import COLUMNS, content_hashes
from scalingnote.storage import exchange, schema
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, write_table
from scalingnote.storage.slices import Slice

ROWS = 1 << 22  # of a slice and of a bucket: some 50 bytes each, as no text is kept
PARTS_PER_GROUP = 64
HASHED = pa.schema([("doc_id", pa.string()), schema.CONTENT_HASH])
SEEN = pa.schema([*HASHED, ("part", pa.int32()), ("row", pa.int32())])
COPY = pa.schema({name: pa.int32() for name in ("part", "row", "base_part", "base_row")})


def deal(item: Slice, *, artifact: Artifact, table: str, folder: str, buckets: int) -> int:
    """Scatter ids, hashes and places of a slice of documents or embeddings; how many there are."""
    number, parts = item
    place = {name: i for i, name in enumerate(artifact.table_parts(table))}
    found = []
    for part in parts:
        rows = hashed(artifact.table(part, COLUMNS if table == "documents" else HASHED.names))
        where = np.full(len(rows), place[part], np.int32)
        lies = [pa.array(where), pa.array(np.arange(len(rows), dtype=np.int32))]
        found.append(pa.table([*rows.columns, *lies], schema=SEEN))
    seen = pa.concat_tables(found)
    bucket = exchange.bucket_of(seen["doc_id"], buckets)
    exchange.scatter(seen, bucket, target=fs.join(folder, "dealt", table), name=f"{number:05d}")
    return len(seen)


def settle(item: tuple[int, int], *, folder: str, output: str) -> dict[str, Any]:
    """Compare the two sides of a bucket; write what changed to the artifact, and scatter what did not.

    Says which file holds the changes, and how many of each kind there are.
    """
    bucket = item[1]
    now, then = (
        exchange.gather(fs.join(folder, "dealt", table), bucket, schema=SEEN)
        for table in ("documents", "embeddings")
    )
    at = pc.index_in(now["doc_id"], value_set=then["doc_id"].combine_chunks())
    known = np.asarray(pc.is_valid(at))
    before = then.take(at.filter(pa.array(known)))
    same = np.zeros(len(now), bool)
    same[known] = np.asarray(pc.equal(now["content_hash"].filter(pa.array(known)), before["content_hash"]))
    still = pa.array(same[known])
    copy = now.filter(pa.array(same)).select(["part", "row"])
    for name in ("part", "row"):
        copy = copy.append_column(f"base_{name}", before[name].filter(still))
    group = np.asarray(copy["part"]).astype(np.int64) // PARTS_PER_GROUP
    exchange.scatter(copy, group, target=fs.join(folder, "copies"), name=f"{bucket:05d}")

    gone = pc.invert(pc.is_in(then["doc_id"], value_set=now["doc_id"].combine_chunks()))
    kinds = {
        "added": now["doc_id"].filter(pa.array(~known)),
        "changed": now["doc_id"].filter(pa.array(known & ~same)),
        "deleted": then["doc_id"].filter(gone),
    }
    changes = pa.concat_tables(
        pa.table([ids, pa.array([kind] * len(ids), pa.string())], schema=schema.CHANGES)
        for kind, ids in kinds.items()
    ).sort_by("doc_id")
    name = f"changes/part-{bucket:05d}.parquet"
    part = write_table(fs.join(output, name), changes)
    return {"name": name, "part": asdict(part), **{kind: len(ids) for kind, ids in kinds.items()}}


def sort(item: tuple[int, int], *, folder: str) -> int:
    """Write for each part of a group what it copies; how many rows that are."""
    copies = exchange.gather(fs.join(folder, "copies"), item[1], schema=COPY)
    copies = copies.sort_by([("part", "ascending"), ("row", "ascending")])
    numbers, starts = np.unique(np.asarray(copies["part"]), return_index=True)
    spans = pairwise([*starts.tolist(), len(copies)])
    for number, (start, stop) in zip(numbers.tolist(), spans, strict=True):
        write_table(_uri(folder, number), copies.slice(start, stop - start))
    return len(copies)


def copied(number: int, *, folder: str, base: Artifact) -> pa.Table:
    """What a part copies from `base`: the columns of its embeddings and ``row``, where each belongs."""
    uri = _uri(folder, number)
    parts = base.table_parts("embeddings")
    layout = pq.read_schema(fs.open_input(base.file(parts[0]))).append(COPY.field("row"))
    found = [layout.empty_table()]
    if fs.exists(uri):
        wanted = pq.read_table(fs.open_input(uri))
        for part in np.unique(np.asarray(wanted["base_part"])).tolist():
            here = wanted.filter(pc.equal(wanted["base_part"], part))
            rows = base.table(parts[part]).take(here["base_row"].combine_chunks())
            found.append(rows.append_column("row", here["row"]))
    return pa.concat_tables(found).sort_by("row")


def hashed(table: pa.Table) -> pa.Table:
    """Ids and content hashes, worked out where the table has none."""
    if schema.CONTENT_HASH.name in table.column_names:
        return table.select(HASHED.names)
    return pa.table([table["doc_id"], content_hashes(table)], schema=HASHED)


def groups(parts: int) -> range:
    """Numbers of the groups of so many parts."""
    return range(-(-parts // PARTS_PER_GROUP))


def buckets(rows: int) -> int:
    """How many buckets keep each of them near ROWS rows."""
    return max(-(-rows // ROWS), 1)


def _uri(folder: str, number: int) -> str:
    return fs.join(folder, "copy", f"{number:05d}.parquet")
