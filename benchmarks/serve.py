"""Requests a second and latency of `/search`, of a service that does nothing, and of a hand-written one.

    python -m benchmarks.serve --json docs/results/serve.json

Every server answers the same queries, k = 10, over loopback, on a machine that it shares with the load
generator (benchmarks/load.py). Ours and its peers (benchmarks/serve_peers.py) run at the same time and get
load in turns of half a second while the others are idle, so that other work of the machine affects all of
them. A ratio is the median over turns. The service that does nothing is an application of the same Serve.
Ours are:

    lookup x 1, x 4     a lookup tower, an index of 1 or 4 shards, both in the gateway
    int8 x 1, x 4       a transformer of two layers with 8-bit products, in the gateway
    replicas            lookup, 4 shards: the encoder and two groups of shards in separate replicas

Those on Ray Serve run with HAProxy.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import load, report, serve_inputs
from benchmarks.serve_inputs import Inputs
from scalingnote.run.service_config import HAPROXY
from scalingnote.storage.artifact import Artifact

PORT, HANDWRITTEN_PORT, TURN_S = 8600, 8601, 0.5
Turns = dict[str, dict[int, list[load.Load]]]  # by server and number of connections


def servers(inputs: Inputs) -> dict[str, list[str]]:
    """Return the command of each of our servers, with the application that does nothing, by its name."""

    def command(index: Artifact, tower: Artifact, replicas: int, **knobs: Any) -> list[str]:
        deployments = {part: {"num_replicas": replicas} for part in ("encoder", "searcher")}
        settings = {"port": PORT, "ingress": "haproxy", "query_form": "auto", "deployments": deployments}
        args = {"index": index.uri, "query_tower": tower.uri, "serve": settings | knobs}
        return ["-m", "benchmarks.serve_peers", "ours", json.dumps(args)]

    towers = {"lookup": inputs.lookup, "int8": inputs.int8}
    here = {
        f"{name} x {shards}": command(index, tower, 0)
        for name, tower in towers.items()
        for shards, index in inputs.indexes.items()
    }
    return here | {"replicas": command(inputs.indexes[4], inputs.lookup, 1, shards_per_searcher=2)}


@contextmanager
def running(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the URL of a server while it runs, with these environment variables."""
    environment = {**os.environ, **variables, "PYTHONPATH": os.getcwd()}
    process = psutil.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        url = next((line.split()[0] for line in process.stdout if line.startswith("http://")), None)
        if url is None:
            raise SystemExit(f"`{' '.join(command)}` ended before it printed a URL: see above")
        while not _listens(int(url.rpartition(":")[2])):
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


def in_turns(
    urls: Mapping[str, str], bodies: list[bytes], *, concurrency: Sequence[int], turns: int
) -> Turns:
    """Load several servers in turns, after a warm-up."""
    for url in urls.values():
        load.run(url, bodies, connections=8, seconds=2)
    loads_by_server: Turns = {name: {number: [] for number in concurrency} for name in urls}
    for number in concurrency:
        for turn in range(turns):
            # Alternate the order, so that no server always follows the heaviest.
            for name, url in list(urls.items())[:: 1 if turn % 2 == 0 else -1]:
                loads_by_server[name][number].append(
                    load.run(url, bodies, connections=number, seconds=TURN_S)
                )
        rates = ", ".join(f"{name} {_rate(loads[number]):,.0f}/s" for name, loads in loads_by_server.items())
        print(f"{number} connections: {rates}", flush=True)
    return loads_by_server


def main() -> None:
    parser = report.arguments(__doc__, documents=200_000, turns=20)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/scalingnote-serve"))
    options = parser.parse_args()
    inputs = serve_inputs.build(options.folder, documents=options.documents)
    np.save(options.folder / "vectors.npy", inputs.vectors)
    (options.folder / "texts.txt").write_text("\n".join(inputs.texts), encoding="utf-8")
    bodies = [json.dumps({"query": query, "k": 10}).encode() for query in inputs.queries]
    del inputs.texts[:]  # the servers have them
    args = json.dumps({"port": HANDWRITTEN_PORT, "folder": str(options.folder)})
    by_hand = ["-m", "benchmarks.serve_peers", "handwritten", args]
    turns_by_server: dict[str, Turns] = {}
    with running(by_hand, HAPROXY) as handwritten:
        for name, command in servers(inputs).items():
            with running(command, HAPROXY) as ours:
                urls = {
                    "noop": f"{ours}/noop/search",
                    "handwritten": f"{handwritten}/search",
                    name: f"{ours}/search",
                }
                print(name, flush=True)
                turns_by_server[name] = in_turns(
                    urls, bodies, concurrency=options.concurrency, turns=options.turns
                )
    rows = [
        _row(
            name,
            number,
            [one for turns in turns_by_server.values() for one in turns.get(name, {}).get(number, ())],
        )
        for name in ("noop", "handwritten", *turns_by_server)
        for number in options.concurrency
    ]
    report.show(f"{options.documents:,} documents, k = 10", rows)
    report.write(options.json, metrics=metrics(turns_by_server), table=rows)


def _rate(loads: Sequence[load.Load]) -> float:
    return statistics.median(one.rate for one in loads)


def _row(name: str, connections: int, loads: Sequence[load.Load]) -> dict[str, Any]:
    latencies = load.Load(latencies=[latency for one in loads for latency in one.latencies])
    return {
        "server": name,
        "connections": connections,
        "requests/s": round(_rate(loads)),
        "p50 ms": round(latencies.percentile(50), 2),
        "p99 ms": round(latencies.percentile(99), 2),
        "not 200": sum(count for one in loads for status, count in one.statuses.items() if status != 200),
    }


def metrics(found: Mapping[str, Turns]) -> dict[str, float]:
    """Return requests a second of ours over those of a peer: the median over turns."""
    compared = {
        "rps_over_noop_c16_lookup": ("lookup x 1", "noop", 16),
        "rps_over_noop_c64_lookup": ("lookup x 1", "noop", 64),
        "rps_over_noop_c16_lookup_4_shards": ("lookup x 4", "noop", 16),
        "rps_over_noop_c16_int8": ("int8 x 1", "noop", 16),
        "rps_over_noop_c16_replicas": ("replicas", "noop", 16),
        "rps_over_handwritten_c16": ("int8 x 1", "handwritten", 16),
        "rps_over_handwritten_c16_lookup": ("lookup x 1", "handwritten", 16),
    }
    ratios = {}
    for metric, (name, peer, number) in compared.items():
        if name in found and number in found[name][name]:
            pairs = zip(found[name][name][number], found[name][peer][number], strict=True)
            ratios[metric] = round(statistics.median(ours.rate / theirs.rate for ours, theirs in pairs), 3)
    return ratios


if __name__ == "__main__":
    main()
