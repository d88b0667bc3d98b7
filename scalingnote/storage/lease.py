"""Leases: one process at a time builds an artifact, on any storage and without a lock server.

The holder writes its identity to a file next to its work and rewrites the file every few seconds. Another
process that is to build the same artifact waits while the file changes. A holder loses its lease if its
process on this machine has ended, or if the file has not changed for half a minute. Every write is
conditional on the previous content: if two processes take the same lease in an object store, one write fails.
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

from scalingnote.core.log import get_logger
from scalingnote.storage import filesystem as fs

HEARTBEAT_INTERVAL_S, EXPIRY_S, POLL_INTERVAL_S = 5.0, 30.0, 0.5
_PROCESS = uuid.uuid4().hex  # operating systems reuse process ids
log = get_logger("artifact")


class Lease:
    """The right to build an artifact, held until it is released or the object is garbage-collected."""

    _held: ClassVar["WeakSet[Lease]"] = WeakSet()
    _changing: ClassVar = threading.Lock()  # lock of the set: it must not change while its leases are listed
    _thread: ClassVar = threading.Lock()  # acquired by the first lease: one thread renews all leases

    def __init__(self, uri: str) -> None:
        self._uri, self._mine, self._writing = uri, b"", threading.Lock()

    def acquire(self, *, of: str, done: Callable[[], bool]) -> bool:
        """Wait until no other process holds the lease, and acquire it.

        Args:
            of: name of the artifact, for the log.
            done: returns whether the artifact is finished.

        Returns:
            Whether the lease is acquired; False if the artifact was finished while waiting.
        """
        content: bytes | None = None
        last_content, since = content, time.monotonic()
        while not (_is_free(content, unchanged_s=time.monotonic() - since) and self._write(content)):
            if (content := fs.read_if_exists(self._uri)) is not None and done():
                return False
            if content == last_content:
                time.sleep(POLL_INTERVAL_S)
                continue
            if last_content is None and (holder := _holder(content)) and not _has_ended(holder):
                log.info("process %s of %s builds %s: waiting for it", holder["pid"], holder["host"], of)
            last_content, since = content, time.monotonic()
        with self._changing:
            self._held.add(self)
        if self._thread.acquire(blocking=False):
            threading.Thread(target=_renew_periodically, daemon=True).start()
        return True

    @property
    def lost(self) -> bool:
        """Whether another process took the lease after this one had not renewed it in time."""
        holder = _holder(fs.read_if_exists(self._uri))
        return holder is not None and holder["process"] != _PROCESS

    def renew(self) -> None:
        """Renew the lease if this process still holds it."""
        with self._writing:
            if self in self._held:
                self._write(self._mine)

    def release(self) -> None:
        """Stop renewing the lease; the caller deletes its file with the work directory."""
        with self._writing, self._changing:  # wait for a renewal in progress
            self._held.discard(self)

    @classmethod
    def renew_all(cls) -> None:
        """Renew every lease that this process holds; a failure is logged."""
        with cls._changing:
            held_leases = list(cls._held)
        for lease in held_leases:
            try:
                lease.renew()
            except Exception as error:  # storage may be unavailable for a while: the next renewal may succeed
                log.warning("the lease could not be renewed: %s", error)

    def _write(self, before: bytes | None) -> bool:
        """Write the next beat if the content of the file is still `before`; return whether it was written."""
        beats = json.loads(self._mine)["beats"] + 1 if self._mine else 1
        holder = {"process": _PROCESS, "host": socket.gethostname(), "pid": os.getpid(), "beats": beats}
        new = json.dumps(holder).encode()
        if not fs.swap(self._uri, before, new):
            return False
        self._mine = new
        return True


def _holder(text: bytes | None) -> dict[str, Any] | None:
    """Parse the holder in a lease file; None if the file is missing or unreadable."""
    try:
        holder: dict[str, Any] | None = json.loads(text) if text else None
    except ValueError:
        return None
    return holder


def _is_free(text: bytes | None, *, unchanged_s: float) -> bool:
    """Return whether a lease with the content `text`, unchanged for `unchanged_s` seconds, may be taken."""
    holder = _holder(text)
    if holder is None or _has_ended(holder):
        return True
    if unchanged_s > EXPIRY_S:
        log.info("its lease has expired: resuming its work")
        return True
    return False


def _has_ended(holder: dict[str, Any]) -> bool:
    """Return whether the holder is known to have ended, or is this process."""
    if holder["process"] == _PROCESS:
        return True
    if holder["host"] != socket.gethostname():
        return False
    try:
        return holder["pid"] == os.getpid() or psutil.Process(holder["pid"]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _renew_periodically() -> None:
    while True:
        time.sleep(HEARTBEAT_INTERVAL_S)
        Lease.renew_all()  # a call, so that no local variable keeps a lease alive during the sleep
