"""The gate every row of a log passes, a column at a time: good rows leave typed, bad ones with their reason.

The reasons are those of `datasets.intake`, which checks row by row what comes row by row. Where a row has
several faults, the first one in the order of the columns is named.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, UInt8
from numpy import ndarray

from scalingnote.datasets.config import Logs
from scalingnote.datasets.logs import values
from scalingnote.datasets.logs.queries import query_ids, shown
from scalingnote.datasets.logs.reading import PROBLEM
from scalingnote.datasets.logs.tally import Tally
from scalingnote.storage.schema import DOCUMENTS, IMPRESSIONS, QRELS, SCORES

_MAX_ID_CHARS = 256
_QUERY = pa.field("query", pa.string())
CHECKED = {
    "documents": DOCUMENTS,
    "impressions": IMPRESSIONS.append(_QUERY),
    "scores": SCORES,
    "qrels": QRELS.append(_QUERY),  # null where judgements name queries by id only
}


def check(rows: pa.Table, table: str, *, config: Logs, tally: Tally) -> pa.Table:
    """The good rows of one table, in the columns of CHECKED; documents also carry the config's features."""
    gate = _Gate(rows, "documents" if table == "unpaired" else table, tally)
    match table:
        case "documents" | "unpaired":
            return _documents(gate, config)
        case "impressions":
            columns = _pair(gate, config) | _impression(gate, config)
        case "scores":
            columns = _pair(gate, config) | {"score": pc.cast(gate.number("score"), pa.float32())}
        case _:
            columns = _pair(gate, config) | {"relevance": _relevance(gate)}
    return gate.good(columns, CHECKED[table])


