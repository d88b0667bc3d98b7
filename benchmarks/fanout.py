"""One gateway before 1, 8 and 48 groups of shards, and second calls where one searcher is slow.

    python -m benchmarks.fanout --json docs/results/fanout.json

The gateway is this process: the fan-out of the service, and the merging of what comes back. Aggregators are
processes of their own. Two processes stand for the searchers, a replica of every group in each: they sleep
for times that a scan of vectors took here, and answer with ten documents. All are asynchronous actors of Ray.

On two cores the gateway shares the machine with all that it calls, which it does not in a cluster: its
queries/s are those of a second of its own processor time. Latencies are of two queries at a time.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from benchmarks.report import arguments, show, write
from scalingnote import cluster
from scalingnote.index.shard import DOCUMENTS
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates
from scalingnote.serve.fan_out import Aggregator, FanOut, merged, sizes
from scalingnote.serve.towers import Refused
from scalingnote.serve_config import FanOutConfig

GROUPS = (1, 8, 48)
K, DIM = 10, 64
SCANNED = 100_000  # vectors of a scan whose time is a searcher's
SLOW = 20.0  # times as long as the others, of one replica of one group
SLOW_GROUP = 5
DEADLINE_S = 30.0


class Searchers:
    """A replica of every group.

    Args:
        seconds: of scans, one of which every call takes.
        slow: the group that is slow here; None: none is.
        seed: of the draws.
    """

    def __init__(self, seconds: list[float], slow: int | None, seed: int) -> None:
        self._seconds, self._slow, self._rng = seconds, slow, np.random.default_rng(seed)
        text = {name: "x" * (200 if name == "snippet" else 20) for name in DOCUMENTS.names}
        self._documents = [text] * K

    async def search_many(self, group: int, queries: Sequence[Query]) -> list[Candidates]:
        """Ten documents of a group for each query."""
        seconds = self._rng.choice(self._seconds) * (SLOW if group == self._slow else 1)
        await asyncio.sleep(seconds)
        ids = group * K + np.arange(K)
        scores = np.float32(ids * 7919 % 1000)
        found = Candidates(ids, np.full(K, group), scores, None, self._documents, searched=1, version="v")
        return [found] * len(queries)

    async def ping(self) -> bool:
        """Answers once the process has started."""
        return True


class GroupHandle:
    """Calls a group at the replica with the fewest calls of this caller, as Ray Serve's handles do."""

    def __init__(self, replicas: Sequence[Any], group: int) -> None:
        self._replicas, self._group = list(replicas), group
        self._in_flight: Counter[int] = Counter()

    @property
    def search_many(self) -> "GroupHandle":
        """As a handle's method."""
        return self

    async def remote(self, queries: Sequence[Query], _: float) -> Any:
        """The group's answers."""
        chosen = min(range(len(self._replicas)), key=lambda n: (self._in_flight[n], np.random.random()))
        self._in_flight[chosen] += 1
        try:
            return await self._replicas[chosen].search_many.remote(self._group, queries)
        finally:
            self._in_flight[chosen] -= 1


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--crowd", type=int, default=64, help="queries at once under load")
    options = parser.parse_args()
    cluster.connect()
    seconds = scan_seconds()
    rows = []
    for groups in GROUPS:
        found = [throughput(seconds, groups, options.seconds, options.crowd) for _ in range(options.rounds)]
        rows.append(
            {
                "groups": groups,
                "calls of the gateway": len(sizes(groups, FanOutConfig())) or groups,
                "queries/s of a gateway's core": float(np.median([each[0] for each in found])),
                "p50 ms": float(np.median([each[1] for each in found])),
                "p99 ms": float(np.median([each[2] for each in found])),
            }
        )
    show(f"{options.crowd} queries at once for queries/s, 2 for latencies", rows)
    hedging = []
    for hedge_after in ("off", "auto"):
        every = [latencies(seconds, 8, options.seconds, hedge_after) for _ in range(options.rounds)]
        tails = [1000 * float(np.quantile(each, 0.99)) for each in every]
        hedging.append({"second calls": hedge_after, "p99 ms": float(np.median(tails)), "rounds": tails})
    show(f"8 groups of two replicas, one of the 16 is {SLOW:g} times as slow", hedging)
    rate = {row["groups"]: row["queries/s of a gateway's core"] for row in rows}
    tail = {row["groups"]: row["p99 ms"] for row in rows}
    metrics = {
        "qps_8_over_1": round(rate[8] / rate[1], 3),
        "qps_48_over_1": round(rate[48] / rate[1], 3),
        "p99_48_slowdown": round(tail[48] / tail[1], 3),
        "hedge_p99_cut": round(1 - hedging[1]["p99 ms"] / hedging[0]["p99 ms"], 3),
    }
    ray.shutdown()
    write(options.json, metrics=metrics, table=rows, hedging=hedging)


