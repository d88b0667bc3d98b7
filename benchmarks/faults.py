"""Killing stage I: a worker, the driver, all of Ray; does the run end as if nothing had happened?

Every case trains the same small dual encoder. A fault strikes with SIGKILL, at the first checkpoint after a
drawn step. The driver is then started again, unless Ray has to mend it alone. What must be equal to the
uninterrupted run: every number of the loss curve, and the digest of the artifact, that is all bytes of the
saved towers.

Then the run is elastic, on a cluster of two nodes: one is lost, and another joins later. It goes on with one
rank, and then with two again. One rank rounds its sums in another order than two, so losses are compared.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import psutil
import pyarrow as pa
from matplotlib.figure import Figure
from ray.cluster_utils import Cluster

from benchmarks import report
from scalingnote import cluster
from scalingnote.config import Config
from scalingnote.log import configure
from scalingnote.models.config import Scratch, TowerConfig
from scalingnote.storage import schema
from scalingnote.storage.artifact import Draft, open_artifact
from scalingnote.train import job
from scalingnote.train.config import Losses, Optimizer, Ranks, TrainConfig, Validation

Fault = Literal["none", "worker", "driver", "ray"]
FAULTS: dict[Fault, str] = {
    "none": "uninterrupted",
    "worker": "a worker killed; Ray restarts the group",
    "driver": "the driver killed and started again",
    "ray": "all of Ray killed and started again",
}
ELASTIC = "a node lost and another added; the run goes on with one rank, then two"
PLOT = Path("docs/results/faults.png")
PROMPT = "{title} [TITLE_QUERY] {topic} {content} [CONTENT_QUERY] [EMB]"
STEPS, EVERY = 240, 10
DOCUMENTS, BATCH = 256, 32
COLOURS = ("#8a8f98", "#0f8b8d", "#e69f00", "#cc6f9c")
ELASTIC_STEPS = 600  # long enough for Ray to see the nodes change
RESIZE_INTERVAL_S = 10.0
TIMEOUT = 1800.0


class Made(Config):
    """The config of inputs made up here."""


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws the steps at which faults strike")
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)  # one driver: inputs, output
    parser.add_argument("--elastic", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(*options.drive, elastic=options.elastic)
        return
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder / "inputs")
        cases = {}
        for fault in FAULTS:
            at = rng.randrange(STEPS // 5, STEPS * 4 // 5)
            cases[fault] = run(fault, folder, at=at)
        elastic = elastic_runs(folder)
    whole = cases["none"]
    rows = [
        {
            "case": FAULTS[fault],
            "struck after step": case["struck"] or "-",
            "seconds": case["seconds"],
            "last loss": case["curve"][-1]["loss"],
            "curve identical": case["curve"] == whole["curve"],
            "artifact identical": case["digest"] == whole["digest"],
        }
        for fault, case in cases.items()
    ]
    report.show("Stage I under faults", rows)
    report.show(f"Elastic: {ELASTIC}", [elastic])
    plot(cases, options.plot)
    same = [row["curve identical"] and row["artifact identical"] for row in rows[1:]]
    report.write(
        options.json,
        metrics={
            "faults_survived": float(sum(same)),
            "lost_to_faults": float(len(same) - sum(same)),
            "faults": float(len(same)),
            "elastic_loss_difference_max": elastic["largest difference of a loss"],
        },
        cases=rows,
        elastic=elastic,
        curves={FAULTS[fault]: case["curve"] for fault, case in cases.items()},
    )


def run(fault: Fault, folder: Path, *, at: int) -> dict[str, Any]:
    """Train once with a fault; what came of it."""
    output = folder / "runs" / "train" / fault
    command = [
        *(sys.executable, "-m", "benchmarks.faults"),
        *("--drive", str(folder / "inputs"), str(output)),
    ]
    start, struck = time.monotonic(), None
    driver = subprocess.Popen(command)
    try:
        if fault != "none":
            struck = wait_for_checkpoint(output, at, driver)
            strike(fault, psutil.Process(driver.pid))
        if fault in ("driver", "ray"):
            driver.wait(timeout=TIMEOUT)
            driver = subprocess.Popen(command)
        if driver.wait(timeout=TIMEOUT) != 0:
            raise SystemExit(f"the driver of case {fault!r} ended with {driver.returncode}")
    finally:
        kill([driver.pid])
    artifact = open_artifact(str(output), kind="dual_encoder")
    return {
        "struck": struck,
        "seconds": time.monotonic() - start,
        "curve": artifact.read_json("curve.json"),
        "digest": artifact.digest,
    }


def elastic_runs(folder: Path) -> dict[str, Any]:
    """An elastic training without a fault, and one whose cluster loses a node and gets another."""
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_health_check_failure_threshold": "2"}
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    lost = [nodes.add_node(num_cpus=1) for _ in range(2)][-1]
    command = [sys.executable, "-m", "benchmarks.faults", "--elastic", "--drive", str(folder / "inputs")]
    environment = os.environ | {"RAY_ADDRESS": nodes.address}
    curves, seconds, struck = {}, {}, []
    try:
        for name in ("whole", "disturbed"):
            output, start = folder / "runs" / "train" / name, time.monotonic()
            with (folder / "elastic.log").open("wb") as log:
                driver = subprocess.Popen([*command, str(output)], env=environment, stdout=log, stderr=log)
            if name == "disturbed":
                struck.append(wait_for_checkpoint(output, ELASTIC_STEPS // 6, driver))
                nodes.remove_node(lost, allow_graceful=False)
                struck.append(wait_for_checkpoint(output, ELASTIC_STEPS // 2, driver))
                nodes.add_node(num_cpus=1)
            if driver.wait(timeout=TIMEOUT) != 0:
                raise SystemExit(f"the elastic run {name!r} ended with {driver.returncode}")
            seconds[name] = time.monotonic() - start
            curves[name] = open_artifact(str(output), kind="dual_encoder").read_json("curve.json")
    finally:
        nodes.shutdown()
    pairs = zip(curves["whole"], curves["disturbed"], strict=True)
    return {
        "lost after step": struck[0],
        "added after step": struck[1],
        "seconds": seconds["disturbed"],
        "seconds without": seconds["whole"],
        "first loss": curves["whole"][0]["loss"],
        "last loss": curves["disturbed"][-1]["loss"],
        "largest difference of a loss": max(abs(one["loss"] - other["loss"]) for one, other in pairs),
    }


def wait_for_checkpoint(output: Path, at: int, driver: subprocess.Popen[bytes]) -> int:
    """The step of the first whole checkpoint at or after `at`."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        for marker in sorted(output.glob("_work/checkpoints/*/checkpoint.json")):
            step = int(marker.parent.name.removeprefix("step-"))
            if step >= at:
                return step
        if driver.poll() is not None:
            raise SystemExit(f"the driver ended with {driver.returncode} before step {at}")
        time.sleep(0.01)
    raise SystemExit(f"no checkpoint at or after step {at} within {TIMEOUT:.0f} s")


def strike(fault: Fault, driver: psutil.Process) -> None:
    """SIGKILL to what the fault names, and to nothing else."""
    below = driver.children(recursive=True)
    if fault == "worker":
        workers = [p.pid for p in below if p.cmdline()[:1] and "RayTrainWorker" in p.cmdline()[0]]
        if not workers:
            raise SystemExit("found no training worker to kill")
        kill(workers[-1:])
    elif fault == "driver":
        kill([driver.pid])
        _, left = psutil.wait_procs(below, timeout=60)  # Ray notices, and ends
        kill([process.pid for process in left])
    else:
        kill([process.pid for process in below])
        kill([driver.pid])


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def drive(inputs: str, output: str, *, elastic: bool) -> None:
    """What a user's driver does."""
    configure()
    cluster.connect()
    job.RESIZE_INTERVAL_S = RESIZE_INTERVAL_S
    steps = ELASTIC_STEPS if elastic else STEPS
    config = TrainConfig(
        query=TowerConfig(backbone=backbone(), max_length=16),
        document=TowerConfig(backbone=backbone(), max_length=48, prompt=PROMPT),
        dim=32,
        losses=Losses(matryoshka=(16, 32)),
        optimizer=Optimizer(peak_lr=2e-3),
        global_batch=BATCH,
        epochs=steps * BATCH / DOCUMENTS,
        precision="float32",
        checkpoint_every=EVERY,
        validation=Validation(every=50, queries=32, documents=DOCUMENTS, negatives=32),
        resources=Ranks(workers=2, min_workers=1 if elastic else None, cpus_per_worker=1.0),
    )
    job.run(config, dataset=f"{inputs}/dataset", triplets=f"{inputs}/triplets", output=output)


def backbone() -> Scratch:
    return Scratch(layers=2, hidden=64, heads=4, intermediate=128, vocabulary=600, max_positions=64)


def write_inputs(folder: Path) -> None:
    """Documents of random words, queries of two words of their document, negatives from the neighbours."""
    rng = random.Random(7)
    syllables = ["ba", "ko", "li", "me", "nu", "ra", "si", "ta", "ve", "zo"]

    def words(count: int) -> str:
        return " ".join("".join(rng.choices(syllables, k=3)) for _ in range(count))

    documents = [
        {"doc_id": f"d{i:04d}", "title": words(2), "topic": f"topic {i % 8}", "content": words(16)}
        for i in range(2 * DOCUMENTS)
    ]
    for row in documents:
        row["group"] = row["doc_id"]
    dataset = Draft(f"{folder}/dataset", kind="dataset", config=Made(), parents={})
    dataset.write_table("documents/part-0.parquet", pa.Table.from_pylist(documents, schema=schema.DOCUMENTS))
    rows = [
        {
            "query_id": f"q{i:04d}",
            "query": f"{row['title'].split()[0]} {row['content'].split()[3]}",
            "positive": row["doc_id"],
            "negatives": [documents[(i + 1) % len(documents)]["doc_id"]],
            "source": "click",
            "hop": "one",
            "via": None,
            "weight": 1.0,
            "split": "train" if i < DOCUMENTS else "validation",
        }
        for i, row in enumerate(documents)
    ]
    parents = {"dataset": dataset.commit(counts={"documents": len(documents)})}
    triplets = Draft(f"{folder}/triplets", kind="triplets", config=Made(), parents=parents)
    triplets.write_table("triplets/part-0.parquet", pa.Table.from_pylist(rows, schema=schema.TRIPLETS))
    triplets.commit(counts={"triplets": len(rows)})


def plot(cases: dict[Fault, dict[str, Any]], path: Path) -> None:
    """The curves over each other, wide ones below narrow ones, so that equal ones are all seen."""
    with mpl.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for number, (fault, case) in enumerate(cases.items()):
            steps = [point["step"] for point in case["curve"]]
            losses = [point["loss"] for point in case["curve"]]
            colour, width = COLOURS[number], 7.5 - 2.2 * number
            axes.plot(steps, losses, color=colour, linewidth=width, label=FAULTS[fault])
            if case["struck"]:
                axes.axvline(case["struck"], color=colour, linewidth=1.2, linestyle=":")
        axes.set_xlabel("step (dotted: where the fault struck)")
        axes.set_ylabel("loss")
        axes.legend(frameon=False, fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
