"""Batches form of what waits, each caller gets their own answer, one bad call spoils no other."""

import asyncio
import threading

import pytest

from serve.batcher import Batcher


def test_what_arrives_during_a_batch_is_the_next_one():
    batches: list[list[int]] = []
    begun, go_on = threading.Event(), threading.Event()

    def work(batch):
        batches.append(list(batch))
        begun.set()
        go_on.wait(10)
        return [10 * each for each in batch]

    async def crowd():
        batcher = Batcher(work, most=3)
        first = asyncio.create_task(batcher(0))
        await asyncio.to_thread(begun.wait, 10)
        others = [asyncio.create_task(batcher(number)) for number in range(1, 6)]
        await asyncio.sleep(0)
        assert len(batcher) == 5
        go_on.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(crowd()) == [0, 10, 20, 30, 40, 50]
    assert batches == [[0], [1, 2, 3], [4, 5]]


def test_an_error_of_one_is_raised_for_it_alone_and_one_of_the_work_for_all():
    def work(batch):
        if "all" in batch:
            raise OSError("the disk is gone")
        return [ValueError(each) if each == "bad" else each for each in batch]

    async def crowd(*asked):
        batcher = Batcher(work, most=8)
        return await asyncio.gather(*map(batcher, asked), return_exceptions=True)

    alone, good, bad = asyncio.run(crowd("x", "good", "bad"))
    assert (alone, good) == ("x", "good")
    assert isinstance(bad, ValueError)
    assert all(isinstance(each, OSError) for each in asyncio.run(crowd("all")))


def test_whoever_gave_up_is_not_worked_for():
    seen: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def work(batch):
        seen.extend(batch)
        begun.set()
        go_on.wait(10)
        return list(batch)

    async def impatient():
        batcher = Batcher(work, most=8)
        first = asyncio.create_task(batcher(0))
        await asyncio.to_thread(begun.wait, 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher(1), 0.01)
        last = asyncio.create_task(batcher(2))
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(first, last)

    assert asyncio.run(impatient()) == [0, 2]
    assert seen == [0, 2]


def test_other_work_takes_its_turn_between_batches():
    async def main():
        batcher = Batcher(lambda batch: list(batch), most=8)
        return await asyncio.gather(batcher(1), batcher.in_turn(lambda: "between"), batcher(2))

    assert asyncio.run(main()) == [1, "between", 2]
