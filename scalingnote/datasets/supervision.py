"""Queries, judgements, impressions and scores of a data set: checked, split, completed by simulated clicks.

    raw rows -> valid rows about known queries and documents -> split by groups -> simulated impressions

:func:`write_tables` does it in one task for at most MAX_ROWS rows; `job` does it for more,
bucket by bucket of their queries, with the functions of this module.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.datasets import row_checks, simulate, splits
from scalingnote.datasets.config import AnyClickModel, AnyDataset, Texts
from scalingnote.datasets.document_tasks import above_zero, left_out_ids, write_part
from scalingnote.datasets.raw_rows import (
    Quarantine,
    Row,
    Rows,
    SlicedRows,
    Source,
    UnreadableRow,
    table_of,
)
from scalingnote.errors import DataError
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import read_table
from scalingnote.storage.schema import IMPRESSIONS, QRELS, QUERIES, SCORES, USERS
from scalingnote.storage.shuffle import JsonRecord, stream
from scalingnote.texts import is_valid_unicode

log = get_logger("datasets")
MAX_ROWS = 5_000_000  # of all tables, in one task
TABLES = {"queries": QUERIES, "qrels": QRELS, "impressions": IMPRESSIONS, "scores": SCORES}
OUTPUTS = (*TABLES, "users")
PAIRS = ("qrels", "impressions", "scores")
_PARTS_PER_READ = 256
_POSITIVES = pa.schema({"query_id": pa.string(), "group": pa.string()})


@dataclass(frozen=True)
class Context:
    """What every task needs; the same for all of them."""

    config: AnyDataset
    profile: pa.Schema
    parts: Sequence[str]  # of the documents
    work: str
    output: str
    buckets: int
    max_rows: int

    def file(self, *names: str) -> str:
        """A file of the work directory."""
        return fs.join(self.work, "supervision", *names)


class Supervision(NamedTuple):
    """What the tasks wrote."""

    parts: dict[str, dict[str, Any]]
    counts: dict[str, int]
    left_out: dict[str, int]  # valid rows that subsets have not
    click_model: str | None  # that simulated the impressions


def write_tables(item: tuple[int, Source], *, context: Context) -> JsonRecord:
    """Write all tables, unless there are more than MAX_ROWS rows, which come from files."""
    source, config, quarantine = item[1], context.config, Quarantine()
    given: dict[str, Rows] = {}
    left = context.max_rows
    for table in OUTPUTS:
        given[table] = rows = list(islice(getattr(source, table), left + 1))
        left -= len(rows)
        if left < 0 and all(isinstance(getattr(source, name), (SlicedRows, tuple)) for name in OUTPUTS):
            return {"whole": False}
        if left < 0:
            raise DataError(
                f"{config.name}: more than {context.max_rows:,} rows of {', '.join(OUTPUTS)}, which one task "
                "holds: write them to files, and read these with dataset.name=columns"
            )
    named = {doc_id for name in PAIRS for row in given[name] if (doc_id := identifier(row, "doc_id"))}
    checked = check(given, named, context, quarantine)
    if not len(checked.queries) and not isinstance(config, Texts):
        raise no_query(config, quarantine)
    queries = decide(checked.queries, checked.positives, config)
    tables = {"queries": queries} | {
        name: of_queries(table, queries["query_id"]) for name, table in checked.pairs.items()
    }
    left_out = above_zero({name: count - len(tables[name]) for name, count in checked.valid.items()})
    tables["users"] = valid_users(given["users"], context.profile, quarantine)
    clicks = None if len(tables["impressions"]) else config.click_model
    if clicks:
        impressions, profiles = simulated(queries, tables["qrels"], context, clicks)
        tables["impressions"] = pa.concat_tables(impressions)
        tables["users"] = tables["users"] if profiles is None else profiles
    counts = {name: len(table) for name, table in tables.items()} | count_splits(queries)
    warn_of_one_side(config, counts, undecided=has_undecided(checked.queries))
    parts: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if len(table) or name in ("queries", "qrels"):
            parts |= write_part(table, f"{name}.parquet", output=context.output)
    done = Supervision(parts, counts, left_out, clicks.kind if clicks else None)
    return {"whole": True, "quarantine": quarantine.store(context.file("rejected.arrow")), **done._asdict()}


class Checked(NamedTuple):
    """The valid rows of some queries, before `max_queries`."""

    queries: pa.Table  # QUERIES; `split` is empty where the source has none
    pairs: dict[str, pa.Table]  # about documents of the data set
    positives: pa.Table  # _POSITIVES
    valid: dict[str, int]  # numbers of rows, also about documents that a subset left out


def check(given: dict[str, Rows], named: set[str], context: Context, quarantine: Quarantine) -> Checked:
    """Check rows against each other and against the documents that they name.

    Rows are checked against all valid documents, so that rows about documents outside a subset are left out,
    not rejected.
    """
    found = _read_documents(context, ["doc_id", "group"], named=named)
    doc_ids = found["doc_id"].combine_chunks()
    valid_ids = set(doc_ids.to_pylist())
    if context.config.max_documents is not None:
        valid_ids.update(read_table(left_out_ids(context.work))["doc_id"].to_pylist())
    queries = {row["query_id"]: row for row in row_checks.queries(given["queries"], quarantine=quarantine)}
    pairs = {}
    for name in PAIRS:
        rows = row_checks.pairs(
            name, given[name], query_ids=queries, doc_ids=valid_ids, quarantine=quarantine
        )
        pairs[name] = _pair_table(rows, TABLES[name], given[name])
    usable = _supervised(pairs)
    for query_id in [query_id for query_id in queries if query_id not in usable]:
        quarantine.reject("queries", queries.pop(query_id), "no relevant document and no impression")
    valid = {"queries": len(queries), **{name: len(table) for name, table in pairs.items()}}
    pairs = {
        name: table.filter(pc.is_in(table["doc_id"], value_set=doc_ids)) for name, table in pairs.items()
    }
    usable = _supervised(pairs)
    kept = [row for query_id, row in queries.items() if query_id in usable]
    relevant = pairs["qrels"].filter(pc.greater(pairs["qrels"]["relevance"], 0))
    clicked = pairs["impressions"].filter(pairs["impressions"]["clicked"])
    positives = pa.concat_tables(table.select(["query_id", "doc_id"]) for table in (relevant, clicked))
    group = found["group"].take(pc.index_in(positives["doc_id"], value_set=doc_ids))
    positives = pa.table([positives["query_id"], group], schema=_POSITIVES)
    distinct = positives.group_by(_POSITIVES.names, use_threads=False).aggregate([])
    return Checked(pa.Table.from_pylist(kept, schema=QUERIES), pairs, distinct, valid)


def _pair_table(rows: Iterator[Row], schema: pa.Schema, raw: Rows) -> pa.Table:
    """Rows as a table; those of a bucket with their number in the input."""
    if not isinstance(raw, BucketRows):
        return table_of(rows, schema)
    numbered = ({**row, "_number": raw.number} for row in rows)
    return table_of(numbered, schema.append(pa.field("_number", pa.int64())))


def _supervised(pairs: dict[str, pa.Table]) -> set[str]:
    """Queries with a relevant document or an impression."""
    relevant = pairs["qrels"].filter(pc.greater(pairs["qrels"]["relevance"], 0))["query_id"].unique()
    return {*relevant.to_pylist(), *pairs["impressions"]["query_id"].unique().to_pylist()}


def identifier(row: Row | UnreadableRow, name: str) -> str | None:
    """An id of a row, as `row_checks` reads it; also an invalid one, unless Arrow cannot hold it."""
    value = str(row.get(name)).strip() if isinstance(row, dict) else ""
    return value if value and is_valid_unicode(value) else None


def _read_documents(context: Context, columns: list[str], *, named: set[str] | None = None) -> pa.Table:
    """Columns of all documents, or of those whose id is in `named`, in order."""
    value_set = pa.array(sorted(named), pa.string()) if named is not None else None

    def read(part: str) -> pa.Table:
        return read_table(fs.join(context.output, part), columns)

    found = []
    for start in range(0, len(context.parts), _PARTS_PER_READ):
        rows = pa.concat_tables(fs.map_files(read, context.parts[start : start + _PARTS_PER_READ]))
        found.append(rows if named is None else rows.filter(pc.is_in(rows["doc_id"], value_set=value_set)))
    return pa.concat_tables(found)


def decide(queries: pa.Table, positives: pa.Table, config: AnyDataset) -> pa.Table:
    """The queries of a subset, with a split where the source has none."""
    if config.max_queries is not None:
        order = np.argsort(
            [splits.uniform(query_id, seed=config.seed) for query_id in queries["query_id"].to_pylist()],
            kind="stable",
        )
        queries = queries.take(pa.array(np.sort(order[: config.max_queries])))
        positives = of_queries(positives, queries["query_id"])
    if not has_undecided(queries):
        return queries
    test = splits.held_out(
        queries["query_id"].combine_chunks(), positives, fraction=config.test_fraction, seed=config.seed
    )
    drawn = pc.if_else(pa.array(test), "test", "train")
    split = pc.if_else(pc.equal(queries["split"], ""), drawn, queries["split"])
    return queries.set_column(queries.schema.get_field_index("split"), "split", split)


def has_undecided(queries: pa.Table) -> bool:
    """Whether the source has no split for some query."""
    return bool(pc.any(pc.equal(queries["split"], "")).as_py())


def of_queries(table: pa.Table, query_ids: pa.ChunkedArray) -> pa.Table:
    """The rows of a table that are about these queries."""
    return table.filter(pc.is_in(table["query_id"], value_set=query_ids.combine_chunks()))


def count_splits(queries: pa.Table) -> dict[str, int]:
    """The numbers of queries of either split."""
    return {f"{s}_queries": pc.sum(pc.equal(queries["split"], s)).as_py() or 0 for s in ("train", "test")}


def valid_users(rows: Rows, profile: pa.Schema, quarantine: Quarantine) -> pa.Table:
    """Distinct users, with the columns of USERS and `profile`."""
    valid = list(row_checks.users(rows, profile=profile, quarantine=quarantine))
    return pa.Table.from_pylist(valid, schema=pa.schema([*USERS, *profile]))


def no_query(config: AnyDataset, quarantine: Quarantine) -> DataError:
    """The error of a source without usable supervision."""
    return DataError(f"{config.name}: no query with a relevant document remains{quarantine.reasons()}")


def warn_of_one_side(config: AnyDataset, counts: dict[str, int], *, undecided: bool) -> None:
    """Warn if a split that was drawn has no query on one side."""
    train, test = counts["train_queries"], counts["test_queries"]
    if undecided and 0 < config.test_fraction < 1 and not (train and test):
        log.warning(
            "all %d queries are for %s: they share too many documents, or are too few, for test_fraction=%g",
            counts["queries"],
            "train" if train else "test",
            config.test_fraction,
        )


def simulated(
    queries: pa.Table, qrels: pa.Table, context: Context, config: AnyClickModel
) -> tuple[Iterator[pa.Table], pa.Table | None]:
    """Impressions of training queries, and the profiles of users who have tastes.

    Documents of a group that a test query is judged on are not shown.
    """
    taste = config.taste
    columns = ["doc_id", "group", "topic", *(taste.columns if taste else ())]
    documents = _read_documents(context, columns)
    test = queries.filter(pc.equal(queries["split"], "test"))["query_id"]
    is_test = pc.is_in(qrels["query_id"], value_set=test.combine_chunks())
    relevant = qrels.filter(pc.and_(is_test, pc.greater(qrels["relevance"], 0)))["doc_id"].unique()
    hidden = documents.filter(pc.is_in(documents["doc_id"], value_set=relevant))["group"].unique()
    rows = np.flatnonzero(~np.asarray(pc.is_in(documents["group"], value_set=hidden)))
    seen = documents.select(["doc_id", "topic"]).take(rows)
    tastes = simulate.Tastes.draw(taste, documents, users=config.users, seed=config.seed) if taste else None
    impressions = simulate.simulate(
        qrels.filter(pc.invert(is_test)).select(QRELS.names),
        doc_ids=seen["doc_id"].to_pylist(),
        topics=seen["topic"].to_pylist(),
        config=config,
        tastes=tastes.of_documents(rows) if tastes else None,
    )
    return impressions, tastes.profiles() if tastes else None


# --- raw rows in buckets: as JSON, also those of Parquet files --------------------------------------------


def encode_row(row: Row | UnreadableRow) -> str:
    """A raw row as JSON, which :class:`BucketRows` decodes."""
    return json.dumps([row.row, row.reason] if isinstance(row, UnreadableRow) else row, default=_tagged)


def _tagged(value: Any) -> dict[str, str] | str:
    match value:
        case bytes():
            return {"__bytes__": base64.b64encode(value).decode()}
        case datetime():
            return {"__datetime__": value.isoformat()}
        case Decimal():
            return {"__decimal__": str(value)}
    return str(value)


def _decode(text: str) -> Row | UnreadableRow:
    row = json.loads(text, object_hook=_untagged)
    return row if isinstance(row, dict) else UnreadableRow(*row)


def _untagged(value: dict[str, Any]) -> Any:
    match value:
        case {"__bytes__": text}:
            return base64.b64decode(text)
        case {"__datetime__": text}:
            return datetime.fromisoformat(text)
        case {"__decimal__": text}:
            return Decimal(text)
    return value


class BucketRows:
    """The raw rows of a table in a bucket, in the order of the input."""

    def __init__(self, context: Context, table: str, bucket: int) -> None:
        self._target, self._bucket = context.file("scattered", table), bucket
        self.number = -1  # in the input, of the row that was read last

    def __iter__(self) -> Iterator[Row | UnreadableRow]:
        for rows in stream(self._target, self._bucket, ["number", "row"]):
            for self.number, text in zip(
                *(rows[name].to_pylist() for name in ("number", "row")), strict=True
            ):
                yield _decode(text)

    def named_documents(self) -> set[str]:
        """The doc_ids that the rows name."""
        named = [
            rows["doc_id"].unique().drop_null() for rows in stream(self._target, self._bucket, ["doc_id"])
        ]
        return set(pa.concat_arrays([pa.array([], pa.string()), *named]).to_pylist())
