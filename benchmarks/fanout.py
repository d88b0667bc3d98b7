"""One gateway with 1 to 48 groups of shards, and second calls if one searcher is slow.

    python -m benchmarks.fanout --json docs/results/fanout.json

The gateway is this process: the service's HTTP application, called without a socket, with its fan-out,
merging and JSON. All aggregators are in a second process and all searchers in a third, asynchronous actors of
Ray. A searcher sleeps for the processor time of a scan of vectors on this machine, and returns ten documents.

On two cores, in contrast to a cluster, the gateway shares the machine with the parts that it calls: its
queries/s are those per second of processor time of its event loop, the thread that limits a gateway.
Latencies are those of two queries at a time. Second calls are measured with searchers in this process, so
that only the intended one is slow.
"""

import asyncio
import gc
import json
import pickle
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from fastapi import FastAPI

from benchmarks.report import arguments, show, write
from scalingnote.core import cluster
from scalingnote.index.shard import SHARD_DOCUMENTS, IndexLayout
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates
from scalingnote.serve import api
from scalingnote.serve.app import GC_THRESHOLD
from scalingnote.serve.catalog import Catalog, Version
from scalingnote.serve.concurrency import LocalHandle
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.fan_out import Aggregator, FanOut, sizes
from scalingnote.serve.service import Service
from scalingnote.serve.versions import VersionContent, Versions

# Groups, and groups per aggregator: 16 groups with and without aggregators show whether these help.
CASES = ((1, 16), (8, 16), (16, 16), (16, 8), (48, 16))
K, DIM = 10, 64
SCANNED = 100_000  # vectors of a scan, which gives a searcher's time
SLOW = 50.0  # factor of the time of one replica of one group
HEDGED_GROUPS, SLOW_GROUP = 8, 5
WARM_QUERIES, HEDGED_QUERIES = 100, 400
CROWD = 64  # queries at once under load
DEADLINE_S = 60.0
HEADERS = [(b"content-type", b"application/json")]


class Searchers:
    """The searchers of all groups; each call takes as long as one of the scans, drawn at random."""

    def __init__(self, seconds: list[float], slow: int | None = None, seed: int = 0) -> None:
        self._seconds, self._slow, self._rng = seconds, slow, np.random.default_rng(seed)

    async def search_many(self, group: int, pickled: bytes) -> bytes:
        """Return ten documents of a group for each query."""
        await asyncio.sleep(self._rng.choice(self._seconds) * (SLOW if group == self._slow else 1))
        ids = group * K + np.arange(K)
        rows = [
            {name: f"{each} " * (40 if name == "snippet" else 3) for name in SHARD_DOCUMENTS.names}
            for each in ids
        ]
        scores, shards = (ids * 7919 % 1000).astype(np.float32), np.full(K, group)
        return pickle.dumps(
            [
                Candidates(ids, shards, scores, None, rows, searched=1, version="v")
                for _ in pickle.loads(pickled)
            ]
        )


class Aggregators:
    """All aggregators, which are separate processes in a service."""

    def __init__(self, searchers: Any, shared: Sequence[Sequence[int]]) -> None:
        self._all = [Aggregator([_Remote(searchers, g) for g in own], own, False) for own in shared]  # type: ignore[misc]

    async def search_many(self, number: int, pickled: bytes, left_s: float) -> bytes:
        """Return the answers of one aggregator."""
        return await self._all[number].search_many(pickled, left_s)


class _Remote:
    """One group or one aggregator in another process, with the interface of a handle of Ray Serve."""

    def __init__(self, actor: Any, number: int, *, aggregates: bool = False) -> None:
        self._actor, self._number, self._aggregates = actor, number, aggregates
        self.search_many = self

    def remote(self, pickled: bytes, left_s: float) -> Any:
        if self._aggregates:
            return self._actor.search_many.remote(self._number, pickled, left_s)
        return self._actor.search_many.remote(self._number, pickled)


class _Replicas:
    """Two replicas of a group in this process; a call goes to the one with fewer calls, like in Ray Serve."""

    def __init__(self, replicas: Sequence[Searchers], group: int) -> None:
        self._replicas, self._group = replicas, group
        self._in_flight: Counter[int] = Counter()
        self._rng = np.random.default_rng(group)
        self.search_many = self

    async def remote(self, pickled: bytes, _: float) -> bytes:
        first = int(self._rng.integers(2))
        chosen = min((first, 1 - first), key=lambda number: self._in_flight[number])
        self._in_flight[chosen] += 1
        try:
            return await self._replicas[chosen].search_many(self._group, pickled)
        finally:
            self._in_flight[chosen] -= 1


class _Parts:
    """An encoder and the content of the index, without any work."""

    def __init__(self, groups: int) -> None:
        layout = IndexLayout(DIM, 10**6, groups, "flat", "flat", 1, 1, 1, None, ())
        self._content = VersionContent(layout, groups, layout.documents, pa.schema([]), {})

    async def encode(self, _: str, user_id: str | None) -> Query:
        return Query(np.ones((1, DIM), np.float32))

    async def describe(self, _: str) -> VersionContent:
        return self._content


