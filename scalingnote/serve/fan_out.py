"""Ask several replicas at once and go on with those that answer in time: calls in, answers or None out."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from scalingnote.serve.log import get_logger

T = TypeVar("T")
log = get_logger()


async def in_time(calls: Sequence[Awaitable[T]], *, deadline_s: float) -> list[T | None]:
    """The answers in the order of `calls`; None where a call failed or took longer than `deadline_s`.

    The calls run together, so this returns after at most `deadline_s` however many are stuck.
    """
    if len(calls) == 1:  # without a task of its own: half of what a fan-out of one would cost
        return [await _one(0, calls[0], deadline_s)]
    return await asyncio.gather(*(_one(n, call, deadline_s) for n, call in enumerate(calls)))


async def _one(number: int, call: Awaitable[T], deadline_s: float) -> T | None:
    try:
        async with asyncio.timeout(deadline_s):
            return await call
    except TimeoutError:
        log.warning("call %d of the fan-out took longer than %.3gs and was left out", number, deadline_s)
    except Exception:  # whatever broke one shard must not cost the answers of the others
        log.exception("call %d of the fan-out failed and was left out", number)
    return None
