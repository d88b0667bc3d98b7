"""The two steps that end in parts: the documents of a bucket of ids, and all about the queries of a bucket.

What a task holds are the ids of one bucket, with the texts and counts that slices made of them, and one
part. Rows pass through a file at a time: a hot query makes many parts, not a large task.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets.config import Logs
from scalingnote.datasets.logs import parts, split
from scalingnote.datasets.logs.slices import IDS
from scalingnote.datasets.logs.tally import Tally
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import write_table
from scalingnote.storage.exchange import gather
from scalingnote.storage.schema import QRELS, SCORES

ROWS_PER_PART = 1 << 19  # of impressions
_NAMED_AT_ONCE = 1 << 20  # ids that slices name, looked up together


def settle_documents(bucket: int, *, config: Logs, work: str, output: str) -> dict[str, Any]:
    """Write every document of a bucket once, the first of its id; tell each slice which ids are unknown."""
    tally = Tally()
    files = parts.files(work, "documents", bucket)
    ids = pa.concat_tables([IDS.empty_table(), *(parts.read(uri, ["doc_id"]) for uri in files)])
    first = split.first_of_each(ids, ["doc_id"])

    def kept() -> Iterator[pa.Table]:
        start = 0
        for uri in files:
            rows = parts.read(uri)
            mask = first[start : start + len(rows)]
            start += len(rows)
            tally.reject("documents", "duplicate doc_id", rows, ~mask)
            yield rows.filter(pa.array(mask))

    name = f"documents/part-{bucket:05d}"
    written = parts.write(kept(), name, rows_per_part=config.documents_per_part, output=output)
    known = ids["doc_id"].filter(pa.array(first)).combine_chunks()
    for number, lost in _unknown(parts.files(work, "named", bucket), known):
        uri = fs.join(work, "unknown", f"{number:05d}", f"{bucket:05d}.parquet")
        write_table(uri, pa.table([lost], IDS))
    tally.counts["documents"] += len(known)
    return {"done": len(ids), "parts": written, "tally": tally.values()}


def settle_queries(bucket: int, *, config: Logs, work: str, output: str) -> dict[str, Any]:
    """Deal the queries of a bucket out to training and test; write them and all that is known of them."""
    tally = Tally()
    asked = split.added_up(gather(fs.join(work, "asked"), bucket, schema=split.ASKED))
    texts = split.added_up(gather(fs.join(work, "texts"), bucket, schema=split.TEXTS))
    impressions = parts.files(work, "train", bucket)
    ids = [parts.read(uri, ["query_id"])["query_id"].unique() for uri in impressions]
    trained = pa.concat_arrays([pa.array([], pa.string()), *ids]).unique()
    if config.qrels:
        judged = _known(gather(fs.join(work, "qrels"), bucket, schema=QRELS), "qrels", texts, tally)
    else:
        judged = split.clicked(asked, min_clicks=config.min_clicks)
    settled = split.settle(trained, asked=asked, texts=texts, judged=judged)
    scores = _known(gather(fs.join(work, "scores"), bucket, schema=SCORES), "scores", texts, tally)
    useful = scores.filter(pc.is_in(scores["query_id"], value_set=trained))
    tally.left_out["scores of queries that are not for training"] += len(scores) - len(useful)
    tally.left_out.update(settled.left_out)
    if config.qrels:
        tally.left_out["judgements of queries that are not for test"] += len(judged) - len(settled.qrels)

    written = {}
    tables = {"queries": settled.queries, "qrels": settled.qrels}
    for table, rows in (tables | ({"scores": useful} if len(useful) else {})).items():
        part = f"{table}/part-{bucket:05d}.parquet"
        written[part] = vars(write_table(fs.join(output, part), rows))
    rows = map(parts.read, impressions)
    name = f"impressions/part-{bucket:05d}"
    written |= parts.write(rows, name, rows_per_part=ROWS_PER_PART, output=output)
    for part, values in written.items():
        tally.counts[part.split("/")[0]] += values["rows"]
    tally.counts["train_queries"] += len(trained)
    tally.counts["test_queries"] += len(settled.queries) - len(trained)
    return {"done": 1, "parts": written, "tally": tally.values()}


def _unknown(files: list[str], known: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    """Of every slice that names ids of this bucket: its number, and those of them that are not `known`."""
    waiting: list[tuple[int, pa.Array]] = []
    for place, uri in enumerate(files, 1):
        number = int(uri.rsplit("/", 1)[1].removesuffix(".parquet"))
        waiting.append((number, parts.read(uri)["doc_id"].combine_chunks()))
        if place < len(files) and sum(len(ids) for _, ids in waiting) < _NAMED_AT_ONCE:
            continue
        # One look-up for many slices: it hashes the known ids anew each time.
        lost = pc.invert(pc.is_in(pa.concat_arrays([ids for _, ids in waiting]), value_set=known))
        start = 0
        for number, ids in waiting:
            some = ids.filter(lost.slice(start, len(ids)))
            start += len(ids)
            if len(some):
                yield number, some
        waiting = []


def _known(rows: pa.Table, table: str, texts: pa.Table, tally: Tally) -> pa.Table:
    """Rows about queries that have a text, each query and document once, the first that came."""
    unknown = pc.invert(pc.is_in(rows["query_id"], value_set=texts["query_id"].combine_chunks()))
    tally.reject(table, "unknown query_id", rows, unknown.to_numpy(zero_copy_only=False))
    rows = rows.filter(pc.invert(unknown))
    first = split.first_of_each(rows, ["query_id", "doc_id"])
    tally.reject(table, "duplicate query and document", rows, ~first)
    return rows.filter(pa.array(first))
