"""Checks of the columns of a table: values are converted to our types, rows with faults are set aside.

Valid rows get the columns of ``storage.schema``; others are rejected with a reason. If a row has several
faults, the reason is the first one in the order of the columns.
"""

import hashlib
from collections.abc import Callable
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Int32, UInt8
from numpy import ndarray

from scalingnote.datasets.input_files import Quarantine, plain_column
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, QUERIES, SCORES, USERS

MAX_ID_CHARS = 256
MAX_TITLE_CHARS = 512  # a document with a longer title is set aside
MAX_CONTENT_CHARS = 20_000  # longer content is cut, and counted
MAX_DIVIDED_CHARS = 5_000_000  # the same limit for documents that are divided into passages
TimestampUnit = Literal["s", "ms", "us"]
_QUERY = pa.field("query", pa.string())
CHECKED = {
    "documents": DOCUMENTS,
    "queries": QUERIES,  # `split` is "train", "test", or empty if the source has no split
    "impressions": IMPRESSIONS.append(_QUERY),
    "scores": SCORES.append(_QUERY),  # null if rows identify queries only by id
    "qrels": QRELS.append(_QUERY),
    "users": USERS,
}
_MS = pa.timestamp("ms")
_MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 0.001}
_FIRST_MS, _END_MS = -62_135_596_800_000, 253_402_300_800_000  # the years 1 to 9999, as Python's datetime
# Control characters except tab and line ends, DEL and the C1 block.
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x{9f}]"
_NUMBER = r"(?i)^[+-]?(\d+\.?\d*(e[+-]?\d+)?|\.\d+(e[+-]?\d+)?|nan|inf|infinity)$"
# Failing casts are slow, so only texts that look like a date are cast.
_DATE = r"^\d{4}-\d\d-\d\d([T ].*)?$"
_ZONE = r"[T ].*(Z|[+-]\d\d:?\d\d)$"


# --- checks of tables --------------------------------------------------------------------------------------


def check_table(
    rows: pa.Table,
    table: str,
    *,
    features: pa.Schema,
    quarantine: Quarantine,
    timestamp_unit: TimestampUnit = "s",
    max_content: int = MAX_CONTENT_CHARS,
) -> pa.Table:
    """Return the valid rows of one table with the columns of CHECKED and `features`.

    Args:
        rows: with the columns of ours that the file has.
        table: name of the table, a key of CHECKED.
        features: further columns of documents and users; an invalid value becomes null, the row stays.
        quarantine: receives the rejected rows, and counts them and repaired values.
        timestamp_unit: of timestamps that are plain numbers.
        max_content: number of characters of a document's content that are kept.
    """
    checker = _ColumnChecker(rows, table, quarantine)
    match table:
        case "documents":
            columns = _documents(checker, max_content)
        case "queries":
            columns = _queries(checker)
        case "users":
            columns = {"user_id": checker.identifier("user_id")}
        case "impressions":
            columns = _pair(checker) | _impression(checker, timestamp_unit)
        case "scores":
            columns = _pair(checker) | {"score": pc.cast(checker.number("score"), pa.float32())}
        case _:
            columns = _pair(checker) | {"relevance": _relevance(checker)}
    columns |= {field.name: checker.feature(field) for field in features}
    return checker.valid_rows(columns, pa.schema([*CHECKED[table], *features]))


