"""A thread for work that would hold an event loop (searches, models, files), and whether it still works.

Ray Serve replaces a replica that fails three checks in a row (`check_health` of the deployments). A check
that only asks the event loop passes for ever, also where the thread of a search hangs on a file whose server
is gone. So a check does the replica's own work, a search or an encoding, in the thread that does it for
requests. Under load it adds nothing: a thread that works is well, unless one call takes longer than any does.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from scalingnote.run.service_config import ENCODING_DEADLINE_S

WORK_LIMIT_S = ENCODING_DEADLINE_S  # of one call: a request whose call takes longer has no answer any more
PROBE_WAIT_S = 5.0  # of a check, for its probe
T = TypeVar("T")


class WorkerThread:
    """Does one call after the other.

    Args:
        name: of the thread, for messages.
        limit_s: seconds after which a call counts as hanging.
    """

    def __init__(self, name: str, *, limit_s: float = WORK_LIMIT_S) -> None:
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
