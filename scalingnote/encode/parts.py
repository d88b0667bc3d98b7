"""Part-wise work on Ray Data: immutable parts in, one committed file for each part out.

    name ─read─► input of a part ─encode─► table ─commit─► a file, then its record

A part is the unit of work and of resumption. The name of its file depends on the part alone, and its record,
written last, holds the file's checksum. A run that continues after a crash encodes only the parts without a
record, and a part encoded twice gives the same file: readers see every row exactly once. A worker does all
three steps, or tasks on other CPUs read before it and write after it.

One execution of Ray Data goes over all parts. A part that fails, or whose process or node is lost, is tried
again in the next one, so after the others; a part that fails wherever it is encoded is set aside. A worker
that cannot load, or whose parts fail, waits in its place (:mod:`.attempts`): the others do its work.

Only workers import torch: the driver and the tasks start in a fraction of the time.
"""

import json
import pickle
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from scalingnote import cluster
from scalingnote.encode.attempts import BACKOFF_S, Attempts
from scalingnote.encode.config import Fleet
from scalingnote.encode.encodings import Cost
from scalingnote.encode.failures import PartFailures, check_failures
from scalingnote.encode.tally import EncodingTally
from scalingnote.errors import EncodingError, ScalingNoteError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import usage
from scalingnote.storage.artifact import Artifact, Draft, Part, read_table, write_table

log = get_logger("encode")
# JSON values: name, part, rejected, fields of Cost and of the worker's times (:class:`EncodeParts`)
PartRecord = dict[str, Any]
PROCESS_BYTES = 1 << 30  # of a worker: torch, transformers, batches
BYTES_PER_WEIGHT_BYTE = 2  # a file of half precision is read as float32 where products are
MAX_FAILED_IN_A_ROW = 2  # parts of a worker, which then loads anew: an error of a GPU stays in its process
WAIT_POLL_INTERVAL_S = 2.0
Rejected = list[dict[str, str]]  # rows of storage.schema.REJECTED


@dataclass(frozen=True)
class EncodedPart:
    """A part to be written, with its cost and the rows left out."""

    table: pa.Table
    cost: Cost = field(default_factory=Cost)
    rejected: Rejected = field(default_factory=list)


@dataclass(frozen=True)
class Steps:
    """The two steps of a stage that works on parts.

    Attributes:
        read: input of a part from its name; runs in any process. :func:`read_nothing` if the encoder reads.
        encoder: makes, once in each worker, a function of a part's name and input.
    """

    read: Callable[[str], Any]
    encoder: Callable[..., Callable[[str, Any], EncodedPart]]


def read_nothing(_: str) -> None:
    """The first step of a stage whose encoder reads its parts itself."""


def reader_cpus(resources: Fleet) -> int:
    """CPUs needed for tasks beside the workers, at least."""
    return min(resources.readers, 1)


def sized_for(resources: Fleet, towers: Artifact, folder: str) -> Fleet:
    """The same workers, or by default as many as there is memory for with this tower in each."""
    size = sum(towers.manifest.parts[name].bytes for name in towers.names(f"{folder}/"))
    return cluster.with_memory(resources, PROCESS_BYTES + BYTES_PER_WEIGHT_BYTE * size)


def write_parts(steps: Steps, draft: Draft, **options: Any) -> list[PartRecord]:
    """Encode the parts of an artifact by :func:`encode_parts` and register them with its draft."""
    records = encode_parts(steps, output=draft.uri, work=draft.work("parts"), **options)
    for record in records:
        draft.register(record["name"], Part(**record["part"]))
    return records


