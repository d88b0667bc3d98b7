"""A write-ahead log: one writer appends records, and every record that was synced outlives any crash.

    folder/lock                          held by the writer
    folder/acknowledged                  the last record known to be durable
    folder/00000000000000000001.log ...  segments, named after their first record; a record is header, payload

Records are numbered from 1 without gaps. The end of the newest segment may be torn by a crash: what was never
acknowledged is cut off when the writer comes back. Anything else that is not as it was written is damage, and
refused. An acknowledgement is known from two places: the file of that name, which outlives the process but is
not synced, and every later record, whose header says what had been acknowledged when it was written.
"""

import os
import threading
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from scalingnote.errors import ArtifactError, ConfigError
from scalingnote.index.live.claim import claim
from scalingnote.index.live.config import DEFAULTS
from scalingnote.index.live.wal_segment import (
    Record,
    claimed,
    framed,
    make_folder,
    records,
    segments,
    start_segment,
)
from scalingnote.log import get_logger
from scalingnote.storage import filesystem as fs

_MARK = Struct("<QI")  # the record acknowledged, and the CRC-32 of its number
MAX_RECORD_BYTES = 1 << 30
_sync = getattr(os, "fdatasync", os.fsync)  # the file's times need not be durable


class Log:
    """The writer of a log. Threads may append while one of them syncs."""

    def __init__(
        self, folder: str | Path, *, after: int = 0, segment_bytes: int = DEFAULTS.segment_bytes
    ) -> None:
        """Take the log for writing; a torn end is cut off. New records are numbered above `after`.

        ConfigError when another process writes it, ArtifactError when an acknowledged record is damaged.
        """
        self.folder, self._segment_bytes = Path(folder), segment_bytes
        make_folder(self.folder)
        self._claim = claim(
            self.folder / "lock",
            taken=f"{self.folder} is being written by another process ({{owner}}): a log has one writer; "
            "stop that one, or open this shard as a follower",
        )
        try:
            last, self._path = _recover(self.folder)
            self._mark = os.open(self.folder / "acknowledged", os.O_RDWR | os.O_CREAT, 0o644)
            self._lock, self._syncing = threading.Lock(), threading.Lock()
            self._broken, self._closed = False, False
            if self._path is None or last < after:  # all that is here is older than what it is to go on from
                last = max(last, after)
                self._path = start_segment(self.folder, last + 1)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._file).st_size
            self._next, self._acknowledged = last + 1, last
            self._note()
        except BaseException:
            os.close(self._claim)
            raise

    @property
    def acknowledged(self) -> int:
        """The last record that is durable."""
        return self._acknowledged

    def append(self, payload: bytes) -> int:
        """Write a record and return its number. It is durable after the next :meth:`sync`, not before."""
        if len(payload) > MAX_RECORD_BYTES:
            raise ConfigError(f"a record of {len(payload):,} bytes is too large: write smaller batches")
        with self._lock:
            self._require_usable()
            frame = framed(payload, sequence=self._next, acknowledged=self._acknowledged)
            try:
                _write_all(self._file, frame)
            except OSError as error:
                self._broken = True  # until the half record is gone
                os.ftruncate(self._file, self._size)
                self._broken = False
                raise ArtifactError(f"{self._path}: {error}; the record was not written") from error
            self._size += len(frame)
            self._next += 1
            return self._next - 1

    def sync(self) -> int:
        """Make durable what was appended so far; the number of the last record that is.

        One thread syncs at a time, for all whose records are there: those who waited find theirs durable.
        Two at once could note their numbers in the wrong order, or close a segment under one another.
        """
        with self._lock:
            self._require_usable()
            wanted = self._next - 1
        with self._syncing:
            if wanted > self._acknowledged:
                with self._lock:
                    self._require_usable()
                    target = self._next - 1
                try:
                    _sync(self._file)
                except OSError as error:
                    # The pages count as clean from here on: a second sync would succeed and mean nothing.
                    self._broken = True
                    message = f"{self._path} cannot be made durable: {error}; open it again"
                    raise ArtifactError(message) from error
                with self._lock:
                    self._acknowledged = target
                    self._note()
                    if self._size >= self._segment_bytes and self._next == target + 1:
                        self._rotate()
            return self._acknowledged

    def drop(self, *, through: int) -> None:
        """Remove the segments all of whose records are numbered up to `through`."""
        with self._lock:
            self._require_usable()
            if self._size and self._acknowledged <= through and self._next == self._acknowledged + 1:
                self._rotate()
            found = segments(self.folder)
            for (_, path), (following, _) in pairwise(found):
                if following <= through + 1:
                    path.unlink()
            fs.sync(self.folder)  # removed names are durable only once their folder is

    def rotate(self) -> None:
        """Begin a segment, so that what was synced by now can be dropped whole one day."""
        with self._lock:
            self._require_usable()
            if self._size and self._next == self._acknowledged + 1:
                self._rotate()

    def close(self) -> None:
        """Give the log back; what was not synced may be lost. Closing twice is no error."""
        with self._lock:
            self._broken = True
            if not self._closed:
                for file in (self._file, self._mark, self._claim):
                    os.close(file)
            self._closed = True

    def _require_usable(self) -> None:
        if self._broken:
            raise ArtifactError(f"{self.folder} is closed, or a write to it failed: open it again")

    def _rotate(self) -> None:
        path = start_segment(self.folder, self._next)
        os.close(self._file)
        self._path, self._file, self._size = path, os.open(path, os.O_WRONLY | os.O_APPEND), 0

    def _note(self) -> None:
        number = _MARK.pack(self._acknowledged, zlib.crc32(self._acknowledged.to_bytes(8, "little")))
        os.pwrite(self._mark, number, 0)


