"""Splits of a data set: seeded subsets, train and test by groups or by time, and the rows of each split.

A log is split by time: impressions of the train window are for training, new queries after it for test. A
test query has no impression in the train window (ScalingNote, section 4.1.2). Windows are half-open,
[start, end), so that they may be adjacent.
"""

import hashlib
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.core.errors import DataError
from scalingnote.core.parts import Executor
from scalingnote.datasets.column_checks import normal_text
from scalingnote.datasets.config import Logs
from scalingnote.datasets.input_files import RawRow
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.schema import QRELS, QUERIES
from scalingnote.storage.shuffle import hash_of

# Documents shown for a query in the test window, and the number of clicks on each.
TEST_CLICKS = pa.schema({"query_id": pa.string(), "doc_id": pa.string(), "clicks": pa.int64()})
# The texts of a query, and the number of rows with each text.
QUERY_TEXTS = pa.schema({"query_id": pa.string(), "query": pa.string(), "rows": pa.int64()})


def uniform(key: str, *, seed: int) -> float:
    """Compute a number in [0, 1) that depends only on `key` and `seed`, on every machine."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56


def subset(rows: Iterable[RawRow], *, size: int, seed: int, key: str) -> list[RawRow]:
    """Select the `size` rows of smallest seeded hash of `key`, in their order; only these are in memory."""

    def order(item: tuple[int, RawRow]) -> tuple[float, int]:
        number, row = item
        return uniform(row[key], seed=seed), number

    numbered_rows = heapq.nsmallest(size, enumerate(rows), key=order)
    return [row for _, row in sorted(numbered_rows, key=lambda item: item[0])]


def held_out(
    query_ids: pa.Array, positives: pa.Table, *, fraction: float, seed: int
) -> Bool[ndarray, " queries"]:
    """Choose the test queries: no other query has a document of a group that a test query is judged on.

    Queries and groups that are connected by `positives` (columns query_id and group) form one component. A
    component is for test if the seeded hash of its first group is below `fraction`, the expected share.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    distinct = positives["group"].unique()
    groups = distinct.take(pc.sort_indices(distinct))
    edges = (
        pc.index_in(positives["group"], value_set=groups).to_numpy(),
        pc.index_in(positives["query_id"], value_set=query_ids).to_numpy() + len(groups),
    )
    nodes = len(groups) + len(query_ids)
    graph = coo_matrix((np.ones(len(positives), bool), edges), shape=(nodes, nodes))
    _, component = connected_components(graph, directed=False)
    # The lowest node identifies a component: its first group, or its query if that has no group.
    _, lowest = np.unique(component, return_index=True)
    keys = (("g:", groups), ("q:", query_ids))
    names = pa.concat_arrays([pc.binary_join_element_wise(kind, ids, "") for kind, ids in keys])
    in_test = [uniform(name, seed=seed) < fraction for name in names.take(pa.array(lowest)).to_pylist()]
    test: ndarray = np.array(in_test, bool)[component[len(groups) :]]
    return test


# --- reading a split of a `dataset` artifact; only the test split is in memory ---------------------------


def queries(dataset: Artifact, split: str, *, each: Executor = map) -> pa.Table:
    """Read query_id and query of one split, in the order of `each`, which maps over the parts."""
    read_part = partial(_queries_of_part, dataset=dataset, split=split)
    empty = QUERIES.empty_table().select(["query_id", "query"])
    return pa.concat_tables([empty, *each(read_part, dataset.table_parts("queries"))])


def judgements(dataset: Artifact, query_ids: pa.ChunkedArray) -> pa.Table:
    """Read the judgements (QRELS) of these queries."""
    value_set = query_ids.combine_chunks()
    batches = dataset.batches("qrels", columns=QRELS.names)
    selected = [b.filter(pc.is_in(b["query_id"], value_set=value_set)).select(QRELS.names) for b in batches]
    return pa.Table.from_batches(selected, QRELS)


_IDS = pa.schema([("doc_id", pa.string())])
_COMPARED = ["doc_id", "group", "title", "content"]
_JUDGED = pa.schema([("group", pa.string()), ("text", pa.uint64())])
_CHOSEN = pa.schema([("doc_id", pa.string()), ("by_text", pa.bool_())])


def held_out_documents(dataset: Artifact, *, each: Executor = map) -> pa.Array:
    """Return the doc_ids of :func:`find_held_out`."""
    return find_held_out(dataset, each=each)["doc_id"].combine_chunks()


