"""Columns of a log: converted to our types, checked, the rows' faults counted.

Valid rows become typed, others are rejected with a reason. The rules and reasons are those of `row_checks`;
if a row has several faults, the reason is the first one in the order of the columns.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int32, UInt8
from numpy import ndarray

from scalingnote.datasets.config import Logs
from scalingnote.datasets.file_formats import column_schema
from scalingnote.datasets.raw_rows import Quarantine
from scalingnote.datasets.row_checks import MAX_ID_CHARS
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, SCORES
from scalingnote.storage.shuffle import JsonRecord

MAX_EXAMPLES = 100  # rejected rows kept of each reason, the first of the input
PROBLEM = "_problem"  # column that `log_inputs` adds: the reason why a row cannot be used
_QUERY = pa.field("query", pa.string())
CHECKED = {
    "documents": DOCUMENTS,
    "impressions": IMPRESSIONS.append(_QUERY),
    "scores": SCORES,
    "qrels": QRELS.append(_QUERY),  # null where judgements name queries by id only
}
_MS = pa.timestamp("ms")
_MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 0.001}
# Control characters except tab and line ends, DEL and the C1 block, as in `row_checks`.
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x{9f}]"
_NUMBER = r"(?i)^[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|nan|inf|infinity)$"
# Failing casts are slow, so only texts that look like a date are cast.
_DATE = r"^\d{4}-\d\d-\d\d([T ].*)?$"
_ZONE = r"[T ].*(Z|[+-]\d\d:?\d\d)$"


class LogTally(Quarantine):
    """Counts of rejected, repaired, omitted and written rows of one task, or of all of them."""

    def __init__(self) -> None:
        super().__init__(kept_per_reason=MAX_EXAMPLES)
        self.counts: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def reject_where(self, table: str, reason: str, rows: pa.Table, which: Bool[ndarray, " rows"]) -> None:
        """Count the rows of `rows` where `which` is true as rejected."""
        numbers = np.flatnonzero(which)
        if len(numbers):
            first = printable_rows(rows.take(pa.array(numbers[:MAX_EXAMPLES])))
            self.reject_rows(table, first, reason, count=len(numbers))

    def store(self, uri: str) -> JsonRecord:
        """The counts and the rows that are kept, as :class:`Quarantine` stores them."""
        return super().store(uri) | {"counts": dict(self.counts), "left_out": dict(self.left_out)}

    def add(self, stored: JsonRecord) -> None:
        """Add what a task stored; tasks are added in their order."""
        super().add(stored)
        self.counts.update(stored["counts"])
        self.left_out.update(stored["left_out"])


# --- checks of tables --------------------------------------------------------------------------------------


def check_table(rows: pa.Table, table: str, *, config: Logs, tally: LogTally) -> pa.Table:
    """The valid rows of one table with the columns of CHECKED; documents also have the config's features."""
    checker = _ColumnChecker(rows, "documents" if table == "unpaired" else table, tally)
    if checker.table == "documents":
        return _documents(checker, config)
    columns = _pair(checker, config)
    match table:
        case "impressions":
            columns |= _impression(checker, config)
        case "scores":
            columns["score"] = pc.cast(checker.number("score"), pa.float32())
        case _:
            columns["relevance"] = _relevance(checker)
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
            self.tally.repaired[what] += count

    def text(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of stripped text; control characters become blanks, null becomes empty if not optional."""
        column, invalid = text_column(self.rows, name)
        self.reject(invalid, "invalid UTF-8")
        repaired = pc.match_substring_regex(column, _CONTROL)
        if pc.any(repaired).as_py():
            self.count_repaired(repaired, "control_characters_blanked")
            column = pc.replace_substring_regex(column, _CONTROL, " ")
        return pc.utf8_trim_whitespace(column if optional else pc.fill_null(column, ""))

    def identifier(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of ids, stripped; an optional id may be null, but not empty."""
        column, invalid = text_column(self.rows, name)
        self.reject(invalid, "invalid UTF-8")
        column = pc.utf8_trim_whitespace(column)
        empty = pc.equal(column, "")
        self.reject(empty if optional else pc.or_kleene(empty, pc.is_null(column)), f"no {name}")
        length = pc.utf8_length(column)
        self.reject(pc.greater(length, MAX_ID_CHARS), f"{name} longer than {MAX_ID_CHARS} characters")
        self.reject(pc.match_substring_regex(column, _CONTROL), f"{name} with control characters")
        return column

    def number(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of finite float64; NaN where the row is rejected or an optional value is missing."""
        column, present = number_column(self.rows, name)
        missing = pc.is_null(column)
        self.reject(pc.and_(missing, present) if optional else missing, f"{name} is not a number")
        self.reject(pc.invert(pc.is_finite(column)), f"{name} is not finite")
        return pc.fill_null(column, float("nan"))

    def valid_rows(self, columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
        """The valid rows; the others are counted, and the first of them kept as examples."""
        rows = self.rows.drop_columns([PROBLEM])
        for number, reason in enumerate(self.reasons, 1):
            self.tally.reject_where(self.table, reason, rows, self.verdict == number)
        table = pa.table(columns)
        if self.reasons:
            table = table.filter(pa.array(self.verdict == 0))
        return table.select(schema.names).cast(schema)


def _documents(checker: _ColumnChecker, config: Logs) -> pa.Table:
    features = column_schema(config.features)
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
            columns[field.name], is_lost = feature_column(checker.rows, field)
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
        query = _map_distinct(checker.text("query"), _collapse)
        if checker.table == "impressions" or "query_id" not in have:
            checker.reject(pc.equal(query, ""), "empty query")
    named = (
        checker.identifier("query_id") if "query_id" in have else query_ids(query, fold_case=config.fold_case)
    )
    return {"query_id": named, "query": query, "doc_id": checker.identifier("doc_id")}


def _impression(checker: _ColumnChecker, config: Logs) -> dict[str, pa.Array]:
    position, is_whole = _whole_numbers(checker.number("position"))
    checker.reject(~is_whole | (position < 1), "position is not 1 or above")
    clicked = boolean_column(checker.rows, "clicked")
    checker.reject(pc.is_null(clicked), "clicked is neither true nor false")
    columns = {
        "session_id": checker.identifier("session_id"),
        "user_id": checker.identifier("user_id", optional=True),
        "position": pa.array(position),
        "clicked": clicked,
    }
    columns["timestamp"], problem = time_column(checker.rows, "timestamp", unit=config.timestamp_unit)
    for reason in problem.drop_null().unique().to_pylist():
        checker.reject(pc.equal(problem, reason), reason)
    dwell = pc.cast(checker.number("dwell_s", optional=True), pa.float32())
    return columns | {"dwell_s": pc.if_else(pc.is_nan(dwell), None, dwell)}


def _relevance(checker: _ColumnChecker) -> pa.Array:
    """Whole numbers; 1 for all rows of a file without the column."""
    if "relevance" not in checker.rows.column_names:
        return pa.array(np.ones(len(checker.rows), np.int32))
    relevance, is_whole = _whole_numbers(checker.number("relevance"))
    checker.reject(~is_whole, "relevance is not a whole number")
    return pa.array(relevance)


def _whole_numbers(numbers: pa.Array) -> tuple[Int32[ndarray, " rows"], Bool[ndarray, " rows"]]:
    """Numbers as int32, 0 for others than whole ones; and which are whole."""
    array = np.asarray(numbers)
    is_whole = (np.abs(array) < 2**31) & (array == np.round(array))
    return np.where(is_whole, array, 0).astype(np.int32), is_whole


# --- conversions: an invalid value becomes null ------------------------------------------------------------


def text_column(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """A column as strings, integers as decimal digits; and which rows are not UTF-8."""
    column = _column(rows, name)
    if pa.types.is_integer(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.string())
    # A Parquet string column may hold invalid UTF-8; Arrow validates it only when binary is cast to string.
    plain = cast_or_null(column.cast(pa.binary()), pa.string())
    return plain, pc.and_(pc.is_null(plain), pc.is_valid(column))


def number_column(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """A column as float64, including numbers in text; and which rows have any value."""
    column = _column(rows, name)
    if pa.types.is_floating(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.float64()), pc.is_valid(column)
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        return column.cast(pa.float64(), safe=False), pc.is_valid(column)
    plain = pc.utf8_trim_whitespace(text_column(rows, name)[0])
    numeral = pc.if_else(pc.match_substring_regex(plain, _NUMBER), plain, None)
    return cast_or_null(numeral, pa.float64()), pc.is_valid(column)


def boolean_column(rows: pa.Table, name: str) -> pa.Array:
    """A column as booleans: true and false, 1 and 0; null for anything else."""
    column = _column(rows, name)
    if pa.types.is_integer(column.type):
        known = pc.is_in(column, value_set=pa.array([0, 1], column.type))
        return pc.if_else(known, pc.not_equal(column, 0), None)
    return column.cast(pa.bool_())


def time_column(rows: pa.Table, name: str, *, unit: Literal["s", "ms", "us"]) -> tuple[pa.Array, pa.Array]:
    """A column as UTC milliseconds, and the reason for each row without; `unit` is that of plain numbers."""
    column = _column(rows, name)
    if pa.types.is_timestamp(column.type):
        return _utc(column), pc.if_else(pc.is_null(column), f"{name} is not a number", None)
    numeric, present = number_column(rows, name)
    ms = np.rint(np.asarray(pc.fill_null(numeric, float("nan"))) * _MS_PER_UNIT[unit])
    usable = np.abs(ms) < 2.0**62
    clock = pa.array(np.where(usable, ms, 0).astype(np.int64)).cast(_MS)
    clock = pc.if_else(pa.array(usable), clock, None)
    problem = pc.if_else(pa.array(~usable), f"{name} is not finite", None)
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return clock, pc.if_else(present, problem, f"{name} is not a number")
    plain = pc.utf8_trim_whitespace(text_column(rows, name)[0])
    plain = pc.if_else(pc.match_substring_regex(plain, _DATE), plain, None)
    zoned = pc.match_substring_regex(plain, _ZONE)
    with_zone = cast_or_null(pc.if_else(zoned, plain, None), pa.timestamp("ns", "UTC"))
    without_zone = cast_or_null(pc.if_else(zoned, None, plain), pa.timestamp("ns"))
    clock = pc.coalesce(clock, _utc(with_zone), _utc(without_zone))
    neither = pc.if_else(pc.is_null(numeric), f"{name} is neither a number nor ISO 8601 text", None)
    problem = pc.if_else(pc.is_valid(clock), None, pc.coalesce(neither, problem))
    return clock, pc.if_else(present, problem, f"{name} is not a number")


def feature_column(rows: pa.Table, field: pa.Field) -> tuple[pa.Array, pa.Array]:
    """A column of numbers or booleans with the type of `field`, and which rows lost an invalid value."""
    column = _column(rows, field.name)
    if pa.types.is_boolean(field.type):
        plain = boolean_column(rows, field.name)
    else:
        plain, _ = number_column(rows, field.name)
        if pa.types.is_integer(field.type):  # an integer column would lose digits as float64
            plain = cast_or_null(column if pa.types.is_integer(column.type) else plain, pa.int64())
    return plain, pc.and_(pc.is_null(plain), pc.is_valid(column))


def cast_or_null(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column; invalid values become null. Bisection finds them, which is fast if they are few."""
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind)
    middle = len(column) // 2
    return pa.concat_arrays([cast_or_null(column[:middle], kind), cast_or_null(column[middle:], kind)])


def printable_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as Python values that can be printed, also for invalid UTF-8 and out-of-range timestamps."""
    columns = {}
    for name in table.column_names:
        column = _column(table, name)
        if pa.types.is_timestamp(column.type):
            columns[name] = column.cast(pa.string()).to_pylist()
        elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
            raw = column.cast(pa.binary()).to_pylist()
            columns[name] = [None if v is None else v.decode("utf-8", "backslashreplace") for v in raw]
        else:
            columns[name] = column.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _column(rows: pa.Table, name: str) -> pa.Array:
    """One array of a plain type; nulls where the file has no such column."""
    if name not in rows.column_names:
        return pa.nulls(len(rows))
    column = rows[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # zero chunks stay a ChunkedArray
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.binary()) if pa.types.is_large_binary(column.type) else column


def _utc(column: pa.Array) -> pa.Array:
    """Timestamps of any unit and zone as UTC milliseconds; without a zone they are UTC."""
    if column.type.tz:
        column = column.cast(pa.timestamp(column.type.unit, "UTC")).cast(pa.timestamp(column.type.unit))
    return column.cast(_MS, safe=False)


# --- query texts and their ids ----------------------------------------------------------------------------

_BLANKS = r"[\s\pZ\x{85}]+"


def query_ids(texts: pa.Array, *, fold_case: bool) -> pa.Array:
    """An id of 16 hexadecimal digits for every text that is not null.

    Equal ids mean the same query, whatever the width, blanks and case of its letters. They are reproducible:
    the text without format characters (Unicode's Cf), in NFKC, with runs of white space as one blank and none
    at the ends, in lower case with `ß` as `ss` and `ς` as `σ` (if `fold_case`); in UTF-8; BLAKE2b of 8 bytes;
    in hex. Among 100 million queries, two share an id with probability 0.0003.
    """

    def identify(distinct: pa.Array) -> pa.Array:
        plain = _collapse(normal_text(distinct, fold_case=fold_case))
        hashes = [
            None if text is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            for text in plain.to_pylist()
        ]
        return pa.array(hashes, pa.string())

    return _map_distinct(texts, identify)


def normal_text(texts: pa.Array | pa.ChunkedArray, *, fold_case: bool) -> pa.Array | pa.ChunkedArray:
    """NFKC without format characters; if `fold_case`, lower case with `ß` as `ss` and `ς` as `σ`.

    Copied text has zero-width spaces, joiners, soft hyphens and byte-order marks; a blank for them would
    split a word. They are removed first, so that NFKC can compose an accent after one with its letter.
    """
    plain = pc.utf8_normalize(pc.replace_substring_regex(texts, r"\p{Cf}+", ""), form="NFKC")
    if not fold_case:
        return plain
    lower = pc.replace_substring(pc.utf8_lower(plain), "ß", "ss")
    return pc.replace_substring(lower, "ς", "σ")  # their upper case forms are equal


def _collapse(texts: pa.Array) -> pa.Array:
    """Texts with runs of white space as one blank, and none at the ends."""
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, _BLANKS, " "))


def _map_distinct(texts: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply `function` once per distinct text, since a log repeats its queries."""
    coded = pc.dictionary_encode(texts)
    return function(coded.dictionary).take(coded.indices)
