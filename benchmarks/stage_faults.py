"""Killing the offline stages: the driver, a worker, a node; is every artifact what an undisturbed run builds?

    python -m benchmarks.stage_faults --json docs/results/stage_faults.json

A cluster of two nodes runs the stages of benchmarks/scale.py one after the other on a small corpus. For each
seed all of them run in a folder of their own, and SIGKILL strikes a driver, a worker and a node, each at a
drawn moment of a drawn stage. A killed driver is started again, a lost node is replaced; Ray replaces the
worker. In the end every part of every artifact must have the checksum that it has without faults; of the
report, the results of every method count, as the report itself holds times.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil
from ray.cluster_utils import Cluster

from benchmarks import scale, scale_inputs
from benchmarks.report import arguments, show, write
from scalingnote.storage.artifact import MANIFEST, open_artifact

Fault = Literal["driver", "worker", "node"]
FAULTS: tuple[Fault, ...] = ("driver", "worker", "node")
DOCUMENTS = 100_000
INPUTS = ("documents", "queries", "qrels", "impressions")
TIMEOUT_S = 1_200.0
BUSY_WAIT_S = 2.0  # how long a fault waits for a worker that has work
LOG = "stages.json"  # a line for every stage that starts: its name and the time
# Processes of Ray that hold no work of a stage.
RAY_PROCESSES = ("IDLE", "Agent", "_Stats", "Autoscaling", "DatasetStats")
Row = dict[str, Any]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)  # one driver: its folder
    options = parser.parse_args()
    if options.drive:
        drive(options.drive, options.documents)
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_health_check_failure_threshold": "2"}
    with tempfile.TemporaryDirectory(prefix="stage-faults-") as name:
        rows = run(Path(name), options.documents, range(options.seeds))
    metrics = {
        "faults": float(len(FAULTS) * len(rows)),
        "faults_survived": float(len(FAULTS) * sum(not row["artifacts lost"] for row in rows)),
        "lost_to_faults": float(sum(row["artifacts lost"] for row in rows)),
    }
    write(options.json, metrics=metrics, runs=rows)


def run(folder: Path, documents: int, seeds: range) -> list[Row]:
    """A row for each seed."""
    scale_inputs.files(folder / "inputs", documents)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    rows: list[Row] = []
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        os.environ["RAY_ADDRESS"] = cluster.address
        whole = linked(folder / "whole", folder / "inputs")
        finish(start(whole, documents), whole)
        durations, expected = seconds(whole), checksums(whole)
        for seed in seeds:
            output = linked(folder / f"seed-{seed}", folder / "inputs")
            row = disturbed(output, documents, random.Random(seed), durations, cluster, nodes)
            found = checksums(output)
            lost = sum(found.get(name) != parts for name, parts in expected.items())
            rows.append({"seed": seed, **row, "artifacts": len(expected), "artifacts lost": lost})
            show("Stages under faults", rows)
            shutil.rmtree(output)
    finally:
        cluster.shutdown()
    return rows


def disturbed(
    folder: Path,
    documents: int,
    rng: random.Random,
    durations: dict[str, float],
    cluster: Cluster,
    nodes: list[Any],
) -> Row:
    """All stages with one fault of each kind; the row tells where they struck."""
    stages = list(scale.STAGES)
    struck = dict(
        zip(rng.sample(FAULTS, len(FAULTS)), sorted(rng.sample(range(len(stages)), 3)), strict=True)
    )
    since, driver = time.monotonic(), start(folder, documents)
    row: Row = {}
    for fault, number in struck.items():
        wait_for(stages[number], folder, driver)
        time.sleep(rng.random() * durations[stages[number]])
        if fault == "driver":
            driver.kill()
            driver.wait()
            driver = start(folder, documents)
        elif fault == "worker":
            kill_worker(rng)
        else:
            cluster.remove_node(nodes.pop(rng.randrange(len(nodes))), allow_graceful=False)
            nodes.append(cluster.add_node(num_cpus=1))
        row[fault] = stages[number]
    finish(driver, folder)
    return {fault: row[fault] for fault in FAULTS} | {"seconds": round(time.monotonic() - since)}


def linked(folder: Path, inputs: Path) -> Path:
    """A folder with links to the input files."""
    folder.mkdir(parents=True)
    for name in INPUTS:
        (folder / name).symlink_to(inputs / name)
    return folder


def start(folder: Path, documents: int) -> subprocess.Popen[bytes]:
    """A driver of all stages, as a user starts it."""
    command = [sys.executable, "-m", "benchmarks.stage_faults", "--drive", str(folder)]
    with (folder / "driver.log").open("ab") as log:
        return subprocess.Popen([*command, "--documents", str(documents)], stderr=log, stdout=log)


def finish(driver: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until the driver has ended well."""
    if code := driver.wait(timeout=TIMEOUT_S):
        lines = (folder / "driver.log").read_text(encoding="utf-8").splitlines()[-20:]
        raise SystemExit("\n".join([*lines, f"the driver of {folder.name} ended with {code}"]))


def wait_for(stage: str, folder: Path, driver: subprocess.Popen[bytes]) -> None:
    """Return once the stage has begun."""
    deadline = time.monotonic() + TIMEOUT_S
    while stage not in [name for name, _ in begun(folder)]:
        if driver.poll() is not None or time.monotonic() > deadline:
            finish(driver, folder)
            raise SystemExit(f"{folder.name}: {stage} never began")
        time.sleep(0.01)


def kill_worker(rng: random.Random) -> None:
    """Kill a process that works for a stage; an idle one if none has work for a while."""
    deadline = time.monotonic() + BUSY_WAIT_S
    while True:
        workers = list(ray_processes())
        busy = [each for each, title in workers if not any(name in title for name in RAY_PROCESSES)]
        if busy or time.monotonic() > deadline:
            rng.choice(busy or [each for each, title in workers if "IDLE" in title]).kill()
            return
        time.sleep(0.01)


def ray_processes() -> Iterator[tuple[psutil.Process, str]]:
    """Processes of Ray's workers and their titles."""
    for process in psutil.process_iter(["cmdline"]):
        title = (process.info["cmdline"] or [""])[0]
        if title.startswith("ray::"):
            yield process, title


def begun(folder: Path) -> list[tuple[str, float]]:
    """Stages that began, and when."""
    log = folder / LOG
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def seconds(folder: Path) -> dict[str, float]:
    """How long each stage took, from the log of an undisturbed run."""
    marks = begun(folder)
    return {name: end - since for (name, since), (_, end) in pairwise(marks)}


def checksums(folder: Path) -> dict[str, dict[str, str]]:
    """Checksums of the parts of every artifact, without the report's own pages."""
    found = {}
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        kind = json.loads(manifest.read_text(encoding="utf-8"))["kind"]
        parts = open_artifact(str(manifest.parent), kind=kind).manifest.parts
        found[manifest.parent.name] = {
            name: part.sha256 for name, part in parts.items() if not name.startswith("report.")
        }
    return found


def drive(folder: Path, documents: int) -> None:
    """What a user's driver does: every stage, one after the other."""
    from scalingnote import cluster
    from scalingnote.log import configure

    configure()
    cluster.connect()

    def mark(name: str) -> None:
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps([name, time.time()]) + "\n")

    for name, stage in scale.STAGES.items():
        mark(name)
        stage(folder, documents)
    mark("end")


if __name__ == "__main__":
    main()
