"""The register of a live index: which versions are kept, and which is current; one file, changed whole.

Whatever moment a process is killed at, the old register is there or the new one. What a register no longer
names is removed only after it is durable.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scalingnote.errors import ArtifactError
from scalingnote.index.live.claim import claim
from scalingnote.index.live.wal_segment import make_folder
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact, open_artifact

FILE = "versions.json"


@dataclass(frozen=True)
class Version:
    """An index version; `origin` is the digest of the index that was built, the same for all of them."""

    number: int
    uri: str
    origin: str
    documents: int
    created: str  # in UTC
    included: tuple[int, ...]  # of each shard's log, the record up to which its writes are in

    def open(self) -> Artifact:
        """The artifact."""
        return open_artifact(self.uri, kind="index")


@dataclass(frozen=True)
class Register:
    """Versions in the order in which they were last made current: the current one is the last of them."""

    kept: tuple[Version, ...]
    last: int  # the highest number that a version ever had

    @property
    def current(self) -> Version:
        """What is opened."""
        return self.kept[-1]

    @property
    def needed(self) -> list[int]:
        """The record of each log above which some version kept needs all."""
        return [min(records) for records in zip(*(each.included for each in self.kept), strict=True)]

    def activated(self, version: Version) -> "Register":
        """With this version, which may be a new one, as the current."""
        others = tuple(each for each in self.kept if each.number != version.number)
        return Register((*others, version), max(self.last, version.number))

    def limited(self, keep: int) -> "Register":
        """With the versions that were current last, so many of them."""
        return replace(self, kept=self.kept[-keep:])


def exists(folder: str | Path) -> bool:
    """Whether an index was ever opened there for writing."""
    return (Path(folder) / FILE).exists()


def read(folder: str | Path) -> Register:
    """The register of a folder; ArtifactError where there is none."""
    if not exists(folder):
        raise ArtifactError(f"{folder} has no {FILE}: no index was opened there for writing")
    path = Path(folder) / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kept = (Version(**each | {"included": tuple(each["included"])}) for each in values["kept"])
        return Register(tuple(kept), values["last"])
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): restore it") from None


def write(folder: str | Path, register: Register) -> None:
    """Replace the register, durably."""
    folder = Path(folder)
    pending = folder / f"{FILE}.pending"
    with pending.open("w", encoding="utf-8") as stream:
        json.dump(asdict(register), stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    pending.replace(folder / FILE)
    fs.sync(folder)


def begin(folder: str | Path, register: Register) -> None:
    """Write the first register of a folder; where several processes come to it, that of one of them stays."""
    folder = Path(folder)
    make_folder(folder)
    with (folder / f"{FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        if not exists(folder):
            write(folder, register)


@contextmanager
def changing(folder: str | Path) -> Iterator[None]:
    """Be the one process that changes the register; ConfigError where another is at it."""
    read(folder)
    taken = (
        f"{folder} is being compacted, or set to another version, by another process ({{owner}}): wait for it"
    )
    lock = claim(Path(folder) / "compaction.lock", taken=taken)
    try:
        yield
    finally:
        os.close(lock)