def main() -> None:
    options = arguments(__doc__, queries=4000, rounds=3).parse_args()
    seconds = scan_seconds()
    gc.set_threshold(GC_THRESHOLD)
    cluster.connect()
    rows = []
    for groups, most in CASES:
        found = [measure(seconds, groups, most, options.queries) for _ in range(options.rounds)]
        rate, median, tail = (float(np.median(column)) for column in zip(*found, strict=True))
        rows.append(
            {
                "groups": groups,
                "aggregators": (aggregators := len(sizes(groups, ServeConfig(groups_per_aggregator=most)))),
                "calls of the gateway": aggregators or groups,
                "queries/s of a gateway's loop": rate,
                "p50 ms": median,
                "p99 ms": tail,
            }
        )
    ray.shutdown()
    show(f"{CROWD} queries at once for queries/s, 2 for latencies", rows)
    hedging = []
    for hedged in (False, True):
        slow = [asyncio.run(tail_ms(seconds, hedged)) for _ in range(options.rounds)]
        name = "auto" if hedged else "off"
        hedging.append({"second calls": name, "p99 ms": float(np.median(slow)), "rounds": slow})
    show(f"{HEDGED_GROUPS} groups of two replicas, one of the replicas {SLOW:g} times as slow", hedging)
    rates, tails = ([row[name] for row in rows] for name in ("queries/s of a gateway's loop", "p99 ms"))
    metrics = {
        "qps_8_over_1": rates[1] / rates[0],
        "qps_48_over_1": rates[4] / rates[0],
        "p99_48_slowdown": tails[4] / tails[0],
        "qps_16_aggregated_over_direct": rates[3] / rates[2],
        "p99_16_aggregated_over_direct": tails[3] / tails[2],
        "hedge_p99_cut": 1 - hedging[1]["p99 ms"] / hedging[0]["p99 ms"],  # type: ignore[operator]
    }
    rounded = {name: round(value, 3) for name, value in metrics.items()}
    show("Metrics", [rounded])
    write(options.json, metrics=rounded, table=rows, hedging=hedging)


def scan_seconds() -> list[float]:
    """Measure the processor time of scans of vectors in this thread."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((SCANNED, DIM), dtype=np.float32)
    seconds = []
    for query in rng.standard_normal((300, DIM), dtype=np.float32):
        started = time.thread_time()
        np.argpartition(vectors @ query, -K)
        seconds.append(time.thread_time() - started)
    return seconds


def measure(seconds: list[float], groups: int, most: int, queries: int) -> tuple[float, float, float]:
    """Measure queries per second of the loop's processor time; p50 and p99 in ms, with two at a time."""
    actor: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}
    searcher: Any = ray.remote(Searchers)
    aggregator: Any = ray.remote(Aggregators)
    config = ServeConfig(deadline_s=DEADLINE_S, groups_per_aggregator=most)
    group_sizes = sizes(groups, config)
    searchers = searcher.options(**actor).remote(seconds)
    aggregators = aggregator.options(**actor).remote(searchers, group_sizes)
    ray.get([searchers.__ray_ready__.remote(), aggregators.__ray_ready__.remote()])
    targets: list[Any] = [_Remote(searchers, group) for group in range(groups)]
    callees: list[Any] = [_Remote(aggregators, number, aggregates=True) for number in range(len(group_sizes))]
    parts = LocalHandle(_Parts(groups))
    catalog = Catalog(Version("v", "nowhere", 10**6, DIM, ""))
    arms = [ServedArm("default", parts, "fake", personalised=False)]
    service = Service(Deployed(arms, catalog, targets, callees), config)
    service.versions = versions = Versions(catalog, [parts])
    application = api.build(service, config)

    body = json.dumps({"query": "a question", "k": K}).encode()

    async def ask() -> None:
        answer = await post(application, body)
        assert len(answer["results"]) == K
        assert answer["shards_answered"] == groups

    async def measured() -> tuple[float, list[float]]:
        await versions.start()
        await latencies(ask, clients=CROWD, queries=queries // 4)
        started = time.thread_time()
        await latencies(ask, clients=CROWD, queries=queries)
        spent = time.thread_time() - started
        return spent, await latencies(ask, clients=2, queries=queries // 10)

    spent, few_clients = asyncio.run(measured())
    for each in (searchers, aggregators):
        ray.kill(each)
    return queries / spent, 1000 * float(np.median(few_clients)), 1000 * float(np.quantile(few_clients, 0.99))


async def latencies(ask: Callable[[], Awaitable[None]], *, clients: int, queries: int) -> list[float]:
    """Return the seconds of each query; every client sends the next query after an answer."""
    remaining, seconds = iter(range(queries)), []

    async def client() -> None:
        for _ in remaining:
            started = time.perf_counter()
            await ask()
            seconds.append(time.perf_counter() - started)

    await asyncio.gather(*(client() for _ in range(clients)))
    return seconds


async def post(application: FastAPI, body: bytes) -> dict[str, Any]:
    """Call ``POST /search`` and return the answer."""
    messages: list[Any] = []
    scope = {"type": "http", "method": "POST", "path": "/search", "headers": HEADERS, "query_string": b""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        messages.append(message)

    await application(scope, receive, send)
    assert messages[0]["status"] == 200, messages
    answer: dict[str, Any] = json.loads(messages[1]["body"])
    return answer


async def tail_ms(seconds: list[float], hedged: bool) -> float:
    """Measure p99 of queries, two at a time, while one replica of one group is slow."""
    replicas = [Searchers(seconds, SLOW_GROUP), Searchers(seconds, seed=1)]
    handles: list[Any] = [_Replicas(replicas, group) for group in range(HEDGED_GROUPS)]
    fan_out = FanOut(handles, [[group] for group in range(HEDGED_GROUPS)], hedged=hedged)
    query = Query(np.ones((1, DIM), np.float32), k=K, version="v")

    async def ask() -> None:
        answer = await fan_out.search(query, DEADLINE_S)
        assert isinstance(answer, Candidates)
        assert not answer.missing

    await latencies(ask, clients=2, queries=WARM_QUERIES)
    return 1000 * float(np.quantile(await latencies(ask, clients=2, queries=HEDGED_QUERIES), 0.99))


if __name__ == "__main__":
    main()