class _ColumnChecker:
    """Checker of the columns of one table; a check may reject rows, and the first reason of a row counts."""

    def __init__(self, rows: pa.Table, table: str, quarantine: Quarantine) -> None:
        self.rows, self.table, self.quarantine = rows, table, quarantine
        self.reasons: list[str] = []
        self.verdict: UInt8[ndarray, " rows"] = np.zeros(len(rows), np.uint8)  # 0: valid; else reason number

    def reject(self, which: pa.ChunkedArray | pa.Array | Bool[ndarray, " rows"], reason: str) -> None:
        """Reject rows that were valid so far; null in `which` means valid."""
        if not isinstance(which, np.ndarray):
            which = np.asarray(pc.fill_null(which, False))
        newly_rejected = which & (self.verdict == 0)
        if newly_rejected.any():
            self.reasons.append(reason)
            self.verdict[newly_rejected] = len(self.reasons)

    def count_repaired(self, which: pa.Array, what: str) -> None:
        """Count repaired rows, if they are valid so far."""
        count = int((np.asarray(pc.fill_null(which, False)) & (self.verdict == 0)).sum())
        if count:
            self.quarantine.repaired[what] += count

    def text(self, name: str) -> pa.Array:
        """Check a column of texts and strip them; control characters become blanks, null becomes empty."""
        column, invalid = text_column(self.rows, name)
        self.reject(invalid, "invalid UTF-8")
        repaired = pc.match_substring_regex(column, _CONTROL)
        if pc.any(repaired).as_py():
            self.count_repaired(repaired, "control_characters_blanked")
            column = pc.replace_substring_regex(column, _CONTROL, " ")
        return pc.utf8_trim_whitespace(pc.fill_null(column, ""))

    def identifier(self, name: str, *, optional: bool = False) -> pa.Array:
        """Check a column of ids and strip them; an optional id may be null, but not empty."""
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
        """Check a column of finite float64; NaN if the row is rejected or an optional value is missing."""
        column, present = number_column(self.rows, name)
        missing = pc.is_null(column)
        self.reject(pc.and_(missing, present) if optional else missing, f"{name} is not a number")
        self.reject(pc.invert(pc.is_finite(column)), f"{name} is not finite")
        return pc.fill_null(column, float("nan"))

    def feature(self, field: pa.Field) -> pa.Array:
        """Convert a column to the type of `field`; invalid values become null and are counted."""
        if pa.types.is_string(field.type):
            column, invalid = text_column(self.rows, field.name)
            column = pc.utf8_trim_whitespace(pc.replace_substring_regex(column, _CONTROL, " "))
        else:
            column, invalid = feature_column(self.rows, field)
        self.count_repaired(invalid, f"feature_{field.name}_dropped")
        return column

    def valid_rows(self, columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
        """Select the valid rows; count the others and keep the first of them as examples."""
        for number, reason in enumerate(self.reasons, 1):
            self.quarantine.reject_where(self.table, reason, self.rows, self.verdict == number)
        table = pa.table(columns)
        if self.reasons:
            table = table.filter(pa.array(self.verdict == 0))
        return table.select(schema.names).cast(schema)


def _documents(checker: _ColumnChecker, max_content: int) -> dict[str, pa.Array]:
    doc_id = checker.identifier("doc_id")
    title, topic, content = (checker.text(name) for name in ("title", "topic", "content"))
    checker.reject(pc.and_(pc.equal(title, ""), pc.equal(content, "")), "no text")
    checker.reject(
        pc.greater(pc.utf8_length(title), MAX_TITLE_CHARS),
        f"title longer than {MAX_TITLE_CHARS} characters",
    )
    group = checker.text("group")
    checker.count_repaired(pc.greater(pc.utf8_length(content), max_content), "content_truncated")
    return {
        "doc_id": doc_id,
        "title": title,
        "topic": topic,
        "content": pc.utf8_slice_codeunits(content, 0, max_content),
        "group": pc.if_else(pc.equal(group, ""), doc_id, group),
    }


def _queries(checker: _ColumnChecker) -> dict[str, pa.Array]:
    query_id = checker.identifier("query_id")
    query = _map_distinct(checker.text("query"), _collapse)
    checker.reject(pc.equal(query, ""), "empty query")
    split = checker.text("split")
    unknown = pc.invert(pc.is_in(split, value_set=pa.array(["", "train", "test"])))
    for value in split.filter(unknown).unique().to_pylist():
        checker.reject(pc.equal(split, value), f"split {value!r} is neither train nor test")
    return {"query_id": query_id, "query": query, "split": split}


def _pair(checker: _ColumnChecker) -> dict[str, pa.Array]:
    """Check the ids of the query and the document of each row, and the query text."""
    names = checker.rows.column_names
    query = pa.nulls(len(checker.rows), pa.string())
    if "query" in names:
        query = _map_distinct(checker.text("query"), _collapse)
        if checker.table == "impressions" or "query_id" not in names:
            checker.reject(pc.equal(query, ""), "empty query")
    by_text = "query" in names and "query_id" not in names
    query_id = query_ids(query) if by_text else checker.identifier("query_id")
    return {"query_id": query_id, "query": query, "doc_id": checker.identifier("doc_id")}


def _impression(checker: _ColumnChecker, unit: TimestampUnit) -> dict[str, pa.Array]:
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
    columns["timestamp"], problem = time_column(checker.rows, "timestamp", unit=unit)
    for reason in problem.drop_null().unique().to_pylist():
        checker.reject(pc.equal(problem, reason), reason)
    clock = columns["timestamp"].cast(pa.int64())
    checker.reject(
        pc.or_(pc.less(clock, _FIRST_MS), pc.greater_equal(clock, _END_MS)),
        "timestamp is not in the years 1 to 9999: give seconds, or say the unit",
    )
    dwell = pc.cast(checker.number("dwell_s", optional=True), pa.float32())
    return columns | {"dwell_s": pc.if_else(pc.is_nan(dwell), None, dwell)}


def _relevance(checker: _ColumnChecker) -> pa.Array:
    """Check the column of whole numbers; 1 for all rows of a file without the column."""
    if "relevance" not in checker.rows.column_names:
        return pa.array(np.ones(len(checker.rows), np.int32))
    relevance, is_whole = _whole_numbers(checker.number("relevance"))
    checker.reject(~is_whole, "relevance is not a whole number")
    return pa.array(relevance)


def _whole_numbers(numbers: pa.Array) -> tuple[Int32[ndarray, " rows"], Bool[ndarray, " rows"]]:
    """Convert numbers to int32, with 0 for numbers that are not whole; and return which are whole."""
    array = np.asarray(numbers)
    is_whole = (np.abs(array) < 2**31) & (array == np.round(array))
    return np.where(is_whole, array, 0).astype(np.int32), is_whole


# --- conversions: an invalid value becomes null ------------------------------------------------------------


def text_column(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """Convert a column to strings, integers to decimal digits; and return which rows are not UTF-8."""
    column = plain_column(rows, name)
    if pa.types.is_integer(column.type) or pa.types.is_null(column.type):
        column = column.cast(pa.string())
    # A Parquet string column may hold invalid UTF-8; Arrow validates it only when binary is cast to string.
    plain = cast_or_null(column.cast(pa.binary()), pa.string())
    return plain, pc.and_(pc.is_null(plain), pc.is_valid(column))


def number_column(rows: pa.Table, name: str) -> tuple[pa.Array, pa.Array]:
    """Convert a column to float64, including numbers in text; and return which rows have any value."""
    column = plain_column(rows, name)
    if pa.types.is_floating(column.type) or pa.types.is_null(column.type):
        return column.cast(pa.float64()), pc.is_valid(column)
    if pa.types.is_integer(column.type) or pa.types.is_decimal(column.type):
        return column.cast(pa.float64(), safe=False), pc.is_valid(column)
    plain = pc.utf8_trim_whitespace(text_column(rows, name)[0])
    numeral = pc.if_else(pc.match_substring_regex(plain, _NUMBER), plain, None)
    return cast_or_null(numeral, pa.float64()), pc.is_valid(column)


def boolean_column(rows: pa.Table, name: str) -> pa.Array:
    """Convert a column to booleans: true and false, 1 and 0; null for any other value."""
    column = plain_column(rows, name)
    if pa.types.is_integer(column.type):
        is_flag = pc.is_in(column, value_set=pa.array([0, 1], column.type))
        return pc.if_else(is_flag, pc.not_equal(column, 0), None)
    return column.cast(pa.bool_())


def time_column(rows: pa.Table, name: str, *, unit: TimestampUnit) -> tuple[pa.Array, pa.Array]:
    """Convert a column to UTC milliseconds; `unit` is that of plain numbers.

    Returns:
        The times, and the reason for each row without a time.
    """
    column = plain_column(rows, name)
    if pa.types.is_timestamp(column.type):
        return _utc(column), pc.if_else(pc.is_null(column), f"{name} is not a number", None)
    numeric, present = number_column(rows, name)
    with np.errstate(over="ignore"):  # infinite values are rejected below
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
    """Convert a column to the type of `field` (not text), and return which rows lost an invalid value."""
    column = plain_column(rows, field.name)
    if pa.types.is_list(field.type):
        plain = column.cast(field.type)
    elif pa.types.is_boolean(field.type):
        plain = boolean_column(rows, field.name)
    else:
        plain, _ = number_column(rows, field.name)
        if pa.types.is_integer(field.type):  # integers would lose digits as float64
            text, _ = text_column(rows, field.name)
            digits = pc.if_else(pc.match_substring_regex(text, r"^-?\d+$"), text, None)
            plain = pc.coalesce(cast_or_null(digits, pa.int64()), cast_or_null(plain, pa.int64()))
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


def _utc(column: pa.Array) -> pa.Array:
    """Convert timestamps of any unit and zone to UTC milliseconds; without a zone they are UTC."""
    if column.type.tz:
        column = column.cast(pa.timestamp(column.type.unit, "UTC")).cast(pa.timestamp(column.type.unit))
    return column.cast(_MS, safe=False)


# --- query texts and their ids ----------------------------------------------------------------------------

_BLANKS = r"[\s\pZ\x{85}]+"


def query_ids(texts: pa.Array) -> pa.Array:
    """Compute an id of 16 hexadecimal digits for every text that is not null.

    Equal ids mean the same query, independent of width, white space and case. Ids are reproducible: remove
    format characters (Unicode's Cf); convert to NFKC and to lower case with `ß` as `ss` and `ς` as `σ`;
    replace runs of white space by one blank, and remove those at the ends; encode in UTF-8; hash by BLAKE2b
    with 8 bytes; write in hex. Among 100 million queries, two have an equal id with probability 0.0003.
    """

    def identify(distinct: pa.Array) -> pa.Array:
        plain = _collapse(normal_text(distinct))
        hashes = [
            None if text is None else hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            for text in plain.to_pylist()
        ]
        return pa.array(hashes, pa.string())

    return _map_distinct(texts, identify)


def normal_text(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Convert texts to NFKC without format characters, in lower case with `ß` as `ss` and `ς` as `σ`.

    Copied text has zero-width spaces, joiners, soft hyphens and byte-order marks; a blank in their place
    would split a word. They are removed first, so that NFKC can compose an accent after one with its letter.
    """
    plain = pc.utf8_normalize(pc.replace_substring_regex(texts, r"\p{Cf}+", ""), form="NFKC")
    lower = pc.replace_substring(pc.utf8_lower(plain), "ß", "ss")
    return pc.replace_substring(lower, "ς", "σ")  # their upper case forms are equal


def _collapse(texts: pa.Array) -> pa.Array:
    """Replace runs of white space by one blank, and remove those at the ends."""
    return pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, _BLANKS, " "))


def _map_distinct(texts: pa.Array, function: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply `function` once per distinct text, since a log repeats its queries."""
    coded = pc.dictionary_encode(texts)
    return function(coded.dictionary).take(coded.indices)
