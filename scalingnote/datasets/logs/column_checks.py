"""Checks of a log's rows, column by column: valid rows become typed, others are rejected with a reason.

The rules and reasons are those of `datasets.row_checks`. If a row has several faults, the reason is the first
one in the order of the columns.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, UInt8
from numpy import ndarray

from scalingnote.datasets.config import Logs
from scalingnote.datasets.logs import values
from scalingnote.datasets.logs.values import collapse_spaces, query_ids
from scalingnote.datasets.raw_rows import shown_row
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, REJECTED, SCORES

_MAX_ID_CHARS = 256
MAX_EXAMPLES = 100  # rejected rows kept of each reason, the first of the input
PROBLEM = "_problem"  # column that `slice_reader` adds: the reason why a row cannot be used
_QUERY = pa.field("query", pa.string())
CHECKED = {
    "documents": DOCUMENTS,
    "impressions": IMPRESSIONS.append(_QUERY),
    "scores": SCORES,
    "qrels": QRELS.append(_QUERY),  # null where judgements name queries by id only
}


class LogTally:
    """Counts of rejected, repaired and omitted rows of one task, or their sum over tasks.

    The sum does not depend on the order in which tasks finish. Workers send tallies as JSON values.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.mended: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        # (table, reason) -> (number of the task, number of the row in it, the row)
        self._examples: defaultdict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)

    def reject(self, table: str, reason: str, rows: pa.Table, which: Bool[ndarray, " rows"]) -> None:
        """Count the rows of `rows` where `which` is true as rejected."""
        numbers = np.flatnonzero(which)
        if len(numbers):
            first = values.printable_rows(rows.take(pa.array(numbers[:MAX_EXAMPLES])))
            self.reject_rows(table, reason, first, count=len(numbers))

    def reject_rows(
        self, table: str, reason: str, first: Iterable[str | dict[str, Any]], *, count: int = 1
    ) -> None:
        """Count `count` rejected rows, of which `first` are the first."""
        self.rejected[f"{table}: {reason}"] += count
        kept = self._examples[table, reason]
        for row in first:
            if len(kept) < MAX_EXAMPLES:
                kept.append((0, len(kept), shown_row(row)))

    def add(self, values: dict[str, Any], *, number: int) -> None:
        """Add the :meth:`values` of the tally of task `number`."""
        for name in ("counts", "mended", "left_out", "rejected"):
            getattr(self, name).update(values[name])
        for table, reason, rows in values["examples"]:
            kept = self._examples[table, reason]
            kept += [(number, place, row) for place, row in enumerate(rows)]
            kept.sort()
            del kept[MAX_EXAMPLES:]

    def values(self) -> dict[str, Any]:
        """The tally as JSON values."""
        return {
            "counts": dict(self.counts),
            "mended": dict(self.mended),
            "left_out": dict(self.left_out),
            "rejected": dict(self.rejected),
            "examples": [
                [table, reason, [row for *_, row in rows]]
                for (table, reason), rows in sorted(self._examples.items())
            ],
        }

    def table(self) -> pa.Table:
        """REJECTED: at most MAX_EXAMPLES rows of each reason."""
        rows = [
            {"table": table, "row": row, "reason": reason}
            for (table, reason), kept in sorted(self._examples.items())
            for *_, row in kept
        ]
        return pa.Table.from_pylist(rows, schema=REJECTED)


def check_table(rows: pa.Table, table: str, *, config: Logs, tally: LogTally) -> pa.Table:
    """The valid rows of one table with the columns of CHECKED; documents also have the config's features."""
    checker = _ColumnChecker(rows, "documents" if table == "unpaired" else table, tally)
    match table:
        case "documents" | "unpaired":
            return _documents(checker, config)
        case "impressions":
            columns = _pair(checker, config) | _impression(checker, config)
        case "scores":
            columns = _pair(checker, config) | {"score": pc.cast(checker.number("score"), pa.float32())}
        case _:
            columns = _pair(checker, config) | {"relevance": _relevance(checker)}
    return checker.valid_rows(columns, CHECKED[table])


