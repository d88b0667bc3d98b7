"""A write-ahead log: one writer appends records, and every synced record survives any crash.

    folder/lock                          locked by the writer
    folder/acknowledged                  the last record that is known to be durable
    folder/00000000000000000001.log ...  segments, named after their first record; a record is header, payload

Records are numbered from 1 without gaps. A crash may leave an incomplete record at the end of the newest
segment: the writer cuts off such a record, which was never acknowledged, when it opens the log. Any other
difference from the written bytes is damage and an error. An acknowledgement is stored in two places: in the
file `acknowledged`, which outlives the process but is not synced, and in every later record, which has the
number of the last acknowledged record in its header.
"""

import fcntl
import os
import threading
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.core.log import get_logger
from scalingnote.storage import filesystem as fs

_MARK = Struct("<QI")  # number of the acknowledged record, and the CRC-32 of this number
MAX_RECORD_BYTES = 1 << 30
SEGMENT_BYTES = 64 << 20  # size at which a segment is closed and the next one begins
_sync = getattr(os, "fdatasync", os.fsync)  # the times of the file need not be durable
_MAGIC = b"SNL1"
_HEADER, _CRC = Struct("<4sIIQQ"), Struct("<I")  # the fields of Header; CRC-32 of these bytes
_FRAME = _HEADER.size + _CRC.size


class Header(NamedTuple):
    """Header of a record; its fields are stored in this order."""

    magic: bytes
    length: int  # bytes of the payload
    check: int  # CRC-32 of the payload
    sequence: int
    acknowledged: int  # the last record that was durable when this one was written


class Log:
    """Writer of a log; threads may append while one of them syncs."""

    def __init__(self, folder: str | Path, *, after: int = 0) -> None:
        """Open the log for writing, and cut off a record that a crash left incomplete.

        Args:
            folder: of the log, created if missing.
            after: number that new records must exceed.

        Raises:
            ConfigError: another process writes this log.
            ArtifactError: an acknowledged record is damaged.
        """
        self.folder = Path(folder)
        make_folder(self.folder)
        self._lock_handle = lock_file(
            self.folder / "lock",
            taken=f"another process ({{owner}}) writes {self.folder}, and a log has one writer: stop that "
            "process, or open the shard as a follower",
        )
        try:
            last, newest = _recover(self.folder)
            self._mark = os.open(self.folder / "acknowledged", os.O_RDWR | os.O_CREAT, 0o644)
            self._lock, self._syncing = threading.Lock(), threading.Lock()
            self._broken, self._closed = False, False
            if newest is None or last < after:  # all records here are older than `after`
                last = max(last, after)
                newest = _start_segment(self.folder, last + 1)
            self._path = newest
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._file).st_size
            self._next, self._acknowledged = last + 1, last
            self._note()
        except BaseException:
            os.close(self._lock_handle)
            raise

    @property
    def acknowledged(self) -> int:
        """Last record that is durable."""
        return self._acknowledged

    def append(self, payload: bytes) -> int:
        """Write a record and return its number. It is durable after the next :meth:`sync`, not before."""
        if len(payload) > MAX_RECORD_BYTES:
            raise ConfigError(f"a record of {len(payload):,} bytes is too large: write smaller batches")
        with self._lock:
            self._require_usable()
            check = zlib.crc32(payload)
            header = _HEADER.pack(*Header(_MAGIC, len(payload), check, self._next, self._acknowledged))
            frame = header + _CRC.pack(zlib.crc32(header)) + payload
            try:
                _write_all(self._file, frame)
            except OSError as error:
                self._broken = True  # until the incomplete record is cut off
                os.ftruncate(self._file, self._size)
                self._broken = False
                raise ArtifactError(f"{self._path}: {error}; the record was not written") from error
            self._size += len(frame)
            self._next += 1
            return self._next - 1

    def sync(self) -> int:
        """Make all appended records durable, and return the number of the last durable record.

        One thread syncs at a time, for all records appended so far, so that the records of waiting threads
        are already durable after it. Two syncs at once could store their numbers in the wrong order, or one
        could close the segment of the other.
        """
        with self._lock:
            self._require_usable()
            last = self._next - 1
        with self._syncing:
            if last > self._acknowledged:
                with self._lock:
                    self._require_usable()
                    target = self._next - 1
                try:
                    _sync(self._file)
                except OSError as error:
                    # The kernel marks the pages as clean now: a second sync would succeed without effect.
                    self._broken = True
                    raise ArtifactError(
                        f"{self._path} cannot be made durable: {error}; open it again"
                    ) from error
                with self._lock:
                    self._acknowledged = target
                    self._note()
                    if self._size >= SEGMENT_BYTES:
                        self._rotate_if_synced()
            return self._acknowledged

    def drop(self, *, through: int) -> None:
        """Delete segments without records above `through`, except the newest."""
        with self._lock:
            self._require_usable()
            if self._acknowledged <= through:
                self._rotate_if_synced()
            files = segments(self.folder)
            for (_, path), (following, _) in pairwise(files):
                if following <= through + 1:
                    path.unlink()
            fs.sync(self.folder)  # makes the deletion durable

    def rotate(self) -> None:
        """Begin a new segment, so that the segments of the synced records can be dropped later."""
        with self._lock:
            self._require_usable()
            self._rotate_if_synced()

    def require_claim(self) -> None:
        """Raise an ArtifactError unless this process can still write its segment and holds the lock."""
        with self._lock:
            self._require_usable()
            for path, handle in ((self.folder / "lock", self._lock_handle), (self._path, self._file)):
                try:
                    is_held = os.path.samestat(os.stat(path), os.fstat(handle))
                except OSError as error:
                    raise ArtifactError(f"{path} cannot be reached: {error}; open the log again") from error
                if not is_held:
                    raise ArtifactError(f"{path} was replaced while it was written: open the log again")

    def close(self) -> None:
        """Close the log; records that were not synced may be lost. A second call has no effect."""
        with self._lock:
            self._broken = True
            if not self._closed:
                for file in (self._file, self._mark, self._lock_handle):
                    os.close(file)
            self._closed = True

    def _require_usable(self) -> None:
        if self._broken:
            raise ArtifactError(f"{self.folder} is closed, or a write to it failed: open it again")

    def _rotate_if_synced(self) -> None:
        """Begin a new segment, unless the current one is empty or has a record that is not durable."""
        if self._size and self._next == self._acknowledged + 1:
            path = _start_segment(self.folder, self._next)
            os.close(self._file)
            self._path, self._file, self._size = path, os.open(path, os.O_WRONLY | os.O_APPEND), 0

    def _note(self) -> None:
        number = _MARK.pack(self._acknowledged, zlib.crc32(self._acknowledged.to_bytes(8, "little")))
        os.pwrite(self._mark, number, 0)


