"""Access logs: complete lines, full files, one writer per name, killed processes and full disks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from access_lines import RECORD, requests
from scalingnote.core.errors import ConfigError
from scalingnote.evaluate.experiment.access_log import REQUESTS
from scalingnote.serve import access_writer
from scalingnote.serve.access_writer import AccessWriter


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    """Let writers write only when a test calls `flush` or `close`."""
    monkeypatch.setattr(access_writer, "FLUSH_S", 60.0)


def test_a_record_is_read_as_it_was_written(tmp_path):
    writer = AccessWriter(tmp_path, "replica#1")
    for number in range(5):
        writer.append(RECORD | {"request_id": f"q{number}"})
    writer.append({"time": 2.0, "request_id": "\ud800", "path": "/search", "status": 500, "new": [1]})
    writer.close()
    assert writer.path.name == "access-replica_1.jsonl"
    rows, rejected = requests(writer.path)
    assert [row["request_id"] for row in rows] == [f"q{i}" for i in range(5)]
    assert rejected == {"access log: invalid JSON": 1}  # half of a surrogate pair
    expected = RECORD | {"request_id": "q1", "total_ms": RECORD["timings_ms"]["total"]}
    assert rows[1] == {name: expected[name] for name in REQUESTS.names}


def test_full_files_are_rotated_between_lines(tmp_path, monkeypatch):
    size = len(json.dumps(RECORD | {"request_id": "q00"}, ensure_ascii=False, separators=(",", ":")).encode())
    monkeypatch.setattr(access_writer, "MAX_FILE_BYTES", 3 * (size + 1))
    monkeypatch.setattr(access_writer.time, "time_ns", lambda: 7)
    writer = AccessWriter(tmp_path, "a")
    for number in range(10):
        writer.append(RECORD | {"request_id": f"q{number:02d}"})
    writer.close()
    files = [tmp_path / f"access-a.{n}.jsonl" for n in (7, 8, 9)] + [writer.path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert [len(requests(path)[0]) for path in files] == [3, 3, 3, 1]
    rows, rejected = requests(*files)
    assert ([row["request_id"] for row in rows], rejected) == ([f"q{i:02d}" for i in range(10)], {})
    monkeypatch.setattr(access_writer, "MAX_FILE_BYTES", 10)
    again = AccessWriter(tmp_path, "a")
    for _ in range(2):  # a record longer than a file gets its own file
        again.append(RECORD)
    again.close()
    files += [tmp_path / f"access-a.{n}.jsonl" for n in (10, 11)]
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_a_second_writer_of_the_same_name_is_refused(tmp_path):
    writer = AccessWriter(tmp_path, "a")
    with pytest.raises(ConfigError, match="written by another process"):
        AccessWriter(tmp_path, "a")
    writer.close()
    writer.append(RECORD)
    assert writer.dropped == 1
    AccessWriter(tmp_path, "a").close()


KILLED = """
import sys, time
from scalingnote.serve import access_writer
access_writer.FLUSH_S = 0.02
writer = access_writer.AccessWriter(sys.argv[1], "a")
number = 0
while True:
    writer.append({"time": 1.0, "request_id": f"q{number}", "path": "/search", "status": 200})
    number += 1
    if number % 50 == 0:
        time.sleep(0.001)
"""


def test_a_killed_writer_loses_only_records_since_the_last_flush(tmp_path):
    path = tmp_path / "access-a.jsonl"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    while process.poll() is None and not (path.exists() and path.stat().st_size > 100_000):
        time.sleep(0.01)
    flushed = path.read_bytes().count(b"\n")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with path.open("ab") as stream:  # as if a machine had died within a line
        stream.write(b'{"time": 1.0, "requ')
    writer = AccessWriter(tmp_path, "a")
    writer.append(RECORD)
    writer.close()
    rows, rejected = requests(path)
    assert len(rows) > flushed
    assert [row["request_id"] for row in rows] == [*(f"q{i}" for i in range(len(rows) - 1)), "q1"]
    assert rejected == {"access log: invalid JSON": 1}


def test_lines_are_kept_and_bounded_while_the_disk_is_full(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(access_writer, "MAX_WAITING", 4)
    writer = AccessWriter(tmp_path, "a")
    writer.append(RECORD)
    writer.flush()
    real, full = os.write, True

    def write(file: int, data) -> int:
        if file != writer._file or not full:
            return real(file, data)
        real(file, bytes(data)[:10])  # the disk is full after half a line
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    writer.append(RECORD | {"request_id": "q2"})
    writer.append(RECORD | {"request_id": {1, 2}})  # not JSON
    writer.flush()
    assert (len(requests(writer.path)[0]), requests(writer.path)[1]) == (1, {})
    for number in range(9):
        writer.append(RECORD | {"request_id": f"q{number + 3}"})
    assert writer.dropped == 6  # one is not JSON, five did not fit into the queue
    full = False
    writer.close()
    rows, rejected = requests(writer.path)
    assert ([row["request_id"] for row in rows], rejected) == (["q1", "q2", "q3", "q4", "q5", "q6"], {})


def test_append_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(access_writer, "FLUSH_S", 0.001)
    writer = AccessWriter(tmp_path, "a")
    released = threading.Event()
    syncing = threading.Event()

    def sync(_: int) -> None:
        syncing.set()
        released.wait(60)

    monkeypatch.setattr(os, "fsync", sync)
    writer.append(RECORD)
    assert syncing.wait(60)
    for _ in range(100):
        writer.append(RECORD)  # would hang here if it waited
    released.set()
    writer.close()
    assert len(requests(writer.path)[0]) == 101
