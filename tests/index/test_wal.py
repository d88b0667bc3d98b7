import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalingnote.core.errors import ArtifactError, ConfigError
from scalingnote.index.live import wal
from scalingnote.index.live.wal import Log, read


def _write(folder: Path, *payloads: bytes, **knobs: int) -> None:
    log = Log(folder, **knobs)
    for payload in payloads:
        log.append(payload)
        log.sync()
    log.close()


def _read(folder: Path, **bounds: int) -> list[tuple[int, bytes]]:
    return [*read(folder, **bounds)]


def _forget(folder: Path) -> None:
    """Delete a file that was not synced, as a crash of the machine may do."""
    (folder / "acknowledged").unlink()


PAYLOADS = [b"one", b"", b"three" * 100, b"SNL1 four"]


def test_synced_records_are_read_in_order(tmp_path: Path) -> None:
    _write(tmp_path, *PAYLOADS[:2])
    _write(tmp_path, *PAYLOADS[2:])
    assert _read(tmp_path) == list(enumerate(PAYLOADS, 1))
    assert _read(tmp_path, after=1, until=3) == [(2, PAYLOADS[1]), (3, PAYLOADS[2])]
    assert wal.last_acknowledged(tmp_path) == 4


def test_a_reader_does_not_get_records_before_the_sync(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.append(b"one")
    assert _read(tmp_path) == []
    assert log.sync() == 1
    log.append(b"two")
    assert _read(tmp_path) == [(1, b"one")]
    log.close()


@pytest.mark.parametrize("without_mark", [False, True])
def test_only_an_incomplete_record_is_cut_off(tmp_path: Path, without_mark: bool) -> None:
    log = Log(tmp_path)
    for payload in PAYLOADS:
        log.append(payload)
        log.sync()
    segment = next(tmp_path.glob("*.log"))
    complete_size = segment.stat().st_size
    log.append(b"in flight")
    log.close()
    data = segment.read_bytes()
    for size in range(complete_size, len(data)):
        segment.write_bytes(data[:size])
        if without_mark and (tmp_path / "acknowledged").exists():
            _forget(tmp_path)
        _write(tmp_path)
        assert segment.stat().st_size == complete_size
        assert _read(tmp_path) == list(enumerate(PAYLOADS, 1))
    segment.write_bytes(data)  # a complete record without acknowledgement may be kept
    _write(tmp_path, b"later")
    assert _read(tmp_path) == list(enumerate([*PAYLOADS, b"in flight", b"later"], 1))


@pytest.mark.parametrize("without_mark", [False, True])
def test_a_flipped_byte_of_an_acknowledged_record_is_refused(tmp_path: Path, without_mark: bool) -> None:
    _write(tmp_path, b"one", b"two", b"three")
    segment = next(tmp_path.glob("*.log"))
    data = segment.read_bytes()
    # Only the mark states that the last record was acknowledged: without it, the record looks incomplete.
    length = len(data) - (len(data) // 3 + 2 if without_mark else 0)
    for position in range(length):
        segment.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        if without_mark and (tmp_path / "acknowledged").exists():
            _forget(tmp_path)
        with pytest.raises(ArtifactError, match=rf"{segment.name} is damaged at byte \d+, record \d"):
            Log(tmp_path)
        assert segment.stat().st_size == len(data)
    segment.write_bytes(data)
    _write(tmp_path, b"four")


def test_missing_acknowledged_records_are_errors(tmp_path: Path) -> None:
    _write(tmp_path, b"one", b"two")
    segment = next(tmp_path.glob("*.log"))
    segment.write_bytes(segment.read_bytes()[:35])  # the complete first record
    with pytest.raises(ArtifactError, match="ends with record 1, but record 2 was acknowledged"):
        Log(tmp_path)
    with pytest.raises(ArtifactError, match="has no record 2, but record 2 was acknowledged"):
        _read(tmp_path)
    segment.unlink()
    with pytest.raises(ArtifactError, match="has no segment, but record 2 was acknowledged"):
        Log(tmp_path)


def test_a_log_has_one_writer(tmp_path: Path) -> None:
    log = Log(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"another process \(pid {os.getpid()}\) writes .* a log has one writer"
    ):
        Log(tmp_path)
    log.close()
    log.close()
    with pytest.raises(ArtifactError, match="closed"):
        log.append(b"late")
    Log(tmp_path).close()


def test_segments_rotate_and_unneeded_ones_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 300)
    payloads = [bytes([number]) * 100 for number in range(10)]
    _write(tmp_path, *payloads)
    assert len(list(tmp_path.glob("*.log"))) == 4
    assert _read(tmp_path) == list(enumerate(payloads, 1))
    log = Log(tmp_path)
    log.drop(through=5)  # the segment of records 4 to 6 is still needed
    assert _read(tmp_path, after=3) == list(enumerate(payloads, 1))[3:]
    with pytest.raises(ArtifactError, match="has no record 3, but record 10 was acknowledged"):
        _read(tmp_path, after=2)
    log.drop(through=10)
    assert [path.stat().st_size for path in tmp_path.glob("*.log")] == [0]
    assert _read(tmp_path, after=10) == []
    assert log.append(b"eleven") == 11
    log.sync()
    log.close()
    assert _read(tmp_path, after=10) == [(11, b"eleven")]


def test_new_numbers_exceed_those_that_the_index_includes(tmp_path: Path) -> None:
    _write(tmp_path, b"old", after=0)
    _write(tmp_path, b"new", after=7)
    assert _read(tmp_path, after=7) == [(8, b"new")]


def test_threads_append_and_share_syncs(tmp_path: Path) -> None:
    log, numbers = Log(tmp_path), []

    def write(name: int) -> None:
        for count in range(50):
            number = log.append(f"{name}-{count}".encode())
            assert log.sync() >= number
            numbers.append(number)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert sorted(numbers) == list(range(1, 201))
    payloads = [payload.decode() for _, payload in _read(tmp_path)]
    for name in range(4):  # the records of each thread are in its order
        assert [p for p in payloads if p.startswith(f"{name}-")] == [f"{name}-{count}" for count in range(50)]


def test_an_earlier_sync_does_not_lower_the_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, has_begun, may_continue = Log(tmp_path), threading.Event(), threading.Event()
    sync, slow = wal._sync, threading.Thread(target=log.sync)

    def delayed_sync(file: int) -> None:
        if threading.current_thread() is slow:
            has_begun.set()
            may_continue.wait(10)
        sync(file)

    monkeypatch.setattr(wal, "_sync", delayed_sync)
    log.append(b"one")
    slow.start()
    has_begun.wait(10)
    log.append(b"two")
    quick = threading.Thread(target=log.sync)
    quick.start()
    quick.join(0.2)
    may_continue.set()
    for thread in (slow, quick):
        thread.join()
    assert log.acknowledged == wal.last_acknowledged(tmp_path) == 2
    assert _read(tmp_path) == [(1, b"one"), (2, b"two")]
    log.close()


def test_records_of_a_failed_sync_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel marks the pages of a failed sync as clean, so only another write makes them durable."""
    log = Log(tmp_path)
    log.append(b"one")
    log.sync()
    log.append(b"two")

    def fail(_: int) -> None:
        raise OSError("disk error")

    with monkeypatch.context() as patch:
        patch.setattr(wal, "_sync", fail)
        with pytest.raises(ArtifactError, match=r"cannot be made durable: .*; open it again"):
            log.sync()
    with pytest.raises(ArtifactError, match="a write to it failed"):
        log.append(b"three")
    log.close()
    segment = next(tmp_path.glob("*.log"))
    for is_first in (True, False):  # the first opening acknowledges it
        os.utime(segment, ns=(0, 0))
        Log(tmp_path).close()
        assert (segment.stat().st_mtime_ns > 0) == is_first
        assert _read(tmp_path) == [(1, b"one"), (2, b"two")]


@settings(max_examples=40)
@given(st.data())
def test_acknowledged_records_survive_any_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A crash may lose any pages that were written since the last sync, but no synced page."""
    folder = tmp_path_factory.mktemp("log")
    log, payloads = Log(folder), []
    for payload in data.draw(st.lists(st.binary(max_size=500), max_size=12)):
        payloads.append(payload)
        log.append(payload)
        if data.draw(st.booleans()):
            log.sync()
    acknowledged = log.acknowledged
    log.close()
    segment = sorted(folder.glob("*.log"))[-1]
    content = bytearray(segment.read_bytes())
    first = int(segment.stem)
    durable = sum(32 + len(payload) for payload in payloads[first - 1 : acknowledged])
    for position in range(durable, len(content), 16):
        if data.draw(st.booleans()):  # pages that were not written to the disk are zeros
            content[position : position + 16] = bytes(len(content[position : position + 16]))
    segment.write_bytes(content)
    _write(folder, b"after")
    remaining = [payload for _, payload in _read(folder)]
    assert remaining[-1] == b"after"
    assert len(remaining) - 1 >= acknowledged
    assert remaining[:-1] == payloads[: len(remaining) - 1]


def test_a_replaced_or_closed_log_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "SEGMENT_BYTES", 1)
    log = Log(tmp_path)
    log.require_claim()
    log.append(b"one")
    log.sync()  # begins another segment
    log.require_claim()
    newest = max(tmp_path.glob("*.log"))
    os.replace(newest, tmp_path / "away")
    with pytest.raises(ArtifactError, match=r"log cannot be reached.*open the log again"):
        log.require_claim()
    newest.touch()
    with pytest.raises(ArtifactError, match="was replaced while it was written"):
        log.require_claim()
    log.close()
    with pytest.raises(ArtifactError, match="closed"):
        log.require_claim()


def test_only_headers_of_earlier_records_are_read(tmp_path: Path) -> None:
    log = wal.Log(tmp_path / "log")
    for number in range(3):
        log.append(b"payload %d" % number * 10)
    log.sync()
    ((_, path),) = wal.segments(log.folder)
    data = bytearray(path.read_bytes())
    data[data.index(b"payload 0")] ^= 1
    path.write_bytes(data)
    assert [number for number, _ in _read(log.folder, after=1)] == [2, 3]
    with pytest.raises(ArtifactError, match="damaged at byte 0, record 1"):
        _read(log.folder)
    log.close()
