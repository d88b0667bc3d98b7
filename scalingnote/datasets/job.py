"""The prepare stage: documents and supervision of any source become a `dataset` artifact.

    input -> `document_tasks`, slice by slice -> the tables beside the documents -> manifest

Sources that name files are read in slices, on Ray where there are several; others, which fit in memory, are
one slice in this process. Logs are split by time and have a job of their own (`log_job`).

The tables beside the documents are written by one task or by many:

    supervision      one task             -> all tables, one part each, if they have at most MAX_ROWS rows
                                             else
    scatter_rows     slices of the tables -> raw rows, by bucket of their query or user
    judge_queries    buckets              -> valid rows; groups of the documents that answer a query
    split_queries    one task             -> the split of every query, by bucket
    write_queries    buckets              -> parts
    write_users      buckets              -> parts
    simulate_clicks  one task             -> parts of simulated impressions

A row is checked against rows of its own query and the documents that it names, so a bucket of queries is
checked like a small source. A task holds the queries of its bucket and columns of their rows, and reads the
ids and groups of all documents once. A split by groups needs the ids of all positives at once, simulated
clicks all judgements and the ids and topics of all documents: one task each, which MAX_POSITIVES and
MAX_SIMULATED_DOCUMENTS bound to about 5 GB. Rows, splits and clicks are those of one task.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.config import Resources
from scalingnote.datasets import document_tasks, file_formats, sources, supervision
from scalingnote.datasets.config import AnyClickModel, AnyDataset, Logs, NewDocuments
from scalingnote.datasets.document_tasks import (
    Documents,
    above_zero,
    commit,
    resume_or_clear,
    slices_of,
    write_part,
    write_parts,
)
from scalingnote.datasets.raw_rows import FileRows, Quarantine, SlicedRows, Source, files_of
from scalingnote.datasets.supervision import OUTPUTS, PAIRS, TABLES, BucketRows, Context, Supervision
from scalingnote.errors import ConfigError, DataError
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, read_table, write_table
from scalingnote.storage.schema import QUERIES
from scalingnote.storage.shuffle import JsonRecord, TaskRunner, bucket_of, gather, run_slices, scatter

log = get_logger("datasets")
MAX_SIMULATED_DOCUMENTS = 10_000_000
MAX_POSITIVES = 50_000_000  # that a split by groups is drawn from
BUCKET_BYTES = 128 << 20  # of input files
ROWS_PER_PART = 1 << 19
_ROWS_PER_BATCH = 1 << 16
_RAW = pa.schema({"number": pa.int64(), "doc_id": pa.string(), "row": pa.string()})
_SPLIT = pa.schema({"query_id": pa.string(), "split": pa.string()})


def run(config: AnyDataset, *, output: str) -> Artifact:
    """Build the data set at `output`, or return it if it exists.

    Bad rows are set aside in `rejected.parquet` and counted by reason in the manifest (`rejected_by_reason`).

    Raises:
        DataError: nothing usable remains.
    """
    if isinstance(config, Logs):
        from scalingnote.datasets import log_job  # late: other sources may not need Ray

        return log_job.run(config, output=output)
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    source = sources.read(config)
    _require_taste_columns(config, source)
    return build(config, source, draft, each=_runner(source, config))


def build(config: AnyDataset, source: Source, draft: Draft, *, each: TaskRunner) -> Artifact:
    """Build the data set of a source; `each` runs the tasks."""
    quarantine = Quarantine()
    simulated = config.click_model is not None and not source.impressions
    limit = MAX_SIMULATED_DOCUMENTS if simulated else None
    documents = _write_documents(config, source, draft, quarantine, each, limit=limit)
    source = replace(source, documents=())
    tables = _write_supervision(config, source, draft, documents.parts, quarantine, each)
    for name, part in tables.parts.items():
        draft.register(name, Part(**part))
    draft.write_table("rejected.parquet", quarantine.table())
    return commit(
        draft,
        config.name,
        {"documents": documents.rows, **tables.counts},
        quarantine,
        tables.left_out | {"documents": documents.left_out},
        click_model=tables.click_model,
        documents_per_part=documents.per_part,
        **source.notes,
    )


def prepare_documents(config: NewDocuments, *, output: str) -> Artifact:
    """Build a data set of documents only, with the checks of :func:`run`: input of a live index."""
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    source = file_formats.read_documents(config)
    quarantine = Quarantine()
    documents = _write_documents(config, source, draft, quarantine, _runner(source, config))
    draft.write_table("rejected.parquet", quarantine.table())
    counts = {"documents": documents.rows, "rejected": sum(quarantine.rejected.values())}
    log.info("%s new documents, %s rejected rows -> %s", *(f"{n:,}" for n in counts.values()), output)
    return draft.commit(
        counts=counts,
        rejected_by_reason=quarantine.rejected,
        repaired=dict(sorted(quarantine.repaired.items())),
        documents_per_part=documents.per_part,
    )


def _write_documents(
    config: AnyDataset | NewDocuments,
    source: Source,
    draft: Draft,
    quarantine: Quarantine,
    each: TaskRunner,
    *,
    limit: int | None = None,
) -> Documents:
    pieces = [rows.part for name in ("documents", *OUTPUTS) for rows in files_of(getattr(source, name))]
    # Rows that are not in files are read anew: nothing is resumed.
    in_files = isinstance(source.documents, SlicedRows)
    resume_or_clear(draft, [asdict(piece) for piece in pieces] if in_files else [])
    return document_tasks.write_documents(
        draft, source, config=config, quarantine=quarantine, each=each, limit=limit
    )


def _require_taste_columns(config: AnyDataset, source: Source) -> None:
    taste = config.click_model.taste if config.click_model else None
    if missing := sorted(set(taste.columns if taste else ()) - set(source.features.names)):
        raise ConfigError(
            f"click_model.taste names {missing}, which are no features of {config.name}: it has "
            f"{source.features.names}"
        )


def _runner(source: Source, config: AnyDataset | NewDocuments) -> TaskRunner:
    """Tasks run on Ray where documents are several slices or other files are large, else in this process."""
    if len(slices_of(source, config)) == 1 and _input_bytes(source) <= BUCKET_BYTES:
        return map
    from scalingnote import cluster  # late: small data sets do not need Ray

    cluster.connect()

    def each(task: Callable[[Any], Any], items: Sequence[Any]) -> Iterable[Any]:
        if len(items) == 1:  # `map_tasks` would run it in this process, whose memory is small
            return cluster.map_tasks_in_order(task, items, Resources())
        return cluster.map_tasks(task, items)

    return each


# --- the tables beside the documents -----------------------------------------------------------------------


def _write_supervision(
    config: AnyDataset,
    source: Source,
    draft: Draft,
    parts: Sequence[str],
    quarantine: Quarantine,
    each: TaskRunner,
) -> Supervision:
    """Write the tables beside the documents, of which `parts` are there.

    DataError if no query with a relevant document remains, or one task cannot hold what it must: rows of
    tables that are not read from files, or positives that a split is drawn from.
    """
    work, buckets = draft.work(), max(-(-_input_bytes(source) // BUCKET_BYTES), 2)
    context = Context(config, source.profile, parts, work, draft.uri, buckets, supervision.MAX_ROWS)
    do = partial(run_slices, folder=work, each=each, section="datasets", unit="tasks")
    (record,) = do("supervision", partial(supervision.write_tables, context=context), [source])
    if record["whole"]:
        quarantine.add(record["quarantine"])
        return Supervision(*(record[name] for name in Supervision._fields))
    return _many_tasks(source, context, do, quarantine)


def _input_bytes(source: Source) -> int:
    """Size of the files of all tables but the documents."""
    files = {rows.part.file for name in OUTPUTS for rows in files_of(getattr(source, name))}
    return sum(file.size for file in files)


def _many_tasks(
    source: Source, context: Context, do: Callable[..., list[Any]], quarantine: Quarantine
) -> Supervision:
    config, buckets = context.config, range(context.buckets)
    slices = [(table, rows) for table in OUTPUTS for rows in files_of(getattr(source, table))]
    log.info(
        "%s: queries and their rows in %d buckets of %d files' slices", config.name, len(buckets), len(slices)
    )
    do("scatter_rows", partial(_scatter_rows, context=context), slices)
    judged = do("judge_queries", partial(_judge_queries, context=context), buckets)
    for record in judged:
        quarantine.add(record["quarantine"])
    if not any(record["queries"] for record in judged):
        raise supervision.no_query(config, quarantine)
    do("split_queries", partial(_split_queries, context=context), [None])
    written = do("write_queries", partial(_write_queries, context=context), buckets)
    clicks = None if any(record["rows"]["impressions"] for record in written) else config.click_model
    further = []
    if files_of(source.users):
        # Users with tastes are simulated: those of the source are checked and left out.
        kept = not (clicks and clicks.taste)
        further += do("write_users", partial(_write_users, context=context, kept=kept), buckets)
    for record in further:
        quarantine.add(record["quarantine"])
    if clicks:
        further += do("simulate_clicks", partial(_simulate_clicks, context=context), [clicks])
    parts = {name: part for record in (*written, *further) for name, part in record["parts"].items()}
    counts = dict.fromkeys(OUTPUTS, 0)
    for name, part in parts.items():
        counts[name.split("/")[0].removesuffix(".parquet")] += part["rows"]
    for split in ("train_queries", "test_queries"):
        counts[split] = sum(record[split] for record in written)
    supervision.warn_of_one_side(config, counts, undecided=any(record["undecided"] for record in judged))
    left_out = {
        name: sum(r["valid"][name] - w["rows"][name] for r, w in zip(judged, written, strict=True))
        for name in TABLES
    }
    return Supervision(parts, counts, above_zero(left_out), clicks.kind if clicks else None)


# --- tasks ------------------------------------------------------------------------------------------------


def _scatter_rows(item: tuple[int, tuple[str, FileRows]], *, context: Context) -> int:
    """Send the raw rows of a slice to the buckets of their query or user; returns their number."""
    slice_number, (table, raw) = item
    key = "user_id" if table == "users" else "query_id"
    rows, count = iter(raw), 0
    while some := list(islice(rows, _ROWS_PER_BATCH)):
        # Rows without a valid key will be rejected, in whichever bucket.
        keys = pa.array([supervision.identifier(row, key) or "" for row in some], pa.string())
        columns = [
            np.arange(len(some)) + (slice_number << 40) + count,
            [supervision.identifier(row, "doc_id") for row in some],
            [supervision.encode_row(row) for row in some],
        ]
        name = f"{slice_number:06d}-{count // _ROWS_PER_BATCH:06d}"
        bucket = bucket_of(keys, context.buckets)
        scatter(pa.table(columns, schema=_RAW), bucket, target=context.file("scattered", table), name=name)
        count += len(some)
    return count


def _judge_queries(item: tuple[int, int], *, context: Context) -> JsonRecord:
    """Check the rows of a bucket of queries, store the valid ones."""
    bucket, quarantine = item[1], Quarantine()
    given = {name: BucketRows(context, name, bucket) for name in TABLES}
    named = set[str]().union(*(given[name].named_documents() for name in PAIRS))
    checked = supervision.check(dict(given), named, context, quarantine)
    tables = checked.pairs | {"queries": checked.queries, "positives": checked.positives}
    for name, table in tables.items():
        write_table(_judged(context, bucket, name), table)
    return {
        "queries": len(checked.queries),
        "undecided": supervision.has_undecided(checked.queries),
        "valid": checked.valid,
        "quarantine": quarantine.store(context.file("rejected", f"{bucket:05d}.arrow")),
    }


def _judged(context: Context, bucket: int, table: str) -> str:
    return context.file("judged", table, f"{bucket:05d}.arrow")


def _all_judged(context: Context, table: str, columns: list[str] | None = None) -> pa.Table:
    tables = fs.map_files(lambda b: read_table(_judged(context, b, table)), range(context.buckets))
    return pa.concat_tables(t.select(columns) if columns else t for t in tables)


def _split_queries(_: Any, *, context: Context) -> int:
    """Choose the queries of a subset and the split of each; returns their number."""
    queries = _all_judged(context, "queries", _SPLIT.names)
    positives = _all_judged(context, "positives")
    if len(positives) > MAX_POSITIVES and supervision.has_undecided(queries):
        raise DataError(
            f"{context.config.name}: {len(positives):,} answers, but a split by groups is drawn from "
            f"{MAX_POSITIVES:,} at most: give every query a split, or use dataset.name=logs, split by time"
        )
    chosen = supervision.decide(queries, positives, context.config)
    bucket = bucket_of(chosen["query_id"], context.buckets)
    scatter(chosen, bucket, target=context.file("split"), name="all")
    return len(chosen)


def _write_queries(item: tuple[int, int], *, context: Context) -> JsonRecord:
    bucket = item[1]
    chosen = gather(context.file("split"), bucket, schema=_SPLIT)
    judged = read_table(_judged(context, bucket, "queries"))
    queries = supervision.of_queries(judged, chosen["query_id"])
    place = pc.index_in(queries["query_id"], value_set=chosen["query_id"].combine_chunks())
    tables = {
        "queries": pa.table([queries["query_id"], queries["query"], chosen["split"].take(place)], QUERIES)
    }
    for name in PAIRS:
        rows = supervision.of_queries(read_table(_judged(context, bucket, name)), chosen["query_id"])
        tables[name] = rows.select(TABLES[name].names)
    parts = write_parts(
        [tables["impressions"]],
        f"impressions/part-{bucket:05d}",
        rows_per_part=ROWS_PER_PART,
        output=context.output,
    )
    for name in ("queries", "qrels", "scores"):
        if len(tables[name]) or name != "scores":
            parts |= write_part(tables[name], f"{name}/part-{bucket:05d}.parquet", output=context.output)
    rows = {name: len(table) for name, table in tables.items()}
    return {"parts": parts, "rows": rows, **supervision.count_splits(tables["queries"])}


def _write_users(item: tuple[int, int], *, context: Context, kept: bool) -> JsonRecord:
    bucket, quarantine = item[1], Quarantine()
    users = supervision.valid_users(BucketRows(context, "users", bucket), context.profile, quarantine)
    name = f"users/part-{bucket:05d}"
    parts = write_parts([users] if kept else [], name, rows_per_part=ROWS_PER_PART, output=context.output)
    stored = quarantine.store(context.file("rejected", f"users-{bucket:05d}.arrow"))
    return {"parts": parts, "quarantine": stored}


def _simulate_clicks(item: tuple[int, AnyClickModel], *, context: Context) -> JsonRecord:
    """Simulate the impressions that one task would: judgements are in the order of the input."""
    chosen = pa.concat_tables(
        gather(context.file("split"), bucket, schema=_SPLIT) for bucket in range(context.buckets)
    )
    qrels = supervision.of_queries(_all_judged(context, "qrels"), chosen["query_id"]).sort_by("_number")
    impressions, profiles = supervision.simulated(chosen, qrels, context, item[1])
    parts = write_parts(impressions, "impressions/part", rows_per_part=ROWS_PER_PART, output=context.output)
    if profiles is not None:
        parts |= write_part(profiles, "users.parquet", output=context.output)
    return {"parts": parts}
