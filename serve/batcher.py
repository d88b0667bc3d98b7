"""Work that pays in batches: what arrives while a batch is worked on forms the next one.

A lone call never waits, and a crowd shares one pass. The work is done in a thread, so the event loop turns.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")
B = TypeVar("B")


class Batcher(Generic[Q, A]):
    """Calls from one event loop go in one by one, and through `work` together, at most `most` of them."""

    def __init__(self, work: Callable[[Sequence[Q]], Sequence[A | Exception]], *, most: int) -> None:
        """`work` gives an answer for each, or the error to be raised for that one alone."""
        self._work, self._most = work, most
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._thread = ThreadPoolExecutor(1, "batcher")
        self._busy = False

    async def __call__(self, asked: Q) -> A:
        """The answer to one call."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, answer))
        if not self._busy:
            self._begin(answer.get_loop())
        return await answer

    async def in_turn(self, work: Callable[[], B]) -> B:
        """Something else that is done in the same thread, between two batches."""
        return await asyncio.wrap_future(self._thread.submit(work))

    def __len__(self) -> int:
        """Calls that wait for the next batch."""
        return len(self._waiting)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        # Whoever asked may have given up by now.
        waiting = [(asked, answer) for asked, answer in self._waiting if not answer.done()]
        batch, self._waiting = waiting[: self._most], waiting[self._most :]
        self._busy = bool(batch)
        if batch:
            done = self._thread.submit(self._work, [asked for asked, _ in batch])
            done.add_done_callback(
                lambda done: loop.call_soon_threadsafe(self._finish, loop, [a for _, a in batch], done)
            )

    def _finish(
        self,
        loop: asyncio.AbstractEventLoop,
        waiting: Sequence[asyncio.Future[A]],
        done: Future[Sequence[A | Exception]],
    ) -> None:
        failed = done.exception()
        found = [failed] * len(waiting) if failed is not None else done.result()
        for answer, result in zip(waiting, found, strict=True):
            if answer.done():
                continue
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)
        self._begin(loop)
