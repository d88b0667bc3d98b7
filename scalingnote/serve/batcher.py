"""Work that pays in batches: what arrives while a batch is worked on forms the next one.

A lone call never waits, and a crowd shares one pass.

    Batcher    works in a thread, so the event loop turns
    AtOnce     works in the event loop itself: for what takes less time than it takes to wake a thread, which
               then would wait for the interpreter's lock at every step
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
        _settle(waiting, [failed] * len(waiting) if failed is not None else done.result())
        self._begin(loop)


class AtOnce(Generic[Q, A]):
    """Calls of two turns of the event loop go in one by one, and through `work` together, at most `most`.

    In a crowd two turns bring twice as many as one does, and eight searches together take two thirds of the
    time of four and four; a lone call waits for a turn that has nothing else to do.
    """

    def __init__(self, work: Callable[[Sequence[Q]], Sequence[A | Exception]], *, most: int) -> None:
        """`work` gives an answer for each, or the error to be raised for that one alone."""
        self._work, self._most = work, most
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []

    async def __call__(self, asked: Q) -> A:
        """The answer to one call."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[A] = loop.create_future()
        self._waiting.append((asked, answer))
        if len(self._waiting) == 1:  # behind whatever else this turn still brings, and the next
            loop.call_soon(loop.call_soon, self._turn, loop)
        return await answer

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = [(asked, answer) for asked, answer in self._waiting if not answer.done()]
        batch, self._waiting = waiting[: self._most], waiting[self._most :]
        try:
            found = self._work([asked for asked, _ in batch])
        except Exception as error:
            found = [error] * len(batch)
        _settle([answer for _, answer in batch], found)
        if self._waiting:  # the loop turns in between
            loop.call_soon(self._turn, loop)


def _settle(waiting: Sequence[asyncio.Future[A]], found: Sequence[A | BaseException]) -> None:
    for answer, result in zip(waiting, found, strict=True):
        if answer.done():  # whoever asked has given up
            continue
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)
