"""Part-wise work on Ray Data: immutable parts in, one committed file for each part out.

    name ─read─► input of a part ─encode─► table ─commit─► a file, then its record

A part is the unit of work and of resumption. The name of its file depends on the part alone, and its record,
written last, holds the file's checksum. A run that continues after a crash encodes only the parts without a
record, and a part encoded twice gives the same file: readers see every row exactly once. A worker does all
three steps, or tasks on other CPUs read before it and write after it.

Only workers import torch: the driver and the tasks start in a fraction of the time.
"""

import json
import pickle
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from scalingnote import cluster
from scalingnote.encode.config import Fleet
from scalingnote.encode.encodings import Cost
from scalingnote.errors import EncodingError, ScalingNoteError
from scalingnote.log import Progress, get_logger
from scalingnote.storage import filesystem as fs
from scalingnote.storage import usage
from scalingnote.storage.artifact import Draft, Part, write_table

log = get_logger("encode")
# JSON values: name, part, rejected, fields of Cost and of the worker's times (:class:`EncodeParts`)
PartRecord = dict[str, Any]
MAX_WORKERS_TOLD = 4  # of which the summary tells each; of more the least and the most
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
        The records of the parts, in the order of `rows`.

    Raises:
        EncodingError: two executions in a row finished no part.
        ConfigError: the cluster lacks the resources.
    """
    cluster.check_resources(resources, knob=knob, task_cpus=reader_cpus(resources))
    records = read_records(work, set(rows))
    if records:
        log.info("resuming: %d of %d parts are done", len(records), len(rows))
    tally = EncodingTally(price_per_hour=resources.price_per_hour * resources.workers)
    done, stalled = sum(rows[name] for name in records), False
    counted = usage.rows_on_this_node()

    def underway() -> int:
        """Rows encoded since then by this node's workers: all workers' on one machine."""
        return usage.rows_on_this_node() - counted

    with Progress("encode", total=sum(rows.values()), done=done, unit=unit, underway=underway) as progress:
        while todo := [name for name in rows if name not in records]:
            failure = ""
            for record, reason in _execution_results(steps, todo, resources, output=output, work=work):
                if reason:
                    # At once, since the others may take hours; the traceback of the first is enough.
                    shown = reason.strip().splitlines()[-1] if failure else reason
                    log.warning("a part failed and is tried again after the others: %s", shown)
                    failure = failure or reason
                if record:
                    records[record["name"]] = record
                    tally.add(record)
                    progress.advance(rows[record["name"]], note=tally)
            left = sum(name not in records for name in todo)
            if stalled and left == len(todo):
                raise EncodingError(f"none of {left} parts could be encoded: {failure}")
            if left:
                log.warning("%d parts of %d are left, trying again", left, len(todo))
            stalled = left == len(todo)
    log.info("%s %s: %s -> %s", f"{sum(rows.values()):,}", unit, tally, output)
    log.info("workers: %s", tally.workers() or "none was needed")
    return [records[name] for name in rows]


def _execution_results(
    steps: Steps, todo: Sequence[str], resources: Fleet, *, output: str, work: str
) -> Iterator[tuple[PartRecord | None, str]]:
    """The record of each part that one execution does, or the reason of a failure."""
    reported = set()
    try:
        for row in _execute(steps, todo, resources, output=output, work=work):
            record = json.loads(row["record"]) if row["record"] else None
            reported.add(record["name"] if record else None)
            yield record, row["failure"]
    except cluster.execution_errors() as error:
        # Ray may have ended before it reported parts that are done.
        for name, record in read_records(work, set(todo)).items():
            if name not in reported:
                yield record, ""
        yield None, str(error)


def _execute(steps: Steps, todo: Sequence[str], resources: Fleet, **where: str) -> Iterator[dict[str, str]]:
    """One execution of Ray Data over all parts. Yields per part its ``record`` as JSON or a ``failure``.

    An actor loads its model once and stays until the last part: the driver's memory grows by about 8 KB a
    part, so 100,000 parts fit.
    """
    options = {"steps": steps, "threads": resources.cpus_per_worker}
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

    def __init__(self, *, steps: Steps, threads: float, commit: dict[str, str] | None) -> None:
        import torch

        torch.set_num_threads(max(int(threads), 1))
        self._since = time.monotonic(), time.process_time()
        self._read, self._commit, self._encode = steps.read, commit, steps.encoder()
        self._worker = {"worker": uuid.uuid4().hex, "load_seconds": time.monotonic() - self._since[0]}

    def __call__(self, batch: Any) -> Any:
        """Encode one part, given its name, or its name and what :func:`read_part` gave."""
        (name,), start = batch["name"], time.monotonic()
        read = pickle.loads(batch["input"][0]) if "input" in batch else _attempt(self._read, name)
        result = read if read.error or read.failure else _attempt(self._timed, name, read.value, start)
        if self._commit is None:
            return {"name": [name], "result": [pickle.dumps(result)]}
        return _commit(name, result, **self._commit)

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
    failure = f"{name}: {result.failure}" if result.failure else ""
    return {"record": [result.value or ""], "error": [result.error], "failure": [failure]}


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


# --- cost -------------------------------------------------------------------------------------------


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over the records of parts, for the manifest.

    Args:
        records: of parts, with the fields of :class:`Cost`, ``seconds``, ``cpu_seconds`` and ``peak`` (FLOPs
            per second).

    Returns:
        ``worker_seconds`` (of all workers, waiting included), ``worker_cpu_seconds``, ``tokens`` (without
        padding), ``padding`` (its share of all computed tokens) and ``of_peak`` (model FLOPs utilisation: the
        model's arithmetic over what matrix products achieve in the same time).
    """
    sums = dict.fromkeys(("tokens", "padded", "flops", "seconds", "cpu_seconds", "possible"), 0.0)
    for record in records:
        for name in ("tokens", "padded", "flops", "seconds"):
            sums[name] += record[name]
        sums["cpu_seconds"] += record.get("cpu_seconds", 0.0)  # not in records of an earlier release
        sums["possible"] += record["seconds"] * record["peak"]
    return {
        "worker_seconds": sums["seconds"],
        "worker_cpu_seconds": sums["cpu_seconds"],
        "tokens": sums["tokens"],
        "padding": 1 - sums["tokens"] / max(sums["padded"], 1.0),
        "of_peak": sums["flops"] / max(sums["possible"], 1.0),
    }


