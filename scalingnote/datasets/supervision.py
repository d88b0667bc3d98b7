"""The other tables of a data set: rows are sent to the bucket of their query, checked there and written.

    route    slices            -> rows about known documents, by bucket of their query or user

A log is split by time, each bucket of queries separately:

    queries  buckets           -> parts of queries, qrels, impressions, scores

Other sources are split by groups, which needs the ids of all positives at once:

    judge    buckets           -> valid rows; groups of the documents that answer a query
    split    one task          -> the split of every query, by bucket
    queries  buckets           -> parts, also of users
    clicks   one task          -> parts of simulated impressions

A bucket task has in memory the ids of its bucket, the texts and counts that slices derived from them, and one
part: impressions of a log are streamed file by file, so a frequent query makes more parts, not a larger task.
If queries are split by groups, the task reads the ids and groups of all documents once. MAX_SPLIT_POSITIVES
and MAX_SIMULATED_DOCUMENTS bound the single tasks to about 5 GB. A source of at most MAX_TASK_ROWS rows is
one bucket, and each table is one part.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.core.errors import DataError
from scalingnote.core.log import get_logger
from scalingnote.datasets import simulate, splits
from scalingnote.datasets.config import Logs, PositionClicks, SampledDataset
from scalingnote.datasets.documents import PrepareContext, write_part, write_parts
from scalingnote.datasets.input_files import Quarantine
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import IMPRESSIONS, QRELS, QUERIES, SCORES, USERS
from scalingnote.storage.shuffle import JsonRecord, gather, stream

log = get_logger("datasets")
MAX_TASK_ROWS = 5_000_000  # of all tables, in one bucket
MAX_SPLIT_POSITIVES = 50_000_000  # that a split by groups is drawn from
ROWS_PER_PART = 1 << 19  # of impressions and users
PAIR_SCHEMAS = {"qrels": QRELS, "impressions": IMPRESSIONS, "scores": SCORES}
_KEYS = {"users": "user_id"}  # of other tables: query_id
_PARTS_PER_READ = 256
_POSITIVES = pa.schema({"query_id": pa.string(), "group": pa.string()})
_SPLIT = pa.schema({"query_id": pa.string(), "split": pa.string()})


def route_slice(item: tuple[int, tuple[int, str]], *, context: PrepareContext) -> JsonRecord:
    """Reject rows about unknown documents and send the others to the bucket of their query or user.

    Impressions in a log's train window are sent as rows, those of the test window as counts of clicks.
    """
    (_, (number, table)), quarantine = item, Quarantine()

    def send(rows: pa.Table, target: str) -> None:
        key = _KEYS.get(table, "query_id")
        context.send(rows, key, target, number=number, buckets=context.query_buckets)

    uri = context.checked_file(number)
    if not fs.exists(uri):  # without valid rows
        return {"quarantine": context.store(quarantine, "route", number)}
    rows = read_table(uri)
    if "doc_id" in rows.column_names:
        ids = gather(context.file("unknown"), number, schema=pa.schema({"doc_id": pa.string()}))["doc_id"]
        unknown = np.asarray(pc.is_in(rows["doc_id"], value_set=ids.combine_chunks()))
        quarantine.reject_where(table, "unknown doc_id", rows, unknown)
        rows = rows.filter(pa.array(~unknown))
    if context.windows and isinstance(context.config, Logs) and table == "impressions":
        train, test = (
            rows.filter(splits.in_window(rows["timestamp"], window))
            for window in (context.windows.train, context.windows.test)
        )
        send(train, "impressions")
        send(splits.count_test_clicks(test, min_dwell_s=context.config.min_dwell_s), "test_clicks")
        quarantine.counts["test_impressions"] += len(test)
        quarantine.left_out["impressions outside both windows"] += len(rows) - len(train) - len(test)
    else:
        send(rows, table)
    return {"quarantine": context.store(quarantine, "route", number)}


# --- parts ------------------------------------------------------------------------------------------------


def _write_tables(
    tables: Mapping[str, Iterable[pa.Table]],
    step: str,
    bucket: int,
    quarantine: Quarantine,
    context: PrepareContext,
) -> JsonRecord:
    """Write the rows of a bucket, each table as one part; impressions and users may be several parts."""
    numbered, parts = context.by_time or context.query_buckets > 1, dict[str, dict[str, Any]]()
    for table, rows in tables.items():
        name = f"{table}/part-{bucket:05d}" if numbered else table
        if numbered and table in ("impressions", "users"):
            table_parts = write_parts(rows, name, rows_per_part=ROWS_PER_PART, output=context.output)
        else:
            all_rows = pa.concat_tables(rows)
            needed = len(all_rows) or table in ("queries", "qrels")
            table_parts = write_part(all_rows, f"{name}.parquet", output=context.output) if needed else {}
            for split in ("train", "test") if table == "queries" else ():
                split_rows = pc.sum(pc.equal(all_rows["split"], split), min_count=0).as_py()
                quarantine.counts[f"{split}_queries"] += split_rows
        if table_parts:
            quarantine.counts[table] += sum(part["rows"] for part in table_parts.values())
        parts |= table_parts
    return {"parts": parts, "quarantine": context.store(quarantine, step, bucket)}


# --- a log: queries split by time -------------------------------------------------------------------------


def write_log_queries(item: tuple[int, int], *, context: PrepareContext) -> JsonRecord:
    """Split the queries of a bucket into training and test; write them and their rows of every table."""
    bucket, quarantine, config = item[1], Quarantine(), context.config
    assert isinstance(config, Logs)
    test_clicks = splits.sum_equal_rows(
        gather(context.file("test_clicks"), bucket, schema=splits.TEST_CLICKS)
    )
    texts = splits.sum_equal_rows(gather(context.file("texts"), bucket, schema=splits.QUERY_TEXTS))
    impressions = context.file("impressions")
    ids = [rows["query_id"].unique() for rows in stream(impressions, bucket, ["query_id"])]
    train_ids = pa.concat_arrays([pa.array([], pa.string()), *ids]).unique()
    query_ids = texts["query_id"].combine_chunks()
    if config.qrels:
        judged = _valid_pairs("qrels", bucket, query_ids, context, quarantine)
    else:
        judged = splits.judge_by_clicks(test_clicks, min_clicks=config.min_clicks)
    split = splits.split_queries(train_ids, test_clicks=test_clicks, texts=texts, judged=judged)
    scores = _valid_pairs("scores", bucket, query_ids, context, quarantine)
    useful = scores.filter(pc.is_in(scores["query_id"], value_set=train_ids))
    quarantine.left_out["scores of queries that are not for training"] += len(scores) - len(useful)
    quarantine.left_out.update(split.left_out)
    if config.qrels:
        left_out = len(judged) - len(split.qrels)
        quarantine.left_out["judgements of queries that are not for test"] += left_out
    tables = {"queries": [split.queries], "qrels": [split.qrels], "scores": [useful]}
    all_tables = tables | {"impressions": stream(impressions, bucket)}
    return _write_tables(all_tables, "queries", bucket, quarantine, context)


def _valid_pairs(
    table: str, bucket: int, query_ids: pa.Array, context: PrepareContext, quarantine: Quarantine
) -> pa.Table:
    """Select the rows of known queries; of qrels and scores only the first one of each query and document."""
    rows = gather(context.file(table), bucket, schema=PAIR_SCHEMAS[table])
    has_query = np.asarray(pc.is_in(rows["query_id"], value_set=query_ids))
    quarantine.reject_where(table, "unknown query_id", rows, ~has_query)
    rows = rows.filter(pa.array(has_query))
    if table == "impressions":
        return rows
    return _first_rows(rows, table, ["query_id", "doc_id"], "duplicate query and document", quarantine)


def _first_rows(rows: pa.Table, table: str, keys: list[str], reason: str, quarantine: Quarantine) -> pa.Table:
    first = splits.first_rows(rows, keys)
    quarantine.reject_where(table, reason, rows, ~first)
    return rows.filter(pa.array(first))


# --- other sources: queries split by groups of documents --------------------------------------------------


def judge_queries(item: tuple[int, int], *, context: PrepareContext, documents: Sequence[str]) -> JsonRecord:
    """Check the rows of a bucket of queries against each other and store the valid ones.

    `documents` has the parts of documents. Rows about documents outside the subset are valid, but left out.
    """
    bucket, quarantine = item[1], Quarantine()
    queries = _first_rows(
        gather(context.file("queries"), bucket, schema=QUERIES),
        "queries",
        ["query_id"],
        "duplicate query_id",
        quarantine,
    )
    query_ids = queries["query_id"].combine_chunks()
    pairs = {table: _valid_pairs(table, bucket, query_ids, context, quarantine) for table in PAIR_SCHEMAS}
    usable = np.asarray(pc.is_in(query_ids, value_set=_answered_ids(pairs)))
    quarantine.reject_where("queries", "no relevant document and no impression", queries, ~usable)
    valid = {"queries": int(usable.sum()), **{table: len(rows) for table, rows in pairs.items()}}
    pair_ids = pa.concat_tables(rows.select(["doc_id"]) for rows in pairs.values())["doc_id"].unique()
    groups = _read_documents(context, documents, ["doc_id", "group"], doc_ids=pair_ids)
    doc_ids = groups["doc_id"].combine_chunks()
    pairs = {table: rows.filter(pc.is_in(rows["doc_id"], value_set=doc_ids)) for table, rows in pairs.items()}
    queries = queries.filter(pc.is_in(query_ids, value_set=_answered_ids(pairs)))
    positives = pa.concat_tables([_relevant(pairs["qrels"]), _clicks(pairs["impressions"])])
    group = groups["group"].take(pc.index_in(positives["doc_id"], value_set=doc_ids))
    positives = pa.table([positives["query_id"], group], schema=_POSITIVES)
    distinct = positives.group_by(_POSITIVES.names, use_threads=False).aggregate([])
    for table, rows in (pairs | {"queries": queries, "positives": distinct}).items():
        write_table(_judged_file(context, bucket, table), rows)
    undecided = has_undecided(queries)
    rejected = context.store(quarantine, "judge", bucket)
    return {"queries": len(queries), "undecided": undecided, "valid": valid, "quarantine": rejected}


def _answered_ids(pairs: dict[str, pa.Table]) -> pa.Array:
    """Return the queries with a relevant document or an impression."""
    ids = (_relevant(pairs["qrels"])["query_id"], pairs["impressions"]["query_id"])
    return pa.concat_arrays(each.combine_chunks() for each in ids)


def _relevant(qrels: pa.Table) -> pa.Table:
    return qrels.filter(pc.greater(qrels["relevance"], 0)).select(["query_id", "doc_id"])


def _clicks(impressions: pa.Table) -> pa.Table:
    return impressions.filter(impressions["clicked"]).select(["query_id", "doc_id"])


def _judged_file(context: PrepareContext, bucket: int, table: str) -> str:
    return context.file("judged", table, f"{bucket:05d}.arrow")


def _all_judged(context: PrepareContext, table: str, columns: list[str]) -> pa.Table:
    buckets = range(context.query_buckets)
    return pa.concat_tables(
        fs.map_files(lambda b: read_table(_judged_file(context, b, table), columns), buckets)
    )


def _read_documents(
    context: PrepareContext, parts: Sequence[str], columns: list[str], *, doc_ids: pa.Array | None = None
) -> pa.Table:
    """Read columns of all documents, or of some, in order."""
    divided = context.config.passages is not None

    def read(part: str) -> pa.Table:
        if not divided:
            return read_table(fs.join(context.output, part), columns)
        stored_columns = ["document_id" if name == "doc_id" else name for name in columns]
        rows = read_table(fs.join(context.output, part), [*stored_columns, "passage"])
        # One row of each document.
        first_passages = rows.filter(pc.equal(rows["passage"], 1)).select(stored_columns)
        return first_passages.rename_columns(columns)

    tables = []
    for start in range(0, len(parts), _PARTS_PER_READ):
        rows = pa.concat_tables(fs.map_files(read, parts[start : start + _PARTS_PER_READ]))
        tables.append(rows if doc_ids is None else rows.filter(pc.is_in(rows["doc_id"], value_set=doc_ids)))
    return pa.concat_tables(tables)


def has_undecided(queries: pa.Table) -> bool:
    """Return whether the source has no split for some query."""
    return bool(pc.any(pc.equal(queries["split"], "")).as_py())


def split_queries(item: tuple[int, SampledDataset], *, context: PrepareContext) -> int:
    """Draw a split by groups for queries without one, and return the number of queries."""
    config = item[1]
    queries = _all_judged(context, "queries", _SPLIT.names)
    if has_undecided(queries):
        positives = _all_judged(context, "positives", _POSITIVES.names)
        if len(positives) > MAX_SPLIT_POSITIVES:
            raise DataError(
                f"{context.config.name}: {len(positives):,} answers, but a split by groups is drawn from "
                f"{MAX_SPLIT_POSITIVES:,} at most: give every query a split, or use dataset.name=logs"
            )
        ids = queries["query_id"].combine_chunks()
        test = splits.held_out(ids, positives, fraction=config.test_fraction, seed=config.seed)
        drawn_split = pc.if_else(pa.array(test), "test", "train")
        split = pc.if_else(pc.equal(queries["split"], ""), drawn_split, queries["split"])
        queries = pa.table([ids, split], schema=_SPLIT)
    context.send(queries, "query_id", "split", number=0, buckets=context.query_buckets)
    return len(queries)


def write_queries(item: tuple[int, int], *, context: PrepareContext) -> JsonRecord:
    """Write the queries of a bucket with their split, their rows of every table, and the bucket's users."""
    bucket, quarantine = item[1], Quarantine()
    split = gather(context.file("split"), bucket, schema=_SPLIT)
    rows = read_table(_judged_file(context, bucket, "queries"))
    queries = pa.table([rows["query_id"], rows["query"], split["split"]], schema=QUERIES)
    tables = {table: read_table(_judged_file(context, bucket, table)) for table in PAIR_SCHEMAS}
    # Leaves out valid rows about queries that only documents outside the subset answer.
    tables = {"queries": queries} | {
        table: rows.filter(pc.is_in(rows["query_id"], value_set=queries["query_id"].combine_chunks()))
        for table, rows in tables.items()
    }
    users = gather(context.file("users"), bucket, schema=pa.schema([*USERS, *context.profile]))
    tables["users"] = _first_rows(users, "users", ["user_id"], "duplicate user_id", quarantine)
    all_tables = {table: [rows] for table, rows in tables.items()}
    return _write_tables(all_tables, "queries", bucket, quarantine, context)


