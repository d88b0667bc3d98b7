"""Changes between an earlier corpus that was encoded and a dataset, found by way of files.

    earlier embeddings ─scatter─┐
                                ├─► buckets of doc_ids ─compare─► groups of parts ─► rows each part copies
    documents ─────────scatter──┘                          └───► changes: added, changed, deleted

A document is unchanged if its content hash is, in whichever part it lies. Memory is bounded by a slice when
scattering, then by a bucket or a group. Every step repeated writes the same files again.
"""

import hashlib
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scalingnote import cluster
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import schema, shuffle
from scalingnote.storage.artifact import (
    Artifact,
    Draft,
    Part,
    read_table,
    write_table,
)
from scalingnote.storage.shuffle import NumberedSlice, run_slices, slices

log = get_logger("encode")
COLUMNS = ["doc_id", "title", "topic", "content"]
TEXTS = COLUMNS[1:]
MAX_ROWS = 1 << 22  # of a slice and of a bucket; about 50 bytes each, since no text is kept
PARTS_PER_GROUP = 64
HASHED = pa.schema([("doc_id", pa.string()), schema.CONTENT_HASH])
LOCATED = pa.schema([*HASHED, ("part", pa.int32()), ("row", pa.int32())])
COPY = pa.schema({name: pa.int32() for name in ("part", "row", "base_part", "base_row")})


def content_hashes(documents: pa.Table) -> pa.Array:
    """A hash of each document's title, topic and content: equal as long as none of them changed."""
    texts = zip(*(documents[name].to_pylist() for name in TEXTS), strict=True)
    return pa.array(
        # Lengths come first, so that moving text from one field to the next changes the hash.
        [
            hashlib.blake2b(
                b"".join(b"%d:%s" % (len(text), text) for text in map(str.encode, fields)), digest_size=16
            ).digest()
            for fields in texts
        ],
        schema.CONTENT_HASH.type,
    )


def compare_with_base(source: Artifact, base: Artifact, draft: Draft) -> dict[str, int]:
    """Find what changed since `base` was encoded, in tasks, and register the table `changes` with the draft.

    Args:
        source: the dataset.
        base: earlier embeddings.
        draft: of the new embeddings; what each part copies is written to its work folder ``base``.

    Returns:
        Numbers of documents ``added``, ``changed``, ``deleted`` and ``copied``.
    """
    folder = draft.work("base")
    run = partial(run_slices, folder=folder, each=cluster.map_tasks, room="encode", unit="tasks")
    sides = ((base, "embeddings"), (source, "documents"))
    buckets = max(-(-sum(artifact.counts["documents"] for artifact, _ in sides) // MAX_ROWS), 1)
    for artifact, table in sides:
        task = partial(scatter_hashes, artifact=artifact, table=table, folder=folder, buckets=buckets)
        run(f"scatter-{table}", task, slices(artifact, table, rows=MAX_ROWS))
    compared = run("compare", partial(compare_bucket, folder=folder, output=draft.uri), range(buckets))
    groups = range(-(-len(source.table_parts("documents")) // PARTS_PER_GROUP))
    copied = run("copies", partial(write_copies, folder=folder), groups)
    for record in compared:
        draft.register(record["name"], Part(**record["part"]))
    counts = {kind: sum(record[kind] for record in compared) for kind in ("added", "changed", "deleted")}
    counts["copied"] = sum(copied)
    log.info("since %s: %s", base.uri, ", ".join(f"{count:,} {kind}" for kind, count in counts.items()))
    return counts


def scatter_hashes(item: NumberedSlice, *, artifact: Artifact, table: str, folder: str, buckets: int) -> int:
    """Scatter ids, hashes and locations of a slice of documents or embeddings; returns their number."""
    number, parts = item
    part_number = {name: i for i, name in enumerate(artifact.table_parts(table))}
    tables = []
    for part in parts:
        rows = artifact.table(part, COLUMNS if table == "documents" else HASHED.names)
        hashes = content_hashes(rows) if table == "documents" else rows["content_hash"]
        place = np.full(len(rows), part_number[part], np.int32)
        columns = [rows["doc_id"], hashes, pa.array(place), pa.array(np.arange(len(rows), dtype=np.int32))]
        tables.append(pa.table(columns, schema=LOCATED))
    located = pa.concat_tables(tables)
    bucket = shuffle.bucket_of(located["doc_id"], buckets)
    shuffle.scatter(located, bucket, target=fs.join(folder, "scattered", table), name=f"{number:05d}")
    return len(located)


def compare_bucket(item: tuple[int, int], *, folder: str, output: str) -> dict[str, Any]:
    """Compare both sides of a bucket: write changes to the artifact, scatter unchanged rows to groups.

    Returns the file of changes and the number of documents of each kind.
    """
    bucket = item[1]
    now, then = (
        shuffle.gather(fs.join(folder, "scattered", table), bucket, schema=LOCATED)
        for table in ("documents", "embeddings")
    )
    at = pc.index_in(now["doc_id"], value_set=then["doc_id"].combine_chunks())
    known = np.asarray(pc.is_valid(at))
    before = then.take(at.filter(pa.array(known)))
    same = np.zeros(len(now), bool)
    same[known] = np.asarray(pc.equal(now["content_hash"].filter(pa.array(known)), before["content_hash"]))
    copy = now.filter(pa.array(same)).select(["part", "row"])
    for name in ("part", "row"):
        copy = copy.append_column(f"base_{name}", before[name].filter(pa.array(same[known])))
    group = np.asarray(copy["part"]).astype(np.int64) // PARTS_PER_GROUP
    shuffle.scatter(copy, group, target=fs.join(folder, "copies"), name=f"{bucket:05d}")

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


def write_copies(item: tuple[int, int], *, folder: str) -> int:
    """Write which rows each part of a group copies; returns their number."""
    copies = shuffle.gather(fs.join(folder, "copies"), item[1], schema=COPY)
    copies = copies.sort_by([("part", "ascending"), ("row", "ascending")])
    numbers, starts = np.unique(np.asarray(copies["part"]), return_index=True)
    spans = pairwise([*starts.tolist(), len(copies)])
    for number, (start, stop) in zip(numbers.tolist(), spans, strict=True):
        write_table(_copies_uri(folder, number), copies.slice(start, stop - start))
    return len(copies)


def read_copies(number: int, *, folder: str, base: Artifact) -> pa.Table:
    """The rows that a part copies from `base`: columns of its embeddings, and ``row``, their place."""
    uri = _copies_uri(folder, number)
    parts = base.table_parts("embeddings")
    layout = pq.read_schema(base.open(parts[0])).append(COPY.field("row"))
    tables = [layout.empty_table()]
    if fs.exists(uri):
        copies = read_table(uri)
        for part in np.unique(np.asarray(copies["base_part"])).tolist():
            from_part = copies.filter(pc.equal(copies["base_part"], part))
            rows = base.table(parts[part]).take(from_part["base_row"].combine_chunks())
            tables.append(rows.append_column("row", from_part["row"]))
    return pa.concat_tables(tables).sort_by("row")


def _copies_uri(folder: str, number: int) -> str:
    return fs.join(folder, "copy", f"{number:05d}.parquet")
