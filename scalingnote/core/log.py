"""Logging and progress: one line format everywhere; ranks above 0 log warnings only.

Progress is a plain log line every few seconds, the same on a terminal, in a job's log and in CI:

    12:01:07 encode   8,192/20,000 documents  41%  512/s  ETA 23s  cpu 97%

Work that logs no line for a while logs its status (:func:`status_lines`).
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
SILENCE_S = 7.0  # without a line, after which the status of the current work is logged
# These are imported when transformers saves a model or peft adds adapters. They warn of hardware and kernels
# that a run may not need; DeepSpeed does so on standard output, on which commands print JSON.
OTHERS_WITH_WARNINGS = ("DeepSpeed", "bitsandbytes.backends.cpu.ops")
LINE = re.compile(r"\d\d:\d\d:\d\d \w+ ")  # start of every line of this package


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a package, e.g. ``get_logger("encode")``; :func:`configure` configures all."""
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
    """Configure the log of a script or a notebook, unless the program has set up its own logging."""
    if not logging.getLogger().handlers and logging.getLogger(ROOT).level == logging.NOTSET:
        configure()


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """A handler that writes to the current value of `sys.stderr`."""

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
    """Record that a line was just shown, by this process or, through it, by a worker."""
    global _last_line
    _last_line = time.monotonic()


@contextlib.contextmanager
def status_lines(package: str, status: Callable[[], str]) -> Iterator[None]:
    """Log `status()` whenever no line was logged for SILENCE_S, until the block ends.

    Of nested blocks, the innermost one logs its status. One thread serves all blocks.
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
    """Return a status function for work without countable steps: its name, duration and CPU use."""
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
            note_line()  # also if no line is shown (ranks above 0): the next attempt is as late
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s", status())


class Progress:
    """Counter of finished rows that logs rate, ETA and CPU use every few seconds, also without finished rows.

    ``done`` starts above zero when a run resumes, so that the rate includes only the rows of this run.
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
        """Begin at `done` rows of `total`.

        `underway` returns the number of rows that this run has processed, also those of unfinished parts.
        """
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
        """Rows per second, of this run."""
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
        if self._underway is not None:  # below the total: the last part is finished when it is written
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
    """Describe the machine and the versions, for measurements in reports and benchmark files."""
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
    """Return the name of the processor; Python's own `platform.processor` is empty on Linux."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (FileNotFoundError, StopIteration):
        return platform.processor() or "unknown"