def encode_parts(
    steps: Steps,
    *,
    output: str,
    work: str,
    rows: dict[str, int],
    resources: Fleet,
    unit: str,
    knob: str = "encode.resources",
) -> list[PartRecord]:
    """Encode parts into files. A part that fails is tried again after the others.

    Args:
        steps: how a part is read and encoded.
        output: URI of the folder that the names of parts are relative to.
        work: URI of the folder for records; records of a killed run there are reused.
        rows: name -> number of rows of each part.
        resources: workers and readers.
        unit: what rows are, for progress lines.
        knob: config key of `resources`, for error messages.

    Returns:
        The records of the parts, in the order of `rows`. That of a part that is set aside has no rows, and
        the reason as ``set_aside``.

    Raises:
        EncodingError: more than `resources.max_failed_parts` parts could not be encoded, or none could.
        ConfigError: the cluster lacks the resources.
    """
    cluster.check_resources(resources, knob=knob, task_cpus=reader_cpus(resources))
    records = read_records(work, set(rows))
    if records:
        log.info("resuming: %d of %d parts are done", len(records), len(rows))
    tally = EncodingTally(price_per_hour=resources.price_per_hour * cluster.workers(resources))
    done, counted = sum(rows[name] for name in records), usage.rows_on_this_node()
    attempts = cluster.Shared(Attempts, BACKOFF_S)
    failures = PartFailures()

    def underway() -> int:
        """Rows encoded since then by this node's workers: all workers' on one machine."""
        return usage.rows_on_this_node() - counted

    with (
        closing(attempts),
        Progress("encode", total=sum(rows.values()), done=done, unit=unit, underway=underway) as progress,
    ):
        while todo := failures.in_order(name for name in rows if name not in records):
            for record in _execution_records(
                steps, todo, resources, attempts, failures, output=output, work=work
            ):
                records[record["name"]] = record
                tally.add(record)
                progress.advance(rows[record["name"]], note=tally)
            failures.end_execution(todo, records, attempts)
    check_failures(failures.set_aside, records, rows, most=resources.max_failed_parts, knob=knob)
    for name, reason in failures.set_aside.items():
        records[name] = _set_aside(name, reason, like=next(iter(records.values())), output=output)
    log.info("%s %s: %s -> %s", f"{sum(rows.values()):,}", unit, tally, output)
    log.info("workers: %s", tally.workers() or "none was needed")
    return [records[name] for name in rows]


def _execution_records(
    steps: Steps,
    todo: Sequence[str],
    resources: Fleet,
    attempts: cluster.Shared,
    failures: PartFailures,
    **where: str,
) -> Iterator[PartRecord]:
    """The record of each part that one execution does; the others are noted among the failures."""
    attempts.call("start", min(cluster.workers(resources), len(todo)))
    reported = set()
    try:
        for row in _execute(steps, todo, resources, attempts, **where):
            if row["failure"]:
                failures.add(row["name"], row["failure"])
            else:
                record = json.loads(row["record"])
                reported.add(record["name"])
                yield record
    except cluster.execution_errors() as error:
        # Ray may have ended before it reported parts that are done.
        for name, record in read_records(where["work"], set(todo)).items():
            if name not in reported:
                yield record
        failures.add("", f"{error}")
        log.warning("an execution ended early: %s", f"{error}".strip().splitlines()[0])


def _set_aside(name: str, reason: str, *, like: PartRecord, output: str) -> PartRecord:
    """The record of a part that is left out: an empty file, so that every part has one."""
    log.warning("%s is left out: %s", name, reason)
    empty = read_table(fs.join(output, like["name"])).slice(0, 0)
    part = asdict(write_table(fs.join(output, name), empty))
    times = dict.fromkeys(("seconds", "cpu_seconds", "busy_seconds", "load_seconds", "peak"), 0.0)
    record: PartRecord = {"name": name, "part": part, "rejected": [], "set_aside": reason, "worker": ""}
    return record | asdict(Cost()) | times


def _execute(
    steps: Steps, todo: Sequence[str], resources: Fleet, attempts: cluster.Shared, **where: str
) -> Iterator[dict[str, str]]:
    """One execution of Ray Data over all parts. Yields per part its ``record`` as JSON or a ``failure``.

    An actor loads its model once and stays until the last part: the driver's memory grows by about 8 KB a
    part, so 100,000 parts fit.
    """
    options = {"steps": steps, "threads": resources.cpus_per_worker, "attempts": attempts}
    yield from cluster.dataset_rows(
        cluster.map_with_actors(
            [{"name": name} for name in todo],
            EncodeParts,
            options | {"commit": None if resources.readers else where},
            resources,
            before=partial(read_part, steps=steps) if resources.readers else None,
            after=partial(write_part, **where) if resources.readers else None,
            tasks=resources.readers,
        )
    )


class _Result(NamedTuple):
    """Value of a step, or its error: returned as a value, because Ray Data loses the type of exceptions."""

    value: Any = None
    error: str = ""  # a ScalingNoteError: ends the run
    failure: str = ""  # traceback of another exception: the part is tried again, the others go on


def _attempt(step: Callable[..., Any], *arguments: Any, **options: Any) -> _Result:
    try:
        return _Result(step(*arguments, **options))
    except ScalingNoteError as error:
        return _Result(error=cluster.error_column(error))
    except Exception:
        return _Result(failure=traceback.format_exc())


# Ray's dashboard shows the names of the three functions and classes below.


def read_part(batch: Any, *, steps: Steps) -> Any:
    """Task: read the input of a part."""
    (name,) = batch["name"]
    return {"name": [name], "input": [pickle.dumps(_attempt(steps.read, name))]}


