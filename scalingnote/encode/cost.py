"""Cost of encoding, measured while it runs: tokens per second, padding, share of peak arithmetic, money."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """Work of a forward pass."""

    tokens: int = 0  # without padding
    padded: int = 0  # with padding
    flops: float = 0.0  # 0 if the shape of the architecture is unknown

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.tokens + other.tokens, self.padded + other.padded, self.flops + other.flops)


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sums over the records of parts, for the manifest.

    Args:
        records: of parts, with the fields of :class:`Cost`, ``seconds`` and ``peak`` (FLOPs per second).

    Returns:
        ``worker_seconds`` (of all workers, waiting included), ``tokens`` (without padding), ``padding`` (its
        share of all computed tokens) and ``of_peak`` (model FLOPs utilisation, MFU: the model's arithmetic
        over what matrix products achieve in the same time).
    """
    sums = dict.fromkeys(("tokens", "padded", "flops", "seconds", "possible"), 0.0)
    for record in records:
        for name in ("tokens", "padded", "flops", "seconds"):
            sums[name] += record[name]
        sums["possible"] += record["seconds"] * record["peak"]
    return {
        "worker_seconds": sums["seconds"],
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
            text += f"  {sums['of_peak']:.0%} of peak"
        return text + (f"  cost {elapsed / 3600 * self._price:,.2f}" if self._price else "")
