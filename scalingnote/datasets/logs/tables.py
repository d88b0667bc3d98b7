"""What each table of a log holds: its columns, what kind of values they take, and which it cannot lack."""

from collections.abc import Collection
from typing import Literal

import pyarrow as pa

from scalingnote.datasets.config import FeatureType, Logs

Kind = Literal["id", "text", "number", "flag", "time"]
_DOCUMENTS: dict[str, Kind] = {
    "doc_id": "id",
    "title": "text",
    "topic": "text",
    "content": "text",
    "group": "text",
}
_PAIR: dict[str, Kind] = {"query": "text", "query_id": "id", "doc_id": "id"}
_IMPRESSIONS: dict[str, Kind] = _PAIR | {
    "session_id": "id",
    "user_id": "id",
    "position": "number",
    "clicked": "flag",
    "timestamp": "time",
    "dwell_s": "number",
}
_FEATURES: dict[FeatureType, Kind] = {
    "string": "text",
    "int64": "number",
    "float64": "number",
    "bool": "flag",
}
_DESCRIBED: dict[Kind, str] = {
    "id": "text or whole numbers",
    "text": "text",
    "number": "a number",
    "flag": "true or false, or 1 and 0",
    "time": "a timestamp, a number or ISO 8601 text",
}
NAMES = ("documents", "unpaired", "impressions", "scores", "qrels")


def kinds(config: Logs, table: str) -> dict[str, Kind]:
    """The columns of a table, by our names, and what they hold."""
    match table:
        case "documents" | "unpaired":
            return _DOCUMENTS | {name: _FEATURES[kind] for name, kind in config.features.items()}
        case "impressions":
            return _IMPRESSIONS
        case "scores":
            return _PAIR | {"score": "number"}
        case _:
            return _PAIR | {"relevance": "number"}


def missing(config: Logs, table: str, have: Collection[str]) -> list[str]:
    """What a file with the columns `have` lacks to be of any use."""
    either: tuple[str, ...]
    match table:
        case "documents" | "unpaired":
            needed, either = ["doc_id"], ("title", "content")
        case "impressions":
            needed, either = ["session_id", "query", "doc_id", "position", "clicked", "timestamp"], ("query",)
            needed += ["dwell_s"] if config.min_dwell_s else []
        case "scores":
            needed, either = ["doc_id", "score"], ("query", "query_id")
        case _:
            needed, either = ["doc_id"], ("query", "query_id")
    lacking = [name for name in needed if name not in have]
    if not any(name in have for name in either) and not set(either) & set(lacking):
        lacking.append(" or ".join(either))
    return lacking


def describe(kind: Kind) -> str:
    """The values of a kind, in words."""
    return _DESCRIBED[kind]


def fits(found: pa.DataType, kind: Kind) -> bool:
    """Whether a column of this type can hold values of `kind`; what the values are is checked row by row."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    # Binary columns are text that some writer forgot to mark.
    text = any(
        is_type(found)
        for is_type in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    )
    number = pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found)
    match kind:
        case "id":
            good = text or pa.types.is_integer(found)
        case "text":
            good = text
        case "number":
            good = text or number
        case "flag":
            good = pa.types.is_boolean(found) or pa.types.is_integer(found)
        case "time":
            good = text or number or pa.types.is_timestamp(found)
    return good or pa.types.is_null(found)


def fits_json(found: set[type], kind: Kind) -> bool:
    """The same of the Python types a JSON column was seen with; one that fits is enough."""
    types: dict[Kind, set[type]] = {
        "id": {str, int},
        "text": {str},
        "number": {int, float, str},
        "flag": {bool, int},
        "time": {int, float, str},
    }
    return not found or bool(found & types[kind])
