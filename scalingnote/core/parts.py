"""Execution of parts by workers until none is left, and one rule for failures.

A :class:`PartStage` is loaded once in each worker and then processes one part after the other. An executor is
a function of a stage and its parts that yields their results in the order of completion:

    map_here              this process, without Ray
    cluster.map_tasks     tasks of Ray, for a stage that loads nothing
    cluster.map_loaded    actors of Ray Data, which load the stage once

They differ in their workers. All treat a part that fails in the same way (:class:`PartQueue`):

- A ScalingNoteError ends the run at once: the user can fix it.
- A part with another error is tried again after the others, MAX_ERRORS times in all. After an OSError, which
  is mostly an error of the network, MAX_OS_ERRORS times.
- A part whose process is lost is tried again too, MAX_PROCESS_LOSSES times in all. If the node is lost,
  MAX_LOSSES times: spot machines are lost for reasons other than their work.
- A part that is not tried again is set aside with its reason. When the others are done, the run ends with a
  :class:`PartsFailedError`.

A worker whose process is killed cannot report it. :class:`Attempts` detects it by a load, or a part, that
began and did not end; it is in a process that outlives the workers.
"""

import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from scalingnote.core.errors import PartsFailedError, ScalingNoteError
from scalingnote.core.log import get_logger

MAX_ERRORS, MAX_OS_ERRORS = 2, 4  # of a part, before it is set aside
MAX_PROCESS_LOSSES, MAX_LOSSES = 2, 4  # of a part: of processes on nodes that are alive, and in all
MAX_REASONS = 3  # parts with a reason in the message of an error
MAX_LOADS = 2  # failures of every slot, after which no worker is expected to load
MAX_BACKOFF_S, MAX_DOUBLINGS = 600.0, 30
PATIENCE_S = 600.0  # wait for other slots to start, after all that started have failed
R = TypeVar("R")
log = get_logger("parts")


def _identity(part: Any) -> Any:
    return part


def _result_only(_: Any, result: Any) -> Any:
    return result


@dataclass(frozen=True)
class PartStage:
    """Work on parts, in three steps.

    Attributes:
        load: returns the function of a part's input; called once in each worker.
        read: returns the input of a part; runs in any process.
        write: takes a part and the function's result, returns the result of the part; runs in any process.
    """

    load: Callable[[], Callable[[Any], Any]]
    read: Callable[[Any], Any] = _identity
    write: Callable[[Any, Any], Any] = _result_only

    def start(self) -> Callable[[Any], Any]:
        """Load in this process, and return a function that runs all three steps on a part."""
        work = self.load()
        return lambda part: self.write(part, work(self.read(part)))


# Yields the results of a stage, or of a function, for parts, in any order: the built-in `map` is one too.
Executor = Callable[[Any, Sequence[Any]], Iterable[Any]]


def as_stage(work: PartStage | Callable[[Any], Any]) -> PartStage:
    """Convert a function of a part to a stage that loads nothing."""
    return work if isinstance(work, PartStage) else PartStage(lambda: work)


