"""The writer of access logs, which `scalingnote experiment` reads (evaluate/experiment/access_log.py)."""

import atexit
import fcntl
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger

FLUSH_S = 1.0  # between two writes
MAX_FILE_BYTES = 64 << 20
MAX_WAITING = 100_000  # records in memory; if a disk is too slow, more are dropped and counted
log = get_logger("access")


class AccessWriter:
    """Writer of ``{folder}/access-{replica}.jsonl``; full files become ``access-{replica}.{ns}.jsonl``.

    A thread writes records as JSON lines. :meth:`append` only adds to a queue in memory, so an event loop
    never waits for a disk. A killed process loses at most the records since the last flush. Flushed lines are
    complete and synced.
    """

    def __init__(self, folder: str | Path, replica: str) -> None:
        """Open the file and start the thread.

        Args:
            folder: of the files; created if missing.
            replica: name of the writer, unique within the folder.

        Raises:
            ConfigError: another running process writes the file.
        """
        self.dropped = 0  # records that were never written
        name = re.sub(r"[^A-Za-z0-9_-]", "_", replica)
        self._stem = Path(folder).absolute() / f"access-{name}"
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._unwritten: list[bytes] = []  # lines that could not be written
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def path(self) -> Path:
        """The current file."""
        return self._stem.with_name(f"{self._stem.name}.jsonl")

    def append(self, record: Mapping[str, Any]) -> None:
        """Queue a record, which the caller must not change afterwards. This never waits or raises."""
        if len(self._waiting) >= MAX_WAITING or self._stop.is_set():
            self.dropped += 1
        else:
            self._waiting.append(record)

    def flush(self) -> None:
        """Write and sync all queued records. It blocks, so do not call it in an event loop."""
        with self._writing:
            records = [self._waiting.popleft() for _ in range(len(self._waiting))]
            lines = self._unwritten + [line for record in records if (line := self._line(record))]
            try:
                self._write(lines)
            except OSError as error:  # for example a full disk: the next flush tries again
                if not self._unwritten:
                    log.warning("%s cannot be written (%s): its lines are kept for a retry", self.path, error)
            self.dropped += max(len(lines) - MAX_WAITING, 0)
            self._unwritten = lines[:MAX_WAITING]

    def close(self) -> None:
        """Flush and stop; closing again does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self.flush()
        if self._unwritten:
            self.dropped += len(self._unwritten)
            log.warning("%d lines of %s could not be written", len(self._unwritten), self.path)
        os.close(self._file)
        atexit.unregister(self.close)

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self.flush()

    def _line(self, record: Mapping[str, Any]) -> bytes:
        try:
            text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            self.dropped += 1
            log.warning("a record cannot be written as JSON and was dropped: %s", error)
            return b""
        # Half of a surrogate pair becomes its escape sequence, which is valid JSON.
        return text.encode("utf-8", "backslashreplace") + b"\n"

    def _write(self, lines: list[bytes]) -> None:
        """Write lines with one call per file, and remove from the list those that are written."""
        wrote_lines = False
        while lines:
            stop, size = 0, self._size
            while stop < len(lines) and (size == 0 or size + len(lines[stop]) <= MAX_FILE_BYTES):
                size += len(lines[stop])
                stop += 1
            if not stop:
                self._rotate()
                continue
            self._append(b"".join(lines[:stop]))
            del lines[:stop]
            wrote_lines = True
        if wrote_lines:
            os.fsync(self._file)

    def _append(self, data: bytes) -> None:
        """Write all of `data` or nothing: a partial write is truncated."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _open(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise ConfigError(
                f"{self.path} is written by another process: give each replica a separate name"
            ) from None
        self._file, self._size = file, os.fstat(file).st_size
        if self._size and os.pread(file, 1, self._size - 1) != b"\n":
            self._append(b"\n")  # end the torn last line of a killed process

    def _rotate(self) -> None:
        os.fsync(self._file)
        moment = time.time_ns()
        while (full := self._stem.with_name(f"{self._stem.name}.{moment}.jsonl")).exists():
            moment += 1
        self.path.rename(full)
        full_file = self._file
        try:
            self._open()
        except OSError:
            full.rename(self.path)
            raise
        os.close(full_file)
