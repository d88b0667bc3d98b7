"""Logging and progress: one line format everywhere; ranks above 0 log warnings only.

Progress is a plain log line every few seconds, the same on a terminal, in a job's log and in CI:

    12:01:07 encode   8,192/20,000 documents  41%  512/s  ETA 23s  cpu 97%
"""

import logging
import os
import platform
import re
import sys
import time

import psutil

ROOT = "scalingnote"
PROGRESS_INTERVAL_S = 5.0
LINE = re.compile(r"\d\d:\d\d:\d\d \w+ ")  # start of every line of this package


def get_logger(name: str) -> logging.Logger:
    """Logger of a package, e.g. ``get_logger("encode")``; configured once by :func:`configure`."""
    return logging.getLogger(f"{ROOT}.{name}")


def configure(*, rank: int = 0) -> None:
    """Send this package's log to stderr. Ranks above 0 log warnings only."""
    root = logging.getLogger(ROOT)
    root.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.propagate = False
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter())
        root.addHandler(handler)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        package = record.name.removeprefix(f"{ROOT}.")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = f"{clock} {package:<8} {mark}{record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class Progress:
    """Counts finished rows and logs rate, ETA and CPU use, at most once every PROGRESS_INTERVAL_S.

    ``done`` starts above zero when a run resumes, so that the rate only counts this run's work.
    """

    def __init__(self, package: str, *, total: int, unit: str, done: int = 0) -> None:
        self._log = get_logger(package)
        self._total, self._unit = total, unit
        self._done, self._before = done, done
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        psutil.cpu_percent()  # the first call only starts the measuring interval
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            seconds = time.monotonic() - self._start
            self._log.info("%s %s in %.1fs (%s/s)", f"{self._done:,}", self._unit, seconds, self._speed())

    @property
    def rate(self) -> float:
        """Rows per second of this run."""
        return (self._done - self._before) / max(time.monotonic() - self._start, 1e-9)

    def _speed(self) -> str:
        return f"{self.rate:,.0f}" if self.rate >= 10 else f"{self.rate:.2g}"

    def advance(self, rows: int, note: object = "") -> None:
        """Record `rows` more as finished; `note`, as a string, is appended to the next line that is shown."""
        self._done += rows
        now = time.monotonic()
        if now - self._last_line < PROGRESS_INTERVAL_S:
            return
        self._last_line = now
        left = (self._total - self._done) / max(self.rate, 1e-9)
        share = 100 * self._done // max(self._total, 1)
        progress = (
            f"{self._done:,}/{self._total:,} {self._unit}  {share}%  {self._speed()}/s  ETA {left:.0f}s"
        )
        self._log.info("%s  cpu %.0f%%%s", progress, psutil.cpu_percent(), f"  {note}" if note else "")


def environment() -> dict[str, str | int | float]:
    """Machine and versions a measured number belongs to; stored in reports and benchmark files."""
    from importlib.metadata import PackageNotFoundError, version

    facts: dict[str, str | int | float] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpus": os.cpu_count() or 1,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
    }
    for package in ("scalingnote", "torch", "transformers", "ray", "faiss-cpu", "pyarrow", "numpy"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _processor() -> str:
    """Its name; Python's own `platform.processor` is empty on Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (FileNotFoundError, StopIteration):
        return platform.processor() or "unknown"
