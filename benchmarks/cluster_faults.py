"""Faults of a cluster while it encodes documents: is every document encoded exactly once?

    python -m benchmarks.cluster_faults --json docs/results/cluster_faults.json

A cluster of several raylets on this machine, with made-up GPUs and token authentication, encodes the same
documents again and again. Each run has one fault, most of them when a drawn number of parts is committed:

- driver: SIGKILL; the driver is started again
- encoder: SIGKILL of a worker's process
- node: SIGKILL of a raylet and its workers; no other node comes in its place
- join: the run starts with one node (min_workers), and a second one joins
- slot: one GPU, whose workers cannot load
- part: a part that ends the process which encodes it, wherever that is; it may be left out

But for the documents of that part, the artifact must have the bytes of the undisturbed one.

- lost, doubled: documents of all runs
- finished_share: of the parts but that one, over all runs
- joined: 1 if workers of the second node encoded parts, too
- resolve_gpu, resolve_vllm: 1 if pip finds versions for these extras in the package index
- loads_per_actor: how often a process loaded the model, on average, in the undisturbed run
- lost_parts_max: parts that were encoded once more because of a fault, at most
"""

import argparse
import os
import random
import secrets
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

Fault = Literal["driver", "encoder", "node", "join", "slot", "part"]
FAULTS: tuple[Fault, ...] = ("slot", "part", "node", "join", "driver", "encoder")
ROWS_PER_PART, PARTS = 80, 40
DOCUMENTS = ROWS_PER_PART * PARTS - 1  # the last part is one short, by which its encoder knows it
NODES = (2, 1)  # GPUs of each
JOIN_PART_S = (
    4.0  # of a part where a node joins: Ray Data looks for new nodes every 20 s, then a worker loads
)
TIMEOUT_S = 600.0
ENCODER = "EncodeParts"
CALLS = "calls"  # a line for each model that is loaded and each part that is encoded


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="runs with each fault")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--drive", nargs=3, help=argparse.SUPPRESS)  # one driver: folder, output, fault
    options = parser.parse_args()
    if options.drive:
        drive(*options.drive)
        return
    if "RAY_AUTH_TOKEN" not in os.environ:  # Ray has read these when it was imported: begin again
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        os.environ |= {"RAY_health_check_failure_threshold": "2"}
        # Workers import what the driver does.
        os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cluster_faults", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = inputs.documents(
            f"{folder}/dataset", DOCUMENTS, rows_per_part=ROWS_PER_PART, words=60, spread=0.6
        )
        inputs.towers(f"{folder}/towers", dataset, layers=1, hidden=128)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            nodes = [add_node(cluster, gpus) for gpus in NODES]
            os.environ["RAY_ADDRESS"] = cluster.address
            undisturbed = finish(start(folder, "whole"), folder / "whole")
            whole = calls(folder / "whole")
            rows = []
            for seed in range(options.seeds):
                for fault in options.faults:
                    rng = random.Random(f"{fault} {seed}")
                    rows.append(run(fault, folder / f"{fault}-{seed}", cluster, nodes, rng, undisturbed))
                    show("Encoding under faults of a cluster", rows)
        finally:
            cluster.shutdown()
    write(
        options.json,
        metrics={
            "lost": float(sum(row["lost"] for row in rows)),
            "doubled": float(sum(row["doubled"] for row in rows)),
            "finished_share": sum(row["finished"] for row in rows) / len(rows),
            "resolve_gpu": float(resolves("gpu")),
            "resolve_vllm": float(resolves("vllm")),
            "joined": float(all(row["workers"] > NODES[0] for row in rows if row["fault"] == "join")),
            "faults": float(len(rows)),
            "digests_equal": float(sum(row["digest equal"] for row in rows)),
            "loads_per_actor": loads_per_actor(whole),
            "lost_parts_max": float(max(row["parts encoded again"] for row in rows)),
        },
        cases=rows,
    )


