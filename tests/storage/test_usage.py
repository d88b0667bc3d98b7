import json
import os
from pathlib import Path

import pytest

from scalingnote.core import cluster as ray_cluster
from scalingnote.core.config import Config, Resources
from scalingnote.storage import filesystem as fs
from scalingnote.storage import usage
from scalingnote.storage.artifact import Draft


def test_a_stage_counts_the_files_it_opens_and_its_peak(tmp_path: Path) -> None:
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


def test_processes_that_were_killed_are_counted_too(cluster: None, tmp_path: Path) -> None:
    def write_and_die(uri: str) -> None:  # the first attempt writes, the second finds it
        if not fs.exists(uri):
            fs.write_bytes(uri, bytes(1000))
            os._exit(1)

    start = usage.snapshot()
    uris = [f"{tmp_path}/{n}" for n in range(2)]
    list(ray_cluster.map_tasks(write_and_die, uris))
    used = usage.since(start)
    assert used["bytes_written"] == 2000
    assert used["requests"] >= 4 + 2  # looked for twice, written once
    assert used["worker_peak_bytes"] > 10_000_000
    list(ray_cluster.map_tasks(fs.read_bytes, uris, Resources(workers=1)))
    again = usage.since(start)
    assert again["bytes_read"] == 2000


def test_each_node_tells_what_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = usage.snapshot()
    far = {"far": (3, 20, 10, 7 << 30, 0)}
    start = own | {"far": (1, 0, 10, 1 << 30, 0), "idle": (5, 5, 5, 9 << 30, 0)}
    monkeypatch.setattr(usage, "_on_other_nodes", lambda: [far, {"idle": start["idle"]}])
    used = usage.since(start)
    assert (used["requests"], used["bytes_read"], used["bytes_written"]) == (2, 20, 0)
    assert used["worker_peak_bytes"] == 7 << 30  # the idle process counted nothing since
    line = usage.summary(used, seconds=2.0, rows=100)
    assert line.startswith("50 rows/s, 0.0 MB/s read, 0.0 MB/s written, 2 requests, peak ")
    assert line.endswith("7.52 GB worker")
