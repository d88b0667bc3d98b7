"""Files that processes of one machine read together: copied to it once."""

import fcntl
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from scalingnote.storage import filesystem as fs


def fetch(uri: str, files: list[str], *, version: str) -> Path:
    """A folder of this machine with `files` of `uri`: itself when local, else a copy.

    Of all processes that want a file, the first copies it.
    """
    with _alone(uri) if "://" in uri else nullcontext():
        return fs.download(uri, files, version=version)


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """One process of this machine at a time."""
    name = f"scalingnote-{hashlib.sha256(uri.encode()).hexdigest()[:24]}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