def simulate_clicks(
    item: tuple[int, PositionClicks], *, context: PrepareContext, documents: Sequence[str]
) -> JsonRecord:
    """Simulate impressions of training queries, and write them.

    Documents of a group that a test query is judged on are not shown.
    """
    buckets, quarantine = range(context.query_buckets), Quarantine()
    split = pa.concat_tables(gather(context.file("split"), b, schema=_SPLIT) for b in buckets)
    qrels = _all_judged(context, "qrels", QRELS.names)
    qrels = qrels.filter(pc.is_in(qrels["query_id"], value_set=split["query_id"].combine_chunks()))
    visible = _read_documents(context, documents, ["doc_id", "group", "topic"])
    test = split.filter(pc.equal(split["split"], "test"))["query_id"]
    is_test = pc.is_in(qrels["query_id"], value_set=test.combine_chunks())
    relevant = qrels.filter(pc.and_(is_test, pc.greater(qrels["relevance"], 0)))["doc_id"].unique()
    hidden = visible.filter(pc.is_in(visible["doc_id"], value_set=relevant))["group"].unique()
    visible = visible.filter(pc.invert(pc.is_in(visible["group"], value_set=hidden)))
    impressions = simulate.simulate(
        qrels.filter(pc.invert(is_test)),
        doc_ids=visible["doc_id"].to_pylist(),
        topics=visible["topic"].to_pylist(),
        config=item[1],
    )
    return _write_tables({"impressions": impressions}, "clicks", 0, quarantine, context)
