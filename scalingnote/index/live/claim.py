"""A claim: what one process at a time may do, by a lock that the system takes back when the process ends."""

import fcntl
import os
from pathlib import Path

from scalingnote.errors import ConfigError


def claim(path: Path, *, taken: str) -> int:
    """Lock a file and return its handle, whose closing gives the claim back.

    ConfigError with `taken`, in which `{owner}` is the other process, when it is locked.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(lock, 32, 0).decode() or "of unknown number"
        os.close(lock)
        raise ConfigError(taken.format(owner=owner)) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()}".encode(), 0)
    return lock
