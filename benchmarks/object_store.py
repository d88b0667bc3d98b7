"""Requests and seconds of artifacts on an object store that is 30 ms away.

    python -m benchmarks.object_store --json docs/results/object_store.json

A local S3 server (moto) waits 30 ms before each answer and counts requests (benchmarks/slow_store.py).

- requests_per_part_written: a table of 20,000 rows as a part of a draft
- requests_per_part_read: the same part, opened, verified and read
- quickstart_s3_over_local: seconds of the quickstart's stages with run_dir on the store, over those with it
  on disk; the table tells each stage's requests. Both follow a run that is not counted: the first one on a
  machine reads every module from disk and compiles loops
- read_mb_s: a file of 256 MB by :func:`scalingnote.storage.filesystem.read_bytes`; `stream` is pyarrow's
  input stream, one request of 256 KiB after the other, on a file of 8 MB
"""

import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.report import arguments, show, write
from scalingnote import pipeline
from scalingnote import stages as stages_of
from scalingnote.config import Config
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Draft, open_artifact

DELAY_S = 0.03
ROWS = 20_000
LARGE_BYTES = 256 << 20
STREAM_BYTES = 8 << 20  # at 8 MB/s, the stream would take half a minute for the large file
PARTS = 5
QUICKSTART, RUN = "configs/quickstart/python_docs.yaml", "quickstart"
SMALL = ("dataset.max_documents=1500", "train.epochs=1", "distill.epochs=2")
Count = Callable[[], dict[str, int]]


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    with store() as count:
        requests = part_requests(count)
        speeds = read_speeds(count)
        stages = quickstart()
    show("Requests", requests)
    show("Reads", speeds)
    show("The quickstart's stages, on S3 and on disk", stages)
    by_name = {row["read by"]: row["MB/s"] for row in speeds}
    metrics = {
        "requests_per_part_written": requests[0]["requests"],
        "requests_per_part_read": requests[1]["requests"],
        "read_mb_s": by_name["ranges"],
        "read_over_stream": round(by_name["ranges"] / by_name["stream"], 1),
        "quickstart_s3_over_local": round(
            sum(row["s3 s"] for row in stages) / sum(row["disk s"] for row in stages), 2
        ),
    }
    show("Metrics", [metrics])
    write(options.json, metrics=metrics, requests=requests, reads=speeds, stages=stages)


@contextmanager
def store() -> Iterator[Count]:
    """The slow store with a bucket; yields what counts its requests since the last call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    server = subprocess.Popen([sys.executable, "-m", "benchmarks.slow_store", str(port), str(DELAY_S)])

    def count() -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/requests") as answer:
            found: dict[str, int] = json.load(answer)
            return found

    try:
        for _ in range(200):
            try:
                count()
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        boto3: Any = importlib.import_module("boto3")
        boto3.client("s3").create_bucket(Bucket="benchmark")
        yield count
    finally:
        server.terminate()
        server.wait()


def part_requests(count: Count) -> list[dict[str, Any]]:
    """Mean requests of a part that is written, and of one that is read."""
    rng = np.random.default_rng(0)
    table = pa.table({"doc_id": [f"d{n}" for n in range(ROWS)], "score": rng.random(ROWS)})
    draft = Draft("s3://benchmark/rows", kind="rows", config=Config(), parents={})
    count()
    for number in range(PARTS):
        draft.write_table(f"rows/part-{number}.parquet", table)
    written = count()
    uri = draft.commit(counts={}).uri
    commit = count()
    artifact = open_artifact(uri, kind="rows")
    opened = count()
    for number in range(PARTS):
        artifact.table(f"rows/part-{number}.parquet")
    read = count()
    return [
        _row("a part written", written, PARTS),
        _row("a part read", read, PARTS),
        _row("a commit", commit, 1),
        _row("an artifact opened", opened, 1),
    ]


def _row(name: str, counts: dict[str, int], times: int) -> dict[str, Any]:
    by_method = ", ".join(f"{n / times:g} {method}" for method, n in sorted(counts.items()))
    return {"what": name, "requests": sum(counts.values()) / times, "by method": by_method}


def read_speeds(count: Count) -> list[dict[str, Any]]:
    """Megabytes per second of a file, by ranges side by side and as a stream; medians of three."""
    uri, small = "s3://benchmark/large", "s3://benchmark/small"
    rng = np.random.default_rng(0)
    fs.write_bytes(uri, rng.bytes(LARGE_BYTES))
    fs.write_bytes(small, rng.bytes(STREAM_BYTES))
    filesystem, path = fs.resolve(small)

    def stream() -> int:
        with filesystem.open_input_stream(path) as file:
            return len(file.read())

    sides: dict[str, Callable[[], int]] = {"ranges": lambda: len(fs.read_bytes(uri)), "stream": stream}
    rows = []
    for name, read in sides.items():
        count()
        seconds, size = [], 0
        for _ in range(3):
            start = time.perf_counter()
            size = read()
            seconds.append(time.perf_counter() - start)
        requests = sum(count().values()) / 3
        speed = round(size / 1e6 / statistics.median(seconds), 1)
        rows.append({"read by": name, "bytes": size, "requests": round(requests, 1), "MB/s": speed})
    return rows


def quickstart() -> list[dict[str, Any]]:
    """Seconds of each stage of the quickstart on the store and on disk, and its requests and bytes there."""
    with tempfile.TemporaryDirectory() as folder:
        places = [f"{folder}/first", f"s3://benchmark/{RUN}", f"{folder}/{RUN}"]
        _, *sides = map(run, places)
    return [
        {
            "stage": name,
            "s3 s": seconds,
            "disk s": disk[name][0],
            "requests": used["requests"],
            "MB read": round(used["bytes_read"] / 1e6, 1),
            "MB written": round(used["bytes_written"] / 1e6, 1),
        }
        for there, disk in [sides]
        for name, (seconds, used) in there.items()
    ]


def run(run_dir: str) -> dict[str, tuple[float, dict[str, int]]]:
    """Run the quickstart's stages in a process of their own: stage -> seconds, and what it used."""
    config = [QUICKSTART, *(word for value in SMALL for word in ("--set", value))]
    command = [sys.executable, "-m", "scalingnote.cli", "run", *config, "--set", f"run_dir={run_dir}"]
    subprocess.run(command, check=True)
    made = pipeline.load_run(run_dir)
    found = {}
    for stage in stages_of.of(made):
        info = pipeline.locate(made, stage.builds).manifest.info
        found[stage.name] = (info["seconds"], info["usage"])
    return found


if __name__ == "__main__":
    main()
