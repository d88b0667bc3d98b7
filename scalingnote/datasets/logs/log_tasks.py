"""The tasks of the log pipeline: two process a slice of the log, two write the parts of a bucket of ids.

A slice task holds one slice; it names a document once, however often it was shown. A bucket task holds the
ids of its bucket, the texts and counts that slices derived from them, and one part: rows are streamed file by
file, so a frequent query makes more parts, not a larger task.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.config import Logs
from scalingnote.datasets.document_tasks import write_parts
from scalingnote.datasets.logs import time_split
from scalingnote.datasets.logs.column_checks import CHECKED, LogTally, check_table
from scalingnote.datasets.logs.inputs import LogSlice, column_kinds
from scalingnote.datasets.logs.slice_reader import read_slice
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import read_table, write_table
from scalingnote.storage.schema import QRELS, SCORES
from scalingnote.storage.shuffle import bucket_of, gather, named_stream, scatter, stream

IDS = pa.schema({"doc_id": pa.string()})
IMPRESSIONS_PER_PART = 1 << 19
_IDS_PER_LOOKUP = 1 << 20


# --- one slice --------------------------------------------------------------------------------------------


def check_slice(piece: LogSlice, *, config: Logs, work: str) -> dict[str, Any]:
    """Check the rows of a slice.

    Documents go to the bucket of their id. Rows of other tables are stored for :func:`route_slice`; the
    doc_ids and query texts that they name go to their buckets.
    """
    tally = LogTally()
    tables = read_slice(piece, kinds=column_kinds(config, piece.table), tally=tally)
    checked = [check_table(rows, piece.table, config=config, tally=tally) for rows in tables]
    record = {"done": piece.size // 1000, "table": piece.table, "rows": sum(map(len, checked))}
    if record["rows"]:
        rows = pa.concat_tables(checked).combine_chunks()
        if piece.table in ("documents", "unpaired"):
            _send(rows, "doc_id", "documents", piece, config=config, work=work)
        else:
            _store_checked(rows, piece, config=config, work=work)
        if piece.table == "impressions":
            span = pc.min_max(rows["timestamp"].cast(pa.int64())).as_py()
            record |= {"first": span["min"], "last": span["max"]}
    return record | {"tally": tally.values()}


def route_slice(
    piece: LogSlice, *, config: Logs, work: str, windows: time_split.SplitWindows
) -> dict[str, Any]:
    """Reject rows about unknown documents and send the others to the bucket of their query.

    Impressions of the train window are sent as rows, those of the test window as counts of clicks.
    """
    tally = LogTally()
    uri = _checked(piece, work)
    without_text = [field for field in CHECKED[piece.table] if field.name != "query"]
    rows = read_table(uri) if fs.exists(uri) else pa.schema(without_text).empty_table()
    unknown = gather(fs.join(work, "unknown"), piece.number, schema=IDS)["doc_id"].combine_chunks()
    is_unknown = np.asarray(pc.is_in(rows["doc_id"], value_set=unknown))
    tally.reject(piece.table, "unknown doc_id", rows, is_unknown)
    known = rows.filter(pa.array(~is_unknown))
    if piece.table != "impressions":
        _send(known, "query_id", piece.table, piece, config=config, work=work)
        return {"done": len(rows), "tally": tally.values()}
    train, test = (
        time_split.in_window(known["timestamp"], window) for window in (windows.train, windows.test)
    )
    test_clicks = time_split.count_test_clicks(known.filter(test), min_dwell_s=config.min_dwell_s)
    _send(known.filter(train), "query_id", "train", piece, config=config, work=work)
    _send(test_clicks, "query_id", "asked", piece, config=config, work=work)
    tally.counts["test_impressions"] += pc.sum(test).as_py() or 0
    outside = len(known) - (pc.sum(pc.or_(train, test)).as_py() or 0)
    tally.left_out["impressions outside both windows"] += outside
    return {"done": len(rows), "tally": tally.values()}


def _store_checked(rows: pa.Table, piece: LogSlice, *, config: Logs, work: str) -> None:
    named = pa.table([rows["doc_id"].unique()], IDS)
    _send(named, "doc_id", "named", piece, config=config, work=work)
    if piece.table != "scores":
        # The text of a judgement counts only for queries without an impression: its weight is 0.
        texts = time_split.count_query_texts(rows, weight=int(piece.table == "impressions"))
        _send(texts, "query_id", "texts", piece, config=config, work=work)
    kept = [column for column in rows.column_names if column != "query"]
    write_table(_checked(piece, work), rows.select(kept))


def _send(rows: pa.Table, key: str, target: str, piece: LogSlice, *, config: Logs, work: str) -> None:
    if len(rows):
        name = f"{piece.number:06d}"
        scatter(rows, bucket_of(rows[key], config.parts), target=fs.join(work, target), name=name)


def _checked(piece: LogSlice, work: str) -> str:
    return fs.join(work, "checked", f"{piece.number:06d}.parquet")


# --- one bucket: documents by doc_id, then queries by query_id --------------------------------------------


def write_documents(bucket: int, *, config: Logs, work: str, output: str) -> dict[str, Any]:
    """Write the first document of every id of a bucket, and for each slice the ids that are unknown."""
    tally = LogTally()
    scattered = fs.join(work, "documents")
    ids = gather(scattered, bucket, schema=IDS)
    first = time_split.first_rows(ids, ["doc_id"])

    def first_documents() -> Iterator[pa.Table]:
        start = 0
        for rows in stream(scattered, bucket):
            mask = first[start : start + len(rows)]
            start += len(rows)
            tally.reject("documents", "duplicate doc_id", rows, ~mask)
            yield rows.filter(pa.array(mask))

    name = f"documents/part-{bucket:05d}"
    written = write_parts(first_documents(), name, rows_per_part=config.documents_per_part, output=output)
    known = ids["doc_id"].filter(pa.array(first)).combine_chunks()
    unknown = [*_unknown_ids(named_stream(fs.join(work, "named"), bucket), known)]
    ids_of_slices = pa.concat_arrays([pa.array([], pa.string()), *(found for _, found in unknown)])
    lengths = np.array([len(found) for _, found in unknown], np.int64)
    numbers = np.repeat(np.array([number for number, _ in unknown], np.int64), lengths)
    scatter(pa.table([ids_of_slices], IDS), numbers, target=fs.join(work, "unknown"), name=f"{bucket:05d}")
    tally.counts["documents"] += len(known)
    return {"done": len(ids), "parts": written, "tally": tally.values()}


def write_queries(bucket: int, *, config: Logs, work: str, output: str) -> dict[str, Any]:
    """Split the queries of a bucket into training and test; write them and their rows of every table."""
    tally = LogTally()
    test_clicks = time_split.sum_equal_rows(
        gather(fs.join(work, "asked"), bucket, schema=time_split.TEST_CLICKS)
    )
    texts = time_split.sum_equal_rows(gather(fs.join(work, "texts"), bucket, schema=time_split.QUERY_TEXTS))
    impressions = fs.join(work, "train")
    ids = [rows["query_id"].unique() for rows in stream(impressions, bucket, ["query_id"])]
    trained = pa.concat_arrays([pa.array([], pa.string()), *ids]).unique()
    if config.qrels:
        judged = _known(gather(fs.join(work, "qrels"), bucket, schema=QRELS), "qrels", texts, tally)
    else:
        judged = time_split.judge_by_clicks(test_clicks, min_clicks=config.min_clicks)
    split = time_split.split_queries(trained, test_clicks=test_clicks, texts=texts, judged=judged)
    scores = _known(gather(fs.join(work, "scores"), bucket, schema=SCORES), "scores", texts, tally)
    useful = scores.filter(pc.is_in(scores["query_id"], value_set=trained))
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
    tally.counts["train_queries"] += len(trained)
    tally.counts["test_queries"] += len(split.queries) - len(trained)
    return {"done": 1, "parts": written, "tally": tally.values()}


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
    tally.reject(table, "unknown query_id", rows, unknown.to_numpy(zero_copy_only=False))
    rows = rows.filter(pc.invert(unknown))
    first = time_split.first_rows(rows, ["query_id", "doc_id"])
    tally.reject(table, "duplicate query and document", rows, ~first)
    return rows.filter(pa.array(first))
