"""Which parts of an encoding are tried again, and which are set aside with a reason."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from scalingnote import cluster
from scalingnote.errors import EncodingError
from scalingnote.log import get_logger

log = get_logger("encode")
MAX_FAILURES_TOLD = 3  # parts of which an error tells the reason
# Of a part, before it is set aside. Spot machines are lost for other reasons than what they do.
MAX_LOSSES = {"process": 2, "node": 4}


class PartFailures:
    """Parts that were not encoded when they were tried, and those that are not tried again.

    Attributes:
        set_aside: part -> the reason.
    """

    def __init__(self) -> None:
        self.set_aside: dict[str, str] = {}
        self._reasons: dict[str, str] = {}  # of parts in this execution; "" for the execution itself
        self._losses: dict[str, Counter[str]] = {}  # part -> how often a process, or a node, was lost with it
        self._failures = Counter[str]()  # of each part, over all executions
        self._left: set[str] | None = None  # after the execution before

    def in_order(self, parts: Iterable[str]) -> list[str]:
        """The parts that are still to be tried, those that have failed most behind the others."""
        return sorted((name for name in parts if name not in self.set_aside), key=self._failures.__getitem__)

    def add(self, part: str, reason: str) -> None:
        """Note that a part failed; told at once, since the others may take hours."""
        if part:
            # The traceback of the first is enough.
            shown = reason.strip().splitlines()[-1] if self._reasons else reason
            log.warning("a part failed and is tried again after the others: %s: %s", part, shown)
        self._reasons[part] = reason

    def end_execution(self, tried: Sequence[str], done: Container[str], attempts: cluster.Shared) -> None:
        """Set aside, of the parts that an execution tried, those that another will not encode."""
        left = [name for name in tried if name not in done]
        alive, lost = cluster.alive_nodes(), attempts.call("unfinished")
        broken = attempts.call("failures")
        for part in [name for name in left if name in lost and name not in self._reasons]:
            kind = "process" if lost[part] in alive else "node"
            losses = self._losses.setdefault(part, Counter())
            losses[kind] += 1
            why = ": out of memory, or a crash of native code" if kind == "process" else ""
            chance = f"{losses[kind]} of {MAX_LOSSES[kind]}"
            self._reasons[part] = f"its {kind} was lost while it was encoded ({chance}){why}"
            if losses[kind] >= MAX_LOSSES[kind]:
                self.set_aside[part] = self._reasons[part]
            else:
                log.warning("%s is tried again: %s", part, self._reasons[part])
        left = [name for name in left if name not in self.set_aside]
        for slot, reason in broken.items():
            log.warning("a worker is not used: %s: %s", slot, reason.strip().splitlines()[-1])
        hopeless = attempts.call("hopeless")
        # An execution that has changed nothing: the next would not either.
        if left and (set(left) == self._left or hopeless):
            reason = self._reasons.get("", "its result was lost")
            reason = f"no worker could load: {hopeless}" if hopeless else reason
            self.set_aside |= {name: self._reasons.get(name, reason) for name in left}
        elif left:
            log.warning("%d parts of %d are left, trying again", len(left), len(tried))
        self._failures.update(list(self._reasons))
        self._left, self._reasons = set(left), {}


def check_failures(
    failed: Mapping[str, str], done: Mapping[str, Any], rows: Mapping[str, int], *, most: int, knob: str
) -> None:
    """EncodingError if more parts failed than may, or all of them."""
    if not failed or (done and len(failed) <= most):
        return
    told = "; ".join(f"{name}: {reason}" for name, reason in islice(failed.items(), MAX_FAILURES_TOLD))
    which = (
        f"none of {len(failed)} parts could be encoded"
        if not done
        else (f"{len(failed)} of {len(rows)} parts could not be encoded, all others are done")
    )
    raise EncodingError(
        f"{which}: {told}. What is done stays: mend the cause and run this again"
        + (f", or leave them out by {knob}.max_failed_parts={len(failed)}" if done else "")
    )
