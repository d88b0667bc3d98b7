import json
import os
from pathlib import Path

import pytest

from scalingnote.core import cluster as ray_cluster
from scalingnote.core.config import Config, Resources
from scalingnote.storage import filesystem as fs
from scalingnote.storage import usage
from scalingnote.storage.artifact import Draft


def test_a_stage_counts_its_bytes_requests_and_peak(tmp_path: Path) -> None:
    fs.write_bytes(f"{tmp_path}/before", bytes(5000))
    draft = Draft(f"{tmp_path}/art", kind="thing", config=Config(), parents={})
    draft.write_bytes("part", bytes(100_000))
    assert len(fs.read_bytes(draft.path("part"))) == 100_000
    used = draft.commit(counts={}).manifest.info["usage"]
    assert 100_000 <= used["bytes_read"] < 103_000
    assert 100_000 <= used["bytes_written"] < 103_000  # with its lease and its claim
    assert 3 <= used["requests"] < 15
    assert used["driver_peak_bytes"] > 10_000_000
    assert used["worker_peak_bytes"] == 0
    assert json.loads((tmp_path / "art/manifest.json").read_bytes())["info"]["usage"] == used


def test_killed_processes_are_counted_too(cluster: None, tmp_path: Path) -> None:
    def write_and_die(uri: str) -> None:  # the first attempt writes the file, the second finds it
        if not fs.exists(uri):
            fs.write_bytes(uri, bytes(1000))
            os._exit(1)

    start = usage.snapshot()
    uris = [f"{tmp_path}/{n}" for n in range(2)]
    list(ray_cluster.map_tasks(write_and_die, uris))
    used = usage.since(start)
    assert used["bytes_written"] == 2000
    assert used["requests"] >= 4 + 2  # two checks and one write of each
    assert used["worker_peak_bytes"] > 10_000_000
    list(ray_cluster.map_tasks(fs.read_bytes, uris, Resources(workers=1)))
    again = usage.since(start)
    assert again["bytes_read"] == 2000


def test_counts_of_all_nodes_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    local_counts = usage.snapshot()
    remote_counts = {"far": (3, 20, 10, 7 << 30, 0)}
    start = local_counts | {"far": (1, 0, 10, 1 << 30, 0), "idle": (5, 5, 5, 9 << 30, 0)}
    monkeypatch.setattr(usage, "_on_other_nodes", lambda: [remote_counts, {"idle": start["idle"]}])
    used = usage.since(start)
    assert (used["requests"], used["bytes_read"], used["bytes_written"]) == (2, 20, 0)
    assert used["worker_peak_bytes"] == 7 << 30  # the idle process counted nothing since
    line = usage.summary(used, seconds=2.0, rows=100)
    assert line.startswith("50 rows/s, 0.0 MB/s read, 0.0 MB/s written, 2 requests, peak ")
    assert line.endswith("7.52 GB worker")
