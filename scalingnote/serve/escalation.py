"""The teacher for queries that the student is uncertain about: it is called if it has capacity.

    student's search ─► five best scores close together? ─► teacher's embedding, in time ─► search again
                             └► no: unchanged                    └► none: the student's answer, and the reason

The teacher is not called for a query that the student is certain about. A teacher that is slow or dead delays
an uncertain query by `deadline_ms` at most. After a few such queries it delays none, because it is then
called only once a second.
"""

import asyncio
import time
from dataclasses import replace

from jaxtyping import Float
from numpy import ndarray

from scalingnote.run.service_config import Escalation
from scalingnote.search.query_path import DoubtWindow, Query
from scalingnote.search.searcher import Candidates
from scalingnote.serve.concurrency import Handle, RequestTimer, at
from scalingnote.serve.fan_out import Find
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import Refused

MAX_SILENT = 3  # calls in a row without an answer before the teacher is not called for a while
PAUSE_S = 1.0
SHARE_OF_TIME = 0.5  # of the time left of the request: the second search needs the rest
SHARE_OF_REQUESTS = 0.25  # of the requests in flight: a slow teacher must not delay all of them
log = get_logger()


class Teacher:
    """The choice of the queries that the teacher encodes, and its calls.

    Args:
        handle: of an :class:`~scalingnote.serve.encoders.ArmEncoder` with the teacher's tower.
        config: share and deadline.
        in_flight: largest number of requests in flight; a share of it may wait for the teacher.
    """

    def __init__(self, handle: Handle, config: Escalation, *, in_flight: int) -> None:
        self.handle, self._deadline_s = handle, config.deadline_ms / 1000
        self.limit(in_flight)
        self._window = DoubtWindow(config.share)
        self._waiting = self._silent = 0
        self._paused_until = 0.0  # of time.monotonic()

    def limit(self, in_flight: int) -> None:
        """Set the largest number of requests in flight; a share of it may wait for the teacher."""
        self._max_waiting = max(1, int(SHARE_OF_REQUESTS * in_flight))

    async def search(
        self, text: str, query: Query, candidates: Candidates, find: Find, timer: RequestTimer
    ) -> tuple[Query, Candidates, str]:
        """Return the teacher's query and its candidates if the student is uncertain, else the student's.

        If the teacher or the second search is not in time, those of the student are returned with the reason.

        Args:
            text: of the query.
            query: with the student's embedding.
            candidates: of this query.
            find: searches again.
            timer: of the request.
        """
        if not self._window.is_uncertain(candidates.dense):
            return query, candidates, ""
        embedding = await self._encode(text, query.version, timer.left_s())
        if isinstance(embedding, str):
            return query, candidates, embedding
        second = replace(query, embedding=embedding)
        answer = await find(second, timer.left_s())
        if isinstance(answer, Refused) or len(answer.missing) > len(candidates.missing):
            return query, candidates, "teacher_late"
        return second, answer, ""

    async def _encode(self, query: str, version: str, left_s: float) -> Float[ndarray, "one dim"] | str:
        """Return the teacher's embedding of a query, or the reason why there is none.

        ``teacher_late``: it did not answer in time. ``teacher_failed``: it raised an error. ``teacher_busy``:
        too many queries wait for it. ``teacher_silent``: it has not answered the previous calls.
        """
        if time.monotonic() < self._paused_until:
            return "teacher_silent"
        if self._waiting >= self._max_waiting:
            return "teacher_busy"
        if self._silent >= MAX_SILENT:
            self._paused_until = time.monotonic() + PAUSE_S  # only this call tries
        self._waiting += 1
        try:
            async with asyncio.timeout(min(self._deadline_s, SHARE_OF_TIME * left_s)):
                answer = await at(self.handle, version).encode.remote(query)
        except TimeoutError:
            return self._without_answer("teacher_late")
        except Exception:
            log.exception("the teacher failed, and the student's answer is returned")
            return self._without_answer("teacher_failed")
        finally:
            self._waiting -= 1
        self._silent, self._paused_until = 0, 0.0
        embedding: ndarray = answer.embedding
        return embedding

    def _without_answer(self, reason: str) -> str:
        self._silent += 1
        if self._silent == MAX_SILENT:
            self._paused_until = time.monotonic() + PAUSE_S
        return reason
