"""Splits of a data set: seeded subsets, the train/test split by groups, and the rows of either split."""

import hashlib
import heapq
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.raw_rows import Row
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import QRELS, QUERIES
from scalingnote.storage.shuffle import TaskRunner


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


def queries(dataset: Artifact, split: str, *, each: TaskRunner = map) -> pa.Table:
    """query_id and query of one split, in the order of `each`, which maps over the parts."""
    read = partial(_queries_of_part, dataset=dataset, split=split)
    empty = QUERIES.empty_table().select(["query_id", "query"])
    return pa.concat_tables([empty, *each(read, dataset.table_parts("queries"))])


def judgements(dataset: Artifact, query_ids: pa.ChunkedArray) -> pa.Table:
    """QRELS of these queries."""
    value_set = query_ids.combine_chunks()
    batches = dataset.batches("qrels", columns=QRELS.names)
    kept = [b.filter(pc.is_in(b["query_id"], value_set=value_set)).select(QRELS.names) for b in batches]
    return pa.Table.from_batches(kept) if kept else QRELS.empty_table()


def held_out_documents(dataset: Artifact, *, each: TaskRunner = map) -> pa.Array:
    """doc_ids of every group with a document that is relevant to a test query; training may use all others.

    A data set whose info says ``hold_out_documents: false`` is split by time: one document may be clicked
    before and after the cut, and only queries are held out (ScalingNote, section 4.1.2).

    Args:
        dataset: the data set.
        each: maps over the parts of its tables; its order is that of the ids.
    """
    if not dataset.manifest.info.get("hold_out_documents", True):
        return pa.array([], pa.string())

    def found(table: str, read: Callable[[str], pa.ChunkedArray]) -> pa.Array:
        chunks = [chunk for column in each(read, dataset.table_parts(table)) for chunk in column.chunks]
        return pa.concat_arrays([pa.array([], pa.string()), *chunks])

    test = queries(dataset, "test", each=each)["query_id"].combine_chunks()
    relevant = found("qrels", partial(_relevant_of_part, dataset=dataset, query_ids=test)).unique()
    groups = found("documents", partial(_groups_of_part, dataset=dataset, doc_ids=relevant)).unique()
    return found("documents", partial(_documents_of_part, dataset=dataset, doc_ids=relevant, groups=groups))


def _queries_of_part(part: str, *, dataset: Artifact, split: str) -> pa.Table:
    table = dataset.table(part, ["query_id", "query", "split"])
    return table.filter(pc.equal(table["split"], split)).select(["query_id", "query"])


def _relevant_of_part(part: str, *, dataset: Artifact, query_ids: pa.Array) -> pa.ChunkedArray:
    table = dataset.table(part, QRELS.names)
    relevant = pc.and_(pc.greater(table["relevance"], 0), pc.is_in(table["query_id"], value_set=query_ids))
    return table.filter(relevant)["doc_id"]


def _groups_of_part(part: str, *, dataset: Artifact, doc_ids: pa.Array) -> pa.ChunkedArray:
    table = dataset.table(part, ["doc_id", "group"])
    # A document without a group is a group of its own.
    return table.filter(pc.and_(pc.is_in(table["doc_id"], value_set=doc_ids), _grouped(table)))["group"]


def _documents_of_part(
    part: str, *, dataset: Artifact, doc_ids: pa.Array, groups: pa.Array
) -> pa.ChunkedArray:
    table = dataset.table(part, ["doc_id", "group"])
    of_groups = pc.and_(_grouped(table), pc.is_in(table["group"], value_set=groups))
    return table.filter(pc.or_(pc.is_in(table["doc_id"], value_set=doc_ids), of_groups))["doc_id"]


def _grouped(table: pa.Table) -> pa.ChunkedArray:
    return pc.not_equal(pc.fill_null(table["group"], ""), "")
