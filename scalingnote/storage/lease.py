"""Leases: one process at a time builds an artifact, on any storage and without a lock server.

The holder names itself in a file beside its work and rewrites the file every few seconds. Another process
that wants to build the same artifact waits while the file changes. A holder loses its lease if its process on
this machine has ended, or if the file has not changed for half a minute.
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

HEARTBEAT_INTERVAL_S, EXPIRY_S, POLL_INTERVAL_S = 5.0, 30.0, 0.5
_PROCESS = uuid.uuid4().hex  # operating systems reuse process ids
log = get_logger("artifact")


class Lease:
    """The right to build an artifact, held until it is released or the object is garbage-collected."""

    _held: ClassVar["WeakSet[Lease]"] = WeakSet()
    _thread: ClassVar = threading.Lock()  # acquired by the first lease: one thread renews all leases

    def __init__(self, uri: str) -> None:
        self._uri, self._beats, self._writing = uri, 0, threading.Lock()

    def acquire(self, *, of: str, done: Callable[[], bool]) -> bool:
        """Wait until no other process holds the lease, and acquire it.

        Args:
            of: name of the artifact, for the log.
            done: whether the artifact is finished.

        Returns:
            False if the artifact was finished while waiting.
        """
        seen, since = "", time.monotonic()
        while (holder := _read(self._uri)) and not _ended(holder):
            if done():
                return False
            if not seen:
                log.info("process %s of %s builds %s: waiting for it", holder["pid"], holder["host"], of)
            if (text := json.dumps(holder)) != seen:
                seen, since = text, time.monotonic()
            elif time.monotonic() - since > EXPIRY_S:
                log.info("its lease has expired: resuming its work")
                break
            time.sleep(POLL_INTERVAL_S)
        self._write()
        self._held.add(self)
        if self._thread.acquire(blocking=False):
            threading.Thread(target=_renew_periodically, args=(self._held,), daemon=True).start()
        return True

    @property
    def lost(self) -> bool:
        """Whether another process took the lease after this one had not renewed it in time."""
        holder = _read(self._uri)
        return holder is not None and holder["process"] != _PROCESS

    def renew(self) -> None:
        """Renew the lease if this process still holds it."""
        with self._writing:
            if self in self._held and not self.lost:
                self._write()

    def release(self) -> None:
        """Stop renewing the lease; the caller deletes its file with the work directory."""
        with self._writing:  # wait for a renewal in progress
            self._held.discard(self)

    def _write(self) -> None:
        self._beats += 1
        holder = {"process": _PROCESS, "host": socket.gethostname(), "pid": os.getpid(), "beats": self._beats}
        fs.write_bytes(self._uri, json.dumps(holder).encode())


def _read(uri: str) -> dict[str, Any] | None:
    """The holder in a lease file; None if the file is missing or unreadable."""
    try:
        holder: dict[str, Any] = json.loads(fs.read_bytes(uri))
    except (OSError, ValueError, ScalingNoteError):
        return None
    return holder


def _ended(holder: dict[str, Any]) -> bool:
    """Whether the holder is known to have ended, or is this process."""
    if holder["process"] == _PROCESS:
        return True
    if holder["host"] != socket.gethostname():
        return False
    try:
        return holder["pid"] == os.getpid() or psutil.Process(holder["pid"]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _renew_periodically(held: "WeakSet[Lease]") -> None:
    while True:
        time.sleep(HEARTBEAT_INTERVAL_S)
        _renew_all(list(held))  # a call, so that no local variable keeps a lease alive during the sleep


def _renew_all(held: list[Lease]) -> None:
    for lease in held:
        try:
            lease.renew()
        except Exception as error:  # storage may be unavailable for a while: the next renewal may succeed
            log.warning("the lease could not be renewed: %s", error)
