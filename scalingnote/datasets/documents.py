"""Preparation of documents: check rows, find repeated and unknown ids by a shuffle, write parts.

    check    slices of all tables    -> valid rows; ids of documents and of other rows, by bucket
    ids      buckets of doc_ids      -> for each slice, the rows with a repeated id, and the unknown ids
    choose   one task, for a subset  -> for each slice, the rows that the subset leaves out
    write    slices                  -> the parts that begin in them; of passages if configured

Parts keep the order of the input. Documents of a log are shuffled by id instead: `ids` writes the parts of
its bucket.

A task has one slice or one bucket of ids in memory. Its record has counts and names of parts, so the driver's
memory grows with the number of slices and parts, and a killed run loses only the tasks that were running.
Parts and rejected rows depend on the input and the config, not on slices or workers.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool
from numpy import ndarray

from scalingnote.datasets import splits
from scalingnote.datasets.column_checks import (
    CHECKED,
    MAX_CONTENT_CHARS,
    MAX_DIVIDED_CHARS,
    check_table,
)
from scalingnote.datasets.config import AnyDataset, Logs, NewDocuments, Passages
from scalingnote.datasets.input_files import InputSlice, Quarantine
from scalingnote.datasets.passages import TOKENIZER, PassageSplitter
from scalingnote.datasets.tables import read_tables, table_format
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Draft, read_table, write_table
from scalingnote.storage.shuffle import JsonRecord, bucket_of, gather, scatter, stream

SLICES_PER_BUCKET = 8  # a bucket has as many ids as these slices of documents
# A part is the unit of work of every later stage: a task has one in memory, a driver has the name of each.
MAX_PARTS = 1 << 14  # above which parts get larger, up to MAX_PART_ROWS
MIN_PART_ROWS, MAX_PART_ROWS = 1 << 12, 1 << 16
MAX_PART_BYTES = 128 << 20  # of titles and contents; overrides the three limits above
_IDS_PER_LOOKUP = 1 << 20
_BYTES_PER_TOKEN = 4  # of English, about: for an estimate of the number of passages
_DOC_IDS = pa.schema({"doc_id": pa.string()})
_NAMED = pa.schema({"doc_id": pa.string(), "slice": pa.int64()})
_LOCATED = _NAMED.append(pa.field("row", pa.int64()))
_ROW = pa.schema({"row": pa.int64()})


@dataclass(frozen=True)
class PrepareContext:
    """Inputs that are the same for all tasks."""

    config: AnyDataset | NewDocuments
    features: pa.Schema
    profile: pa.Schema
    document_slices: int
    work: str
    output: str
    query_buckets: int = 1
    windows: splits.SplitWindows | None = None  # of a log

    @property
    def by_time(self) -> bool:
        """Whether the source is a log, which is split by time."""
        return isinstance(self.config, Logs)

    @property
    def id_buckets(self) -> int:
        """Number of buckets of doc_ids."""
        if isinstance(self.config, Logs):
            return self.config.parts
        return max(-(-self.document_slices // SLICES_PER_BUCKET), 1)

    @property
    def splitter(self) -> PassageSplitter | None:
        """Splitter of documents into passages; None: rows are documents."""
        return None if self.config.passages is None else _splitter(self.config.passages, self.output)

    def file(self, *names: str) -> str:
        """Return the URI of a file of the work directory."""
        return fs.join(self.work, *names)

    def checked_file(self, number: int) -> str:
        """Return the URI of the valid rows of a slice."""
        return self.file("checked", f"{number:06d}.arrow")

    def store(self, quarantine: Quarantine, step: str, number: int) -> JsonRecord:
        """Store the rows that a task rejected, and return the record of the quarantine."""
        return quarantine.store(self.file("rejected", step, f"{number:06d}.arrow"))

    def send(self, rows: pa.Table, key: str, target: str, *, number: int, buckets: int) -> None:
        """Scatter rows of the slice `number` into the buckets of their keys."""
        scatter(rows, bucket_of(rows[key], buckets), target=self.file(target), name=f"{number:06d}")


@functools.lru_cache(1)
def _splitter(config: Passages, dataset: str) -> PassageSplitter:
    return PassageSplitter.load(config, fs.read_bytes(fs.join(dataset, TOKENIZER)))


# --- slices of all tables ---------------------------------------------------------------------------------


def check_slice(item: tuple[int, tuple[str, InputSlice]], *, context: PrepareContext) -> JsonRecord:
    """Check the rows of a slice and store the valid ones; ids of documents go to their buckets."""
    (number, (table, rows)), quarantine = item, Quarantine()
    features = {"documents": context.features, "users": context.profile}.get(table, pa.schema([]))
    unit = context.config.timestamp_unit if isinstance(context.config, Logs) else "s"
    form = table_format(table, features)
    valid_tables = [
        check_table(
            each,
            table,
            features=features,
            quarantine=quarantine,
            timestamp_unit=unit,
            max_content=MAX_CONTENT_CHARS if context.config.passages is None else MAX_DIVIDED_CHARS,
        )
        for each in read_tables(rows, form, quarantine=quarantine)
    ]
    checked = pa.concat_tables([pa.schema([*CHECKED[table], *features]).empty_table(), *valid_tables])
    record = {"table": table, "rows": len(checked), "text_bytes": 0}
    if table == "documents":
        record["text_bytes"] = text_bytes(checked)
        _send_documents(checked, number, context)
    elif len(checked):
        if "doc_id" in checked.column_names:
            ids = checked["doc_id"].combine_chunks().unique()
            mentioned = pa.table([ids, np.full(len(ids), number)], schema=_NAMED)
            context.send(mentioned, "doc_id", "named", number=number, buckets=context.id_buckets)
        if context.by_time and table in ("impressions", "qrels"):
            # The text of a judgement has weight 0: it counts only for queries without an impression.
            texts = splits.count_query_texts(checked, weight=int(table == "impressions"))
            context.send(texts, "query_id", "texts", number=number, buckets=context.id_buckets)
        if context.by_time and table == "impressions":
            span = pc.min_max(checked["timestamp"].cast(pa.int64())).as_py()
            record |= {"first": span["min"], "last": span["max"]}
        columns = checked if table == "queries" else checked.select(_without_text(checked))
        write_table(context.checked_file(number), columns)
    return record | {"quarantine": context.store(quarantine, "check", number)}


def _without_text(rows: pa.Table) -> list[str]:
    return [name for name in rows.column_names if name != "query"]


def _send_documents(rows: pa.Table, number: int, context: PrepareContext) -> None:
    if not context.by_time:
        write_table(context.checked_file(number), rows)
        places = (np.full(len(rows), number), np.arange(len(rows)))
        rows = pa.table([rows["doc_id"], *places], schema=_LOCATED)
    context.send(rows, "doc_id", "documents", number=number, buckets=context.id_buckets)


def text_bytes(documents: pa.Table) -> int:
    """Count the bytes of titles and contents in UTF-8, independent of the division of rows into tables."""
    return sum(pc.sum(pc.binary_length(documents[name])).as_py() or 0 for name in ("title", "content"))


# --- buckets of ids ---------------------------------------------------------------------------------------


def find_ids(item: tuple[int, int], *, context: PrepareContext, per_part: int) -> JsonRecord:
    """Find repeated ids of a bucket, and the ids in other rows that no document has.

    Repeats are sent to their slices; documents of a log are written.
    """
    bucket, quarantine = item[1], Quarantine()
    target = context.file("documents")
    ids = gather(target, bucket, schema=_DOC_IDS)
    first = splits.first_rows(ids, ["doc_id"])
    repeats, parts = Counter[int](), {}
    if context.by_time:
        documents = _first_documents(stream(target, bucket), first, quarantine)
        name = f"documents/part-{bucket:05d}"
        parts = write_parts(
            documents, name, rows_per_part=per_part, output=context.output, splitter=context.splitter
        )
    else:
        repeated = gather(target, bucket, schema=_LOCATED).filter(pa.array(~first))
        numbers = repeated["slice"].to_numpy()
        scatter(repeated.select(["row"]), numbers, target=context.file("repeats"), name=f"{bucket:05d}")
        repeats.update(numbers.tolist())
    document_ids = ids["doc_id"].filter(pa.array(first)).combine_chunks()
    # Few lookups of many ids, because each lookup hashes all known ids again.
    mentioned = rechunk(stream(context.file("named"), bucket), _IDS_PER_LOOKUP)
    unknown_tables = [
        rows.filter(pc.invert(pc.is_in(rows["doc_id"], value_set=document_ids))) for rows in mentioned
    ]
    unknown = pa.concat_tables([_NAMED.empty_table(), *unknown_tables])
    slices = unknown["slice"].to_numpy()
    scatter(unknown.select(["doc_id"]), slices, target=context.file("unknown"), name=f"{bucket:05d}")
    counts = {str(number): count for number, count in repeats.items()}
    rejected = context.store(quarantine, "ids", bucket)
    return {"parts": parts, "repeats": counts, "documents": len(document_ids), "quarantine": rejected}


def _first_documents(
    tables: Iterable[pa.Table], first: Bool[ndarray, " rows"], quarantine: Quarantine
) -> Iterator[pa.Table]:
    start = 0
    for rows in tables:
        mask = first[start : start + len(rows)]
        start += len(rows)
        quarantine.reject_where("documents", "duplicate doc_id", rows, ~mask)
        yield rows.filter(pa.array(mask))


# --- documents in the order of the input ------------------------------------------------------------------


def choose(item: tuple[int, tuple[int, int]], *, context: PrepareContext) -> JsonRecord:
    """Choose a subset of (size, seed): complete groups in the order of a seeded hash.

    The other rows are sent to their slices.

    Returns:
        The number of other rows, by slice.
    """
    size, seed = item[1]
    places, hashes = [np.empty((2, 0), np.int64)], [np.empty(0)]
    for number in range(context.document_slices):
        groups = read_table(context.checked_file(number), ["group"])["group"]
        rows = np.flatnonzero(_remaining(number, len(groups), context, ["repeats"]))
        places.append(np.stack([np.full(len(rows), number), rows]))
        slice_groups = groups.take(pa.array(rows)).to_pylist()
        hashes.append(np.array([splits.uniform(group, seed=seed) for group in slice_groups]))
    order = np.argsort(np.concatenate(hashes), kind="stable")
    numbers, rows = np.concatenate(places, axis=1)[:, np.sort(order[size:])]
    scatter(pa.table([rows], schema=_ROW), numbers, target=context.file("left_out"), name="all")
    return {str(number): count for number, count in Counter(numbers.tolist()).items()}


def _remaining(
    number: int, rows: int, context: PrepareContext, dropped: Sequence[str]
) -> Bool[ndarray, " rows"]:
    """Return which rows of a slice are in none of the targets `dropped`."""
    mask = np.ones(rows, bool)
    for target in dropped:
        mask[gather(context.file(target), number, schema=_ROW)["row"].to_numpy()] = False
    return mask


class Section(NamedTuple):
    """The parts that begin in a slice; the last one may end in a later slice."""

    skip: int  # rows of the slice that are in earlier parts
    rows: int
    per_part: int
    first: int  # number of the first part


def plan_sections(kept: Sequence[int], per_part: int) -> list[Section]:
    """Plan the section of every slice from its number of kept rows."""
    ends = list(accumulate(kept, initial=0))
    sections = []
    for start, stop in pairwise(ends):
        first, last = -(-start // per_part), -(-stop // per_part)
        begin, end = first * per_part, min(last * per_part, ends[-1])
        sections.append(Section(begin - start, max(end - begin, 0), per_part, first))
    return sections


def write_section(item: tuple[int, Section], *, context: PrepareContext) -> JsonRecord:
    """Write the parts that begin in a slice, and set its repeats aside."""
    (number, section), quarantine = item, Quarantine()
    rows = read_table(context.checked_file(number))
    repeated = ~_remaining(number, len(rows), context, ["repeats"])
    quarantine.reject_where("documents", "duplicate doc_id", rows, repeated)
    parts = write_parts(
        _take_rows(_kept_rows(number, context), section.skip, section.rows),
        "documents/part",
        first=section.first,
        rows_per_part=section.per_part,
        output=context.output,
        splitter=context.splitter,
    )
    return {"parts": parts, "quarantine": context.store(quarantine, "write", number)}


def _kept_rows(first: int, context: PrepareContext) -> Iterator[pa.Table]:
    """Yield the kept rows of a slice and of all later ones; a slice is opened when it is reached."""
    for number in range(first, context.document_slices):
        table = read_table(context.checked_file(number))
        yield table.filter(pa.array(_remaining(number, len(table), context, ["repeats", "left_out"])))


def _take_rows(tables: Iterable[pa.Table], skip: int, count: int) -> Iterator[pa.Table]:
    """Yield the rows [skip, skip + count) of consecutive tables."""
    if not count:
        return
    for table in tables:
        rows = table.slice(skip, count)
        skip, count = max(skip - len(table), 0), count - len(rows)
        yield rows
        if not count:
            return


# --- parts ------------------------------------------------------------------------------------------------


def rows_per_part(config: AnyDataset | NewDocuments, *, rows: int, text_bytes: int) -> int:
    """Return the configured `documents_per_part`, or a power of two for a corpus of this size.

    Args:
        config: of the data set.
        rows: number of valid documents, including those with a repeated id.
        text_bytes: of their titles and contents (:func:`text_bytes`).
    """
    if config.documents_per_part is not None:
        return config.documents_per_part
    passages = rows
    if config.passages is not None:
        passages = max(rows, text_bytes // (config.passages.max_tokens * _BYTES_PER_TOKEN))
    by_rows = min(max(_power_of_two(-(-passages // MAX_PARTS)), MIN_PART_ROWS), MAX_PART_ROWS)
    by_passages = by_rows * max(rows, 1) // max(passages, 1)
    by_bytes = min(by_passages, MAX_PART_BYTES * max(rows, 1) // max(text_bytes, 1))
    return by_rows if by_rows <= by_bytes else max(_power_of_two(by_bytes + 1) // 2, 1)


def _power_of_two(value: int) -> int:
    """Return the smallest power of two that is not below the value."""
    return 1 << max(value - 1, 0).bit_length()


def write_parts(
    tables: Iterable[pa.Table],
    name: str,
    *,
    first: int = 0,
    rows_per_part: int,
    output: str,
    splitter: PassageSplitter | None = None,
) -> dict[str, dict[str, Any]]:
    """Write all rows to ``{name}-{first:05d}.parquet``, ..., and return the fields of each Part.

    With a `splitter`, a part has `rows_per_part` documents, and its rows are their passages.
    """
    parts: dict[str, dict[str, Any]] = {}
    for number, rows in enumerate(rechunk(tables, rows_per_part), first):
        divided = rows if splitter is None else splitter.divide(rows)
        parts |= write_part(divided, f"{name}-{number:05d}.parquet", output=output)
    return parts


def write_part(rows: pa.Table, name: str, *, output: str) -> dict[str, dict[str, Any]]:
    """Write one part, and return its name and the fields of its Part."""
    # One chunk: the bytes of Parquet pages depend on the chunks, which depend on the slices.
    return {name: asdict(write_table(fs.join(output, name), rows.combine_chunks()))}


def rechunk(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """Yield the rows in tables of `size` rows (the last one may be shorter); two tables are in memory."""
    waiting: list[pa.Table] = []
    for table in tables:
        start = 0
        while start < len(table):
            missing = size - sum(map(len, waiting))
            waiting.append(table.slice(start, missing))
            start += missing
            if sum(map(len, waiting)) == size:
                yield pa.concat_tables(waiting)
                waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def resume_or_clear(draft: Draft, plan: Sequence[dict[str, Any]]) -> None:
    """Delete the parts and records of a run with other slices, or with other versions of the input files.

    `plan` has the slices as JSON values; with an empty one, no work is resumed.
    """
    text = json.dumps(plan).encode()
    uri = draft.work("plan.json")
    if plan and fs.exists(uri) and fs.read_bytes(uri) == text:
        return
    draft.discard_parts()
    draft.discard_work()
    fs.write_bytes(uri, text)
