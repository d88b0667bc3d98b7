"""What parts of an encoding cost: sums for the manifest, and the notes of progress lines and summaries."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_WORKERS_TOLD = 4  # of which the summary tells each; of more the least and the most


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
