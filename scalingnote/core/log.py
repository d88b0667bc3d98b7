"""Logging and progress: one line format everywhere; ranks above 0 log warnings only.

Progress is a plain log line every few seconds, the same on a terminal, in a job's log and in CI:

    12:01:07 encode   8,192/20,000 documents  41%  512/s  ETA 23s  cpu 97%

Work that has nothing to tell for a while still tells that it goes on (:func:`status_lines`).
"""

import contextlib
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

import psutil

ROOT = "scalingnote"
PROGRESS_INTERVAL_S = 5.0
SILENCE_S = 7.0  # without a line, after which the status of the work at hand is logged
# Imported wherever transformers saves a model or peft adds adapters, and they warn of hardware and kernels
# that a run may not need: DeepSpeed on standard output, where commands print JSON.
OTHERS_WITH_WARNINGS = ("DeepSpeed", "bitsandbytes.backends.cpu.ops")
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
        handler = _CurrentStderr()
        handler.setFormatter(_Formatter())
        root.addHandler(handler)
        for name in OTHERS_WITH_WARNINGS:
            logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


def configure_unless_set() -> None:
    """Configure the log of a script or a notebook; a program that has set up its own logging keeps it."""
    if not logging.getLogger().handlers and logging.getLogger(ROOT).level == logging.NOTSET:
        configure()


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at the time of a line."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        package = record.name.removeprefix(f"{ROOT}.")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = f"{clock} {package:<8} {mark}{record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        note_line()
        return text


# --- status lines ---------------------------------------------------------------------------------------

Status = tuple[logging.Logger, Callable[[], str]]
_open: list[Status] = []  # the innermost work last
_lock = threading.Lock()
_thread: threading.Thread | None = None
_last_line = time.monotonic()


def note_line() -> None:
    """Note that a line was shown just now, by this process or, through it, by a worker."""
    global _last_line
    _last_line = time.monotonic()


@contextlib.contextmanager
def status_lines(package: str, status: Callable[[], str]) -> Iterator[None]:
    """Log `status()` whenever nothing was logged for SILENCE_S, until the block ends.

    Of blocks within each other the innermost tells its status. One thread serves them all.
    """
    global _thread
    entry = (get_logger(package), status)
    with _lock:
        if not _open:
            note_line()  # silence counts from here
        _open.append(entry)
        if _thread is None:
            _thread = threading.Thread(target=_end_silence, name="status-lines", daemon=True)
            _thread.start()
    try:
        yield
    finally:
        with _lock:
            _open.remove(entry)


def elapsed_status(what: str) -> Callable[[], str]:
    """A status of work that cannot count its steps: what it is, since when, and the use of the CPUs."""
    start = time.monotonic()
    psutil.cpu_percent()  # the first call only starts the measuring interval
    return lambda: f"{what}: {time.monotonic() - start:.0f}s  cpu {psutil.cpu_percent():.0f}%"


def _end_silence() -> None:
    global _thread
    while True:
        time.sleep(min(max(_last_line + SILENCE_S - time.monotonic(), 0.1), 1.0))
        with _lock:
            if not _open:
                _thread = None
                return
            logger, status = _open[-1]
        if time.monotonic() - _last_line >= SILENCE_S:
            note_line()  # where no line is shown, as on ranks above 0, the next attempt is no sooner
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s", status())


class Progress:
    """Counts finished rows and logs rate, ETA and CPU use every few seconds, also while no row is finished.

    ``done`` starts above zero when a run resumes, so that the rate only counts this run's work.
    """

    def __init__(
        self,
        package: str,
        *,
        total: int,
        unit: str,
        done: int = 0,
        underway: Callable[[], int] | None = None,
    ) -> None:
        """`underway` tells how many rows are done in all, of this run, with those of unfinished parts."""
        self._log = get_logger(package)
        self._package, self._total, self._unit = package, total, unit
        self._done, self._before = done, done
        self._underway = underway
        self._note: object = ""
        self._start = self._last_line = time.monotonic()
        self._status = contextlib.ExitStack()

    def __enter__(self) -> "Progress":
        psutil.cpu_percent()  # the first call only starts the measuring interval
        self._status.enter_context(status_lines(self._package, self._line))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._status.close()
        if kind is None and self._done:
            seconds = time.monotonic() - self._start
            rate = _rate_text(self.rate)
            self._log.info("%s %s in %.1fs (%s/s)", f"{self._done:,}", self._unit, seconds, rate)

    @property
    def rate(self) -> float:
        """Rows per second of this run."""
        return (self._done - self._before) / max(time.monotonic() - self._start, 1e-9)

    def advance(self, rows: int, note: object = "") -> None:
        """Record `rows` more as finished; `note`, as a string, is appended to lines until the next call."""
        self._done += rows
        self._note = note
        if time.monotonic() - self._last_line >= PROGRESS_INTERVAL_S:
            self._log.info("%s", self._line())

    def _line(self) -> str:
        self._last_line = time.monotonic()
        done = self._done
        if self._underway is not None:  # never all of them: the last part is finished when it is written
            done = max(done, min(self._before + self._underway(), self._total - 1))
        seconds = max(time.monotonic() - self._start, 1e-9)
        line = f"{done:,}/{self._total:,} {self._unit}" if self._total else f"{done:,} {self._unit}"
        if self._total:
            line += f"  {100 * done // self._total}%"
        if rate := (done - self._before) / seconds:
            line += f"  {_rate_text(rate)}/s"
            line += f"  ETA {(self._total - done) / rate:.0f}s" if self._total else ""
        else:
            line += f"  {seconds:.0f}s"
        return f"{line}  cpu {psutil.cpu_percent():.0f}%" + (f"  {self._note}" if self._note else "")


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


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
