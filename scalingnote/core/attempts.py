"""What the workers of a stage begin and finish, counted in a process that outlives them.

A worker whose process is killed can report nothing: a load, or a part, that began and did not end tells of
it. Slots and parts are told apart by that. A slot is a place that a worker runs in, as the third GPU of a
node: one where loading, or part after part, fails is left alone for longer and longer. A part whose process
ends wherever it runs is set aside.
"""

import time
from collections import defaultdict
from dataclasses import dataclass

MAX_BACKOFF_S, MAX_DOUBLINGS = 600.0, 30
MAX_LOADS = 2  # failures of every slot, after which no worker will load
PATIENCE_S = 600.0  # for other slots to come up, when all that did have failed


@dataclass
class WorkerSlot:
    """What is known of a slot.

    Attributes:
        failures: since it last finished a part.
        loading: whether a load began and did not end.
        well: whether its worker has loaded, and has not failed since.
        reason: of the last failure.
    """

    failures: int = 0
    loading: bool = False
    well: bool = False
    reason: str = ""


class Attempts:
    """The counts of one run of a stage; each execution of Ray Data begins with :meth:`start`."""

    def __init__(self, backoff_s: float, patience_s: float = PATIENCE_S) -> None:
        self._backoff_s, self._patience_s = backoff_s, patience_s
        self._execution = 0
        self.start(1)

    def start(self, workers: int) -> None:
        """Begin an execution that starts with so many workers: slots have another chance."""
        self._execution += 1
        self._workers, self._since = workers, time.monotonic()
        self._slots: dict[str, WorkerSlot] = defaultdict(WorkerSlot)
        self._begun: dict[int, str] = {}

    def begin_load(self, slot: str) -> tuple[float, int]:
        """Note that a worker starts in a slot.

        Returns:
            The seconds that it has to wait before it loads, and the number of the execution.
        """
        found = self._slots[slot]
        if found.loading or found.well:  # and its process is gone without a word
            self.fail(slot, found.reason or "its process ended: out of memory, or a crash of native code")
        found.loading = True
        doubled = 2.0 ** min(found.failures - 1, MAX_DOUBLINGS) if found.failures else 0.0
        return min(self._backoff_s * doubled, MAX_BACKOFF_S), self._execution

    def is_over(self, execution: int) -> bool:
        """Whether another execution has begun since."""
        return execution != self._execution

    def end_load(self, slot: str) -> None:
        """Note that a worker has loaded."""
        self._slots[slot].loading, self._slots[slot].well = False, True

    def fail(self, slot: str, reason: str) -> None:
        """Note that a load failed, or that the worker gives up since its parts fail."""
        found = self._slots[slot]
        found.loading = found.well = False
        found.failures, found.reason = found.failures + 1, reason

    def hopeless(self) -> str:
        """The reason of the last failure if no worker will load; else empty."""
        slots = list(self._slots.values())
        if any(slot.well or slot.failures < MAX_LOADS for slot in slots):
            return ""
        waited = time.monotonic() - self._since > self._patience_s
        return slots[-1].reason if slots and (len(slots) >= self._workers or waited) else ""

    def begin(self, part: int, node: str) -> None:
        """Note that a worker begins a part, and the node that it runs on."""
        self._begun[part] = node

    def end(self, part: int, slot: str, finished: bool) -> None:
        """Note that a worker has finished a part, or has told why it could not."""
        self._begun.pop(part, None)
        if finished:
            self._slots[slot].failures = 0

    def underway(self) -> dict[int, str]:
        """Parts that were begun in this execution and not ended, with the nodes of their workers."""
        return dict(self._begun)

    def failures(self) -> dict[str, str]:
        """Slots that have failed since they finished a part, with the reason of the last failure."""
        return {name: slot.reason for name, slot in self._slots.items() if slot.failures}
