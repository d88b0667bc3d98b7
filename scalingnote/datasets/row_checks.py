"""Checks of raw rows: valid rows take the columns of ``storage.schema``, others are rejected with a reason.

`log_columns` applies the same rules to whole columns.
"""

import math
import re
from collections.abc import Callable, Container, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from scalingnote.datasets.config import DatasetConfig
from scalingnote.datasets.raw_rows import Quarantine, Row, Rows, UnreadableRow
from scalingnote.texts import is_valid_unicode, replace_surrogates

# Control characters except tab and line ends, DEL and the C1 block.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
MAX_ID_CHARS = 256
_FIRST_S, _END_S = -62_135_596_800, 253_402_300_800  # the years 1 to 9999, the range of Python's datetime


class _BadRowError(Exception):
    """The reason to reject a row."""


def documents(
    rows: Rows,
    *,
    config: DatasetConfig,
    features: pa.Schema,
    quarantine: Quarantine,
    repeated: Container[int] = (),
) -> Iterator[Row]:
    """Valid documents with the columns of DOCUMENTS and `features`; `group` is never empty.

    `repeated` has the numbers, among these documents, of those whose id is a duplicate of one elsewhere.
    """
    seen: set[str] = set()

    def check(row: Row) -> Row:
        doc_id = _identifier(row, "doc_id")
        title, topic, content = (_text(row, key, quarantine) for key in ("title", "topic", "content"))
        if not title and not content:
            raise _BadRowError("no text")
        if len(title) > config.max_title_chars:
            raise _BadRowError(f"title longer than {config.max_title_chars} characters")
        if len(content) > config.max_content_chars:
            content = content[: config.max_content_chars]
            quarantine.repaired["content_truncated"] += 1
        valid = {
            "doc_id": doc_id,
            "title": title,
            "topic": topic,
            "content": content,
            "group": _text(row, "group", quarantine) or doc_id,
            **{field.name: _feature(row, field, quarantine) for field in features},
        }
        # Only now, so that a rejected row does not make a later one a duplicate.
        is_repeated = doc_id in seen or len(seen) in repeated
        seen.add(doc_id)
        if is_repeated:
            raise _BadRowError("duplicate doc_id")
        return valid

    return _checked("documents", rows, check, quarantine)


def queries(rows: Rows, *, quarantine: Quarantine) -> Iterator[Row]:
    """Queries with an id and a text; `split` is "train", "test", or empty if the source has no split."""
    seen: set[str] = set()

    def check(row: Row) -> Row:
        query_id = _identifier(row, "query_id")
        if query_id in seen:
            raise _BadRowError("duplicate query_id")
        query = " ".join(_text(row, "query", quarantine).split())
        if not query:
            raise _BadRowError("empty query")
        split = row.get("split") or ""
        if split not in ("", "train", "test"):
            raise _BadRowError(f"split {split!r} is neither train nor test")
        seen.add(query_id)
        return {"query_id": query_id, "query": query, "split": split}

    return _checked("queries", rows, check, quarantine)


def users(rows: Rows, *, profile: pa.Schema, quarantine: Quarantine) -> Iterator[Row]:
    """Distinct users with an id and the columns of `profile`."""
    seen: set[str] = set()

    def check(row: Row) -> Row:
        user_id = _identifier(row, "user_id")
        if user_id in seen:
            raise _BadRowError("duplicate user_id")
        valid = {"user_id": user_id, **{f.name: _feature(row, f, quarantine) for f in profile}}
        seen.add(user_id)
        return valid

    return _checked("users", rows, check, quarantine)


def pairs(
    table: str, rows: Rows, *, query_ids: Container[str], doc_ids: Container[str], quarantine: Quarantine
) -> Iterator[Row]:
    """Rows of qrels, impressions or scores with a known query and document; a qrel or score only once."""
    other_columns: Callable[[Row], Row] = {
        "qrels": _qrel,
        "impressions": _impression,
        "scores": lambda row: {"score": _number(row, "score")},
    }[table]
    seen: set[tuple[str, str]] = set()

    def check(row: Row) -> Row:
        query_id, doc_id = _identifier(row, "query_id"), _identifier(row, "doc_id")
        if query_id not in query_ids:
            raise _BadRowError("unknown query_id")
        if doc_id not in doc_ids:
            raise _BadRowError("unknown doc_id")
        if (query_id, doc_id) in seen:
            raise _BadRowError("duplicate query and document")
        valid = {"query_id": query_id, "doc_id": doc_id, **other_columns(row)}
        if table != "impressions":
            seen.add((query_id, doc_id))
        return valid

    return _checked(table, rows, check, quarantine)


