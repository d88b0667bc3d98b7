"""The prepare stage of a search platform's log, of any size, on Ray: one task per slice or per bucket.

    check      slices             -> checked rows; documents by bucket of their id; ids and texts they name
    documents  buckets of doc_ids -> parts of documents; for each slice, the unknown ids
    route      slices             -> impressions, scores, qrels of known documents, by bucket of the query
    queries    buckets of queries -> parts of queries, qrels, impressions, scores

`log_inputs` cuts the files into slices and reads them, `log_columns` rejects bad rows, `splits` splits by
time. No row passes through the driver or Ray's object store: tasks read and write files and return a record
of a few hundred bytes, so the driver's memory grows with the number of slices, not of rows.

A slice task holds one slice; it names a document once, however often it was shown. A bucket task holds the
ids of its bucket, the texts and counts that slices derived from them, and one part: rows are streamed file by
file, so a frequent query makes more parts, not a larger task. Records of finished tasks are kept after a kill
as long as the input is unchanged; the other tasks write the same files again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote import cluster
from scalingnote.datasets import splits
from scalingnote.datasets.config import Logs
from scalingnote.datasets.document_tasks import (
    commit,
    resume_or_clear,
    rows_per_part,
    text_bytes,
    write_parts,
)
from scalingnote.datasets.log_columns import CHECKED, LogTally, check_table
from scalingnote.datasets.log_inputs import LogSlice, plan_slices, read_slice
from scalingnote.errors import DataError
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, read_table, write_table
from scalingnote.storage.schema import QRELS, SCORES
from scalingnote.storage.shuffle import (
    JsonRecord,
    TaskRunner,
    bucket_of,
    gather,
    named_stream,
    run_slices,
    scatter,
    stream,
)

log = get_logger("datasets")
IDS = pa.schema({"doc_id": pa.string()})
IMPRESSIONS_PER_PART = 1 << 19
_IDS_PER_LOOKUP = 1 << 20
_COUNTS = (
    "documents",
    "queries",
    "qrels",
    "impressions",
    "scores",
    "train_queries",
    "test_queries",
    "test_impressions",
)
_MAX_BUCKET_BYTES = 1 << 30  # of input; above it, a warning advises more buckets


def run(config: Logs, *, output: str) -> Artifact:
    """Build the `dataset` artifact of a log, or return it if it is there.

    Bad rows are set aside in `rejected.parquet` and counted by reason in the manifest (`rejected_by_reason`).

    Raises:
        DataError: a file lacks a column, or nothing usable remains.
    """
    draft = Draft(output, kind="dataset", config=config, parents={})
    if draft.finished:
        return draft.existing()
    slices = plan_slices(config)
    cluster.check_resources(config.resources, knob="dataset.resources")
    return build(config, draft, slices, each=partial(cluster.map_tasks_in_order, resources=config.resources))


def build(config: Logs, draft: Draft, slices: Sequence[LogSlice], *, each: TaskRunner) -> Artifact:
    """Build the data set from `slices`; `each` runs the tasks. DataError if nothing is usable."""
    resume_or_clear(draft, [asdict(piece) for piece in slices])
    per_bucket = sum(piece.part.size for piece in slices) // config.parts
    if per_bucket > _MAX_BUCKET_BYTES:
        log.warning(
            "%s MB of input for each of %d buckets: raise dataset.parts to keep tasks small",
            f"{per_bucket // 10**6:,}",
            config.parts,
        )
    tally = LogTally()
    work, output = draft.work(), draft.uri
    do = partial(run_slices, folder=work, each=each, section="datasets")
    buckets = range(config.parts)

    check = partial(check_slice, config=config, work=work)
    kilobytes = [piece.part.size // 1000 for piece in slices]
    checked = do("check", check, slices, rows=kilobytes, unit="kB")
    windows, span = _split_windows(config, checked, tally)
    per_part = _rows_per_part(config, checked)
    documents = partial(write_documents, config=config, work=work, output=output, per_part=per_part)
    parts = do("documents", documents, buckets, unit="buckets")
    route = partial(route_slice, config=config, work=work, windows=windows)
    evidence = [piece for piece in slices if piece.table not in ("documents", "unpaired")]
    routed = do("route", route, evidence)
    queries = partial(write_queries, config=config, work=work, output=output)
    query_parts = do("queries", queries, buckets, unit="buckets")
    for record in (*parts, *routed, *query_parts):
        tally.add(record["tally"])
    for record in (*parts, *query_parts):
        for name, part in record["parts"].items():
            draft.register(name, Part(**part))
    return _commit(config, draft, tally, windows, span, per_part)


def _rows_per_part(config: Logs, checked: Sequence[JsonRecord]) -> int:
    """Rows of a part of documents. Parts are of one bucket each, so that buckets bound them, too."""
    records = [record for record in checked if record["table"] in ("documents", "unpaired")]
    rows, texts = (sum(record[name] for record in records) for name in ("rows", "text_bytes"))
    return rows_per_part(config, rows=rows, text_bytes=texts)


def _split_windows(
    config: Logs, checked: Sequence[JsonRecord], tally: LogTally
) -> tuple[splits.SplitWindows, tuple[int, int]]:
    for record in checked:
        tally.add(record["tally"])
    for tables in (("documents", "unpaired"), ("impressions",)):
        if not any(record["rows"] for record in checked if record["table"] in tables):
            raise DataError(f"logs: no usable row of {tables[0]}{tally.reasons(of=tables[0])}")
    spans = [(record["first"], record["last"]) for record in checked if "first" in record]
    span = (min(first for first, _ in spans), max(last for _, last in spans))
    return splits.choose_windows(config, first=span[0], last=span[1]), span


def _commit(
    config: Logs,
    draft: Draft,
    tally: LogTally,
    split_windows: splits.SplitWindows,
    span: tuple[int, int],
    per_part: int,
) -> Artifact:
    counts = {name: tally.counts[name] for name in _COUNTS}
    windows = split_windows.shown()
    if not counts["train_queries"]:
        window, why = " to ".join(windows["train"]), tally.reasons(of="impressions")
        raise DataError(f"logs: no query to train on in the window {window}{why}: widen dataset.train")
    if not counts["test_queries"]:
        log.warning("no query to test with in the window %s to %s: widen dataset.test", *windows["test"])
    rejected = tally.table().sort_by([("table", "ascending"), ("reason", "ascending")])
    draft.write_table("rejected.parquet", rejected)
    return commit(
        draft,
        "logs",
        counts,
        tally,
        tally.left_out,
        windows=windows,
        span=splits.SplitWindows(span, span).shown()["train"],
        hold_out_documents=config.hold_out_documents,
        documents_per_part=per_part,
    )


# --- one slice --------------------------------------------------------------------------------------------


def check_slice(item: tuple[int, LogSlice], *, config: Logs, work: str) -> JsonRecord:
    """Check the rows of a slice.

    Documents go to the bucket of their id. Rows of other tables are stored for :func:`route_slice`; the
    doc_ids and query texts that they name go to their buckets.
    """
    piece, tally = item[1], LogTally()
    send = partial(_send, piece=piece, config=config, work=work)
    tables = read_slice(piece, config=config, tally=tally)
    checked = [check_table(rows, piece.table, config=config, tally=tally) for rows in tables]
    record = {"table": piece.table, "rows": sum(map(len, checked)), "text_bytes": 0}
    if not record["rows"]:
        return record | {"tally": tally.store(_examples(work, "check", item[0]))}
    rows = pa.concat_tables(checked).combine_chunks()
    if piece.table in ("documents", "unpaired"):
        record["text_bytes"] = text_bytes(rows)
        send(rows, "doc_id", "documents")
    else:
        send(pa.table([rows["doc_id"].unique()], IDS), "doc_id", "named")
        kept = [column for column in rows.column_names if column != "query"]
        write_table(_checked(piece, work), rows.select(kept))
    if piece.table in ("impressions", "qrels"):
        # The text of a judgement counts only for queries without an impression: its weight is 0.
        weight = int(piece.table == "impressions")
        send(splits.count_query_texts(rows, weight=weight), "query_id", "texts")
    if piece.table == "impressions":
        span = pc.min_max(rows["timestamp"].cast(pa.int64())).as_py()
        record |= {"first": span["min"], "last": span["max"]}
    return record | {"tally": tally.store(_examples(work, "check", item[0]))}


def route_slice(
    item: tuple[int, LogSlice], *, config: Logs, work: str, windows: splits.SplitWindows
) -> JsonRecord:
    """Reject rows about unknown documents and send the others to the bucket of their query.

    Impressions of the train window are sent as rows, those of the test window as counts of clicks.
    """
    piece, tally = item[1], LogTally()
    send = partial(_send, piece=piece, config=config, work=work)
    uri = _checked(piece, work)
    without_text = [field for field in CHECKED[piece.table] if field.name != "query"]
    rows = read_table(uri) if fs.exists(uri) else pa.schema(without_text).empty_table()
    unknown = gather(fs.join(work, "unknown"), piece.number, schema=IDS)["doc_id"].combine_chunks()
    is_unknown = np.asarray(pc.is_in(rows["doc_id"], value_set=unknown))
    tally.reject_where(piece.table, "unknown doc_id", rows, is_unknown)
    known = rows.filter(pa.array(~is_unknown))
    if piece.table == "impressions":
        train, test = (
            known.filter(splits.in_window(known["timestamp"], window))
            for window in (windows.train, windows.test)
        )
        test_clicks = splits.count_test_clicks(test, min_dwell_s=config.min_dwell_s)
        send(train, "query_id", "train")
        send(test_clicks, "query_id", "test_clicks")
        tally.counts["test_impressions"] += len(test)
        tally.left_out["impressions outside both windows"] += len(known) - len(train) - len(test)
    else:
        send(known, "query_id", piece.table)
    return {"tally": tally.store(_examples(work, "route", item[0]))}


def _send(rows: pa.Table, key: str, target: str, *, piece: LogSlice, config: Logs, work: str) -> None:
    bucket = bucket_of(rows[key], config.parts)
    scatter(rows, bucket, target=fs.join(work, target), name=f"{piece.number:06d}")


def _examples(work: str, step: str, number: int) -> str:
    """The rejected rows of a task that are kept."""
    return fs.join(work, "examples", step, f"{number:06d}.arrow")


def _checked(piece: LogSlice, work: str) -> str:
    return fs.join(work, "checked", f"{piece.number:06d}.parquet")


# --- one bucket: documents by doc_id, then queries by query_id --------------------------------------------


def write_documents(
    item: tuple[int, int], *, config: Logs, work: str, output: str, per_part: int
) -> JsonRecord:
    """Write the first document of every id of a bucket, and for each slice the ids that are unknown."""
    bucket, tally = item[1], LogTally()
    scattered = fs.join(work, "documents")
    ids = gather(scattered, bucket, schema=IDS)
    first = splits.first_rows(ids, ["doc_id"])

    def first_documents() -> Iterator[pa.Table]:
        start = 0
        for rows in stream(scattered, bucket):
            mask = first[start : start + len(rows)]
            start += len(rows)
            tally.reject_where("documents", "duplicate doc_id", rows, ~mask)
            yield rows.filter(pa.array(mask))

    name = f"documents/part-{bucket:05d}"
    written = write_parts(first_documents(), name, rows_per_part=per_part, output=output)
    known = ids["doc_id"].filter(pa.array(first)).combine_chunks()
    unknown = [*_unknown_ids(named_stream(fs.join(work, "named"), bucket), known)]
    ids_of_slices = pa.concat_arrays([pa.array([], pa.string()), *(found for _, found in unknown)])
    lengths = np.array([len(found) for _, found in unknown], np.int64)
    numbers = np.repeat(np.array([number for number, _ in unknown], np.int64), lengths)
    scatter(pa.table([ids_of_slices], IDS), numbers, target=fs.join(work, "unknown"), name=f"{bucket:05d}")
    tally.counts["documents"] += len(known)
    return {"parts": written, "tally": tally.store(_examples(work, "documents", bucket))}


def write_queries(item: tuple[int, int], *, config: Logs, work: str, output: str) -> JsonRecord:
    """Split the queries of a bucket into training and test; write them and their rows of every table."""
    bucket, tally = item[1], LogTally()
    test_clicks = splits.sum_equal_rows(
        gather(fs.join(work, "test_clicks"), bucket, schema=splits.TEST_CLICKS)
    )
    texts = splits.sum_equal_rows(gather(fs.join(work, "texts"), bucket, schema=splits.QUERY_TEXTS))
    impressions = fs.join(work, "train")
    ids = [rows["query_id"].unique() for rows in stream(impressions, bucket, ["query_id"])]
    train_ids = pa.concat_arrays([pa.array([], pa.string()), *ids]).unique()
    if config.qrels:
        judged = _known(gather(fs.join(work, "qrels"), bucket, schema=QRELS), "qrels", texts, tally)
    else:
        judged = splits.judge_by_clicks(test_clicks, min_clicks=config.min_clicks)
    split = splits.split_queries(train_ids, test_clicks=test_clicks, texts=texts, judged=judged)
    scores = _known(gather(fs.join(work, "scores"), bucket, schema=SCORES), "scores", texts, tally)
    useful = scores.filter(pc.is_in(scores["query_id"], value_set=train_ids))
    tally.left_out["scores of queries that are not for training"] += len(scores) - len(useful)
    tally.left_out.update(split.left_out)
    if config.qrels:
        tally.left_out["judgements of queries that are not for test"] += len(judged) - len(split.qrels)

    written = {}
    tables = {"queries": split.queries, "qrels": split.qrels}
    for table, rows in (tables | ({"scores": useful} if len(useful) else {})).items():
        part = f"{table}/part-{bucket:05d}.parquet"
        written[part] = vars(write_table(fs.join(output, part), rows))
    name = f"impressions/part-{bucket:05d}"
    written |= write_parts(
        stream(impressions, bucket), name, rows_per_part=IMPRESSIONS_PER_PART, output=output
    )
    for part, values in written.items():
        tally.counts[part.split("/")[0]] += values["rows"]
    tally.counts["train_queries"] += len(train_ids)
    tally.counts["test_queries"] += len(split.queries) - len(train_ids)
    return {"parts": written, "tally": tally.store(_examples(work, "queries", bucket))}


def _unknown_ids(named: Iterable[tuple[str, pa.Table]], known: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """Numbers of slices, and ids of this bucket that they name and that are unknown."""
    waiting: list[tuple[int, pa.Array]] = []
    for name, rows in named:
        waiting.append((int(name), rows["doc_id"].combine_chunks()))
        if sum(len(ids) for _, ids in waiting) >= _IDS_PER_LOOKUP:
            yield from _look_up(waiting, known)
            waiting = []
    yield from _look_up(waiting, known)


def _look_up(waiting: list[tuple[int, pa.Array]], known: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """One lookup for many slices, since each lookup hashes all known ids again."""
    named = pa.concat_arrays([pa.array([], pa.string()), *(ids for _, ids in waiting)])
    is_unknown = pc.invert(pc.is_in(named, value_set=known))
    start = 0
    for number, ids in waiting:
        yield number, ids.filter(is_unknown.slice(start, len(ids)))
        start += len(ids)


def _known(rows: pa.Table, table: str, texts: pa.Table, tally: LogTally) -> pa.Table:
    """Rows of queries that have a text; only the first row of each query and document."""
    unknown = pc.invert(pc.is_in(rows["query_id"], value_set=texts["query_id"].combine_chunks()))
    tally.reject_where(table, "unknown query_id", rows, unknown.to_numpy(zero_copy_only=False))
    rows = rows.filter(pc.invert(unknown))
    first = splits.first_rows(rows, ["query_id", "doc_id"])
    tally.reject_where(table, "duplicate query and document", rows, ~first)
    return rows.filter(pa.array(first))
