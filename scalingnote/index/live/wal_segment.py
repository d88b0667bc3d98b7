"""A segment of a write-ahead log: a file of records, each behind a header that tells whether it is whole."""

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple

from scalingnote.errors import ArtifactError
from scalingnote.storage import filesystem as fs

_MAGIC = b"SNL1"
_HEADER, _CRC = Struct("<4sIIQQ"), Struct("<I")  # the fields of Header; CRC-32 of these bytes
_FRAME = _HEADER.size + _CRC.size


@dataclass(frozen=True)
class Record:
    """A payload and its number."""

    sequence: int
    payload: bytes


class Header(NamedTuple):
    """What stands before a payload."""

    magic: bytes
    length: int  # bytes of the payload
    check: int  # its CRC-32
    sequence: int
    acknowledged: int  # the last record that was durable when this one was written


def framed(payload: bytes, *, sequence: int, acknowledged: int) -> bytes:
    """A record as it lies in a segment."""
    header = _HEADER.pack(*Header(_MAGIC, len(payload), zlib.crc32(payload), sequence, acknowledged))
    return header + _CRC.pack(zlib.crc32(header)) + payload


def records(stream: BinaryIO, path: Path, *, first: int) -> Iterator[tuple[Record, int]]:
    """The records of a segment, each with the byte where it ends; ArtifactError at one that is not whole."""
    sequence, start = first, 0
    while data := stream.read(_FRAME):
        header = _parse(data)
        payload = stream.read(header.length) if header else b""
        if not header or header.sequence != sequence or not _whole(header, payload):
            raise ArtifactError(f"{path} is damaged at byte {start}, record {sequence}: restore the file")
        start += len(data) + len(payload)
        yield Record(sequence, payload), start
        sequence += 1


def claimed(data: bytes) -> int:
    """The highest record that an intact header among these bytes says was acknowledged; 0 if none does."""
    found, start = 0, data.find(_MAGIC)
    while start >= 0:
        header = _parse(data[start : start + _FRAME])
        found = max(found, header.acknowledged if header else 0)
        start = data.find(_MAGIC, start + 1)
    return found


def segments(folder: Path) -> list[tuple[int, Path]]:
    """First record and path of every segment of a log, in order."""
    return sorted((int(path.stem), path) for path in folder.glob("*.log"))


def start_segment(folder: Path, first: int) -> Path:
    """A segment without records, durable."""
    path = folder / f"{first:020d}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
    fs.sync(folder)
    return path


def make_folder(folder: Path) -> None:
    """A folder that is still there after a crash of the machine."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        fs.sync(path.parent)


def _parse(data: bytes) -> Header | None:
    """None unless it is a whole header."""
    if len(data) < _FRAME or zlib.crc32(data[: _HEADER.size]) != _CRC.unpack(data[_HEADER.size :])[0]:
        return None
    header = Header(*_HEADER.unpack(data[: _HEADER.size]))
    return header if header.magic == _MAGIC else None


def _whole(header: Header, payload: bytes) -> bool:
    return len(payload) == header.length and zlib.crc32(payload) == header.check