class _Gate:
    """The rows of a table on their way through: every check may refuse some, and the first reason counts."""

    def __init__(self, rows: pa.Table, table: str, tally: Tally) -> None:
        self.rows, self.table, self.tally = rows, table, tally
        self.reasons: list[str] = []
        self.verdict: UInt8[ndarray, " rows"] = np.zeros(len(rows), np.uint8)  # 0: good
        problems = rows[PROBLEM]
        if problems.null_count < len(rows):
            for reason in problems.drop_null().unique().to_pylist():
                self.refuse(pc.equal(problems, reason), reason)

    def refuse(self, which: pa.ChunkedArray | pa.Array | Bool[ndarray, " rows"], reason: str) -> None:
        """Set rows aside that nothing was said against before; null means no."""
        if not isinstance(which, np.ndarray):
            which = np.asarray(pc.fill_null(which, False))
        fresh = which & (self.verdict == 0)
        if fresh.any():
            self.reasons.append(reason)
            self.verdict[fresh] = len(self.reasons)

    def mend(self, which: pa.Array, what: str) -> None:
        """Count rows that are kept after a repair."""
        count = pc.sum(which).as_py()
        if count:
            self.tally.mended[what] += count

    def text(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of text, stripped; control characters become blanks, null becomes empty or stays."""
        found, broken = values.text(self.rows, name)
        self.refuse(broken, "invalid UTF-8")
        odd = values.has_controls(found)
        if pc.any(odd).as_py():
            self.mend(odd, "control_characters_blanked")
            found = values.without_controls(found)
        return pc.utf8_trim_whitespace(found if optional else pc.fill_null(found, ""))

    def identifier(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of ids, stripped; an optional one may be null, but not empty."""
        found, broken = values.text(self.rows, name)
        self.refuse(broken, "invalid UTF-8")
        found = pc.utf8_trim_whitespace(found)
        empty = pc.equal(found, "")
        self.refuse(empty if optional else pc.or_kleene(empty, pc.is_null(found)), f"no {name}")
        length = pc.utf8_length(found)
        self.refuse(pc.greater(length, _MAX_ID_CHARS), f"{name} longer than {_MAX_ID_CHARS} characters")
        self.refuse(values.has_controls(found), f"{name} with control characters")
        return found

    def number(self, name: str, *, optional: bool = False) -> pa.Array:
        """A column of finite float64; NaN where the row was refused or, in an optional one, has none."""
        found, given = values.numbers(self.rows, name)
        lacking = pc.is_null(found)
        self.refuse(pc.and_(lacking, given) if optional else lacking, f"{name} is not a number")
        self.refuse(pc.invert(pc.is_finite(found)), f"{name} is not finite")
        return pc.fill_null(found, float("nan"))

    def good(self, columns: dict[str, pa.Array], schema: pa.Schema) -> pa.Table:
        """The rows that nothing was said against; the others are tallied, some shown as they came."""
        given = self.rows.drop_columns([PROBLEM])
        for number, reason in enumerate(self.reasons, 1):
            self.tally.reject(self.table, reason, given, self.verdict == number)
        kept = pa.table(columns)
        if self.reasons:
            kept = kept.filter(pa.array(self.verdict == 0))
        return kept.select(schema.names).cast(schema)


def _documents(gate: _Gate, config: Logs) -> pa.Table:
    features = pa.schema([(name, values.FEATURES[kind]) for name, kind in config.features.items()])
    doc_id = gate.identifier("doc_id")
    title, topic, content = (gate.text(name) for name in ("title", "topic", "content"))
    gate.refuse(pc.and_(pc.equal(title, ""), pc.equal(content, "")), "no text")
    limit = config.max_title_chars
    gate.refuse(pc.greater(pc.utf8_length(title), limit), f"title longer than {limit} characters")
    group = gate.text("group")
    columns = {
        "doc_id": doc_id,
        "title": title,
        "topic": topic,
        "content": pc.utf8_slice_codeunits(content, 0, config.max_content_chars),
        "group": pc.if_else(pc.equal(group, ""), doc_id, group),
    }
    for field in features:
        if pa.types.is_string(field.type):
            columns[field.name] = gate.text(field.name, optional=True)
        else:
            columns[field.name], lost = values.feature(gate.rows, field)
            gate.mend(lost, f"feature_{field.name}_dropped")
    long = pc.and_(pc.greater(pc.utf8_length(content), config.max_content_chars), pa.array(gate.verdict == 0))
    gate.mend(long, "content_truncated")
    return gate.good(columns, pa.schema([*DOCUMENTS, *features]))


def _pair(gate: _Gate, config: Logs) -> dict[str, pa.Array]:
    """The query and the document a row is about."""
    have = gate.rows.column_names
    query = pa.nulls(len(gate.rows), pa.string())
    if "query" in have:
        query = shown(gate.text("query"))
        if gate.table == "impressions" or "query_id" not in have:
            gate.refuse(pc.equal(query, ""), "empty query")
    named = (
        gate.identifier("query_id") if "query_id" in have else query_ids(query, fold_case=config.fold_case)
    )
    return {"query_id": named, "query": query, "doc_id": gate.identifier("doc_id")}


def _impression(gate: _Gate, config: Logs) -> dict[str, pa.Array]:
    position = gate.number("position")
    places = np.asarray(position)
    at_all = (places >= 1) & (places == np.round(places)) & (places < 2**31)
    gate.refuse(~at_all, "position is not 1 or above")
    clicked = values.flags(gate.rows, "clicked")
    gate.refuse(pc.is_null(clicked), "clicked is neither true nor false")
    columns = {
        "session_id": gate.identifier("session_id"),
        "user_id": gate.identifier("user_id", optional=True),
        "position": _whole(position),
        "clicked": clicked,
    }
    columns["timestamp"], problem = values.times(gate.rows, "timestamp", unit=config.timestamp_unit)
    for reason in problem.drop_null().unique().to_pylist():
        gate.refuse(pc.equal(problem, reason), reason)
    dwell = pc.cast(gate.number("dwell_s", optional=True), pa.float32())
    return columns | {"dwell_s": pc.if_else(pc.is_nan(dwell), None, dwell)}


def _relevance(gate: _Gate) -> pa.Array:
    """Whole numbers; 1 for all rows of a file that does not say."""
    if "relevance" not in gate.rows.column_names:
        return pa.array(np.ones(len(gate.rows), np.int32))
    relevance = gate.number("relevance")
    found = np.asarray(relevance)
    gate.refuse((found != np.round(found)) | (np.abs(found) >= 2**31), "relevance is not a whole number")
    return _whole(relevance)


def _whole(numbers: pa.Array) -> pa.Array:
    """int32; 0 in rows that were refused, where anything may stand."""
    found = np.asarray(numbers)
    sound = (np.abs(found) < 2**31) & (found == np.round(found))
    return pa.array(np.where(sound, found, 0).astype(np.int32))
