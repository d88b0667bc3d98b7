"""Documents in tasks: rows are checked, repeated ids are found by a shuffle, parts keep the input's order.

    check    slices of the input  -> valid rows, and their ids by bucket; rejected rows
    repeats  buckets of doc_ids   -> for each slice, the rows whose id an earlier slice has
    write    slices               -> the parts that begin in them

A task holds one slice or one bucket of ids. Its record has counts and names of parts, so the driver's memory
grows with the number of slices and parts alone, and a killed run loses the tasks that were running. Parts and
rejected rows depend on the input and the config, not on slices or workers.
"""

import json
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
from jaxtyping import Int32
from numpy import ndarray

from scalingnote.datasets import row_checks, sources, splits
from scalingnote.datasets.config import AnyDataset, NewDocuments
from scalingnote.datasets.raw_rows import Quarantine, Row, Rows, SlicedRows, Source, table_of
from scalingnote.errors import DataError
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, Draft, Part, read_table, write_table
from scalingnote.storage.schema import DOCUMENTS
from scalingnote.storage.shuffle import (
    JsonRecord,
    TaskRunner,
    bucket_of,
    gather,
    named_stream,
    run_slices,
    scatter,
)

log = get_logger("datasets")
SLICES_PER_BUCKET = 8  # a bucket has as many ids as these slices
# A part is the unit of work of every later stage: a task holds one, a driver remembers the name of each.
MAX_PARTS = 1 << 14  # above which parts get larger, up to MAX_PART_ROWS
MIN_PART_ROWS, MAX_PART_ROWS = 1 << 12, 1 << 16
MAX_PART_BYTES = 128 << 20  # of titles and contents; wins over the three above
_LOCATED = pa.schema({"doc_id": pa.string(), "row": pa.int32()})
_ROW = pa.schema({"row": pa.int32()})


