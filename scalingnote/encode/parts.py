"""Encoding of tables part by part: immutable parts in, one file for each part out, and their cost.

    name ─read─► input of a part ─encoder─► table ─write─► a file, then its record

The name of a file depends only on the part. A worker takes all three steps, or readers on other CPUs take the
first and the last. :mod:`scalingnote.core.parts` distributes parts to workers and handles failures.

Only workers import torch: the driver and the readers start in a fraction of the time.
"""

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from scalingnote.core import cluster
from scalingnote.core.errors import PartsFailedError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import PartStage
from scalingnote.encode.config import Fleet
from scalingnote.encode.engines import Cost
from scalingnote.storage import filesystem as fs
from scalingnote.storage import usage
from scalingnote.storage.artifact import Artifact, Draft, Part, read_table, write_table
from scalingnote.storage.shuffle import run_parts

log = get_logger("encode")
PartRecord = dict[str, Any]  # JSON values: name, part, rejected, fields of Cost and of :class:`_TimedEncoder`
PROCESS_BYTES = 1 << 30  # of a worker: torch, transformers, batches
BYTES_PER_WEIGHT_BYTE = 2  # a file in half precision is read as float32 if products are in float32
Rejections = list[dict[str, str]]  # rows of storage.schema.REJECTED


@dataclass(frozen=True)
class EncodedPart:
    """A part to be written, its cost, and the rows that were left out."""

    table: pa.Table
    cost: Cost = field(default_factory=Cost)
    rejected: Rejections = field(default_factory=list)


LoadEncoder = Callable[[], Callable[[str, Any], EncodedPart]]  # of a function of a part's name and input


def size_for(resources: Fleet, towers: Artifact, folder: str) -> Fleet:
    """Return the configured workers; by default, as many as there is memory for with this tower in each."""
    size = sum(towers.manifest.parts[name].bytes for name in towers.names(f"{folder}/"))
    return cluster.with_memory(resources, PROCESS_BYTES + BYTES_PER_WEIGHT_BYTE * size)


def write_parts(load_encoder: LoadEncoder, draft: Draft, **options: Any) -> list[PartRecord]:
    """Encode the parts of an artifact by :func:`encode_parts` and register them with its draft."""
    records = encode_parts(load_encoder, output=draft.uri, work=draft.work("parts"), **options)
    for record in records:
        draft.register(record["name"], Part(**record["part"]))
    return records


def encode_parts(
    load_encoder: LoadEncoder,
    *,
    read: Callable[[str], Any] | None = None,
    output: str,
    work: str,
    rows: dict[str, int],
    resources: Fleet,
    unit: str,
    knob: str = "encode.resources",
) -> list[PartRecord]:
    """Encode parts into files.

    Args:
        load_encoder: makes, once in each worker, a function of a part's name and input.
        read: reads the input of a part by its name, in any process; None: the encoder reads the part.
        output: URI of the folder that the names of parts are relative to.
        work: URI of the folder for records; records of a killed run in it are reused.
        rows: name -> number of rows of each part.
        resources: workers and readers.
        unit: name of the rows, for progress lines.
        knob: config key of `resources`, for error messages.

    Returns:
        The records of the parts, in the order of `rows`. The record of a part that is set aside has no rows,
        and the reason as ``set_aside``.

    Raises:
        PartsFailedError: more than `resources.max_failed_parts` parts could not be encoded, or all failed.
        ConfigError: the cluster lacks the resources.
    """
    cluster.check_resources(resources, knob=knob, task_cpus=resources.readers)
    stage = PartStage(
        load=partial(_TimedEncoder, load_encoder, threads=resources.cpus_per_worker),
        read=partial(_read, read=read),
        write=partial(_write, output=output),
    )
    tally = EncodingTally()
    rows_before = usage.rows_on_this_node()
    try:
        records, set_aside = run_parts(
            stage,
            {name: name for name in rows},
            folder=work,
            executor=partial(cluster.map_loaded, resources=resources, readers=resources.readers),
            section="encode",
            unit=unit,
            rows=rows,
            max_failed=resources.max_failed_parts,
            report=tally.add,
            underway=lambda: usage.rows_on_this_node() - rows_before,  # of all workers on one machine
        )
    except PartsFailedError as error:
        remedy = f"leave these parts out by {knob}.max_failed_parts={len(error.reasons)}"
        raise PartsFailedError(f"{error}, or {remedy}", error.reasons) from error.__cause__
    for name, reason in set_aside.items():
        records[name] = _set_aside(name, reason, like=next(iter(records.values())), output=output)
    log.info("%s %s: %s -> %s", f"{sum(rows.values()):,}", unit, tally, output)
    log.info("workers: %s", tally.workers() or "none were needed")
    return [records[name] for name in rows]


