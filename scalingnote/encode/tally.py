"""What encoding costs as it goes: tokens a second, padding, the share of the hardware's peak, money."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What encoding computed: tokens, padding left out and counted in, and floating-point operations."""

    tokens: int = 0
    padded: int = 0
    flops: float = 0.0  # 0 where the architecture's shape is not known

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.tokens + other.tokens, self.padded + other.padded, self.flops + other.flops)


def totals(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What an artifact says of its making.

    ``worker_seconds`` (of all workers, waiting counted in), ``tokens`` (padding left out), ``padding`` (its
    share of all tokens computed) and ``of_peak`` (the model's arithmetic over that of equally long matrix
    products: MFU).
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


class Tally:
    """The same as it grows, over what this run encodes; as a string, what progress shows of it."""

    def __init__(self, *, price_per_hour: float) -> None:
        """`price_per_hour` is that of all workers together."""
        self._price, self._start = price_per_hour, time.monotonic()
        self._records: list[Mapping[str, Any]] = []

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a finished part."""
        self._records.append(record)

    def __str__(self) -> str:
        elapsed = max(time.monotonic() - self._start, 1e-9)
        found = totals(self._records)
        text = f"{found['tokens'] / elapsed:,.0f} tokens/s  padding {found['padding']:.1%}"
        if found["of_peak"]:
            text += f"  {found['of_peak']:.0%} of peak"
        return text + (f"  cost {elapsed / 3600 * self._price:,.2f}" if self._price else "")