def find_held_out(dataset: Artifact, *, each: Executor = map) -> pa.Table:
    """Find the documents to hold out: those in a group with a document that is relevant to a test query.

    Documents with the same text as a relevant document are held out too. Texts are title and content, without
    case, spacing and Unicode's forms. A data set with ``hold_out_documents: false`` in its info is split by
    time: one document may be clicked before and after the cut, and only queries are held out (ScalingNote,
    section 4.1.2).

    Args:
        dataset: the data set.
        each: maps over the parts of its tables; its order is that of the ids.

    Returns:
        A table with `doc_id` and `by_text`: whether only the text is the reason, and not the id or group.
    """
    if not dataset.manifest.info.get("hold_out_documents", True):
        return _CHOSEN.empty_table()

    def read_parts(table: str, read: Callable[[str], pa.Table], schema: pa.Schema) -> pa.Table:
        parts = [schema.empty_table(), *each(read, dataset.table_parts(table))]
        return pa.concat_tables(parts).combine_chunks()

    test = queries(dataset, "test", each=each)["query_id"].combine_chunks()
    relevant = read_parts("qrels", partial(_relevant_of_part, dataset=dataset, query_ids=test), _IDS)
    ids = relevant["doc_id"].unique()
    judged = read_parts("documents", partial(_identify_part, dataset=dataset, doc_ids=ids), _JUDGED)
    groups = judged["group"].drop_null().unique()
    hold_out = partial(
        _hold_out_part, dataset=dataset, doc_ids=ids, groups=groups, texts=judged["text"].unique()
    )
    return read_parts("documents", hold_out, _CHOSEN)


def _queries_of_part(part: str, *, dataset: Artifact, split: str) -> pa.Table:
    table = dataset.table(part, ["query_id", "query", "split"])
    return table.filter(pc.equal(table["split"], split)).select(["query_id", "query"])


def _relevant_of_part(part: str, *, dataset: Artifact, query_ids: pa.Array) -> pa.Table:
    table = dataset.table(part, QRELS.names)
    relevant = pc.and_(pc.greater(table["relevance"], 0), pc.is_in(table["query_id"], value_set=query_ids))
    return table.filter(relevant).select(_IDS.names)


def _identify_part(part: str, *, dataset: Artifact, doc_ids: pa.Array) -> pa.Table:
    """Return the groups of some documents and the hashes of their texts."""
    table = dataset.table(part, _COMPARED)
    table = table.filter(pc.is_in(table["doc_id"], value_set=doc_ids))
    return pa.table([_groups(table), _text_hashes(table)], schema=_JUDGED)


def _hold_out_part(
    part: str, *, dataset: Artifact, doc_ids: pa.Array, groups: pa.Array, texts: pa.Array
) -> pa.Table:
    """Return the documents of a part that are held out, and whether only because of their text."""
    table = dataset.table(part, _COMPARED)
    of_groups = pc.is_in(_groups(table), value_set=groups, skip_nulls=True)
    by_id = pc.or_(pc.is_in(table["doc_id"], value_set=doc_ids).combine_chunks(), of_groups)
    by_text = pc.is_in(_text_hashes(table), value_set=texts, skip_nulls=True)
    is_held_out = pc.or_(by_id, by_text)
    return pa.table([table["doc_id"], pc.invert(by_id)], schema=_CHOSEN).filter(is_held_out)


def _text_hashes(table: pa.Table) -> pa.Array:
    """Hash each document's title and content; null if it has neither."""
    fields = (pc.fill_null(table[name], "") for name in ("title", "content"))
    texts = normal_text(pc.binary_join_element_wise(*fields, " "))
    texts = pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, r"\s+", " "))
    empty = pc.equal(texts, "").to_numpy()
    return pa.array(hash_of(texts), mask=empty)


def _groups(table: pa.Table) -> pa.Array:
    """Return the group of each document; null if it has none and is a separate group."""
    groups = table["group"].combine_chunks()
    return pc.if_else(pc.equal(groups, ""), None, groups)


# --- by time ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitWindows:
    """The train and the test window, each [start, end) in milliseconds since 1970 UTC."""

    train: tuple[int, int]
    test: tuple[int, int]

    def as_iso(self) -> dict[str, list[str]]:
        """Convert the windows to ISO 8601."""
        return {"train": [_iso(ms) for ms in self.train], "test": [_iso(ms) for ms in self.test]}


def choose_windows(config: Logs, *, first: int, last: int) -> SplitWindows:
    """Return the windows of the config or, by default, the log's span cut before its last `test_fraction`.

    `first` and `last` are times of impressions, in milliseconds since 1970. DataError if none is in the train
    window.
    """
    if config.train and config.test:
        train, test = ((_ms(start), _ms(end)) for start, end in (config.train, config.test))
    else:
        cut = last + 1 - round((last + 1 - first) * config.test_fraction)
        train, test = (first, cut), (cut, last + 1)
    if train[0] > last or train[1] <= first:
        raise DataError(
            f"no impression is in the train window, {_iso(train[0])} to {_iso(train[1])}: the log spans "
            f"{_iso(first)} to {_iso(last)}; set dataset.train and dataset.test, or dataset.timestamp_unit"
        )
    return SplitWindows(train, test)


def in_window(timestamps: pa.ChunkedArray, window: tuple[int, int]) -> pa.ChunkedArray:
    """Return whether each timestamp is in `window`, [start, end) in milliseconds since 1970."""
    ms = timestamps.cast(pa.int64())
    return pc.and_(pc.greater_equal(ms, window[0]), pc.less(ms, window[1]))


