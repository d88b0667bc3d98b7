"""The access log: JSON lines of gateway replicas come in, checked Arrow batches of requests go out.

A line that cannot be used costs itself alone: it is counted by reason and set aside. The last line of a
killed process is such a line, unless it was whole.
"""

import glob
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from scalingnote.datasets.quarantine import Quarantine
from scalingnote.errors import DataError
from scalingnote.storage import filesystem as fs

STAGES = ("encode", "search", "rerank", "total")
REQUESTS = pa.schema(
    {
        "time": pa.float64(),  # seconds since 1970
        "request_id": pa.string(),
        "path": pa.string(),
        "status": pa.int32(),
        "arm": pa.string(),  # null, as all below, where a request came not so far
        "unit": pa.string(),  # what the split hashed
        "query": pa.string(),  # also null where the query was a vector
        "k": pa.int32(),
        "filter": pa.string(),  # as JSON
        "doc_ids": pa.list_(pa.string()),  # best first
        "scores": pa.list_(pa.float32()),
        "personalised": pa.bool_(),
        "index_version": pa.string(),
        "shards": pa.int32(),
        "shards_answered": pa.int32(),
        **{f"{stage}_ms": pa.float32() for stage in STAGES},
        "error": pa.string(),
    }
)
REQUIRED = ("time", "request_id", "path", "status")
TABLE = "access log"  # in the quarantine
_MOST, _LARGEST = 2**31 - 1, float(np.finfo(np.float32).max)
_LATEST = 1e11  # seconds since 1970: milliseconds are beyond it


def find(patterns: Sequence[str]) -> list[str]:
    """Files that paths, folders, globs or URIs name, each once; DataError for one that names none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        places = [pattern] if "://" in pattern else sorted(glob.glob(pattern))
        named = [uri for place in places for uri in _files(place)]
        if not named:
            raise DataError(f"no access log at {pattern}: name a file, or a folder of access-*.jsonl")
        found |= dict.fromkeys(map(fs.absolute, named))
    return list(found)


def _files(place: str) -> list[str]:
    """The file at a place, or the logs below a folder."""
    filesystem, path = fs.resolve(place)
    if filesystem.get_file_info(path).is_file:
        return [place]
    names = [PurePosixPath(name) for name in fs.list_files(place)]
    return [fs.join(place, str(name)) for name in names if name.match("access-*.jsonl*")]


def read(files: Iterable[str], quarantine: Quarantine, *, rows: int = 8192) -> Iterator[pa.RecordBatch]:
    """Requests of log files as batches of REQUESTS, one in memory at a time; `.gz` files are unpacked.

    Fields that are not of REQUESTS are ignored. DataError when a file is not there.
    """
    for uri in files:
        waiting: list[dict[str, Any]] = []
        for line in _lines(uri, quarantine):
            try:
                waiting.append(_request(_parsed(line)))
            except ValueError as error:
                whole = line.endswith(b"\n")
                reason = str(error) if whole else "torn: the file ends within the line"
                quarantine.reject(TABLE, line.decode("utf-8", "backslashreplace").rstrip(), reason)
            if len(waiting) == rows:
                yield _batch(waiting, quarantine)
                waiting = []
        if waiting:
            yield _batch(waiting, quarantine)


def _lines(uri: str, quarantine: Quarantine) -> Iterator[bytes]:
    """Lines that are not empty; a compressed file that ends too early is set aside from there on."""
    filesystem, path = fs.resolve(uri)
    try:
        stream = filesystem.open_input_stream(path)
    except FileNotFoundError:
        raise DataError(f"no access log at {uri}: check the path") from None
    with stream:
        try:
            yield from (line for line in io.BufferedReader(stream, 1 << 18) if line.strip())
        except OSError as error:
            quarantine.reject(TABLE, uri, f"unreadable from some place on: {error}")


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(line, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise ValueError("invalid UTF-8") from None
    except RecursionError:
        raise ValueError("invalid JSON") from None
    except ValueError as error:
        raise ValueError("NaN or Infinity" if str(error) == "constant" else "invalid JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _refuse(_: str) -> None:
    raise ValueError("constant")


def _request(value: Mapping[str, Any]) -> dict[str, Any]:
    """A row of REQUESTS; ValueError says which field is wrong."""
    timings = value.get("timings_ms") or {}
    if not isinstance(timings, dict):
        raise ValueError("timings_ms is not an object")
    fields = {**value, **{f"{stage}_ms": timings.get(stage) for stage in STAGES}}
    if fields.get("filter") is not None:
        fields["filter"] = json.dumps(fields["filter"], ensure_ascii=False, sort_keys=True)
    row: dict[str, Any] = {}
    for field in REQUESTS:
        found = fields.get(field.name)
        if found is None and field.name in REQUIRED:
            raise ValueError(f"{field.name} is missing")
        if found is not None and not _FITS[field.type](found):
            raise ValueError(f"{field.name} is not of type {field.type}")
        real = _REAL.get(field.type)
        row[field.name] = real(found) if real and found is not None else found
    if not 0 <= row["time"] < _LATEST:
        raise ValueError("time is not in seconds since 1970")
    return row


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


# Integers are made floats here: Arrow refuses those that a float does not hold to the last digit.
_REAL: dict[pa.DataType, Callable[[Any], Any]] = {
    pa.float64(): float,
    pa.float32(): float,
    pa.list_(pa.float32()): lambda value: [float(number) for number in value],
}
# What a JSON value must be to go into a column of this type.
_FITS: dict[pa.DataType, Callable[[Any], bool]] = {
    pa.float64(): _number,
    pa.float32(): _number,
    pa.int32(): lambda value: type(value) is int and 0 <= value <= _MOST,
    pa.bool_(): lambda value: isinstance(value, bool),
    pa.string(): lambda value: isinstance(value, str),
    pa.list_(pa.string()): lambda value: isinstance(value, list) and all(isinstance(v, str) for v in value),
    pa.list_(pa.float32()): lambda value: isinstance(value, list) and all(map(_number, value)),
}


def _batch(rows: list[dict[str, Any]], quarantine: Quarantine) -> pa.RecordBatch:
    try:
        return pa.RecordBatch.from_pylist(rows, schema=REQUESTS)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and Arrow cannot hold
        kept = []
        for row in rows:
            try:
                pa.RecordBatch.from_pylist([row], schema=REQUESTS)
                kept.append(row)
            except UnicodeEncodeError:
                quarantine.reject(TABLE, row["request_id"], "not valid Unicode")
        return pa.RecordBatch.from_pylist(kept, schema=REQUESTS)
