import gzip
import os
from pathlib import Path

import pytest

from access_lines import line, requests
from scalingnote.core.errors import DataError
from scalingnote.evaluate.experiment import access_log

BROKEN = {
    b"{nonsense}\n": "invalid JSON",
    b"[1]\n": "Input should be an object",
    b'{"a": "\xff"}\n': "invalid JSON",
    b"[" * 100_000 + b"\n": "invalid JSON",
    line(time=None): "time: Input should be a valid number",
    line(status="200"): "status: Input should be a valid integer",
    line(k=2**31): "k: Input should be less than 2147483648",
    line(doc_ids=["d", 1]): "doc_ids: Input should be a valid string",
    line(time=1).replace(b"1,", b"1e999,", 1): "time: Input should be less than 100000000000",
    line(timings_ms=[1]): "timings_ms: Input should be an object",
    line(timings_ms={"total": 10**400}): "timings_ms: total: Input should be a finite number",
    line(timings_ms={"total": float("nan")}): "timings_ms: total: Input should be a finite number",
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


def test_files_are_found_once_and_packed_ones_are_read(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "access-a.jsonl").write_bytes(line(timings_ms={"total": 2**24 + 1}))  # an integer, too
    (tmp_path / "deep/access-a.17.jsonl.gz").write_bytes(gzip.compress(line() * 2))
    (tmp_path / "other.jsonl").write_bytes(b"no log\n")
    found = access_log.find_logs([str(tmp_path), f"{tmp_path}/access-a.j*"])
    assert [Path(uri).name for uri in found] == ["access-a.jsonl", "access-a.17.jsonl.gz"]
    assert [row["total_ms"] for row in requests(*map(Path, found))[0]] == [2**24 + 1, 2.0, 2.0]
    with pytest.raises(DataError, match="no file at"):
        access_log.find_logs([str(tmp_path), str(tmp_path / "nothing")])
    torn = tmp_path / "access-b.jsonl.gz"
    torn.write_bytes(gzip.compress(os.urandom(1 << 16).hex().encode())[:1000])
    ((reason, count),) = requests(torn)[1].items()
    assert (count, "unreadable from some place on" in reason) == (1, True)