def run(
    fault: Fault, output: Path, cluster: Cluster, nodes: list[Any], rng: random.Random, whole: Artifact
) -> dict[str, Any]:
    """One run with a fault; what came of it."""
    if fault == "join":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    since, driver = time.monotonic(), start(output.parent, output.name, fault)
    done = wait_for_parts(output, 2 if fault == "join" else rng.randrange(2, PARTS // 2), driver)
    if fault == "driver":
        driver.kill()
        driver.wait()
        driver = start(output.parent, output.name, fault)
    elif fault == "encoder":
        rng.choice(encoders()).kill()
    elif fault == "node":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    elif fault == "join":
        nodes.append(add_node(cluster, NODES[1]))
    found = finish(driver, output)
    if fault == "node":
        nodes.append(add_node(cluster, NODES[1]))
    left_out = DOCUMENTS % ROWS_PER_PART if fault == "part" else 0
    doc_ids = found.table("embeddings", ["doc_id"])["doc_id"].to_pylist()
    encoded = [name for name in found.table_parts("embeddings") if found.manifest.parts[name].rows]
    same = [name for name in encoded if found.manifest.parts[name] == whole.manifest.parts[name]]
    made = calls(output)
    return {
        "fault": fault,
        "parts done": f"{done} of {PARTS}",
        "seconds": time.monotonic() - since,
        "documents": len(doc_ids),
        "left out": found.counts["rejected"],
        "lost": DOCUMENTS - left_out - len(set(doc_ids)),
        "doubled": len(doc_ids) - len(set(doc_ids)),
        "finished": len(encoded) / (PARTS - bool(left_out)),
        "workers": len({process for what, process in made if what == "encode"}),
        "failed loads": sum(what == "fail" for what, _ in made),
        "parts encoded again": sum(what == "encode" for what, _ in made) - len(encoded),
        "digest equal": len(same) == PARTS - bool(left_out),
    }


def resolves(variant: str) -> bool:
    """Whether the package index has all packages of an image with GPU packages, in versions that fit."""
    command = [sys.executable, "tests/gpu_versions.py", "--variant", variant]
    return subprocess.run(command, check=False).returncode == 0


def add_node(cluster: Cluster, gpus: int) -> Any:
    """A raylet with as many CPUs as GPUs."""
    return cluster.add_node(num_cpus=gpus, num_gpus=gpus, labels={"ray.io/accelerator-type": "made-up"})


def calls(output: Path) -> list[tuple[str, str]]:
    """What the encoders of a run did, and the process of each."""
    lines = (output.parent / f"{output.name}-{CALLS}").read_text(encoding="utf-8").splitlines()
    return [(what, process) for what, process in map(str.split, lines)]


def loads_per_actor(done: list[tuple[str, str]]) -> float:
    """Models loaded over processes that encoded."""
    loads = [process for what, process in done if what == "load"]
    return len(loads) / len(set(loads))


class FaultyEncoder:
    """An encoder that notes in a file when it loads and when it encodes a part, and has its run's fault."""

    def __init__(self, towers: Artifact, token_budget: int, *, notes: str, fault: Fault) -> None:
        self._notes, self._fault = notes, fault
        if fault == "slot" and self._is_broken():
            self._note("fail")
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        self._encoder = load_document_encoder(towers, token_budget)
        self._note("load")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode_with_cost(self, rows: Any, **options: Any) -> Any:
        """As the encoder does."""
        if self._fault == "part" and len(rows) == DOCUMENTS % ROWS_PER_PART:
            os.kill(os.getpid(), 9)
        if self._fault == "join":
            time.sleep(JOIN_PART_S)
        encoded = self._encoder.encode_with_cost(rows, **options)
        self._note("encode")
        return encoded

    def _is_broken(self) -> bool:
        """Whether this slot is the first of the run to load, from then on."""
        from scalingnote import cluster

        slot, _ = cluster.this_slot()
        try:
            with Path(f"{self._notes}-broken").open("x", encoding="utf-8") as file:
                file.write(slot)
        except FileExistsError:
            return Path(f"{self._notes}-broken").read_text(encoding="utf-8") == slot
        return True

    def _note(self, what: str) -> None:
        with Path(self._notes).open("a", encoding="utf-8") as file:
            file.write(f"{what} {os.getpid()}\n")


def start(folder: Path, name: str, fault: str = "none") -> subprocess.Popen[bytes]:
    """A driver, as a user starts it."""
    command = [sys.executable, "-m", "benchmarks.cluster_faults", "--drive", str(folder), name, fault]
    with Path(folder, f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, stderr=log)


def finish(driver: subprocess.Popen[bytes], output: Path) -> Artifact:
    """The artifact, once the driver has ended well."""
    code = driver.wait(timeout=TIMEOUT_S)
    log = Path(f"{output}.log").read_text(encoding="utf-8")
    print(log[-6000:], file=sys.stderr)
    if code:
        raise SystemExit(f"the driver of {output.name} ended with {code}")
    return open_artifact(str(output), kind="embeddings")


def wait_for_parts(output: Path, at: int, driver: subprocess.Popen[bytes]) -> int:
    """How many parts are committed, as soon as it is `at`."""
    deadline = time.monotonic() + TIMEOUT_S
    while (done := len(list(output.glob("_work/parts/*.json")))) < at:
        if driver.poll() is not None or time.monotonic() > deadline:
            finish(driver, output)
            raise SystemExit(f"{output.name}: {done} parts, not {at}")
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


def drive(folder: str, name: str, fault: Fault) -> None:
    """What a user's driver does."""
    from scalingnote import cluster
    from scalingnote.encode.config import EncodeConfig, Fleet
    from scalingnote.log import configure

    configure()
    cluster.connect()
    fleet = Fleet(workers=sum(NODES), min_workers=1, gpus_per_worker=1, max_failed_parts=1)
    config = EncodeConfig(token_budget=2048, resources=fleet)
    towers = open_artifact(f"{folder}/towers", kind="dual_encoder")
    load = partial(FaultyEncoder, notes=f"{folder}/{name}-{CALLS}", fault=fault)
    encode_documents(config, f"{folder}/dataset", towers, f"{folder}/{name}", load_encoder=load)


if __name__ == "__main__":
    main()
