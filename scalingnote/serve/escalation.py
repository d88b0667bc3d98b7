"""The teacher for queries that the student is uncertain about: asked if it has room, for a short time.

    student's search ─► ten best scores close together? ─► teacher's embedding, in time ─► search again
                             └► no: as it is                     └► none: the student's answer, and the reason

What the student is certain of never leaves the gateway. A teacher that is slow or dead costs an uncertain
query `deadline_ms` at most, and after a few such queries nothing: the teacher is then tried once a second.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.search.query_path import COMPARED, Query, doubt, threshold
from scalingnote.search.searcher import Candidates
from scalingnote.serve.concurrency import Handle, RequestTimer, cancel
from scalingnote.serve.fan_out import FanOut, GroupCandidates
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import Refused
from scalingnote.serve_config import Escalation

WINDOW = 1000  # latest queries of a gateway that `share` is a share of
MIN_MEASURED = 100  # queries before the first one escalates, unless all do
TUNED_EVERY = 20  # queries
MAX_SILENT = 3  # calls without an answer, one after the other, before the teacher is left alone
PAUSE_S = 1.0
SHARE_OF_TIME = 0.5  # of the request's time left: the second search needs the rest
log = get_logger()


class Teacher:
    """Decides which queries the teacher encodes, and calls it.

    Args:
        handle: of an :class:`~scalingnote.serve.replicas.ArmEncoder` with the teacher's tower.
        config: share, deadline and number of calls.
    """

    def __init__(self, handle: Handle, config: Escalation) -> None:
        self.handle, self._config = handle, config
        self._doubts: deque[float] = deque(maxlen=WINDOW)
        self._seen = self._waiting = self._silent = 0
        self._paused_until = 0.0  # of time.monotonic()
        self._threshold = float("-inf") if config.share == 1 else float("inf")
        if config.threshold is not None:
            self._threshold = config.threshold

    def is_uncertain(self, found: Sequence[Candidates]) -> bool:
        """Whether a query escalates, by the dense scores of all its candidates."""
        dense = np.concatenate([each.dense for each in found])
        value = float(doubt(-np.sort(-dense)[np.newaxis, :COMPARED])[0])
        uncertain = value > self._threshold  # before it counts itself
        if self._config.threshold is None and self._config.share < 1:
            self._doubts.append(value)
            self._seen += 1
            if self._seen >= MIN_MEASURED and self._seen % TUNED_EVERY == 0:
                self._threshold = threshold(np.array(self._doubts), self._config.share)
        return uncertain

    async def search(
        self, text: str, query: Query, found: GroupCandidates, fan_out: FanOut, timer: RequestTimer
    ) -> tuple[Query, GroupCandidates, str]:
        """The teacher's query and what it finds where the student is uncertain, else those of the student.

        Where the teacher or the second search is not in time, those of the student, with the reason.

        Args:
            text: of the query.
            query: with the student's embedding.
            found: by it.
            fan_out: searches again.
            timer: of the request.
        """
        if not self.is_uncertain(found.candidates):
            return query, found, ""
        embedding = await self._encode(text, timer.left_s())
        if isinstance(embedding, str):
            return query, found, embedding
        second = replace(query, embedding=embedding)
        answer = await fan_out.search(second, timer.left_s())
        if isinstance(answer, Refused) or len(answer.missing) > len(found.missing):
            return query, found, "teacher_late"
        return second, answer, ""

    async def _encode(self, query: str, left_s: float) -> Float[ndarray, "one dim"] | str:
        """The teacher's embedding of a query; or the reason why there is none.

        ``teacher_late``, ``teacher_failed``: it did not answer in time, or by an error. ``teacher_busy``: as
        many queries wait as may. ``teacher_silent``: it has not answered the calls before.
        """
        if time.monotonic() < self._paused_until:
            return "teacher_silent"
        if self._waiting >= self._config.in_flight:
            return "teacher_busy"
        if self._silent >= MAX_SILENT:
            self._paused_until = time.monotonic() + PAUSE_S  # this call is the one that tries
        self._waiting += 1
        call: Any = None
        try:
            async with asyncio.timeout(min(self._config.deadline_ms / 1000, SHARE_OF_TIME * left_s)):
                call = self.handle.encode.remote(query)
                encoded = await call
        except TimeoutError:
            cancel(call)
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
