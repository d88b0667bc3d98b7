"""Asynchronous calls of the service: threads, batches, deadlines, replicas or local objects, periodic tasks.

WorkerThread       does work that would hold the event loop, and says whether it hangs
Batcher            batches calls, and works in a thread or in the event loop
gather_in_time     several calls at once, without those that fail or exceed the deadline
LocalHandle        calls an object of this process the way a Ray Serve deployment is called
ReadHandle         calls a deployment for reading: a call whose replica died is made once more
VersionHandle      calls what a part of the application holds for a version of the index
"""

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from scalingnote.run.service_config import ENCODING_DEADLINE_S
from scalingnote.serve.telemetry import get_logger

Input = TypeVar("Input")
Output = TypeVar("Output")
T = TypeVar("T")
PROBE_WAIT_S = 5.0  # of a thread's check, for its probe
# What a call raises whose replica died before it answered: Ray, and Serve where it had chosen the replica.
REPLICA_LOST = (RayActorError, ReplicaUnavailableError)
log = get_logger()


# --- threads and batches ----------------------------------------------------------------------------------


class WorkerThread:
    """A thread for work that would hold an event loop: it does one call after the other.

    Ray Serve replaces a replica that fails three checks in a row (`check_health` of the deployments). A check
    that only asks the event loop passes for ever, also where the thread of a search hangs on a file whose
    server is gone. So a check does the replica's own work, a search or an encoding, in the thread that does
    it for requests. Under load it adds nothing: a thread that works is well, unless one call takes longer
    than any does.

    Args:
        name: of the thread, for messages.
        limit_s: seconds after which a call counts as hanging: its request has no answer any more.
    """

    def __init__(self, name: str, *, limit_s: float = ENCODING_DEADLINE_S) -> None:
        self._name, self._limit_s = name, limit_s
        self._executor = ThreadPoolExecutor(1, name)
        self._started: float | None = None  # of the call that runs, in time.monotonic()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have work done after what was submitted before."""
        return self._executor.submit(self._do, work)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of work that is submitted."""
        return await asyncio.wrap_future(self.submit(work))

    async def check(self, probe: Callable[[], object]) -> None:
        """Have the thread do a probe if it is idle: its errors; TimeoutError where a call exceeds the limit.

        It returns soon in any case, because Serve waits half a minute: a probe that is not done then is a
        call as any other, for the next check.
        """
        if self._started is None:
            probed = asyncio.wrap_future(self.submit(probe))
            if (await asyncio.wait([probed], timeout=PROBE_WAIT_S))[0]:
                probed.result()
                return
            probed.cancel()  # where it has not begun
        started = self._started
        if started is not None and (seconds := time.monotonic() - started) > self._limit_s:
            raise TimeoutError(
                f"the thread {self._name!r} has not ended one call in {seconds:.0f} s: it hangs"
            )

    def _do(self, work: Callable[[], T]) -> T:
        self._started = time.monotonic()
        try:
            return work()
        finally:
            self._started = None


class LoopFuture(asyncio.Future[Any]):
    """Filled by the event loop itself, in its next turns: the last that a call waits for."""


class Batcher(Generic[Input, Output]):
    """Batches the calls of one event loop: those that arrive during a batch form the next one.

    In a thread, a single call waits for no other one. Without a thread the event loop itself works: for work
    that is shorter than waking a thread, which then would wait for the interpreter's lock at every step. A
    batch then has the calls of two turns of the loop: under load twice as many as those of one, and a batch
    of eight searches takes two thirds of the time of two batches of four.

    Args:
        work: for each input of a batch its output, or the error to raise for that call alone.
        max_batch: inputs of a batch.
        thread: that works; None: the event loop.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Input]], Sequence[Output | Exception]],
        *,
        max_batch: int,
        thread: WorkerThread | None = None,
    ) -> None:
        self._work, self._max_batch, self.thread = work, max_batch, thread
        self._waiting: list[tuple[Input, asyncio.Future[Output]]] = []
        self._busy = False

    async def __call__(self, value: Input) -> Output:
        """The output for one input."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Output] = (
            LoopFuture(loop=loop) if self.thread is None else loop.create_future()
        )
        self._waiting.append((value, result))
        if not self._busy:
            self._busy = True
            if self.thread is None:
                loop.call_soon(loop.call_soon, self._start_batch, loop)  # after this turn, and the next one
            else:
                self._start_batch(loop)
        return await result

    def _start_batch(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = [(value, result) for value, result in self._waiting if not result.done()]  # not cancelled
        batch, self._waiting = waiting[: self._max_batch], waiting[self._max_batch :]
        self._busy = bool(batch)
        if not batch:
            return
        results = [result for _, result in batch]
        work = partial(self._work, [value for value, _ in batch])
        if self.thread is None:
            self._end_batch(loop, results, work)
        else:
            self.thread.submit(work).add_done_callback(
                lambda done: loop.call_soon_threadsafe(self._end_batch, loop, results, done.result)
            )

    def _end_batch(
        self,
        loop: asyncio.AbstractEventLoop,
        results: Sequence[asyncio.Future[Output]],
        outcome: Callable[[], Sequence[Output | Exception]],
    ) -> None:
        outputs: Sequence[Output | Exception]
        try:
            outputs = outcome()
        except Exception as error:
            outputs = [error] * len(results)
        for result, output in zip(results, outputs, strict=True):
            if result.done():  # the caller was cancelled
                continue
            if isinstance(output, Exception):
                result.set_exception(output)
            else:
                result.set_result(output)
        self._busy = bool(self._waiting)
        if self._busy and self.thread is None:
            loop.call_soon(self._start_batch, loop)  # other tasks get a turn between two batches
        elif self._busy:
            self._start_batch(loop)


# --- calls of replicas ------------------------------------------------------------------------------------


class LocalHandle:
    """Calls the asynchronous methods of a local object as ``handle.method.remote(...)``.

    With it the gateway's code does not depend on whether a part runs in the gateway or in replicas.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.target, name))


