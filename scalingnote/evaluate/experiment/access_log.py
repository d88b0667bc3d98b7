"""Access logs: their requests, and those of an experiment.

    JSON lines of `serve.access_writer` ─read_requests─► batches of REQUESTS ─select_requests─► by arm

A line that cannot be used, for example the last line of a killed process, is counted by reason and set aside.

Only requests that the split assigned are compared. The split is computed again for every unit: a request that
named its arm, or was answered with other shares, is recognized because its arm differs from that of its unit.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scalingnote.datasets.input_files import Quarantine, find_files
from scalingnote.evaluate.experiment.config import ExperimentConfig, arm_of
from scalingnote.storage import filesystem as fs

REQUESTS = pa.schema(
    {
        "time": pa.float64(),  # seconds since 1970
        "request_id": pa.string(),
        "path": pa.string(),
        "status": pa.int32(),
        "arm": pa.string(),  # null if the request failed before it was known, like all fields below
        "unit": pa.string(),  # the string that the split hashes
        "query": pa.string(),  # also null if the query was a vector
        "k": pa.int32(),
        "doc_ids": pa.list_(pa.string()),  # best first
        "shards": pa.int32(),
        "shards_answered": pa.int32(),
        "total_ms": pa.float64(),
    }
)
TABLE = "access log"  # name in the quarantine
LOG_NAMES = "**/access-*.jsonl*"  # pattern in a folder
MAX_TIME_S = 1e11  # limit of times in seconds since 1970; times in milliseconds are larger
SEARCH_PATH = "/search"


def find_logs(patterns: Sequence[str]) -> list[str]:
    """Find the distinct files of paths, of patterns with ``*`` and ``?``, and of LOG_NAMES in folders.

    All may be URIs. A DataError is raised for one without files.
    """
    logs: dict[str, None] = {}
    for pattern in patterns:
        filesystem, path = fs.resolve(pattern)
        is_folder = filesystem.get_file_info(path).type == pafs.FileType.Directory
        files = find_files(fs.join(pattern, LOG_NAMES) if is_folder else pattern, ("",))
        logs |= dict.fromkeys(file.uri for file in files)
    return list(logs)


def read_requests(
    files: Iterable[str], quarantine: Quarantine, *, rows: int = 8192
) -> Iterator[pa.RecordBatch]:
    """Yield the requests of log files as batches of REQUESTS, one in memory at a time; unpack `.gz` files.

    Lines that cannot be used, and unreadable ends of files, go to the quarantine. Other fields of a line are
    ignored.

    Args:
        files: paths or URIs.
        quarantine: for lines that cannot be used.
        rows: limit of the rows of a batch.
    """
    for uri in files:
        requests: list[dict[str, Any]] = []
        for line in _lines(uri, quarantine):
            try:
                requests.append(_Line.model_validate_json(line).request())
            except ValidationError as error:
                reason = (
                    _reason(error) if line.endswith(b"\n") else "incomplete: the file ends within the line"
                )
                quarantine.reject(TABLE, line.decode("utf-8", "backslashreplace").rstrip(), reason)
            if len(requests) == rows:
                yield pa.RecordBatch.from_pylist(requests, schema=REQUESTS)
                requests = []
        if requests:
            yield pa.RecordBatch.from_pylist(requests, schema=REQUESTS)


def _lines(uri: str, quarantine: Quarantine) -> Iterator[bytes]:
    """Yield lines that are not empty; the unreadable end of a truncated compressed file is set aside."""
    filesystem, path = fs.resolve(uri)
    try:
        with filesystem.open_input_stream(path) as stream:
            yield from (line for line in io.BufferedReader(stream, 1 << 18) if line.strip())
    except OSError as error:
        quarantine.reject(TABLE, uri, f"the end of the file cannot be read: {error}")


_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Line(BaseModel):
    """A line of the log, with the fields of REQUESTS."""

    model_config = ConfigDict(strict=True)
    time: Annotated[float, Field(ge=0, lt=MAX_TIME_S)]
    request_id: str
    path: str
    status: _Count
    arm: str | None = None
    unit: str | None = None
    query: str | None = None
    k: _Count | None = None
    doc_ids: list[str] | None = None
    shards: _Count | None = None
    shards_answered: _Count | None = None
    timings_ms: dict[str, _Finite | None] | None = None

    def request(self) -> dict[str, Any]:
        """Convert the line to a row of REQUESTS."""
        return vars(self) | {"total_ms": (self.timings_ms or {}).get("total")}


def _reason(error: ValidationError) -> str:
    """Return the first error of a line, without values, so that equal errors have equal reasons."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return "invalid JSON"
    names = [name for name in first["loc"] if isinstance(name, str)]
    return ": ".join([*names, first["msg"]])


def select_requests(batch: pa.RecordBatch, config: ExperimentConfig, quarantine: Quarantine) -> pa.Table:
    """Select the requests of a batch that belong to the experiment, with the `arm` of their unit.

    Args:
        batch: of REQUESTS.
        config: of the experiment: the served split, start and end.
        quarantine: counts the other requests, which are left out, by reason.
    """
    units = pc.dictionary_encode(batch["unit"])
    arms = [arm_of(unit, config.split).name for unit in units.dictionary.to_pylist()]
    expected_arm = pa.array(arms, pa.string()).take(units.indices)
    time, status = batch["time"].to_numpy(), batch["status"].to_numpy()
    start = config.start.timestamp() if config.start else 0.0
    end = config.end.timestamp() if config.end else MAX_TIME_S
    reasons = {
        "not a search": pc.not_equal(batch["path"], SEARCH_PATH),
        "outside of start and end": (time < start) | (time >= end),
        "refused (4xx)": (status >= 400) & (status < 500),
        "without a unit": pc.is_null(batch["unit"]),
        # A request that failed early has no arm in the log, but its unit determines one.
        "not by this split": pc.fill_null(pc.not_equal(batch["arm"], expected_arm), False),
    }
    reason = np.select([np.asarray(mask) for mask in reasons.values()], list(reasons), default="")
    quarantine.left_out.update(reason[reason != ""].tolist())
    table = pa.Table.from_batches([batch])
    table = table.set_column(table.schema.get_field_index("arm"), "arm", expected_arm)
    return table.filter(pa.array(reason == ""))
