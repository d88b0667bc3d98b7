"""The teacher for queries that the student is uncertain about: asked if it has room, for a short time.

    student's search ─► five best scores close together? ─► teacher's embedding, in time ─► search again
                             └► no: as it is                     └► none: the student's answer, and the reason

What the student is certain of never leaves the gateway. A teacher that is slow or dead costs an uncertain
query `deadline_ms` at most, and after a few such queries nothing: the teacher is then tried once a second.
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

MAX_SILENT = 3  # calls without an answer, one after the other, before the teacher is left alone
PAUSE_S = 1.0
SHARE_OF_TIME = 0.5  # of the request's time left: the second search needs the rest
SHARE_OF_REQUESTS = 0.25  # of those a gateway works on: a slow teacher must not hold all of them
log = get_logger()


class Teacher:
    """Decides which queries the teacher encodes, and calls it.

    Args:
        handle: of an :class:`~scalingnote.serve.encoders.ArmEncoder` with the teacher's tower.
        config: share and deadline.
        in_flight: requests that the gateway works on at once; a share of them may wait for the teacher.
    """

    def __init__(self, handle: Handle, config: Escalation, *, in_flight: int) -> None:
        self.handle, self._deadline_s = handle, config.deadline_ms / 1000
        self.limit(in_flight)
        self._window = DoubtWindow(config.share)
        self._waiting = self._silent = 0
        self._paused_until = 0.0  # of time.monotonic()

    def limit(self, in_flight: int) -> None:
        """Let a share of so many requests wait for the teacher from now on."""
        self._max_waiting = max(1, int(SHARE_OF_REQUESTS * in_flight))

    async def search(
        self, text: str, query: Query, found: Candidates, find: Find, timer: RequestTimer
    ) -> tuple[Query, Candidates, str]:
        """The teacher's query and what it finds where the student is uncertain, else those of the student.

        Where the teacher or the second search is not in time, those of the student, with the reason.

        Args:
            text: of the query.
            query: with the student's embedding.
            found: by it.
            find: searches again.
            timer: of the request.
        """
        if not self._window.is_uncertain(found.dense):
            return query, found, ""
        embedding = await self._encode(text, query.version, timer.left_s())
        if isinstance(embedding, str):
            return query, found, embedding
        second = replace(query, embedding=embedding)
        answer = await find(second, timer.left_s())
        if isinstance(answer, Refused) or len(answer.missing) > len(found.missing):
            return query, found, "teacher_late"
        return second, answer, ""

    async def _encode(self, query: str, version: str, left_s: float) -> Float[ndarray, "one dim"] | str:
        """The teacher's embedding of a query; or the reason why there is none.

        ``teacher_late``, ``teacher_failed``: it did not answer in time, or by an error. ``teacher_busy``: as
        many queries wait as may. ``teacher_silent``: it has not answered the calls before.
        """
        if time.monotonic() < self._paused_until:
            return "teacher_silent"
        if self._waiting >= self._max_waiting:
            return "teacher_busy"
        if self._silent >= MAX_SILENT:
            self._paused_until = time.monotonic() + PAUSE_S  # this call is the one that tries
        self._waiting += 1
        try:
            async with asyncio.timeout(min(self._deadline_s, SHARE_OF_TIME * left_s)):
                encoded = await at(self.handle, version).encode.remote(query)
        except TimeoutError:
            return self._without_answer("teacher_late")
        except Exception:
            log.exception("the teacher failed, and the student's answer is given")
            return self._without_answer("teacher_failed")
        finally:
            self._waiting -= 1
        self._silent, self._paused_until = 0, 0.0
        embedding: ndarray = encoded.embedding
        return embedding

    def _without_answer(self, reason: str) -> str:
        self._silent += 1
        if self._silent == MAX_SILENT:
            self._paused_until = time.monotonic() + PAUSE_S
        return reason
