"""Asynchronous calls of the service: threads, batches, deadlines, replicas or local objects, periodic tasks.

WorkerThread       does work that would block the event loop, and reports a call that hangs
Batcher            batches calls, and works in a thread or in the event loop
gather_in_time     makes several calls at once, and leaves out those that fail or exceed the deadline
LocalHandle        calls an object of this process the way a Ray Serve deployment is called
ReadHandle         calls a deployment for reading: if the replica of a call died, the call is made once more
VersionHandle      calls the object that a part of the application holds for a version of the index
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
PROBE_WAIT_S = 5.0  # how long the check of a thread waits for its probe
# Errors of a call if its replica died before it answered: the first is Ray's, the second is Serve's for a
# replica that it had chosen already.
REPLICA_LOST = (RayActorError, ReplicaUnavailableError)
log = get_logger()


# --- threads and batches ----------------------------------------------------------------------------------


class WorkerThread:
    """A thread for work that would block an event loop. It does one call after the other.

    Ray Serve replaces a replica that fails three checks in a row (`check_health` of the deployments). A check
    of only the event loop would always pass, even if the thread of a search hangs on a file of a lost server.
    A check therefore does the work of the replica, a search or an encoding, in the thread that does it for
    requests. Under load it adds no work: a busy thread is healthy, unless one call takes longer than
    `limit_s`.

    Args:
        name: of the thread, for messages.
        limit_s: seconds after which a call counts as hanging: its request gets no answer any more.
    """

    def __init__(self, name: str, *, limit_s: float = ENCODING_DEADLINE_S) -> None:
        self._name, self._limit_s = name, limit_s
        self._executor = ThreadPoolExecutor(1, name)
        self._started: float | None = None  # when the running call began, in time.monotonic()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work behind earlier work."""
        return self._executor.submit(self._do, work)

    async def run(self, work: Callable[[], T]) -> T:
        """Submit work and return its result."""
        return await asyncio.wrap_future(self.submit(work))

    async def check(self, probe: Callable[[], object]) -> None:
        """Run a probe in the thread if it is idle, and raise its error; TimeoutError if a call hangs.

        It returns after PROBE_WAIT_S at the latest, because Serve waits only half a minute. The next check
        treats a probe that still runs like any other call.
        """
        if self._started is None:
            running = asyncio.wrap_future(self.submit(probe))
            if (await asyncio.wait([running], timeout=PROBE_WAIT_S))[0]:
                running.result()
                return
            running.cancel()  # takes effect if it has not begun
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
    """A future that the event loop itself sets in its next turns. A call waits for nothing after it."""


class Batcher(Generic[Input, Output]):
    """Batches of the calls of one event loop: calls that arrive during a batch form the next one.

    With a thread, a call starts at once if the thread is idle. Without a thread the event loop does the work:
    this is for work that takes less time than waking a thread, which would then wait for the interpreter's
    lock at every step. A batch then has the calls of two turns of the loop: under load twice as many as those
    of one turn, and a batch of eight searches takes two thirds of the time of two batches of four.

    Args:
        work: returns for each input of a batch its output, or the error to raise for only this call.
        max_batch: largest number of inputs in a batch.
        thread: does the work; None: the event loop.
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
        """Return the output for one input."""
        loop = asyncio.get_running_loop()
        output: asyncio.Future[Output] = (
            LoopFuture(loop=loop) if self.thread is None else loop.create_future()
        )
        self._waiting.append((value, output))
        if not self._busy:
            self._busy = True
            if self.thread is None:
                loop.call_soon(loop.call_soon, self._start_batch, loop)  # after this turn and the next one
            else:
                self._start_batch(loop)
        return await output

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
    """A handle that calls the asynchronous methods of a local object by ``handle.method.remote(...)``.

    With it the code of the gateway does not depend on whether a part runs in the gateway or in replicas.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.target, name))


class ReadHandle:
    """A handle of a deployment with methods that only read. It repeats a call once if the replica died.

    Serve itself tries another replica only until one has accepted the call. It does not use a dead replica
    again, so the second call goes to another replica, or waits for the one that is started in its place. Do
    not use this handle for writes: a replica may have done a write before it died.
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(_read, getattr(self._handle, name)))

    def broadcast(self, method: str, *args: Any) -> Any:
        """Call a method of every replica, like the handle of the deployment."""
        return self._handle.broadcast(method, *args)


async def _read(method: Any, *args: Any, **options: Any) -> Any:
    try:
        return await _answer(method.remote(*args, **options))
    except REPLICA_LOST as lost:
        log.warning("a replica died before it answered (%s), another one is called", type(lost).__name__)
        return await _answer(method.remote(*args, **options))


async def _answer(response: DeploymentResponse[Any]) -> Any:
    """Return the answer of a replica. If the caller is cancelled, the replica drops the call."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


