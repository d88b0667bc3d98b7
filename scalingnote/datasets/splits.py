"""Splits of a data set: seeded subsets, the train/test split by groups, and the rows of either split."""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.raw_rows import Row
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import QRELS, QUERIES


def uniform(key: str, *, seed: int) -> float:
    """A number in [0, 1) that depends only on `key` and `seed`, on every machine."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def subset(
    rows: Iterable[Row], *, size: int, seed: int, rank: Callable[[Row], Any] | None = None, key: str = "group"
) -> list[Row]:
    """The `size` rows of lowest `rank`; ties, or rows without a rank, are ordered by a seeded hash of `key`.

    Rows keep their order. Only `size` rows are held in memory.
    """

    def order(item: tuple[int, Row]) -> tuple[Any, float, int]:
        number, row = item
        return (rank(row) if rank else 0, uniform(row[key], seed=seed), number)

    return [row for _, row in sorted(heapq.nsmallest(size, enumerate(rows), key=order), key=lambda x: x[0])]


def held_out(
    positives: Iterable[tuple[str, str]],
    *,
    query_ids: Iterable[str],
    group_of: Mapping[str, str],
    fraction: float,
    seed: int,
) -> set[str]:
    """Draw the test queries so that no query trains on a document whose group a test query is judged on.

    Queries and groups that are connected by positives form one component. A component is for test if the hash
    of its first group is below `fraction`.

    Args:
        positives: (query_id, doc_id) pairs.
        query_ids: all queries.
        group_of: the group of each doc_id.
        fraction: expected share of the components in the test split.
        seed: of the hash.
    """
    parent: dict[str, str] = {}

    def find(node: str) -> str:
        root = node
        while parent.setdefault(root, root) != root:
            root = parent[root]
        while parent[node] != root:
            parent[node], node = root, parent[node]
        return root

    ids = list(query_ids)
    for query_id in ids:
        find(f"q:{query_id}")
    for query_id, doc_id in positives:
        first, second = sorted((find(f"q:{query_id}"), find(f"g:{group_of[doc_id]}")))
        parent[second] = first  # the smallest name becomes the root: "g:" sorts before "q:"
    return {q for q in ids if uniform(find(f"q:{q}"), seed=seed) < fraction}


# --- reading either split of a `dataset` artifact; only the test split is held in memory -----------------


def queries(dataset: Artifact, split: str) -> pa.Table:
    """query_id and query of one split."""
    kept = [b.filter(pc.equal(b["split"], split)) for b in dataset.batches("queries")]
    return pa.Table.from_batches(kept, schema=QUERIES).select(["query_id", "query"])


def judgements(dataset: Artifact, query_ids: pa.ChunkedArray) -> pa.Table:
    """QRELS of these queries."""
    value_set = query_ids.combine_chunks()
    batches = dataset.batches("qrels", columns=QRELS.names)
    kept = [b.filter(pc.is_in(b["query_id"], value_set=value_set)).select(QRELS.names) for b in batches]
    return pa.Table.from_batches(kept) if kept else QRELS.empty_table()


def held_out_documents(dataset: Artifact) -> pa.Array:
    """doc_ids of every group with a document that is relevant to a test query; training may use all others.

    A data set whose info says ``hold_out_documents: false`` is split by time: one document may be clicked
    before and after the cut, and only queries are held out (ScalingNote, section 4.1.2).
    """
    if not dataset.manifest.info.get("hold_out_documents", True):
        return pa.array([], pa.string())
    test = queries(dataset, "test")["query_id"].combine_chunks()
    relevant = [
        b.filter(pc.and_(pc.greater(b["relevance"], 0), pc.is_in(b["query_id"], value_set=test)))["doc_id"]
        for b in dataset.batches("qrels")
    ]
    chosen = pa.concat_arrays([pa.array([], pa.string()), *relevant]).unique()
    columns = ["doc_id", "group"]
    # A document without a group is a group of its own.
    groups = [
        b["group"].filter(pc.and_(pc.is_in(b["doc_id"], value_set=chosen), _grouped(b)))
        for b in dataset.batches("documents", columns=columns)
    ]
    tested = pa.concat_arrays([pa.array([], pa.string()), *groups]).unique()
    held_out = [
        b["doc_id"].filter(
            pc.or_(
                pc.is_in(b["doc_id"], value_set=chosen),
                pc.and_(_grouped(b), pc.is_in(b["group"], value_set=tested)),
            )
        )
        for b in dataset.batches("documents", columns=columns)
    ]
    return pa.concat_arrays([pa.array([], pa.string()), *held_out])


def _grouped(batch: pa.RecordBatch) -> pa.Array:
    return pc.not_equal(pc.fill_null(batch["group"], ""), "")
