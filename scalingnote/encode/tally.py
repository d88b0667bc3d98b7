"""What encoding costs as it goes: tokens a second, padding, the share of the hardware's peak, money."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What encoding computed: tokens, padding left out and counted in, and floating-point operations."""

    tokens: int = 0
    padded: int = 0
    flops: float = 0.0  # 0 where the architecture's shape is not known


class Tally:
    """Sums over records of parts: their ``tokens``, ``padded``, ``flops``, ``seconds`` and ``peak``."""

    def __init__(self, *, price_per_hour: float) -> None:
        """`price_per_hour` is that of all workers together."""
        self._price, self._start = price_per_hour, time.monotonic()
        self._sums = dict.fromkeys(("tokens", "padded", "flops", "possible"), 0.0)

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a finished part of this run."""
        for name in ("tokens", "padded", "flops"):
            self._sums[name] += record[name]
        self._sums["possible"] += record["seconds"] * record["peak"]

    def facts(self) -> dict[str, float]:
        """Rates and shares: ``tokens_per_s`` (padding left out), ``padding`` (of all tokens computed),
        ``of_peak`` (arithmetic of the model over that of equally long matrix products: MFU) and ``cost``."""
        elapsed = max(time.monotonic() - self._start, 1e-9)
        return {
            "tokens_per_s": self._sums["tokens"] / elapsed,
            "padding": 1 - self._sums["tokens"] / max(self._sums["padded"], 1.0),
            "of_peak": self._sums["flops"] / max(self._sums["possible"], 1.0),
            "cost": elapsed / 3600 * self._price,
        }

    def __str__(self) -> str:
        found = self.facts()
        text = f"{found['tokens_per_s']:,.0f} tokens/s  padding {found['padding']:.1%}"
        if found["of_peak"]:
            text += f"  {found['of_peak']:.0%} of peak"
        return text + (f"  cost {found['cost']:,.2f}" if self._price else "")