class EncodingTally:
    """Running totals of the parts that this run encodes; `str` of it is the note of the progress line."""

    def __init__(self, *, price_per_hour: float) -> None:
        """`price_per_hour` is that of all workers together."""
        self._price, self._start = price_per_hour, time.monotonic()
        self._records: list[Mapping[str, Any]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a finished part."""
        self._records.append(record)

    def __str__(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        sums = totals(self._records)
        text = f"{sums['tokens'] / elapsed:,.0f} tokens/s  padding {sums['padding']:.1%}"
        if sums["of_peak"]:
            text += f"  MFU {sums['of_peak']:.0%}"
        return text + (f"  cost {elapsed / 3600 * self._price:,.2f}" if self._price else "")

    def workers(self) -> str:
        """What each worker did in this time; of many the least and the most. Empty without parts."""
        elapsed = max(time.monotonic() - self._start, 1e-9)
        by_worker: dict[str, list[Mapping[str, Any]]] = {}
        for record in self._records:
            by_worker.setdefault(record["worker"], []).append(record)
        each = list(by_worker.values())
        if not each:
            return ""
        busy, on_cpu = (
            [sum(record[name] for record in records) / elapsed for records in each]
            for name in ("busy_seconds", "cpu_seconds")
        )
        return (
            f"{len(each)} encoded {_values([float(len(records)) for records in each], '{:.0f}')} parts, "
            f"loaded in {_values([records[0]['load_seconds'] for records in each], '{:.0f}')} s, "
            f"were busy {_values(busy, '{:.0%}')} of {elapsed:.0f} s, on a CPU {_values(on_cpu, '{:.0%}')}"
        )


def _values(values: Sequence[float], form: str) -> str:
    """A few values, or the least and the most of many."""
    if len(values) <= MAX_WORKERS_TOLD:
        return " and ".join(form.format(value) for value in values)
    return f"{form.format(min(values))} to {form.format(max(values))}"