def _checked(name: str, rows: Rows, check: Callable[[Row], Row], quarantine: Quarantine) -> Iterator[Row]:
    for row in rows:
        if isinstance(row, UnreadableRow):
            quarantine.reject(name, row.row, row.reason)
            continue
        try:
            checked = check(row)
        except _BadRowError as bad:
            quarantine.reject(name, row, str(bad))
        else:
            yield checked


def _identifier(row: Row, key: str) -> str:
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise _BadRowError(f"{key} is of type {type(value).__name__}")
    value = (value or "").strip()
    if not value:
        raise _BadRowError(f"no {key}")
    if len(value) > MAX_ID_CHARS:
        raise _BadRowError(f"{key} longer than {MAX_ID_CHARS} characters")
    if _CONTROL.search(value) or not is_valid_unicode(value):
        raise _BadRowError(f"{key} with control characters")
    return value


def _text(row: Row, key: str, quarantine: Quarantine) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            raise _BadRowError("invalid UTF-8") from None
    if not isinstance(value, str):
        raise _BadRowError(f"{key} is of type {type(value).__name__}, not text")
    if not is_valid_unicode(value):
        value = replace_surrogates(value)
        quarantine.repaired["lone_surrogates_replaced"] += 1
    if _CONTROL.search(value):
        value = _CONTROL.sub(" ", value)
        quarantine.repaired["control_characters_blanked"] += 1
    return value.strip()


def _feature(row: Row, field: pa.Field, quarantine: Quarantine) -> Any:
    """The value with the type of `field`; an invalid value becomes None and is counted, the row stays."""
    value = row.get(field.name)
    if value is None:
        return None
    try:
        if pa.types.is_string(field.type):
            return _text(row, field.name, quarantine)
        typed = pa.scalar(value, type=field.type).as_py()
        if not pa.types.is_integer(field.type) or typed == value:  # Arrow truncates 1.5 to 1
            return typed
    except (_BadRowError, OverflowError, pa.ArrowInvalid, pa.ArrowTypeError):
        pass
    quarantine.repaired[f"feature_{field.name}_dropped"] += 1
    return None


def _qrel(row: Row) -> Row:
    relevance = _number(row, "relevance")
    if relevance != int(relevance) or not -(2**31) <= relevance < 2**31:
        raise _BadRowError("relevance is not a whole number")
    return {"relevance": int(relevance)}


def _impression(row: Row) -> Row:
    position = _number(row, "position")
    if position < 1 or position != int(position) or position >= 2**31:
        raise _BadRowError("position is not 1 or above")
    clicked = row.get("clicked")
    if clicked not in (True, False):  # 0 and 1 pass
        raise _BadRowError("clicked is neither true nor false")
    user = row.get("user_id")
    seconds = _number(row, "timestamp")
    if not _FIRST_S <= seconds < _END_S:
        raise _BadRowError("timestamp is not in the years 1 to 9999: give seconds, not milliseconds or less")
    return {
        "session_id": _identifier(row, "session_id"),
        "user_id": None if user is None else _identifier(row, "user_id"),
        "position": int(position),
        "clicked": bool(clicked),
        "timestamp": int(1000 * seconds),  # the schema has milliseconds
        "dwell_s": None if row.get("dwell_s") is None else _number(row, "dwell_s"),
    }


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    if isinstance(value, datetime):
        value = value.replace(tzinfo=value.tzinfo or UTC).timestamp()
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _BadRowError(f"{key} is not a number") from None
    except OverflowError:  # an integer may be larger than any float
        raise _BadRowError(f"{key} is not finite") from None
    if not math.isfinite(number):
        raise _BadRowError(f"{key} is not finite")
    return number
