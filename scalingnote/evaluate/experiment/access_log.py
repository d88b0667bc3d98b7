"""Access logs: reading their requests, and selecting those of an experiment.

    JSON lines of `serve.access_writer` ─read_requests─► batches of REQUESTS ─RequestFilter─► requests by arm

A line that cannot be used is counted by reason and set aside; the last line of a killed process may be one.

Only assignments by the split itself are compared. A request that named its arm, or was answered under other
shares, is recognized because its arm differs from that of its unit: the split is computed again for every
unit.
"""

import glob
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scalingnote.core.errors import DataError
from scalingnote.datasets.input_files import Quarantine
from scalingnote.evaluate.experiment.config import TrafficSplit, arm_of
from scalingnote.storage import filesystem as fs

STAGES = ("encode", "search", "rerank", "total")
REQUESTS = pa.schema(
    {
        "time": pa.float64(),  # seconds since 1970
        "request_id": pa.string(),
        "path": pa.string(),
        "status": pa.int32(),
        "arm": pa.string(),  # null, like all below, if the request failed before it was known
        "unit": pa.string(),  # what the split hashes
        "query": pa.string(),  # also null if the query was a vector
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
TABLE = "access log"  # name in the quarantine
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_TIME_S = 1e11  # since 1970; times in milliseconds are larger
SEARCH_PATH = "/search"
MAX_CACHED_UNITS = 1 << 20


def find_logs(patterns: Sequence[str]) -> list[str]:
    """Distinct files of paths, folders, globs or URIs; DataError for one without files."""
    logs: dict[str, None] = {}
    for pattern in patterns:
        places = [pattern] if "://" in pattern else sorted(glob.glob(pattern))
        files = [uri for place in places for uri in _files(place)]
        if not files:
            raise DataError(f"no access log at {pattern}: name a file, or a folder of access-*.jsonl")
        logs |= dict.fromkeys(map(fs.absolute, files))
    return list(logs)


def _files(place: str) -> list[str]:
    """The file at a URI, or the logs below a folder."""
    filesystem, path = fs.resolve(place)
    if filesystem.get_file_info(path).is_file:
        return [place]
    names = [PurePosixPath(name) for name in fs.list_files(place)]
    return [fs.join(place, str(name)) for name in names if name.match("access-*.jsonl*")]


def read_requests(
    files: Iterable[str], quarantine: Quarantine, *, rows: int = 8192
) -> Iterator[pa.RecordBatch]:
    """Requests of log files as batches of REQUESTS, one in memory at a time; `.gz` files are unpacked.

    Lines that cannot be used go to the quarantine; other fields of a line are ignored. DataError if a file
    does not exist.
    """
    for uri in files:
        requests: list[dict[str, Any]] = []
        for line in _lines(uri, quarantine):
            try:
                requests.append(_Line.model_validate_json(line).request())
            except ValidationError as error:
                reason = _reason(error) if line.endswith(b"\n") else "torn: the file ends within the line"
                quarantine.reject(TABLE, line.decode("utf-8", "backslashreplace").rstrip(), reason)
            if len(requests) == rows:
                yield pa.RecordBatch.from_pylist(requests, schema=REQUESTS)
                requests = []
        if requests:
            yield pa.RecordBatch.from_pylist(requests, schema=REQUESTS)


def _lines(uri: str, quarantine: Quarantine) -> Iterator[bytes]:
    """Lines that are not empty; the rest of a truncated compressed file is set aside."""
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


_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Float32 = Annotated[float, Field(ge=-MAX_FLOAT32, le=MAX_FLOAT32)]


class _Line(BaseModel):
    """A line of the log; its fields are those of REQUESTS."""

    model_config = ConfigDict(strict=True)
    time: Annotated[float, Field(ge=0, lt=MAX_TIME_S)]
    request_id: str
    path: str
    status: _Count
    arm: str | None = None
    unit: str | None = None
    query: str | None = None
    k: _Count | None = None
    filter: Any = None
    doc_ids: list[str] | None = None
    scores: list[_Float32] | None = None
    personalised: bool | None = None
    index_version: str | None = None
    shards: _Count | None = None
    shards_answered: _Count | None = None
    timings_ms: dict[str, _Float32 | None] | None = None
    error: str | None = None

    def request(self) -> dict[str, Any]:
        """A row of REQUESTS."""
        timings = self.timings_ms or {}
        row = vars(self) | {f"{stage}_ms": timings.get(stage) for stage in STAGES}
        if self.filter is not None:
            row["filter"] = json.dumps(self.filter, ensure_ascii=False, sort_keys=True)
        return row


def _reason(error: ValidationError) -> str:
    """The first fault of a line, without what differs between lines of the same fault."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return "invalid JSON"
    names = [name for name in first["loc"] if isinstance(name, str)]
    return ": ".join([*names, first["msg"]])


class RequestFilter:
    """Selects the requests of one experiment; `left_out` counts the others by reason."""

    def __init__(self, split: TrafficSplit, *, start: float = -math.inf, end: float = math.inf) -> None:
        """Args:
        split: as it was served.
        start: first second since 1970.
        end: first second after the experiment.
        """
        self.left_out: Counter[str] = Counter()
        self.first, self.last = math.inf, -math.inf  # times of its requests
        self._start, self._end = start, end
        self._arm: Callable[[str], str] = lru_cache(MAX_CACHED_UNITS)(lambda unit: arm_of(unit, split).name)

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """The requests of a batch that belong to the experiment, with the `arm` of their unit."""
        table = pa.Table.from_batches([batch])
        table = self._keep(table, pc.equal(table["path"], SEARCH_PATH), "not a search")
        inside = pc.and_(pc.greater_equal(table["time"], self._start), pc.less(table["time"], self._end))
        table = self._keep(table, inside, "outside of start and end")
        answered = pc.or_(pc.less(table["status"], 400), pc.greater_equal(table["status"], 500))
        table = self._keep(table, answered, "refused (4xx)")
        table = self._keep(table, pc.is_valid(table["unit"]), "without a unit")
        units = pc.dictionary_encode(table["unit"].combine_chunks())
        assigned = pa.array(map(self._arm, units.dictionary.to_pylist()), pa.string()).take(units.indices)
        # A request that failed early has no arm in the log, but its unit determines one.
        by_split = pc.fill_null(pc.equal(table["arm"], assigned), True)
        table = table.set_column(table.schema.get_field_index("arm"), "arm", assigned)
        table = self._keep(table, by_split, "not by this split")
        if len(table):
            times = table["time"].to_numpy()
            self.first, self.last = min(self.first, times.min()), max(self.last, times.max())
        return table

    def _keep(self, table: pa.Table, which: pa.ChunkedArray, reason: str) -> pa.Table:
        kept = table.filter(which)
        if len(kept) < len(table):
            self.left_out[reason] += len(table) - len(kept)
        return kept
