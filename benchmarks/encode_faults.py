"""Killing the encoding of documents: the driver, an encoder, a node; is every document encoded exactly once?

    python -m benchmarks.encode_faults --json docs/results/encode_faults.json

A cluster of two nodes encodes the same documents again and again. In each run SIGKILL strikes once, when a
drawn number of parts is committed; a lost node is replaced, a killed driver is started again. The artifact
must then have the digest of the undisturbed one, that is all bytes of all its parts.

- loads_per_actor: how often a process loaded the model, on average, in the undisturbed run
- lost_parts_max: parts that were encoded once more because of a fault, at most; each of the two encoders may
  hold one
- lost_work_share: the same over all parts of a run
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
from ray.cluster_utils import Cluster

from benchmarks import encode_inputs as inputs
from benchmarks.report import arguments, show, write
from scalingnote.encode.documents import encode_documents
from scalingnote.encode.engines import load_document_encoder
from scalingnote.storage.artifact import Artifact, open_artifact

Fault = Literal["driver", "encoder", "node"]
FAULTS: tuple[Fault, ...] = ("driver", "encoder", "node")
DOCUMENTS, ROWS_PER_PART = 3200, 80
PARTS = DOCUMENTS // ROWS_PER_PART
TIMEOUT = 600.0
ENCODER = "EncodeParts"
CALLS = "calls"  # a line for each model that is loaded and each part that is encoded


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)  # one driver: folder, output
    options = parser.parse_args()
    if options.drive:
        drive(*options.drive)
        return
    # Workers import what the driver does.
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_health_check_failure_threshold": "2"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = inputs.documents(
            f"{folder}/dataset", DOCUMENTS, rows_per_part=ROWS_PER_PART, words=60, spread=0.6
        )
        inputs.towers(f"{folder}/towers", dataset, layers=1, hidden=128)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
            os.environ["RAY_ADDRESS"] = cluster.address
            undisturbed = finish(start(folder, "whole"), folder / "whole")
            whole = calls(folder / "whole")
            rows = []
            for seed in range(options.seeds):
                rng = random.Random(seed)
                fault, at = FAULTS[seed % len(FAULTS)], rng.randrange(2, PARTS - 6)
                rows.append(run(fault, at, folder / f"run-{seed}", cluster, nodes, rng, undisturbed))
                show("Encoding under faults", rows)
        finally:
            cluster.shutdown()
    survived = sum(row["digest equal"] for row in rows)
    write(
        options.json,
        metrics={
            "faults_survived": float(survived),
            "lost_to_faults": float(len(rows) - survived),
            "faults": float(len(rows)),
            "loads_per_actor": loads_per_actor(whole),
            "lost_parts_max": float(max(row["parts encoded again"] for row in rows)),
            "lost_work_share": max(row["parts encoded again"] for row in rows) / PARTS,
        },
        cases=rows,
    )


def run(
    fault: Fault, at: int, output: Path, cluster: Cluster, nodes: list[Any], rng: random.Random, whole: Any
) -> dict[str, Any]:
    """One run with a fault; what came of it."""
    since, driver = time.monotonic(), start(output.parent, output.name)
    done = wait_for_parts(output, at, driver)
    if fault == "driver":
        driver.kill()
        driver.wait()
        driver = start(output.parent, output.name)
    elif fault == "encoder":
        rng.choice(encoders()).kill()
    else:
        lost = nodes.pop(rng.randrange(len(nodes)))
        cluster.remove_node(lost, allow_graceful=False)
        nodes.append(cluster.add_node(num_cpus=1))
    found = finish(driver, output)
    doc_ids = found.table("embeddings", ["doc_id"])["doc_id"].to_pylist()
    return {
        "fault": fault,
        "parts done": f"{done} of {PARTS}",
        "seconds": time.monotonic() - since,
        "documents": len(doc_ids),
        "lost": DOCUMENTS - len(set(doc_ids)),
        "doubled": len(doc_ids) - len(set(doc_ids)),
        "parts encoded again": sum(what == "encode" for what, _ in calls(output)) - PARTS,
        "digest equal": found.digest == whole.digest,
    }


def calls(output: Path) -> list[tuple[str, str]]:
    """What the encoders of a run did, and the process of each."""
    lines = (output.parent / f"{output.name}-{CALLS}").read_text(encoding="utf-8").splitlines()
    return [(what, process) for what, process in map(str.split, lines)]


def loads_per_actor(done: list[tuple[str, str]]) -> float:
    """Models loaded over processes that encoded."""
    loads = [process for what, process in done if what == "load"]
    return len(loads) / len(set(loads))


class NotedEncoder:
    """An encoder that notes in a file when it is loaded and when it encodes a part."""

    def __init__(self, towers: Artifact, token_budget: int, *, notes: str) -> None:
        self._encoder, self._notes = load_document_encoder(towers, token_budget), notes
        self._note("load")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode_with_cost(self, *rows: Any, **options: Any) -> Any:
        """As the encoder does."""
        encoded = self._encoder.encode_with_cost(*rows, **options)
        self._note("encode")
        return encoded

    def _note(self, what: str) -> None:
        with Path(self._notes).open("a", encoding="utf-8") as file:
            file.write(f"{what} {os.getpid()}\n")


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A driver, as a user starts it."""
    command = [sys.executable, "-m", "benchmarks.encode_faults", "--drive", str(folder), name]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def finish(driver: subprocess.Popen[bytes], output: Path) -> Any:
    """The artifact, once the driver has ended well."""
    if code := driver.wait(timeout=TIMEOUT):
        raise SystemExit(f"the driver of {output.name} ended with {code}")
    return open_artifact(str(output), kind="embeddings")


def wait_for_parts(output: Path, at: int, driver: subprocess.Popen[bytes]) -> int:
    """How many parts are committed, as soon as it is `at`."""
    deadline = time.monotonic() + TIMEOUT
    while (done := len(list(output.glob("_work/parts/*.json")))) < at:
        if driver.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{output.name}: {done} parts, not {at}; the driver ended with {driver.poll()}")
        time.sleep(0.005)
    return done


def encoders() -> list[psutil.Process]:
    """The processes that hold a model."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(ENCODER in word for word in process.info["cmdline"] or ()):
            found.append(process)
    if not found:
        raise SystemExit("found no encoder to kill")
    return found


def drive(folder: str, name: str) -> None:
    """What a user's driver does."""
    from scalingnote import cluster
    from scalingnote.encode.config import EncodeConfig, Fleet

    cluster.connect()
    config = EncodeConfig(token_budget=2048, resources=Fleet(workers=2))
    towers = open_artifact(f"{folder}/towers", kind="dual_encoder")
    load = partial(NotedEncoder, notes=f"{folder}/{name}-{CALLS}")
    encode_documents(config, f"{folder}/dataset", towers, f"{folder}/{name}", load_encoder=load)


if __name__ == "__main__":
    main()