def _read(name: str, *, read: Callable[[str], Any] | None) -> tuple[str, Any]:
    return name, read(name) if read else None


class _TimedEncoder:
    """An encoder in a worker, and the fields of a part's record that describe this worker.

    ``seconds`` and ``cpu_seconds`` count from the end of the previous part, or from the start of loading;
    ``busy_seconds`` from the start of this part.
    """

    def __init__(self, load_encoder: LoadEncoder, *, threads: float) -> None:
        import torch

        torch.set_num_threads(max(int(threads), 1))
        self._since = time.monotonic(), time.process_time()
        self._encode = load_encoder()
        self._worker = {"worker": uuid.uuid4().hex, "load_seconds": time.monotonic() - self._since[0]}

    def __call__(self, given: tuple[str, Any]) -> tuple[EncodedPart, dict[str, Any]]:
        start = time.monotonic()
        encoded = self._encode(*given)
        now = time.monotonic(), time.process_time()
        times = {
            "seconds": now[0] - self._since[0],
            "cpu_seconds": now[1] - self._since[1],
            "busy_seconds": now[0] - start,
            "peak": getattr(self._encode, "peak", 0.0),
        }
        self._since = now
        return encoded, self._worker | times


def _write(name: str, result: tuple[EncodedPart, dict[str, Any]], *, output: str) -> PartRecord:
    """Write a part; return its record."""
    encoded, times = result
    part = asdict(write_table(fs.join(output, name), encoded.table))
    return {"name": name, "part": part, "rejected": encoded.rejected, **asdict(encoded.cost), **times}


def _set_aside(name: str, reason: str, *, like: PartRecord, output: str) -> PartRecord:
    """Write an empty file for a part that is left out, so that every part has a file; return its record."""
    log.warning("%s is left out: %s", name, reason)
    empty = read_table(fs.join(output, like["name"])).slice(0, 0)
    return _write(name, (EncodedPart(empty), {"set_aside": reason}), output=output)


# --- cost of parts --------------------------------------------------------------------------------------


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the records of parts, for the manifest.

    Args:
        records: of parts, with the fields of :class:`Cost`, ``seconds``, ``cpu_seconds`` and ``peak`` (FLOPs
            per second). A missing field counts as 0.

    Returns:
        ``worker_seconds`` (of all workers, waiting included), ``worker_cpu_seconds``, ``tokens`` (without
        padding), ``padding`` (its share of all computed tokens) and ``of_peak`` (model FLOPs utilisation: the
        model's FLOPs divided by those of large matrix products in the same time).
    """
    sums = dict.fromkeys(("tokens", "padded", "flops", "seconds", "cpu_seconds"), 0.0)
    possible = 0.0
    for record in records:
        for name in sums:
            sums[name] += record.get(name, 0.0)
        possible += record.get("seconds", 0.0) * record.get("peak", 0.0)
    return {
        "worker_seconds": sums["seconds"],
        "worker_cpu_seconds": sums["cpu_seconds"],
        "tokens": sums["tokens"],
        "padding": 1 - sums["tokens"] / max(sums["padded"], 1.0),
        "of_peak": sums["flops"] / max(possible, 1.0),
    }


class EncodingTally:
    """Running totals of the parts that this run encodes; their `str` is the note of the progress line."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._records: list[Mapping[str, Any]] = []

    def add(self, record: Mapping[str, Any]) -> "EncodingTally":
        """Count a finished part; return self."""
        self._records.append(record)
        return self

    def __str__(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        sums = totals(self._records)
        text = f"{sums['tokens'] / elapsed:,.0f} tokens/s  padding {sums['padding']:.1%}"
        return text + (f"  MFU {sums['of_peak']:.0%}" if sums["of_peak"] else "")

    def workers(self) -> str:
        """Describe the work of the workers, from the least to the most; empty without parts."""
        elapsed = max(time.monotonic() - self._start, 1e-9)
        by_worker = defaultdict(list)
        for record in self._records:
            by_worker[record["worker"]].append(record)
        if not by_worker:
            return ""
        parts, loads, busy, on_cpu = [], [], [], []
        for records in by_worker.values():
            parts.append(float(len(records)))
            loads.append(records[0]["load_seconds"])
            busy.append(sum(record["busy_seconds"] for record in records) / elapsed)
            on_cpu.append(sum(record["cpu_seconds"] for record in records) / elapsed)
        return (
            f"{len(parts)} encoded {_span(parts, '{:.0f}')} parts, loaded in {_span(loads, '{:.0f}')} s, "
            f"were busy {_span(busy, '{:.0%}')} of {elapsed:.0f} s, on a CPU {_span(on_cpu, '{:.0%}')}"
        )


def _span(values: Sequence[float], form: str) -> str:
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"