class EncodeParts:
    """Actor: encodes parts, and reads and writes them too if `commit` says where."""

    def __init__(
        self, *, steps: Steps, threads: float, commit: dict[str, str] | None, attempts: cluster.Shared
    ) -> None:
        self._attempts, (self._slot, self._node) = attempts, cluster.this_slot()
        self._wait(*attempts.call("begin_load", self._slot))
        import torch

        torch.set_num_threads(max(int(threads), 1))
        self._since = time.monotonic(), time.process_time()
        self._read, self._commit, self._error, self._failed = steps.read, commit, "", 0
        try:
            self._encode = steps.encoder()
        except ScalingNoteError as error:  # the same in every worker: told by the first part
            self._error = cluster.error_column(error)
        except Exception:
            attempts.call("fail", self._slot, traceback.format_exc())
            cluster.start_again()
        attempts.call("end_load", self._slot)
        self._worker = {"worker": uuid.uuid4().hex, "load_seconds": time.monotonic() - self._since[0]}

    def _wait(self, seconds: float, execution: int) -> None:
        """Keep this slot for a while after a failure in it: a worker in its place would fail, too."""
        deadline = time.monotonic() + seconds
        while True:
            if self._attempts.ended() or self._attempts.call("is_over", execution):
                cluster.exit_actor()  # Ray waits for constructors
            if reason := self._attempts.call("hopeless"):
                raise EncodingError(f"no worker could load: {reason}")
            if time.monotonic() >= deadline:
                return
            time.sleep(min(WAIT_POLL_INTERVAL_S, seconds))

    def __call__(self, batch: Any) -> Any:
        """Encode one part, given its name, or its name and what :func:`read_part` gave."""
        (name,), start = batch["name"], time.monotonic()
        if self._failed >= MAX_FAILED_IN_A_ROW:
            self._attempts.call("fail", self._slot, f"{self._failed} parts in a row failed")
            cluster.start_again()
        self._attempts.call("begin", name, self._node)
        read = pickle.loads(batch["input"][0]) if "input" in batch else _attempt(self._read, name)
        if self._error:
            read = _Result(error=self._error)
        result = read if read.error or read.failure else _attempt(self._timed, name, read.value, start)
        if self._commit is not None:
            made = _commit(name, result, **self._commit)
            failed = bool(made["failure"][0])
        else:
            made, failed = {"name": [name], "result": [pickle.dumps(result)]}, bool(result.failure)
        self._failed = self._failed + 1 if failed else 0
        self._attempts.call("end", name, self._slot, not failed)
        return made

    def _timed(self, name: str, part: Any, start: float) -> tuple[EncodedPart, dict[str, Any]]:
        """An encoded part, with what its record tells of this worker.

        ``seconds`` and ``cpu_seconds`` count from the end of the previous part, or from the start of loading;
        ``busy_seconds`` from the start of this part.
        """
        encoded = self._encode(name, part)
        now = time.monotonic(), time.process_time()
        seconds, cpu_seconds = now[0] - self._since[0], now[1] - self._since[1]
        self._since = now
        times = {"seconds": seconds, "cpu_seconds": cpu_seconds, "busy_seconds": now[0] - start}
        return encoded, self._worker | times | {"peak": getattr(self._encode, "peak", 0.0)}


def write_part(batch: Any, *, output: str, work: str) -> Any:
    """Task: write a part, then its record."""
    return _commit(batch["name"][0], pickle.loads(batch["result"][0]), output=output, work=work)


def _commit(name: str, result: _Result, *, output: str, work: str) -> Any:
    if not (result.error or result.failure):
        result = _attempt(_write, name, *result.value, output=output, work=work)
    return {
        "name": [name],
        "record": [result.value or ""],
        "error": [result.error],
        "failure": [result.failure],
    }


def _write(name: str, encoded: EncodedPart, timing: dict[str, Any], *, output: str, work: str) -> str:
    """Write a part, and only then its record; returns the record as JSON."""
    part = write_table(fs.join(output, name), encoded.table)
    record: PartRecord = {"name": name, "part": asdict(part), "rejected": encoded.rejected}
    text = json.dumps(record | asdict(encoded.cost) | timing)
    fs.write_bytes(fs.join(work, _record_name(name)), text.encode())
    return text


def read_records(work: str, names: set[str]) -> dict[str, PartRecord]:
    """Records of parts in a work folder, by name."""
    uris = [fs.join(work, name) for name in fs.list_files(work) if name.endswith(".json")]
    records = [json.loads(data) for data in fs.map_files(fs.read_bytes, uris)]
    return {record["name"]: record for record in records if record["name"] in names}


def _record_name(name: str) -> str:
    return name.replace("/", "-") + ".json"
