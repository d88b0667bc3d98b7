import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest

from scalingnote.datasets.raw_rows import Quarantine
from scalingnote.errors import ConfigError, DataError
from scalingnote.experiment import access_log
from scalingnote.experiment.access_log import AccessWriter

RECORD = {
    "time": 1764000000.123,
    "request_id": "q1",
    "path": "/search",
    "status": 200,
    "arm": "student",
    "unit": "u:9f3c",
    "query": "高血压",
    "k": 10,
    "filter": {"topic": "cardiology"},
    "doc_ids": ["d1", "d2"],
    "scores": [0.75, 0.5],
    "personalised": False,
    "index_version": "3f0c",
    "shards": 4,
    "shards_answered": 3,
    "timings_ms": {"encode": 0.5, "search": 1.25, "rerank": 0, "total": 2},
    "error": None,
}


def line(**changes) -> bytes:
    return json.dumps(RECORD | changes).encode() + b"\n"


def requests(*files: Path) -> tuple[list[dict], dict[str, int]]:
    quarantine = Quarantine()
    batches = access_log.read_requests(map(str, files), quarantine, rows=3)
    rows = pa.Table.from_batches(batches, schema=access_log.REQUESTS).to_pylist()
    return rows, dict(quarantine.rejected)


def test_a_record_is_read_as_it_was_written(tmp_path):
    writer = AccessWriter(tmp_path, "replica#1", flush_s=60.0)
    for number in range(5):
        writer.append(RECORD | {"request_id": f"q{number}"})
    writer.append({"time": 2.0, "request_id": "\ud800", "path": "/search", "status": 500, "new": [1]})
    writer.close()
    assert writer.path.name == "access-replica_1.jsonl"
    rows, rejected = requests(writer.path)
    assert [row["request_id"] for row in rows] == [f"q{i}" for i in range(5)]
    assert rejected == {"access log: invalid JSON": 1}  # half of a surrogate pair
    timings = {f"{stage}_ms": float(ms) for stage, ms in RECORD["timings_ms"].items()}
    expected = {k: v for k, v in RECORD.items() if k != "timings_ms"} | timings
    assert rows[1] == expected | {"request_id": "q1", "filter": '{"topic": "cardiology"}'}


LARGEST = "Input should be less than or equal to 340282346638528860000000000000000000000"
BROKEN = {
    b"{nonsense}\n": "invalid JSON",
    b"[1]\n": "Input should be an object",
    b'{"a": "\xff"}\n': "invalid JSON",
    b"[" * 100_000 + b"\n": "invalid JSON",
    line(time=None): "time: Input should be a valid number",
    line(status="200"): "status: Input should be a valid integer",
    line(k=2**31): "k: Input should be less than 2147483648",
    line(personalised=1): "personalised: Input should be a valid boolean",
    line(doc_ids=["d", 1]): "doc_ids: Input should be a valid string",
    line(scores=[float("nan")]): f"scores: {LARGEST}",
    line(time=1).replace(b"1,", b"1e999,", 1): "time: Input should be less than 100000000000",
    line(timings_ms=[1]): "timings_ms: Input should be an object",
    line(timings_ms={"total": 10**400}): f"timings_ms: total: {LARGEST}",
    line(time=1_700_000_000_123_456_789): "time: Input should be less than 100000000000",
    line(query="\ud800"): "invalid JSON",
    line()[:50]: "torn: the file ends within the line",
}


def test_what_is_broken_costs_itself_alone(tmp_path):
    path = tmp_path / "access-a.jsonl"
    path.write_bytes(b"".join(line() + broken for broken in BROKEN))
    rows, rejected = requests(path)
    assert len(rows) == len(BROKEN)
    assert sum(rejected.values()) == len(BROKEN)
    assert set(rejected) == {f"access log: {reason}" for reason in BROKEN.values()}
    whole = tmp_path / "access-b.jsonl"
    whole.write_bytes(b"\n" + line() + line().rstrip())  # killed between the last byte and the line's end
    assert (len(requests(whole)[0]), requests(whole)[1]) == (2, {})


def test_integers_of_any_size_are_read_where_numbers_are_real(tmp_path):
    (tmp_path / "access-a.jsonl").write_bytes(line(timings_ms={"total": 2**24 + 1}, scores=[2**24 + 1, 1]))
    rows, rejected = requests(tmp_path / "access-a.jsonl")
    assert (rows[0]["total_ms"], rows[0]["scores"], rejected) == (2.0**24, [2.0**24, 1.0], {})


