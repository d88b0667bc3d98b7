import asyncio
import time

import pytest

from scalingnote.serve.fan_out import in_time


async def answer(value: int, *, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return value


async def fail() -> int:
    raise OSError("the disk is gone")


def test_answers_keep_the_order_of_the_calls():
    async def ask():
        return await in_time([answer(1, after_s=0.05), answer(2)], deadline_s=5)

    assert asyncio.run(ask()) == [1, 2]


def test_the_slow_and_the_broken_cost_nobody_else():
    async def ask():
        return await in_time([answer(1), answer(2, after_s=60), fail(), answer(4)], deadline_s=0.2)

    start = time.monotonic()
    assert asyncio.run(ask()) == [1, None, None, 4]
    assert time.monotonic() - start < 30


def test_many_stuck_calls_wait_together_not_one_after_the_other():
    async def ask():
        return await in_time([answer(n, after_s=600) for n in range(50)], deadline_s=0.2)

    start = time.monotonic()
    assert asyncio.run(ask()) == [None] * 50
    assert time.monotonic() - start < 5  # 10 s, were the deadlines added up


def test_a_call_left_out_is_cancelled():
    cancelled = []

    async def stuck():
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    asyncio.run(in_time([stuck()], deadline_s=0.05))
    assert cancelled == [True]


def test_whoever_cancels_the_request_cancels_the_calls():
    async def ask():
        task = asyncio.create_task(in_time([answer(1, after_s=600)], deadline_s=600))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(ask())
