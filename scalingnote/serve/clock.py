"""A stopwatch and a deadline: the milliseconds of each step of a request, and what is left of its time."""

import time


class Clock:
    """Runs from the moment it is made."""

    def __init__(self, deadline_s: float) -> None:
        self._start = self._lap = time.perf_counter()
        self._end = self._start + deadline_s

    def lap(self) -> float:
        """Milliseconds since the last lap."""
        before, self._lap = self._lap, time.perf_counter()
        return round(1000 * (self._lap - before), 3)

    def total(self) -> float:
        """Milliseconds since the start."""
        return round(1000 * (time.perf_counter() - self._start), 3)

    def left(self) -> float:
        """Seconds until the deadline; never less than none."""
        return max(0.0, self._end - time.perf_counter())