def test_files_are_found_once_and_packed_ones_are_read(tmp_path):
    (tmp_path / "access-a.jsonl").write_bytes(line())
    (tmp_path / "access-a.17.jsonl.gz").write_bytes(gzip.compress(line() * 2))
    (tmp_path / "other.jsonl").write_bytes(b"no log\n")
    found = access_log.find_logs([str(tmp_path), f"{tmp_path}/access-a.j*"])
    assert [Path(uri).name for uri in found] == ["access-a.17.jsonl.gz", "access-a.jsonl"]
    assert len(requests(*map(Path, found))[0]) == 3
    with pytest.raises(DataError, match="no access log at"):
        access_log.find_logs([str(tmp_path), str(tmp_path / "nothing")])
    torn = tmp_path / "access-b.jsonl.gz"
    torn.write_bytes(gzip.compress(os.urandom(1 << 16).hex().encode())[:1000])
    ((reason, count),) = requests(torn)[1].items()
    assert (count, "unreadable from some place on" in reason) == (1, True)


def test_full_files_are_rotated_between_lines(tmp_path):
    size = len(json.dumps(RECORD | {"request_id": "q00"}, ensure_ascii=False, separators=(",", ":")).encode())
    writer = AccessWriter(tmp_path, "a", flush_s=60.0, max_bytes=3 * (size + 1), clock_ns=lambda: 7)
    for number in range(10):
        writer.append(RECORD | {"request_id": f"q{number:02d}"})
    writer.close()
    files = [tmp_path / f"access-a.{n}.jsonl" for n in (7, 8, 9)] + [writer.path]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert [len(requests(path)[0]) for path in files] == [3, 3, 3, 1]
    rows, rejected = requests(*files)
    assert ([row["request_id"] for row in rows], rejected) == ([f"q{i:02d}" for i in range(10)], {})
    again = AccessWriter(tmp_path, "a", max_bytes=10, clock_ns=lambda: 10)
    for _ in range(2):  # longer than a file: alone in one
        again.append(RECORD)
    again.close()
    files += [tmp_path / f"access-a.{n}.jsonl" for n in (10, 11)]
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_a_name_is_taken_while_its_writer_lives(tmp_path):
    writer = AccessWriter(tmp_path, "a")
    with pytest.raises(ConfigError, match="written by another process"):
        AccessWriter(tmp_path, "a")
    writer.close()
    writer.append(RECORD)
    assert writer.dropped == 1
    AccessWriter(tmp_path, "a").close()


KILLED = """
import sys, time
from scalingnote.experiment.access_log import AccessWriter
writer = AccessWriter(sys.argv[1], "a", flush_s=0.02)
number = 0
while True:
    writer.append({"time": 1.0, "request_id": f"q{number}", "path": "/search", "status": 200})
    number += 1
    if number % 50 == 0:
        time.sleep(0.001)
"""


def test_a_killed_writer_loses_its_last_moments_and_nothing_within(tmp_path):
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


def test_a_disk_that_refuses_is_waited_for_and_bounded(tmp_path, monkeypatch, caplog):
    writer = AccessWriter(tmp_path, "a", flush_s=60.0, max_waiting=4)
    writer.append(RECORD)
    writer.flush()
    real, full = os.write, True

    def write(file: int, data) -> int:
        if file != writer._file or not full:
            return real(file, data)
        real(file, bytes(data)[:10])  # half a line, then no more
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    writer.append(RECORD | {"request_id": "q2"})
    writer.append(RECORD | {"request_id": {1, 2}})  # no JSON
    writer.flush()
    assert (len(requests(writer.path)[0]), requests(writer.path)[1]) == (1, {})
    for number in range(9):
        writer.append(RECORD | {"request_id": f"q{number + 3}"})
    assert writer.dropped == 6  # one is no JSON, five found no room
    full = False
    writer.close()
    rows, rejected = requests(writer.path)
    assert ([row["request_id"] for row in rows], rejected) == (["q1", "q2", "q3", "q4", "q5", "q6"], {})


def test_handing_over_waits_for_no_disk(tmp_path, monkeypatch):
    writer = AccessWriter(tmp_path, "a", flush_s=0.001)
    held = threading.Event()
    syncing = threading.Event()

    def sync(_: int) -> None:
        syncing.set()
        held.wait(60)

    monkeypatch.setattr(os, "fsync", sync)
    writer.append(RECORD)
    assert syncing.wait(60)
    for _ in range(100):
        writer.append(RECORD)  # would hang here
    held.set()
    writer.close()
    assert len(requests(writer.path)[0]) == 101