class _ColumnChecker:
    """Checks the columns of one table; each check may reject rows, and the first reason of a row counts."""

    def __init__(self, rows: pa.Table, table: str, tally: LogTally) -> None:
        self.rows, self.table, self.tally = rows, table, tally
        self.reasons: list[str] = []
        self.verdict: UInt8[ndarray, " rows"] = np.zeros(len(rows), np.uint8)  # 0: valid; else reason number
        problems = rows[PROBLEM]
        if problems.null_count < len(rows):
            for reason in problems.drop_null().unique().to_pylist():
                self.reject(pc.equal(problems, reason), reason)

    def reject(self, which: pa.ChunkedArray | pa.Array | Bool[ndarray, " rows"], reason: str) -> None:
        """Reject rows that were valid so far; null in `which` means valid."""
        if not isinstance(which, np.ndarray):
            which = np.asarray(pc.fill_null(which, False))
        fresh = which & (self.verdict == 0)
        if fresh.any():
            self.reasons.append(reason)
            self.verdict[fresh] = len(self.reasons)

    def count_repaired(self, which: pa.Array, what: str) -> None:
        """Count repaired rows, which are kept."""
        count = pc.sum(which).as_py()
        if count:
            self.tally.mended[what] += count

    def text(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of stripped text; control characters become blanks, null becomes empty if not optional."""
        column, invalid = values.text_column(self.rows, name)
        self.reject(invalid, "invalid UTF-8")
        has_controls = values.has_controls(column)
        if pc.any(has_controls).as_py():
            self.count_repaired(has_controls, "control_characters_blanked")
            column = values.without_controls(column)
        return pc.utf8_trim_whitespace(column if optional else pc.fill_null(column, ""))

    def identifier(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of ids, stripped; an optional id may be null, but not empty."""
        column, invalid = values.text_column(self.rows, name)
        self.reject(invalid, "invalid UTF-8")
        column = pc.utf8_trim_whitespace(column)
        empty = pc.equal(column, "")
        self.reject(empty if optional else pc.or_kleene(empty, pc.is_null(column)), f"no {name}")
        length = pc.utf8_length(column)
        self.reject(pc.greater(length, _MAX_ID_CHARS), f"{name} longer than {_MAX_ID_CHARS} characters")
        self.reject(values.has_controls(column), f"{name} with control characters")
        return column

    def number(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of finite float64; NaN where the row is rejected or an optional value is missing."""
        column, present = values.number_column(self.rows, name)
        missing = pc.is_null(column)
        self.reject(pc.and_(missing, present) if optional else missing, f"{name} is not a number")
        self.reject(pc.invert(pc.is_finite(column)), f"{name} is not finite")
        return pc.fill_null(column, float("nan"))

    def valid_rows(self, columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
        """The valid rows; the others are counted, and the first of them kept as examples."""
        rows = self.rows.drop_columns([PROBLEM])
        for number, reason in enumerate(self.reasons, 1):
            self.tally.reject(self.table, reason, rows, self.verdict == number)
        table = pa.table(columns)
        if self.reasons:
            table = table.filter(pa.array(self.verdict == 0))
        return table.select(schema.names).cast(schema)


def _documents(checker: _ColumnChecker, config: Logs) -> pa.Table:
    features = pa.schema([(name, values.FEATURES[kind]) for name, kind in config.features.items()])
    doc_id = checker.identifier("doc_id")
    title, topic, content = (checker.text(name) for name in ("title", "topic", "content"))
    checker.reject(pc.and_(pc.equal(title, ""), pc.equal(content, "")), "no text")
    limit = config.max_title_chars
    checker.reject(pc.greater(pc.utf8_length(title), limit), f"title longer than {limit} characters")
    group = checker.text("group")
    columns = {
        "doc_id": doc_id,
        "title": title,
        "topic": topic,
        "content": pc.utf8_slice_codeunits(content, 0, config.max_content_chars),
        "group": pc.if_else(pc.equal(group, ""), doc_id, group),
    }
    for field in features:
        if pa.types.is_string(field.type):
            columns[field.name] = checker.text(field.name, optional=True)
        else:
            columns[field.name], is_lost = values.feature_column(checker.rows, field)
            checker.count_repaired(is_lost, f"feature_{field.name}_dropped")
    long = pc.and_(
        pc.greater(pc.utf8_length(content), config.max_content_chars), pa.array(checker.verdict == 0)
    )
    checker.count_repaired(long, "content_truncated")
    return checker.valid_rows(columns, pa.schema([*DOCUMENTS, *features]))


def _pair(checker: _ColumnChecker, config: Logs) -> dict[str, pa.Array]:
    """The ids of the query and the document of each row, and the query text."""
    have = checker.rows.column_names
    query = pa.nulls(len(checker.rows), pa.string())
    if "query" in have:
        query = collapse_spaces(checker.text("query"))
        if checker.table == "impressions" or "query_id" not in have:
            checker.reject(pc.equal(query, ""), "empty query")
    named = (
        checker.identifier("query_id") if "query_id" in have else query_ids(query, fold_case=config.fold_case)
    )
    return {"query_id": named, "query": query, "doc_id": checker.identifier("doc_id")}


def _impression(checker: _ColumnChecker, config: Logs) -> dict[str, pa.Array]:
    position = checker.number("position")
    numbers = np.asarray(position)
    valid = (numbers >= 1) & (numbers == np.round(numbers)) & (numbers < 2**31)
    checker.reject(~valid, "position is not 1 or above")
    clicked = values.boolean_column(checker.rows, "clicked")
    checker.reject(pc.is_null(clicked), "clicked is neither true nor false")
    columns = {
        "session_id": checker.identifier("session_id"),
        "user_id": checker.identifier("user_id", optional=True),
        "position": _whole(position),
        "clicked": clicked,
    }
    columns["timestamp"], problem = values.time_column(checker.rows, "timestamp", unit=config.timestamp_unit)
    for reason in problem.drop_null().unique().to_pylist():
        checker.reject(pc.equal(problem, reason), reason)
    dwell = pc.cast(checker.number("dwell_s", optional=True), pa.float32())
    return columns | {"dwell_s": pc.if_else(pc.is_nan(dwell), None, dwell)}


def _relevance(checker: _ColumnChecker) -> pa.Array:
    """Whole numbers; 1 for all rows of a file without the column."""
    if "relevance" not in checker.rows.column_names:
        return pa.array(np.ones(len(checker.rows), np.int32))
    relevance = checker.number("relevance")
    grades = np.asarray(relevance)
    checker.reject(
        (grades != np.round(grades)) | (np.abs(grades) >= 2**31), "relevance is not a whole number"
    )
    return _whole(relevance)


def _whole(numbers: pa.Array) -> pa.Array:
    """int32; 0 in rejected rows, which may hold any number."""
    array = np.asarray(numbers)
    is_whole = (np.abs(array) < 2**31) & (array == np.round(array))
    return pa.array(np.where(is_whole, array, 0).astype(np.int32))
