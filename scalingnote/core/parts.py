"""Parts of work through workers until none is left, and the one rule for what fails.

A :class:`PartStage` is loaded once in each worker and then works on one part after the other. An executor is
a function of a stage and its parts that yields their results in the order of completion:

    map_here              this process, without Ray
    cluster.map_tasks     tasks of Ray, for a stage that loads nothing
    cluster.map_loaded    actors of Ray Data, which load the stage once

They differ in their workers. What is done about a part that fails is the same (:class:`PartQueue`):

- A ScalingNoteError ends the run at once: the user can fix it.
- A part with another error is tried again after the others, MAX_ERRORS times, after an OSError, which is
  mostly the network's, MAX_OS_ERRORS times.
- So is a part whose process is lost, MAX_PROCESS_LOSSES times, or whose node is, MAX_LOSSES times: spot
  machines are lost for other reasons than what they do.
- A part that is not tried again is set aside with its reason. When the others are done, the run ends with a
  :class:`PartsFailedError`.

A worker whose process is killed can report nothing: a load, or a part, that began and did not end tells of
it. :class:`Attempts` counts both in a process that outlives the workers.
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
MAX_PROCESS_LOSSES, MAX_LOSSES = 2, 4  # of a part, of processes on nodes that are there, and in all
MAX_REASONS = 3  # parts whose reason is in an error
MAX_LOADS = 2  # failures of every slot, after which no worker will load
MAX_BACKOFF_S, MAX_DOUBLINGS = 600.0, 30
PATIENCE_S = 600.0  # for other slots to come up, when all that did have failed
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
        load: makes, once in each worker, the function of a part's input.
        read: makes the input of a part; runs in any process.
        write: takes a part and the function's result, gives the result of the part; runs in any process.
    """

    load: Callable[[], Callable[[Any], Any]]
    read: Callable[[Any], Any] = _identity
    write: Callable[[Any, Any], Any] = _result_only

    def start(self) -> Callable[[Any], Any]:
        """Load in this process; returns the function of a part that takes all three steps."""
        work = self.load()
        return lambda part: self.write(part, work(self.read(part)))


# Gives the results of a stage, or of a function, for parts, in any order: the built-in `map` is one, too.
Executor = Callable[[Any, Sequence[Any]], Iterable[Any]]


def as_stage(work: PartStage | Callable[[Any], Any]) -> PartStage:
    """A function of a part as a stage that has nothing to load."""
    return work if isinstance(work, PartStage) else PartStage(lambda: work)


class WorkerLostError(Exception):
    """The process or the node of a worker was lost."""


class PartQueue:
    """The numbers of the parts that are still to be tried, and those that are set aside with a reason."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.left = deque(range(len(parts)))
        self.set_aside: dict[int, str] = {}
        self._parts = parts
        self._errors, self._losses = Counter[int](), Counter[int]()
        self._process_losses = Counter[int]()
        self._cause: BaseException | None = None

    def fail(self, number: int, reason: str, *, transient: bool, cause: BaseException | None = None) -> None:
        """Note a part's error; logged at once, since the others may take hours.

        Args:
            number: of the part.
            reason: the traceback.
            transient: whether it may well go away, as an OSError.
            cause: the exception itself, where it is at hand.
        """
        reason = reason.strip()
        # The traceback of the first is enough.
        shown = reason.splitlines()[-1] if self._errors else reason
        self._errors[number] += 1
        self._cause = cause or self._cause
        again = self._errors[number] < (MAX_OS_ERRORS if transient else MAX_ERRORS)
        message = f"a part failed and is tried again after the others: {self._name(number)}: {shown}"
        self._put_back(number, reason, message, again=again)

    def lose(self, number: int, *, node_is_there: bool) -> None:
        """Note that the process of a part was lost; with its node unless that is there."""
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
        """Set aside all that is left."""
        self.set_aside |= dict.fromkeys(self.left, reason)
        self.left.clear()

    def _name(self, number: int) -> Any:
        """The name of a part for messages: the first of a tuple."""
        part = self._parts[number]
        return part[0] if isinstance(part, tuple) and part else part

    def check(self) -> None:
        """PartsFailedError if parts were set aside."""
        if not self.set_aside:
            return
        shown = islice(self.set_aside.items(), MAX_REASONS)
        reasons = "; ".join(f"{self._name(number)}: {reason}" for number, reason in shown)
        failed, parts = len(self.set_aside), len(self._parts)
        which = (
            f"{failed} of {parts} parts failed at every try, all others are done"
            if failed < parts
            else f"none of {parts} parts could be processed"
        )
        raise PartsFailedError(
            f"{which}: {reasons}. What is done stays: mend the cause and run this again", self.set_aside
        ) from self._cause


def map_here(work: PartStage | Callable[[Any], Any], parts: Sequence[Any]) -> Iterator[Any]:
    """Results of work on parts in this process.

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
        except WorkerLostError:
            queue.lose(number, node_is_there=True)
        except Exception as error:
            transient = isinstance(error, OSError)
            queue.fail(number, traceback.format_exc(), transient=transient, cause=error)
        else:
            yield result
    queue.check()


def in_order(numbered: Iterable[tuple[int, R]]) -> Iterator[R]:
    """Results of parts 0, 1, 2 and so on, which come with these numbers in any order."""
    early: dict[int, R] = {}
    number = 0
    for found, result in numbered:
        early[found] = result
        while number in early:
            yield early.pop(number)
            number += 1


# --- workers ----------------------------------------------------------------------------------------------


@dataclass
class WorkerSlot:
    """What is known of a place that workers run in, as the third GPU of a node.

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
    """What the workers of a stage begin and finish; each execution of Ray Data begins with :meth:`start`.

    A slot where loading, or part after part, fails is left alone for longer and longer.
    """

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
