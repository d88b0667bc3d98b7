"""A failure that lasts is told once, and when it is over."""

import asyncio
import logging

import pytest

from scalingnote.serve import following


def test_a_lasting_failure_leaves_two_lines(caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(following, "log", logging.getLogger("following"))  # Serve's has handlers of its own
    caplog.set_level(logging.INFO)
    turns = 0

    async def step():
        nonlocal turns
        turns += 1
        if 2 <= turns <= 5 or turns == 8:
            raise OSError("the storage is away")

    async def until(turn: int):
        task = asyncio.create_task(following.again_and_again(step, every_s=0, doing="looking"))
        while turns < turn:
            await asyncio.sleep(0)
        task.cancel()

    asyncio.run(until(9))
    told = [(record.levelname, record.message) for record in caplog.records if record.name == "following"]
    failed = ("ERROR", "looking failed; it is tried again every 0 s")
    assert told == [failed, ("INFO", "looking works again")] * 2
    assert "the storage is away" in caplog.text
