"""What users said and did, by request: files of feedback and of clicks in, a value per request_id out."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from scalingnote.datasets.quarantine import Quarantine
from scalingnote.datasets.rows import Row, Unreadable, files, json_lines, parquet, quoted
from scalingnote.errors import DataError

_READERS: dict[str, Callable[[Path], Iterable[Row | Unreadable]]] = {
    ".jsonl": json_lines,
    ".csv": quoted,
    ".parquet": parquet,
}
_SATISFIED = {"true": 1.0, "false": 0.0}


def feedback(pattern: str, quarantine: Quarantine) -> dict[str, float]:
    """request_id -> satisfaction, from 0 to 1. Who answers twice has changed their mind: the last counts."""
    found: dict[str, float] = {}
    for row in _rows(pattern, ("request_id", "satisfied"), quarantine, table="feedback"):
        value = _satisfaction(row["satisfied"])
        if value is None:
            quarantine.reject("feedback", row, "satisfied is neither true nor false nor from 0 to 1")
        else:
            found[row["request_id"]] = value
    return found


def clicks(pattern: str, quarantine: Quarantine) -> dict[str, frozenset[str]]:
    """request_id -> documents that were clicked."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for row in _rows(pattern, ("request_id", "doc_id"), quarantine, table="clicks"):
        if isinstance(row["doc_id"], str):
            found[row["request_id"]].add(row["doc_id"])
        else:
            quarantine.reject("clicks", row, "doc_id is no text")
    return {request_id: frozenset(doc_ids) for request_id, doc_ids in found.items()}


def check(pattern: str) -> None:
    """DataError where files are missing or of a kind that is not read; nothing of them is read yet."""
    for path in files(pattern):
        if path.suffix not in _READERS:
            raise DataError(f"{path} is none of {', '.join(_READERS)}: convert it or rename it")


def _rows(pattern: str, names: tuple[str, str], quarantine: Quarantine, *, table: str) -> Iterable[Row]:
    """Rows that have both columns and a request_id of text; DataError where no row has them."""
    usable = False
    for path in files(pattern):
        if path.suffix == ".parquet" and (lacking := sorted({*names} - {*pq.read_schema(path).names})):
            raise DataError(f"{path} has no column {lacking[0]!r}: it needs {' and '.join(names)}")
        for row in _READERS[path.suffix](path):
            if isinstance(row, Unreadable):
                quarantine.reject(table, row.row, row.reason)
            elif lacking := [name for name in names if row.get(name) is None]:
                quarantine.reject(table, row, f"{lacking[0]} is missing")
            elif not isinstance(row["request_id"], str):
                quarantine.reject(table, row, "request_id is no text")
            else:
                usable = True
                yield row
    if not usable:
        raise DataError(f"no row of {pattern} has {' and '.join(names)}: check its columns")


def _satisfaction(value: Any) -> float | None:
    """A number from 0 to 1; CSV has them, and booleans, as text."""
    if isinstance(value, str):
        value = _SATISFIED.get(value.strip().lower(), value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and 0 <= number <= 1 else None