class PartQueue:
    """Queue of the numbers of parts to try, and the parts that are set aside with a reason."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.left = deque(range(len(parts)))
        self.set_aside: dict[int, str] = {}
        self._parts = parts
        self._errors, self._losses = Counter[int](), Counter[int]()
        self._process_losses = Counter[int]()
        self._cause: BaseException | None = None

    def fail(self, number: int, reason: str, *, transient: bool, cause: BaseException | None = None) -> None:
        """Record a part's error and log it at once, because the other parts may take hours.

        Args:
            number: of the part.
            reason: the traceback.
            transient: whether the error may disappear by itself, as an OSError may.
            cause: the exception itself, if available.
        """
        reason = reason.strip()
        # One complete traceback is enough.
        description = reason.splitlines()[-1] if self._errors else reason
        self._errors[number] += 1
        self._cause = cause or self._cause
        again = self._errors[number] < (MAX_OS_ERRORS if transient else MAX_ERRORS)
        message = f"a part failed and is tried again after the others: {self._name(number)}: {description}"
        self._put_back(number, reason, message, again=again)

    def lose(self, number: int, *, node_is_there: bool) -> None:
        """Record that the process of a part was lost, together with its node unless `node_is_there`."""
        self._losses[number] += 1
        self._process_losses[number] += node_is_there
        if node_is_there:
            chance = f"{self._process_losses[number]} of {MAX_PROCESS_LOSSES}"
            reason = f"its process was lost ({chance}): out of memory, or a crash of native code"
        else:
            reason = f"its process or its node was lost ({self._losses[number]} of {MAX_LOSSES})"
        again = self._process_losses[number] < MAX_PROCESS_LOSSES and self._losses[number] < MAX_LOSSES
        message = f"{self._name(number)} is tried again after the others: {reason}"
        self._put_back(number, reason, message, again=again)

    def _put_back(self, number: int, reason: str, message: str, *, again: bool) -> None:
        if again:
            log.warning("%s", message)
            self.left.append(number)
        else:
            self.set_aside[number] = reason

    def give_up(self, reason: str) -> None:
        """Set aside all remaining parts."""
        self.set_aside |= dict.fromkeys(self.left, reason)
        self.left.clear()

    def _name(self, number: int) -> Any:
        """Return the name of a part for messages: the first element of a tuple."""
        part = self._parts[number]
        return part[0] if isinstance(part, tuple) and part else part

    def check(self) -> None:
        """Raise PartsFailedError if parts were set aside."""
        if not self.set_aside:
            return
        first_failures = islice(self.set_aside.items(), MAX_REASONS)
        reasons = "; ".join(f"{self._name(number)}: {reason}" for number, reason in first_failures)
        failed, parts = len(self.set_aside), len(self._parts)
        which = (
            f"{failed} of {parts} parts failed at every try, all others are done"
            if failed < parts
            else f"none of {parts} parts could be processed"
        )
        raise PartsFailedError(
            f"{which}: {reasons}. Finished parts are kept: fix the cause and run this again", self.set_aside
        ) from self._cause


def map_here(work: PartStage | Callable[[Any], Any], parts: Sequence[Any]) -> Iterator[Any]:
    """Process parts in this process and yield their results.

    Raises:
        ScalingNoteError: raised by the work, or PartsFailedError after all results.
    """
    queue = PartQueue(parts)
    process = as_stage(work).start() if parts else None
    while queue.left and process:
        number = queue.left.popleft()
        try:
            result = process(parts[number])
        except ScalingNoteError:
            raise
        except Exception as error:
            transient = isinstance(error, OSError)
            queue.fail(number, traceback.format_exc(), transient=transient, cause=error)
        else:
            yield result
    queue.check()


def in_order(numbered: Iterable[tuple[int, R]]) -> Iterator[R]:
    """Yield results in the order of their part numbers 0, 1, 2, ...; `numbered` has any order."""
    early: dict[int, R] = {}
    number = 0
    for part_number, result in numbered:
        early[part_number] = result
        while number in early:
            yield early.pop(number)
            number += 1


# --- workers ----------------------------------------------------------------------------------------------


@dataclass
class WorkerSlot:
    """State of a place in which workers run, for example the third GPU of a node.

    Attributes:
        failures: number since the slot last finished a part.
        loading: whether a load began and did not end.
        well: whether its worker has loaded and has not failed since.
        reason: of the last failure.
    """

    failures: int = 0
    loading: bool = False
    well: bool = False
    reason: str = ""


class Attempts:
    """Record of what the workers of a stage begin and finish; each execution of Ray Data calls :meth:`start`.

    A slot in which loading, or one part after the other, fails waits longer after each failure.
    """

    def __init__(self, backoff_s: float, patience_s: float = PATIENCE_S) -> None:
        self._backoff_s, self._patience_s = backoff_s, patience_s
        self._execution = 0
        self.start(1)

    def start(self, workers: int) -> None:
        """Begin an execution with this number of workers and forget the failures of all slots."""
        self._execution += 1
        self._workers, self._since = workers, time.monotonic()
        self._slots: dict[str, WorkerSlot] = defaultdict(WorkerSlot)
        self._begun: dict[int, str] = {}

    def begin_load(self, slot: str) -> tuple[float, int]:
        """Record that a worker starts in a slot.

        Returns:
            The seconds that the worker has to wait before it loads, and the number of the execution.
        """
        slot_state = self._slots[slot]
        if slot_state.loading or slot_state.well:  # its process ended without a report
            self.fail(
                slot, slot_state.reason or "its process ended: out of memory, or a crash of native code"
            )
        slot_state.loading = True
        doubled = 2.0 ** min(slot_state.failures - 1, MAX_DOUBLINGS) if slot_state.failures else 0.0
        return min(self._backoff_s * doubled, MAX_BACKOFF_S), self._execution

    def is_over(self, execution: int) -> bool:
        """Return whether a later execution has begun."""
        return execution != self._execution

    def end_load(self, slot: str) -> None:
        """Record that a worker has loaded."""
        self._slots[slot].loading, self._slots[slot].well = False, True

    def fail(self, slot: str, reason: str) -> None:
        """Record that a load failed, or that a worker ends because its parts fail."""
        slot_state = self._slots[slot]
        slot_state.loading = slot_state.well = False
        slot_state.failures, slot_state.reason = slot_state.failures + 1, reason

    def hopeless(self) -> str:
        """Return the reason of the last failure if no worker is expected to load; else an empty string."""
        slots = list(self._slots.values())
        if any(slot.well or slot.failures < MAX_LOADS for slot in slots):
            return ""
        waited = time.monotonic() - self._since > self._patience_s
        return slots[-1].reason if slots and (len(slots) >= self._workers or waited) else ""

    def begin(self, part: int, node: str) -> None:
        """Record that a worker begins a part, and the node that it runs on."""
        self._begun[part] = node

    def end(self, part: int, slot: str, finished: bool) -> None:
        """Record that a worker has finished a part, or has reported why it failed."""
        self._begun.pop(part, None)
        if finished:
            self._slots[slot].failures = 0

    def underway(self) -> dict[int, str]:
        """Return the parts that began in this execution and did not end, with the nodes of their workers."""
        return dict(self._begun)

    def failures(self) -> dict[str, str]:
        """Return the slots that failed after their last finished part, with the last reason."""
        return {name: slot.reason for name, slot in self._slots.items() if slot.failures}