def scan_seconds() -> list[float]:
    """How long scans of vectors took in this process, the slowest hundredth left out."""
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((SCANNED, DIM), dtype=np.float32)
    queries = rng.standard_normal((400, DIM), dtype=np.float32)
    found = []
    for query in queries:
        started = time.perf_counter()
        np.argpartition(vectors @ query, -K)[-K:]
        found.append(time.perf_counter() - started)
    return sorted(found)[: int(0.99 * len(found))]


class Fleet:
    """Two replicas of every group, aggregators where there are many, and the gateway's side."""

    def __init__(
        self, seconds: list[float], groups: int, *, hedge_after: str = "off", slow: int | None = None
    ) -> None:
        replica: Any = ray.remote(num_cpus=0, max_concurrency=1000)(Searchers)
        self._replicas = [replica.remote(seconds, slow, 0), replica.remote(seconds, None, 1)]
        handles: list[Any] = [GroupHandle(self._replicas, group) for group in range(groups)]
        shared = sizes(groups, FanOutConfig())
        aggregator: Any = ray.remote(num_cpus=0, max_concurrency=1000)(Aggregator)
        self._aggregators = [
            aggregator.remote([handles[g] for g in own], [*own], hedge_after) for own in shared
        ]
        ray.get([each.ping.remote() for each in (*self._replicas, *self._aggregators)])
        self.fan_out = FanOut(
            self._aggregators or handles, shared or [[g] for g in range(groups)], hedge_after=hedge_after
        )
        self.groups = groups

    async def answer(self, number: int) -> None:
        """Answer one query, as the gateway does between its encoder and its response."""
        embedding = np.full((1, DIM), number, np.float32)
        found = await self.fan_out.search(Query(embedding, k=K, version="v"), DEADLINE_S)
        assert not isinstance(found, Refused)
        assert not found.missing
        best = merged(found.candidates, k=K)
        assert best.searched == self.groups
        assert len(best) == K

    def end(self) -> None:
        """End all processes."""
        for each in (*self._replicas, *self._aggregators):
            ray.kill(each)


async def crowd(fleet: Fleet, size: int, seconds: float) -> list[float]:
    """The latencies of `size` clients that ask again and again."""
    ends, found = time.perf_counter() + seconds, []

    async def client() -> None:
        while (started := time.perf_counter()) < ends:
            await fleet.answer(len(found))
            found.append(time.perf_counter() - started)

    await asyncio.gather(*(client() for _ in range(size)))
    return found


def throughput(seconds: list[float], groups: int, duration_s: float, size: int) -> tuple[float, float, float]:
    """Queries of a second of the gateway's processor time, and p50 and p99 in milliseconds of few queries."""
    fleet = Fleet(seconds, groups)

    async def measured() -> tuple[int, float, list[float]]:
        await crowd(fleet, size, 0.2 * duration_s)
        started = time.process_time()
        answered = len(await crowd(fleet, size, duration_s))
        spent = time.process_time() - started
        return answered, spent, await crowd(fleet, 2, duration_s)

    answered, spent, few = asyncio.run(measured())
    fleet.end()
    return answered / spent, 1000 * float(np.median(few)), 1000 * float(np.quantile(few, 0.99))


def latencies(seconds: list[float], groups: int, duration_s: float, hedge_after: str) -> list[float]:
    """Seconds of queries, few at a time, while one replica of one group is slow."""
    fleet = Fleet(seconds, groups, hedge_after=hedge_after, slow=SLOW_GROUP)

    async def measured() -> list[float]:
        await crowd(fleet, 2, 0.2 * duration_s)
        return await crowd(fleet, 2, duration_s)

    found = asyncio.run(measured())
    fleet.end()
    return found


if __name__ == "__main__":
    main()