class VersionHandle:
    """A handle of a part that holds an object for each version of the index. The part has a method ``call``.

    Args:
        part: its handle.
        version: of the object with the called methods; None: the methods of the part itself are called.
    """

    def __init__(self, part: "Handle", version: str | None = None) -> None:
        self.part, self._version = part, version

    def __getattr__(self, name: str) -> Any:
        if self._version is None:
            return getattr(self.part, name)
        return SimpleNamespace(remote=partial(self.part.call.remote, self._version, name))


Handle = DeploymentHandle[Any] | LocalHandle | ReadHandle | VersionHandle


def for_reading(handle: Handle) -> Handle:
    """Return a handle that calls a deployment once more if a replica died; any other handle unchanged."""
    return ReadHandle(handle) if isinstance(handle, DeploymentHandle) else handle


def at(handle: Handle, version: str) -> Handle:
    """Return a handle of the object that a part holds for a version; any other handle unchanged."""
    return VersionHandle(handle.part, version) if isinstance(handle, VersionHandle) else handle


async def broadcast(handle: Handle, method: str, *args: Any) -> list[Any]:
    """Call a method of every replica, and return all results."""
    if isinstance(handle, VersionHandle):
        handle = handle.part
    if isinstance(handle, LocalHandle):
        return [await getattr(handle, method).remote(*args)]
    return list(await asyncio.to_thread(handle.broadcast(method, *args).results))


async def gather_in_time(calls: Sequence[Awaitable[T]], *, deadline_s: float) -> list[T | None]:
    """Return results in the order of `calls`; None for a call that failed or took longer than `deadline_s`.

    The calls run concurrently, so this returns after `deadline_s` at the latest.
    """
    if len(calls) == 1:  # without a separate task, which would double the cost of a single call
        return [await _in_time(0, calls[0], deadline_s)]
    return await asyncio.gather(*(_in_time(n, call, deadline_s) for n, call in enumerate(calls)))


async def _in_time(number: int, call: Awaitable[T], deadline_s: float) -> T | None:
    try:
        # A timer takes longer than a table takes to encode a query, and it could not stop work of the loop.
        if isinstance(call, Coroutine):
            waits_for = call.send(None)
            call = _continue(call, waits_for)
            if isinstance(waits_for, LoopFuture):
                return await call
        async with asyncio.timeout(deadline_s):
            return await call
    except StopIteration as stop:  # the call did not wait
        answer: T = stop.value
        return answer
    except TimeoutError:
        log.warning("call %d of the fan-out took longer than %.3gs and was left out", number, deadline_s)
    except Exception:  # an error of one shard must not discard the results of the others
        log.exception("call %d of the fan-out failed and was left out", number)
    return None


@types.coroutine
def _continue(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Run the rest of a coroutine that was started, and waits for `waits_for`."""
    while True:
        try:
            step = partial(call.send, (yield waits_for))
        except BaseException as error:  # the coroutine may handle the cancellation of its task
            step = partial(call.throw, error)
        try:
            waits_for = step()
        except StopIteration as stop:
            answer: T = stop.value
            return answer


STEPS = ("encode", "search", "escalate", "rerank")  # of a search


class RequestTimer:
    """The times of the steps of a request, and the seconds left until its deadline."""

    def __init__(self, deadline_s: float) -> None:
        self._start = self._step_start = time.perf_counter()
        self._deadline = self._start + deadline_s
        self._step_s = dict.fromkeys(STEPS, 0.0)

    def end(self, step: str) -> None:
        """Add the time since the end of the previous step to one of STEPS."""
        start, self._step_start = self._step_start, time.perf_counter()
        self._step_s[step] += self._step_start - start

    def timings_ms(self) -> dict[str, float]:
        """Return the milliseconds of each step, 0 if there was none, and the `total` since the start."""
        seconds = {**self._step_s, "total": time.perf_counter() - self._start}
        return {step: round(1000 * value, 3) for step, value in seconds.items()}

    def left_s(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._deadline - time.perf_counter())


# --- periodic tasks ---------------------------------------------------------------------------------------


async def run_periodically(task: Callable[[], Awaitable[object]], *, interval_s: float, name: str) -> None:
    """Run a task every `interval_s` seconds until this is cancelled, also after the task has failed.

    A series of failures is logged once, with the first error, and once more when it ends.
    """
    failed = False
    while True:
        await asyncio.sleep(interval_s)
        try:
            await task()
        except Exception:
            if not failed:
                log.exception("%s failed; it is retried every %g s", name, interval_s)
            failed = True
        else:
            if failed:
                log.info("%s works again", name)
            failed = False