def count_test_clicks(impressions: pa.Table, *, min_dwell_s: float) -> pa.Table:
    """Count the TEST_CLICKS of impressions: a row per query and shown document, also without a click.

    A click shorter than `min_dwell_s` does not count. A click of unknown dwell time counts, as in `collect`.
    """
    counts = pc.fill_null(impressions["clicked"], False)
    long_enough = pc.fill_null(pc.greater_equal(impressions["dwell_s"], min_dwell_s), True)
    counts = pc.and_(counts, long_enough)
    rows = pa.table([impressions["query_id"], impressions["doc_id"], counts.cast(pa.int64())], TEST_CLICKS)
    return sum_equal_rows(rows)


def count_query_texts(rows: pa.Table, *, weight: int) -> pa.Table:
    """Count the QUERY_TEXTS of rows with a query text; each row counts `weight` times."""
    rows = rows.filter(pc.greater(pc.binary_length(rows["query"]), 0))
    counted = pa.array(np.full(len(rows), weight, np.int64))
    return sum_equal_rows(pa.table([rows["query_id"], rows["query"], counted], QUERY_TEXTS))


def sum_equal_rows(rows: pa.Table) -> pa.Table:
    """Add the numbers (the last column) of equal rows of TEST_CLICKS or QUERY_TEXTS."""
    *keys, number = rows.column_names
    total = rows.group_by(keys, use_threads=False).aggregate([(number, "sum")])
    return total.rename_columns([*keys, number]).cast(rows.schema)


def first_rows(rows: pa.Table, keys: list[str]) -> Bool[ndarray, " rows"]:
    """Return whether each row is the first one with its keys."""
    numbered = rows.select(keys).append_column("_row", pa.array(np.arange(len(rows))))
    first = numbered.group_by(keys, use_threads=False).aggregate([("_row", "min")])["_row_min"]
    is_first = np.zeros(len(rows), dtype=bool)
    is_first[first.to_numpy()] = True
    return is_first


@dataclass(frozen=True)
class SplitQueries:
    """The queries of a bucket: QUERIES sorted by id, QRELS of the test queries, counts of dropped queries."""

    queries: pa.Table
    qrels: pa.Table
    left_out: dict[str, int]


def split_queries(
    trained: pa.Array, *, test_clicks: pa.Table, texts: pa.Table, judged: pa.Table
) -> SplitQueries:
    """Split the queries of a bucket: `trained` for training, others with a relevant document for test.

    `trained` are the queries with an impression in the train window; `test_clicks` (TEST_CLICKS), `texts`
    (QUERY_TEXTS, from the complete log) and `judged` (QRELS) are the rows of the bucket.
    """
    fresh = pc.and_(
        pc.greater(judged["relevance"], 0), pc.invert(pc.is_in(judged["query_id"], value_set=trained))
    )
    test = judged.filter(fresh)["query_id"].unique()
    ids = pa.concat_arrays([trained, test])
    # The most frequent text of each query; ties go to the first in alphabetical order.
    order = [("query_id", "ascending"), ("rows", "descending"), ("query", "ascending")]
    ordered = texts.sort_by(order)
    frequent = ordered.filter(pa.array(first_rows(ordered, ["query_id"])))
    text = frequent["query"].take(pc.index_in(ids, value_set=frequent["query_id"].combine_chunks()))
    split = pa.array(["train"] * len(trained) + ["test"] * len(test), pa.string())
    in_test = test_clicks["query_id"].unique()
    in_training = pc.is_in(in_test, value_set=trained)
    irrelevant = pc.invert(pc.or_(in_training, pc.is_in(in_test, value_set=test)))
    logged = texts.filter(pc.greater(texts["rows"], 0))["query_id"].unique()
    outside = pc.invert(pc.is_in(logged, value_set=pa.concat_arrays([trained, in_test])))
    qrels = judged.filter(pc.is_in(judged["query_id"], value_set=test))
    return SplitQueries(
        pa.table([ids, text, split], QUERIES).sort_by("query_id"),
        qrels.sort_by([("query_id", "ascending"), ("doc_id", "ascending")]),
        {
            "queries of the test window that training has seen": pc.sum(in_training, min_count=0).as_py(),
            "queries of the test window without a relevant document": pc.sum(irrelevant, min_count=0).as_py(),
            "queries without an impression in either window": pc.sum(outside, min_count=0).as_py(),
        },
    )


def judge_by_clicks(test_clicks: pa.Table, *, min_clicks: int) -> pa.Table:
    """Return QRELS of relevance 1 from TEST_CLICKS: documents with at least `min_clicks` clicks."""
    enough = test_clicks.filter(pc.greater_equal(test_clicks["clicks"], min_clicks)).select(
        ["query_id", "doc_id"]
    )
    return enough.append_column("relevance", pa.array(np.ones(len(enough), np.int32))).cast(QRELS)


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def _iso(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms / 1000:.0f} s after 1970"
