"""A stopwatch: the milliseconds of each step of a request, and of all together."""

import time


class Clock:
    """Runs from the moment it is made."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def lap(self) -> float:
        """Milliseconds since the last lap."""
        before, self._lap = self._lap, time.perf_counter()
        return round(1000 * (self._lap - before), 3)

    def total(self) -> float:
        """Milliseconds since the start."""
        return round(1000 * (time.perf_counter() - self._start), 3)