class ReadHandle:
    """Calls a deployment whose methods change nothing; a call whose replica died is made once more.

    Serve itself tries another replica only until one has taken the call. It leaves a dead one out from then
    on, so the second call goes to another one, or waits for the one that is started in its place. Nothing may
    be written by it: a write whose replica died may have been done.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(_read, getattr(self._handle, name)))

    def broadcast(self, method: str, *args: Any) -> Any:
        """Call a method of every replica, as the deployment's own handle does."""
        return self._handle.broadcast(method, *args)


async def _read(method: Any, *args: Any, **named: Any) -> Any:
    try:
        return await _answer(method.remote(*args, **named))
    except REPLICA_LOST as lost:
        log.warning("a replica died before it answered (%s), another one is asked", type(lost).__name__)
        return await _answer(method.remote(*args, **named))


async def _answer(response: DeploymentResponse[Any]) -> Any:
    """The answer of a replica, which drops the call if nobody waits for it any more."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


class VersionHandle:
    """Calls a part that holds something for each version of the index, by its method ``call``.

    Args:
        part: its handle.
        version: whose methods are called; None: those of the part itself.
    """

    def __init__(self, part: "Handle", version: str | None = None) -> None:
        self.part, self._version = part, version

    def __getattr__(self, name: str) -> Any:
        if self._version is None:
            return getattr(self.part, name)
        return SimpleNamespace(remote=partial(self.part.call.remote, self._version, name))


Handle = DeploymentHandle[Any] | LocalHandle | ReadHandle | VersionHandle


def for_reading(handle: Handle) -> Handle:
    """The same deployment, called once more where a replica died; what is in this process as it is."""
    return ReadHandle(handle) if isinstance(handle, DeploymentHandle) else handle


def at(handle: Handle, version: str) -> Handle:
    """Calls what a part holds for a version; a part that holds one thing alone as it is."""
    return VersionHandle(handle.part, version) if isinstance(handle, VersionHandle) else handle


async def broadcast(handle: Handle, method: str, *args: Any) -> list[Any]:
    """Call a method of every replica; all results."""
    if isinstance(handle, VersionHandle):
        handle = handle.part
    if isinstance(handle, LocalHandle):
        return [await getattr(handle, method).remote(*args)]
    return list(await asyncio.to_thread(handle.broadcast(method, *args).results))


async def gather_in_time(calls: Sequence[Awaitable[T]], *, deadline_s: float) -> list[T | None]:
    """Results in the order of `calls`; None where a call failed or took longer than `deadline_s`.

    The calls run concurrently, so this returns after `deadline_s` at the latest.
    """
    if len(calls) == 1:  # without a task of its own, which would double the cost of a single call
        return [await _in_time(0, calls[0], deadline_s)]
    return await asyncio.gather(*(_in_time(n, call, deadline_s) for n, call in enumerate(calls)))


async def _in_time(number: int, call: Awaitable[T], deadline_s: float) -> T | None:
    try:
        # A timer takes longer than a table to encode a query, and could not end what the loop itself does.
        if isinstance(call, Coroutine):
            waits_for = call.send(None)
            call = _continue(call, waits_for)
            if isinstance(waits_for, LoopFuture):
                return await call
        async with asyncio.timeout(deadline_s):
            return await call
    except StopIteration as ended:  # without a wait
        answer: T = ended.value
        return answer
    except TimeoutError:
        log.warning("call %d of the fan-out took longer than %.3gs and was left out", number, deadline_s)
    except Exception:  # an error of one shard must not cost the results of the others
        log.exception("call %d of the fan-out failed and was left out", number)
    return None


@types.coroutine
def _continue(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """The rest of a coroutine that was started, and waits for something."""
    while True:
        try:
            step = partial(call.send, (yield waits_for))
        except BaseException as error:  # it may handle the end of its task
            step = partial(call.throw, error)
        try:
            waits_for = step()
        except StopIteration as ended:
            answer: T = ended.value
            return answer


STEPS = ("encode", "search", "escalate", "rerank")  # of a search


class RequestTimer:
    """Times the steps of a request, and the seconds left until its deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._start = self._step_start = time.perf_counter()
        self._deadline = self._start + deadline_s
        self._step_s = dict.fromkeys(STEPS, 0.0)

    def end(self, step: str) -> None:
        """Add the time since the end of the step before to one of STEPS."""
        before, self._step_start = self._step_start, time.perf_counter()
        self._step_s[step] += self._step_start - before

    def timings_ms(self) -> dict[str, float]:
        """Milliseconds of each step, 0 if there was none, and the `total` since the start."""
        seconds = {**self._step_s, "total": time.perf_counter() - self._start}
        return {step: round(1000 * value, 3) for step, value in seconds.items()}

    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.perf_counter())


# --- periodic tasks ---------------------------------------------------------------------------------------


async def run_periodically(task: Callable[[], Awaitable[object]], *, interval_s: float, name: str) -> None:
    """Run a task every `interval_s` seconds until cancelled, whether it fails or not.

    A series of failures is logged once, with the first error, and once when it is over.
    """
    failed = False
    while True:
        await asyncio.sleep(interval_s)
        try:
            await task()
        except Exception:
            if not failed:
                log.exception("%s failed; it is tried again every %g s", name, interval_s)
            failed = True
        else:
            if failed:
                log.info("%s works again", name)
            failed = False
