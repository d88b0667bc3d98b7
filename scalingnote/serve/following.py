"""What is done again and again beside requests: a failure is told once, however long it lasts."""

import asyncio
from collections.abc import Awaitable, Callable

from scalingnote.serve.log import get_logger

log = get_logger()


async def again_and_again(step: Callable[[], Awaitable[object]], *, every_s: float, doing: str) -> None:
    """Take the step every so many seconds, until cancelled.

    A step that fails is taken again at its time. Storage that is away for an hour leaves two lines in the
    log, the first with the reason.
    """
    failed = False
    while True:
        await asyncio.sleep(every_s)
        try:
            await step()
        except Exception:
            if not failed:
                log.exception("%s failed; it is tried again every %g s", doing, every_s)
            failed = True
        else:
            if failed:
                log.info("%s works again", doing)
            failed = False
