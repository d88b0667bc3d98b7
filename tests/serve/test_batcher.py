"""Batches form of what waits, each caller gets their own answer, one bad call spoils no other."""

import asyncio
import threading

import pytest

from scalingnote.serve.batcher import AtOnce, Batcher


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


def test_calls_of_one_turn_of_the_loop_are_worked_on_at_once_by_the_loop_itself():
    batches: list[list[int]] = []

    def work(batch):
        assert threading.current_thread() is threading.main_thread()
        batches.append(list(batch))
        return [ValueError(each) if each == 3 else 10 * each for each in batch]

    async def crowd():
        at_once = AtOnce(work, most=3)
        gone = asyncio.create_task(at_once(9))
        tasks = [asyncio.create_task(at_once(number)) for number in range(5)]
        await asyncio.sleep(0)
        gone.cancel()  # before its batch is formed
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [*found, await at_once(7)]

    *found, last = asyncio.run(crowd())
    assert [each for each in found if not isinstance(each, Exception)] == [0, 10, 20, 40]
    assert isinstance(found[3], ValueError)
    assert last == 70
    assert [number for batch in batches for number in batch if number != 9] == [0, 1, 2, 3, 4, 7]
    assert max(map(len, batches)) <= 3


def test_work_that_fails_at_once_fails_all_who_wait_for_it():
    def work(batch):
        raise OSError("the disk is gone")

    async def crowd():
        at_once = AtOnce(work, most=8)
        return await asyncio.gather(at_once(1), at_once(2), return_exceptions=True)

    assert all(isinstance(each, OSError) for each in asyncio.run(crowd()))
