"""Batches, calls with a deadline, periodic tasks: a slow or failing call does not affect the others."""

import asyncio
import logging
import threading
import time

import pytest

from scalingnote.serve import concurrency
from scalingnote.serve.concurrency import Batcher, WorkerThread, gather_in_time


def test_calls_during_a_batch_form_the_next_one():
    batches: list[list[int]] = []
    started, go_on = threading.Event(), threading.Event()

    def work(batch):
        batches.append(list(batch))
        started.set()
        go_on.wait(10)
        return [10 * each for each in batch]

    async def crowd():
        batcher = Batcher(work, max_batch=3, thread=WorkerThread("work"))
        first = asyncio.create_task(batcher(0))
        await asyncio.to_thread(started.wait, 10)
        cancelled = asyncio.create_task(batcher(9))
        others = [asyncio.create_task(batcher(number)) for number in range(1, 6)]
        await asyncio.sleep(0)
        cancelled.cancel()  # its batch leaves it out
        go_on.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(crowd()) == [0, 10, 20, 30, 40, 50]
    assert batches == [[0], [1, 2, 3], [4, 5]]


def test_a_loop_batcher_works_in_the_event_loop():
    batches: list[list[int]] = []

    def work(batch):
        assert threading.current_thread() is threading.main_thread()
        batches.append(list(batch))
        return [ValueError(each) if each == 3 else 10 * each for each in batch]

    async def crowd():
        at_once = Batcher(work, max_batch=3)
        cancelled = asyncio.create_task(at_once(9))
        tasks = [asyncio.create_task(at_once(number)) for number in range(5)]
        await asyncio.sleep(0)
        cancelled.cancel()  # before its batch is formed
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        return [*outputs, await at_once(7)]

    *outputs, last = asyncio.run(crowd())
    assert [each for each in outputs if not isinstance(each, Exception)] == [0, 10, 20, 40]
    assert isinstance(outputs[3], ValueError)
    assert last == 70
    assert [number for batch in batches for number in batch if number != 9] == [0, 1, 2, 3, 4, 7]
    assert max(map(len, batches)) <= 3


@pytest.mark.parametrize("thread", [None, WorkerThread("work")])
def test_an_error_is_of_one_call_or_of_the_batch(thread):
    def work(batch):
        if "all" in batch:
            raise OSError("the disk is gone")
        return [ValueError(each) if each == "bad" else each for each in batch]

    async def call(*values):
        each = Batcher(work, max_batch=8, thread=thread)
        return await asyncio.gather(*map(each, values), return_exceptions=True)

    first, good, bad = asyncio.run(call("x", "good", "bad"))
    assert (first, good) == ("x", "good")
    assert isinstance(bad, ValueError)
    assert all(isinstance(each, OSError) for each in asyncio.run(call("all", "all")))


def test_a_slow_or_failing_call_does_not_affect_others():
    cancelled = []

    async def answer(value: int, *, after_s: float = 0.0) -> int:
        try:
            await asyncio.sleep(after_s)
        except asyncio.CancelledError:
            cancelled.append(value)
            raise
        return value

    async def fail() -> int:
        raise OSError("the disk is gone")

    async def answer_at_once() -> int:
        return 5

    async def answer_late() -> int:  # its first wait fails, and it waits again
        with pytest.raises(OSError, match="gone"):
            await asyncio.gather(answer(6), fail())
        return await answer(6)

    double = Batcher(lambda values: [2 * value for value in values], max_batch=8)
    fail_all = Batcher(lambda values: [OSError("the disk is gone") for _ in values], max_batch=8)
    stuck = [answer(n, after_s=600) for n in range(50)]  # ten seconds if the deadlines were added up
    calls = [answer(1, after_s=0.05), answer(2), fail(), answer(4), answer_at_once(), answer_late()]
    calls += [double(4), fail_all(0), *stuck]
    start = time.monotonic()
    assert asyncio.run(gather_in_time(calls, deadline_s=0.2)) == [1, 2, None, 4, 5, 6, 8, None, *[None] * 50]
    assert time.monotonic() - start < 8
    assert cancelled == [*range(50)]

    async def cancel() -> None:
        task = asyncio.create_task(gather_in_time([answer(7, after_s=600)], deadline_s=600))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    assert cancelled[-1] == 7  # a cancelled request cancels its calls


# --- periodic tasks


def test_a_series_of_failures_logs_two_lines(caplog: pytest.LogCaptureFixture, monkeypatch):
    # The logger of Serve has its own handlers.
    monkeypatch.setattr(concurrency, "log", logging.getLogger("following"))
    caplog.set_level(logging.INFO)
    turns = 0

    async def step():
        nonlocal turns
        turns += 1
        if 2 <= turns <= 5 or turns == 8:
            raise OSError("the storage is away")

    async def until(turn: int):
        task = asyncio.create_task(concurrency.run_periodically(step, interval_s=0, name="looking"))
        while turns < turn:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(until(9))
    lines = [(record.levelname, record.message) for record in caplog.records if record.name == "following"]
    failed = ("ERROR", "looking failed; it is retried every 0 s")
    assert lines == [failed, ("INFO", "looking works again")] * 2
    assert "the storage is away" in caplog.text