def acknowledged(folder: str | Path) -> int:
    """The last record that the writer, in this or another process, acknowledged; 0 before the first.

    After a crash of the machine the number may be too low until the writer comes back.
    """
    try:
        data = (Path(folder) / "acknowledged").read_bytes()
    except FileNotFoundError:
        return 0
    if len(data) != _MARK.size:
        return 0
    number, check = _MARK.unpack(data)
    return int(number) if zlib.crc32(data[:8]) == check else 0


def holds(folder: str | Path, *, after: int) -> bool:
    """Whether every acknowledged record above `after` is still there."""
    found = segments(Path(folder))
    return acknowledged(folder) <= after or (bool(found) and found[0][0] <= after + 1)


def read(folder: str | Path, *, after: int = 0, until: int | None = None) -> Iterator[Record]:
    """The acknowledged records above `after`, or those of them up to `until`, in order.

    A reader needs no lock: it may follow a log that is being written. ArtifactError where one is damaged, or
    missing because it was dropped.
    """
    folder = Path(folder)
    until = acknowledged(folder) if until is None else until
    found = segments(folder)
    expected = after + 1
    for number, (first, path) in enumerate(found):
        following = found[number + 1][0] if number + 1 < len(found) else None
        if expected > until or (following is not None and following <= expected):
            continue
        if first > expected:
            break
        with _open(path) as stream:
            for record, _ in records(stream, path, first=first):
                if record.sequence == expected:
                    yield record
                    expected += 1
                if expected > until:  # beyond it a record may be half written
                    break
    if expected <= until:
        raise ArtifactError(
            f"{folder} has no record {expected}, though {until} was acknowledged: it was dropped after a "
            "compaction (adopt the current index version), or a segment is missing (restore it)"
        )


def _recover(folder: Path) -> tuple[int, Path | None]:
    """The last whole record and its segment, after cutting off what a crash has torn.

    What no acknowledgement is known of is written again: where its sync failed, the pages count as clean, and
    a sync of them would mean nothing.
    """
    found, known = segments(folder), acknowledged(folder)
    if not found and known:
        raise ArtifactError(
            f"{folder} has no segment, but record {known} was acknowledged: restore its files"
        )
    if not found:
        return 0, None
    first, path = found[-1]
    last, end, durable = first - 1, 0, 0
    with path.open("rb+") as stream:
        try:
            for record, stop in records(stream, path, first=first):
                last, end = record.sequence, stop
                durable = stop if last <= known else durable
        except ArtifactError:
            stream.seek(end)
            if max(known, claimed(stream.read())) > last:
                raise
            torn = path.stat().st_size - end
            get_logger("index").warning("%s: %d bytes of an unfinished record are cut off", path, torn)
            stream.truncate(end)
        if known > last:
            raise ArtifactError(
                f"{path} ends with record {last}, but {known} was acknowledged: restore the file"
            )
        stream.seek(durable)
        again = stream.read(end - durable)
        stream.seek(durable)
        stream.write(again)
        stream.flush()
        os.fsync(stream.fileno())
    return last, path


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ArtifactError(
            f"{path} was dropped while it was read: adopt the current index version"
        ) from None


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
