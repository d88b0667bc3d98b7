"""Requests a second and latency of `/search`, beside a service that does nothing and one written by hand.

    python -m benchmarks.serve --json docs/results/serve.json

Every server answers the same queries, k = 10, over loopback, one after the other on the same machine, which
the load generator shares (benchmarks/load.py); rounds alternate between them, and a figure is the median of
its rounds. Servers are those of benchmarks/serve_peers.py and ours:

    lookup x 1, x 4     a lookup tower, an index of 1 or 4 shards, both in the gateway
    int8 x 1, x 4       a transformer of two layers with 8-bit products, in the gateway
    replicas            lookup, 4 shards: the encoder and two groups of shards in replicas of their own

Those on Ray Serve run with HAProxy.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import load, report, serve_inputs
from benchmarks.serve_inputs import Inputs
from serve.settings import HAPROXY

PORT = 8600


@dataclass(frozen=True)
class Server:
    """How a server is started: a Python program, or its arguments."""

    name: str
    command: Sequence[str]


def ours(name: str, index: str, tower: str, **knobs: Any) -> Server:
    """One of our own."""
    settings = {"port": PORT, "ingress": "haproxy", "query_form": "auto", **knobs}
    program = f"""
import sys
from serve import launch
from serve.settings import AppArgs
sys.exit(launch.run(AppArgs(index={index!r}, query_tower={tower!r}, serve={settings!r})))
"""
    return Server(name, ["-c", program])


def servers(inputs: Inputs, folder: Path) -> list[Server]:
    """All of them."""
    here = {"encoder_in": "gateway", "searchers_in": "gateway"}
    apart = {"encoder_in": "replicas", "searchers_in": "replicas", "shards_per_searcher": 2}
    peer = ["-m", "benchmarks.serve_peers"]
    return [
        Server("noop", [*peer, "noop", "--port", str(PORT)]),
        Server("handwritten", [*peer, "handwritten", "--port", str(PORT), "--folder", str(folder)]),
        *(ours(f"lookup x {n}", index.uri, inputs.lookup.uri, **here) for n, index in inputs.indexes.items()),
        *(ours(f"int8 x {n}", index.uri, inputs.int8.uri, **here) for n, index in inputs.indexes.items()),
        ours("replicas", inputs.indexes[4].uri, inputs.lookup.uri, **apart),
    ]


@contextmanager
def running(server: Server) -> Any:
    """Its URL, while it runs."""
    environment = {**os.environ, **HAPROXY, "PYTHONPATH": os.getcwd()}
    process = psutil.Popen(
        [sys.executable, *server.command], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        url = next(line for line in process.stdout if line.startswith("http://")).split()[0]
        while not _listens(PORT):
            time.sleep(0.1)
        yield url
    finally:
        for member in [*process.children(recursive=True), process]:
            member.kill()
        process.wait()
        time.sleep(1)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measure(
    url: str, bodies: list[bytes], *, concurrency: Sequence[int], seconds: float
) -> dict[int, load.Load]:
    """Loads of several concurrencies, after a warm-up."""
    load.run(f"{url}/search", bodies, connections=8, seconds=2)
    return {
        number: load.run(f"{url}/search", bodies, connections=number, seconds=seconds)
        for number in concurrency
    }


def main() -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--only", nargs="+", help="names of servers")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/scalingnote-serve"))
    options = parser.parse_args()
    inputs = serve_inputs.build(options.folder, documents=options.documents)
    np.save(options.folder / "vectors.npy", inputs.vectors)
    (options.folder / "texts.txt").write_text("\n".join(inputs.texts), encoding="utf-8")
    bodies = [json.dumps({"query": query, "k": 10}).encode() for query in inputs.queries]
    found: dict[str, dict[int, list[load.Load]]] = {}
    for _ in range(options.rounds):
        for server in servers(inputs, options.folder):
            if options.only and server.name not in options.only:
                continue
            with running(server) as url:
                loads = measure(url, bodies, concurrency=options.concurrency, seconds=options.seconds)
            for number, one in loads.items():
                found.setdefault(server.name, {}).setdefault(number, []).append(one)
                print(f"{server.name}, {number} connections: {one.rate:.0f}/s {one.statuses}", flush=True)
    rows = [_row(name, number, loads) for name, of in found.items() for number, loads in of.items()]
    report.show(f"{options.documents:,} documents, k = 10", rows)
    report.write(options.json, metrics=_metrics(found), table=rows)


def _row(name: str, connections: int, loads: Sequence[load.Load]) -> dict[str, Any]:
    return {
        "server": name,
        "connections": connections,
        "requests/s": round(statistics.median(one.rate for one in loads)),
        "p50 ms": round(statistics.median(one.percentile(50) for one in loads), 2),
        "p99 ms": round(statistics.median(one.percentile(99) for one in loads), 2),
        "not 200": sum(count for one in loads for status, count in one.statuses.items() if status != 200),
    }


def _metrics(found: Mapping[str, Mapping[int, Sequence[load.Load]]]) -> dict[str, float]:
    def ratio(name: str, peer: str, number: int) -> float:
        # Of the same round: the machine's other work moves both.
        pairs = zip(found[name][number], found[peer][number], strict=True)
        return round(statistics.median(ours.rate / theirs.rate for ours, theirs in pairs), 3)

    wanted = {
        "rps_over_noop_c16_lookup": ("lookup x 1", "noop", 16),
        "rps_over_noop_c16_lookup_4_shards": ("lookup x 4", "noop", 16),
        "rps_over_noop_c16_int8": ("int8 x 1", "noop", 16),
        "rps_over_noop_c16_replicas": ("replicas", "noop", 16),
        "rps_over_handwritten_c16": ("int8 x 1", "handwritten", 16),
        "rps_over_handwritten_c16_lookup": ("lookup x 1", "handwritten", 16),
    }
    return {
        metric: ratio(*of)
        for metric, of in wanted.items()
        if of[0] in found and of[1] in found and of[2] in found[of[0]]
    }


if __name__ == "__main__":
    main()