def last_acknowledged(folder: str | Path) -> int:
    """Read the last record that the writer, in this or another process, acknowledged; 0 before the first.

    After a crash of the machine the number may be too low until a writer opens the log.
    """
    try:  # no file object, which would take three times as long: every search with a delta reads this
        mark = os.open(f"{folder}/acknowledged", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        data = os.read(mark, _MARK.size + 1)
    finally:
        os.close(mark)
    if len(data) != _MARK.size:
        return 0
    number, check = _MARK.unpack(data)
    return int(number) if zlib.crc32(data[:8]) == check else 0


def holds(folder: str | Path, *, after: int) -> bool:
    """Return whether the log still has every acknowledged record above `after`."""
    files = segments(Path(folder))
    return last_acknowledged(folder) <= after or (bool(files) and files[0][0] <= after + 1)


def read(folder: str | Path, *, after: int = 0, until: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield numbers and payloads of acknowledged records in order; no lock is needed while a writer appends.

    Args:
        folder: of the log.
        after: number of the record before the first.
        until: number of the last record; None: the last acknowledged one.

    Raises:
        ArtifactError: a record is damaged, or was dropped.
    """
    folder = Path(folder)
    until = last_acknowledged(folder) if until is None else until
    files = segments(folder)
    ends = [*(first for first, _ in files[1:]), until + 1]
    expected = after + 1
    for (first, path), end in zip(files, ends, strict=False):
        if not first <= expected < min(end, until + 1):
            continue
        try:
            stream = path.open("rb")
        except FileNotFoundError:
            raise ArtifactError(
                f"{path} was deleted while it was read: adopt the current index version"
            ) from None
        with stream:
            for number, payload, _ in _records(stream, path, first=first, after=expected - 1):
                yield number, payload
                expected = number + 1
                if expected > until:  # later records may be incomplete
                    break
    if expected <= until:
        raise ArtifactError(
            f"{folder} has no record {expected}, but record {until} was acknowledged: it was dropped after a "
            "compaction (adopt the current index version), or a segment is missing (restore it)"
        )


def _recover(folder: Path) -> tuple[int, Path | None]:
    """Cut off a record that a crash left incomplete, and return the last complete record and its segment.

    Records without a known acknowledgement are written again: if their sync failed, the kernel has marked the
    pages as clean, and another sync would have no effect.
    """
    files, acknowledged = segments(folder), last_acknowledged(folder)
    if not files and acknowledged:
        raise ArtifactError(
            f"{folder} has no segment, but record {acknowledged} was acknowledged: restore its files"
        )
    if not files:
        return 0, None
    first, path = files[-1]
    last, end, durable = first - 1, 0, 0
    with path.open("rb+") as stream:
        try:
            for number, _, stop in _records(stream, path, first=first):
                last, end = number, stop
                durable = end if last <= acknowledged else durable
        except ArtifactError:
            stream.seek(end)
            if max(acknowledged, _highest_acknowledgement(stream.read())) > last:
                raise
            excess = path.stat().st_size - end
            get_logger("index").warning("%s: %d bytes of an incomplete record are cut off", path, excess)
            stream.truncate(end)
        if acknowledged > last:
            raise ArtifactError(
                f"{path} ends with record {last}, but record {acknowledged} was acknowledged: restore it"
            )
        stream.seek(durable)
        unsynced = stream.read(end - durable)
        stream.seek(durable)
        stream.write(unsynced)
        stream.flush()
        os.fsync(stream.fileno())
    return last, path


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _records(stream: BinaryIO, path: Path, *, first: int, after: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """Yield number, payload and end offset of the records of a segment above `after`.

    Only the headers of earlier records are read: a process that follows the log has read them, and looks for
    the next record many times per second.

    Raises:
        ArtifactError: a record is incomplete or damaged.
    """
    sequence, start = first, 0
    while data := stream.read(_FRAME):
        header = _parse(data)
        if header is not None and header.sequence == sequence <= after:
            start = stream.seek(header.length, os.SEEK_CUR)
            sequence += 1
            continue
        payload = stream.read(header.length) if header else b""
        if not header or header[1:4] != (len(payload), zlib.crc32(payload), sequence):
            raise ArtifactError(f"{path} is damaged at byte {start}, record {sequence}: restore the file")
        start += len(data) + len(payload)
        yield sequence, payload, start
        sequence += 1


def _highest_acknowledgement(data: bytes) -> int:
    """Return the highest acknowledged record that a valid header in these bytes states; 0 without one."""
    highest, start = 0, data.find(_MAGIC)
    while start >= 0:
        header = _parse(data[start : start + _FRAME])
        highest = max(highest, header.acknowledged if header else 0)
        start = data.find(_MAGIC, start + 1)
    return highest


def segments(folder: Path) -> list[tuple[int, Path]]:
    """Return the first record and the path of every segment of a log, in order."""
    return sorted((int(path.stem), path) for path in folder.glob("*.log"))


def _start_segment(folder: Path, first: int) -> Path:
    """Create an empty segment durably."""
    path = folder / f"{first:020d}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
    fs.sync(folder)
    return path


def make_folder(folder: Path) -> None:
    """Create a folder durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fs.sync(path.parent)


def _parse(data: bytes) -> Header | None:
    """Parse the header in these bytes; None if it is damaged."""
    if len(data) < _FRAME or zlib.crc32(data[: _HEADER.size]) != _CRC.unpack(data[_HEADER.size :])[0]:
        return None
    header = Header(*_HEADER.unpack(data[: _HEADER.size]))
    return header if header.magic == _MAGIC else None


def lock_file(path: Path, *, taken: str) -> int:
    """Lock a file for this process, and create it if missing; the lock ends with the handle or the process.

    Args:
        path: of the file.
        taken: message of the error; `{owner}` in it is replaced by the process that holds the lock.

    Returns:
        The handle of the file.

    Raises:
        ConfigError: another process holds the lock.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(lock, 32, 0).decode() or "pid unknown"
        os.close(lock)
        raise ConfigError(taken.format(owner=owner)) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()}".encode(), 0)
    return lock
