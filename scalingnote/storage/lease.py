"""Who builds an artifact: one process at a time, on whatever storage, with no server to ask.

A file beside the work says which process it is, and is written again by it every few seconds. Another that
wants to build the same waits for as long as the file changes. A holder that is gone from this machine, or
has been silent for half a minute, has lost its lease.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet

import psutil

from scalingnote.errors import ScalingNoteError
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs

BEAT_S, SILENT_S, LOOK_S = 5.0, 30.0, 0.5
_ME = uuid.uuid4().hex  # numbers of processes come again
log = get_logger("artifact")


class Lease:
    """The right to build what a file stands for: taken, and held until it is given back or forgotten."""

    _held: ClassVar["WeakSet[Lease]"] = WeakSet()
    _thread: ClassVar = threading.Lock()  # taken by the first: one thread writes for all

    def __init__(self, uri: str) -> None:
        self._uri, self._beats, self._writing = uri, 0, threading.Lock()

    def take(self, *, of: str, done: Callable[[], bool]) -> bool:
        """Wait until nobody else holds it, and take it; False if what it is for (`of`) is `done` by then."""
        seen, since = "", time.monotonic()
        while (found := _read(self._uri)) and not _gone(found):
            if done():
                return False
            if not seen:
                log.info("process %s of %s builds %s: waiting for it", found["pid"], found["host"], of)
            if (text := json.dumps(found)) != seen:
                seen, since = text, time.monotonic()
            elif time.monotonic() - since > SILENT_S:
                log.info("it is silent: going on with its work")
                break
            time.sleep(LOOK_S)
        self._write()
        self._held.add(self)
        if self._thread.acquire(blocking=False):
            threading.Thread(target=_beat, args=(self._held,), daemon=True).start()
        return True

    @property
    def lost(self) -> bool:
        """Whether another process has taken it over from this one, which was silent for long."""
        found = _read(self._uri)
        return found is not None and found["process"] != _ME

    def beat(self) -> None:
        """Show that its holder lives, if it still is the holder."""
        with self._writing:
            if self in self._held and not self.lost:
                self._write()

    def give_back(self) -> None:
        """Write no more; the file goes with the work that it is for."""
        with self._writing:  # a beat that has begun comes to its end
            self._held.discard(self)

    def _write(self) -> None:
        self._beats += 1
        told = {"process": _ME, "host": socket.gethostname(), "pid": os.getpid(), "beats": self._beats}
        fs.write_bytes(self._uri, json.dumps(told).encode())


def _read(uri: str) -> dict[str, Any] | None:
    """What a lease says; None where there is none, or it cannot be read."""
    try:
        found: dict[str, Any] = json.loads(fs.read_bytes(uri))
    except (OSError, ValueError, ScalingNoteError):
        return None
    return found


def _gone(holder: dict[str, Any]) -> bool:
    """Whether the holder is known to be no more, or is this very process."""
    if holder["process"] == _ME:
        return True
    if holder["host"] != socket.gethostname():
        return False
    try:
        return holder["pid"] == os.getpid() or psutil.Process(holder["pid"]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _beat(held: "WeakSet[Lease]") -> None:
    while True:
        time.sleep(BEAT_S)
        _beat_all(list(held))  # in a call of its own: what is forgotten elsewhere is to be forgotten here


def _beat_all(held: list[Lease]) -> None:
    for lease in held:
        try:
            lease.beat()
        except Exception as error:  # storage that is away for a while: the next beat may do
            log.warning("no sign of life could be written: %s", error)