@dataclass(frozen=True)
class Context:
    """What every task needs; the same for all of them."""

    config: AnyDataset | NewDocuments
    features: pa.Schema
    rank: Callable[[Row], Any] | None  # of a subset
    slices: int
    work: str
    output: str

    @property
    def buckets(self) -> int:
        """Of doc_ids; the ids of a single slice are compared at once."""
        return -(-self.slices // SLICES_PER_BUCKET) if self.slices > 1 else 0

    def checked(self, number: int) -> str:
        """The valid rows of a slice."""
        return fs.join(self.work, "checked", f"{number:06d}.arrow")

    def rejected(self, number: int) -> str:
        """Its rejected rows."""
        return fs.join(self.work, "rejected", f"{number:06d}.arrow")


def left_out_ids(work: str) -> str:
    """URI of the ids of valid documents that a subset left out."""
    return fs.join(work, "left_out.arrow")


class Documents(NamedTuple):
    """What the tasks wrote."""

    parts: list[str]  # in the order of the input
    rows: int
    left_out: int  # valid rows that a subset has not
    per_part: int  # rows


def rows_per_part(config: AnyDataset | NewDocuments, *, rows: int, text_bytes: int) -> int:
    """`documents_per_part` as configured; else a power of two that fits a corpus of these rows and texts.

    Args:
        config: of the data set.
        rows: documents that are valid, repeated ids counted in.
        text_bytes: of their titles and contents (:func:`text_bytes`).
    """
    if config.documents_per_part is not None:
        return config.documents_per_part
    by_rows = min(max(_power_of_two(-(-rows // MAX_PARTS)), MIN_PART_ROWS), MAX_PART_ROWS)
    by_bytes = MAX_PART_BYTES * max(rows, 1) // max(text_bytes, 1)
    return by_rows if by_rows <= by_bytes else max(_power_of_two(by_bytes + 1) // 2, 1)


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not below the value."""
    return 1 << max(value - 1, 0).bit_length()


def text_bytes(documents: pa.Table) -> int:
    """Bytes of the titles and contents in UTF-8, however the rows are cut into tables."""
    return sum(pc.sum(pc.binary_length(documents[name])).as_py() or 0 for name in ("title", "content"))


def write_documents(
    draft: Draft,
    source: Source,
    *,
    config: AnyDataset | NewDocuments,
    quarantine: Quarantine,
    each: TaskRunner,
    limit: int | None,
) -> Documents:
    """Write the parts of the documents of a source; rejected rows go to the quarantine.

    Raises:
        DataError: there is no document, or more than `limit`, the number for which clicks can be simulated.
    """
    slices = slices_of(source, config)
    context = Context(config, source.features, source.rank, len(slices), draft.work(), draft.uri)
    do = partial(run_slices, folder=draft.work(), each=each, section="datasets")
    checked = do("check", partial(_check, context=context), slices)
    if limit is not None and (rows := sum(record["rows"] for record in checked)) > limit:
        raise DataError(
            f"{config.name}: {rows:,} documents, but clicks are simulated for {limit:,} at most: set "
            "dataset.click_model to null, give impressions, or take a subset by dataset.max_documents"
        )
    repeated = Counter[int]()
    for counts in do("repeats", partial(_find_repeats, context=context), range(context.buckets)):
        repeated.update({int(number): count for number, count in counts.items()})
    kept = [record["rows"] - repeated[number] for number, record in enumerate(checked)]
    ends = list(accumulate(kept, initial=0))
    rows, texts = (sum(record[name] for record in checked) for name in ("rows", "text_bytes"))
    per_part = rows_per_part(config, rows=rows, text_bytes=texts)
    sections = [(rows, _section(number, ends, per_part, repeated)) for number, rows in enumerate(slices)]
    written = do("write", partial(_write, context=context), sections)
    for first, last in zip(checked, written, strict=True):
        quarantine.add(last["quarantine"] or first["quarantine"])
    if not ends[-1]:
        raise DataError(f"{config.name}: no usable document{quarantine.reasons()}")
    for record in written:
        for name, part in record["parts"].items():
            draft.register(name, Part(**part))
    parts = [name for record in written for name in record["parts"]]
    return Documents(parts, ends[-1], sum(record["left_out"] for record in checked), per_part)


def slices_of(source: Source, config: AnyDataset | NewDocuments) -> Sequence[Rows]:
    """The slices of the input. A subset is chosen from all rows, so they are one slice."""
    if isinstance(source.documents, SlicedRows) and config.max_documents is None:
        return source.documents.slices
    return [source.documents]


class _Section(NamedTuple):
    """The parts that begin in a slice; the last one may end in a later slice."""

    skip: int  # rows of the slice that are in earlier parts
    rows: int
    per_part: int
    first: int  # number of the first part
    repeats: list[int]  # those of the slices read that have repeats


def _section(number: int, ends: list[int], per_part: int, repeated: Counter[int]) -> _Section:
    """The section of a slice; `ends` has the rows before each slice and, last, all rows."""
    first, last = -(-ends[number] // per_part), -(-ends[number + 1] // per_part)
    begin, end = first * per_part, min(last * per_part, ends[-1])
    after = max(bisect_left(ends, end), number + 1)
    repeats = [other for other in range(number, after) if repeated[other]]
    return _Section(begin - ends[number], max(end - begin, 0), per_part, first, repeats)


def resume_or_clear(draft: Draft, plan: Sequence[dict[str, Any]]) -> None:
    """Delete the parts and records of a run on other slices, or on other versions of the input files.

    `plan` has the slices as JSON values; an empty one resumes nothing.
    """
    text = json.dumps(plan).encode()
    uri = draft.work("plan.json")
    if plan and fs.exists(uri) and fs.read_bytes(uri) == text:
        return
    draft.discard_parts()
    draft.discard_work()
    fs.write_bytes(uri, text)


# --- tasks ------------------------------------------------------------------------------------------------


def _check(item: tuple[int, Rows], *, context: Context) -> JsonRecord:
    """Store the valid rows of a slice, and send their ids to buckets."""
    number, rows = item
    config, features = context.config, context.features
    quarantine = Quarantine()
    valid: Iterable[Row] = row_checks.documents(rows, config=config, features=features, quarantine=quarantine)
    left_out = 0
    if config.max_documents is not None:
        valid, left_out = _subset(valid, context)
    table = table_of(valid, pa.schema([*DOCUMENTS, *features]))
    write_table(context.checked(number), table)
    if context.buckets:
        located = pa.table([table["doc_id"], np.arange(len(table), dtype=np.int32)], schema=_LOCATED)
        bucket = bucket_of(located["doc_id"], context.buckets)
        scatter(located, bucket, target=fs.join(context.work, "ids"), name=f"{number:06d}")
    counts = quarantine.store(context.rejected(number))
    found = {"rows": len(table), "text_bytes": text_bytes(table)}
    return found | {"left_out": left_out, "quarantine": counts}


def _subset(valid: Iterable[Row], context: Context) -> tuple[list[Row], int]:
    """The rows of a subset, and the number of the others, whose ids are stored."""
    config, ids = context.config, list[str]()
    assert config.max_documents is not None

    def recorded() -> Iterator[Row]:
        for row in valid:
            ids.append(row["doc_id"])
            yield row

    rows = splits.subset(recorded(), size=config.max_documents, seed=config.seed, rank=context.rank)
    chosen = {row["doc_id"] for row in rows}
    others = pa.table({"doc_id": pa.array([id for id in ids if id not in chosen], pa.string())})
    write_table(left_out_ids(context.work), others)
    return rows, len(others)


def _find_repeats(item: tuple[int, int], *, context: Context) -> dict[str, int]:
    """Find the rows of a bucket whose id has come before; returns their number in each slice."""
    bucket = item[1]
    found = list(named_stream(fs.join(context.work, "ids"), bucket))
    located = pa.concat_tables([_LOCATED.empty_table(), *(rows for _, rows in found)])
    lengths = np.array([len(rows) for _, rows in found], np.int64)
    numbers = np.repeat(np.array([int(name) for name, _ in found], np.int64), lengths)
    repeated = ~splits.first_rows(located, ["doc_id"])
    rows = located.filter(pa.array(repeated)).select(["row"])
    scatter(rows, numbers[repeated], target=_repeated(context), name=f"{bucket:05d}")
    return {str(number): count for number, count in Counter(numbers[repeated].tolist()).items()}


def _write(item: tuple[int, tuple[Rows, _Section]], *, context: Context) -> JsonRecord:
    """Write the parts that begin in a slice; set its repeats aside."""
    number, (rows, section) = item
    parts = write_parts(
        take_rows(_valid_rows(number, section.repeats, context), section.skip, section.rows),
        "documents/part",
        first=section.first,
        rows_per_part=section.per_part,
        output=context.output,
    )
    counts = None
    if number in section.repeats:
        # The same check again, which now knows the repeats: rejected rows keep the order of the input.
        quarantine = Quarantine()
        checked = row_checks.documents(
            rows,
            config=context.config,
            features=context.features,
            quarantine=quarantine,
            repeated=set(_repeats_of(number, context).tolist()),
        )
        deque(checked, maxlen=0)
        counts = quarantine.store(context.rejected(number))
    return {"parts": parts, "quarantine": counts}


def _valid_rows(first: int, repeats: list[int], context: Context) -> Iterator[pa.Table]:
    """The rows of a slice and of all later ones, without repeats; slices are opened when they are reached."""
    for number in range(first, context.slices):
        table = read_table(context.checked(number))
        if number in repeats:
            kept = np.ones(len(table), bool)
            kept[_repeats_of(number, context)] = False
            table = table.filter(pa.array(kept))
        yield table


def _repeats_of(number: int, context: Context) -> Int32[ndarray, " repeats"]:
    """The rows of a slice whose id an earlier slice has."""
    rows: ndarray = gather(_repeated(context), number, schema=_ROW)["row"].to_numpy()
    return rows


def _repeated(context: Context) -> str:
    return fs.join(context.work, "repeated")


# --- parts ------------------------------------------------------------------------------------------------


def take_rows(tables: Iterable[pa.Table], skip: int, count: int) -> Iterator[pa.Table]:
    """The rows [skip, skip + count) of tables that follow each other."""
    for table in tables:
        rows = table.slice(skip, count)
        skip, count = max(skip - len(table), 0), count - len(rows)
        yield rows
        if not count:
            return


def write_parts(
    tables: Iterable[pa.Table], name: str, *, first: int = 0, rows_per_part: int, output: str
) -> dict[str, dict[str, Any]]:
    """Write all rows to ``{name}-{first:05d}.parquet``, ...; returns the fields of each :class:`Part`."""
    written: dict[str, dict[str, Any]] = {}
    for number, rows in enumerate(_rechunk(tables, rows_per_part), first):
        written |= write_part(rows, f"{name}-{number:05d}.parquet", output=output)
    return written


def write_part(rows: pa.Table, name: str, *, output: str) -> dict[str, dict[str, Any]]:
    """Write one part; returns its name and the fields of its :class:`Part`."""
    # One chunk: the bytes of Parquet pages depend on the chunks, which come from slices.
    return {name: vars(write_table(fs.join(output, name), rows.combine_chunks()))}


def _rechunk(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """The same rows in tables of `size` (the last one may be shorter); holds two tables in memory."""
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


def commit(
    draft: Draft,
    name: str,
    counts: dict[str, int],
    quarantine: Quarantine,
    left_out: Mapping[str, int],
    *,
    click_model: str | None = None,
    **info: Any,
) -> Artifact:
    """Commit the data set `name`, with the numbers of rows that were rejected, repaired and left out.

    `click_model` has simulated the impressions, if one has.
    """
    about = sources.describe(name)
    counts = counts | {"rejected": sum(quarantine.rejected.values())}
    artifact = draft.commit(
        counts=counts,
        simulated_clicks=click_model is not None,
        click_model=click_model,
        description=about.summary,
        licence=about.licence,
        rejected_by_reason=dict(sorted(quarantine.rejected.items())),
        repaired=dict(sorted(quarantine.repaired.items())),
        left_out=above_zero(left_out),
        **info,
    )
    log.info(
        "%s: %s documents, %s impressions, %s train and %s test queries, %s rejected rows -> %s",
        name,
        *(
            f"{counts[of]:,}"
            for of in ("documents", "impressions", "train_queries", "test_queries", "rejected")
        ),
        draft.uri,
    )
    return artifact


def above_zero(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts without the zeros."""
    return {name: count for name, count in sorted(counts.items()) if count}
