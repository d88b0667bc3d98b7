"""From a query to every group of shards and back: aggregators, shared calls, hedged calls, deadlines.

    gateway ─► aggregators (above DIRECT_GROUPS groups) ─► searchers of the groups

A gateway that calls 48 groups for every query does little else. With aggregators it makes seven calls, and
queries that wait for the same target share one call. A call that takes longer than nearly all others is made
once more: Ray Serve gives it to the replica with the fewest calls, which is not the one that is stuck (Dean
and Barroso, "The Tail at Scale", 2013). What has not answered in time is named by its groups.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates
from scalingnote.serve.concurrency import Handle, LocalHandle, gather_in_time
from scalingnote.serve.towers import Refused
from scalingnote.serve_config import FanOutConfig, ServeConfig

DIRECT_GROUPS = 16  # groups that a gateway calls itself
MAX_CALLS = 4  # in flight to one target: further queries wait, and share the next call
MAX_QUERIES = 64  # of one call
MEASURED_CALLS = 200  # latest calls of a target, whose 95th percentile counts
MIN_MEASURED = 20  # calls of a target before its percentile counts
MIN_HEDGE_S = 0.001  # an earlier second call costs more than it saves
HEDGED_SHARE = 0.1  # of calls at most: a fleet that is slow as a whole gets no more load
AGGREGATOR_SHARE = 0.9  # of the time left, so that an aggregator's partial answer is still in time


@dataclass(frozen=True)
class Found:
    """Candidates of the groups that answered, and the numbers of those that did not."""

    candidates: list[Candidates]
    missing: tuple[int, ...] = ()


Answer = Candidates | Found | Refused


def sizes(groups: int, config: FanOutConfig) -> list[range]:
    """The groups of each aggregator, of nearly equal number; none where the gateway calls them itself."""
    if groups <= DIRECT_GROUPS and config.groups_per_aggregator is None:
        return []
    wanted = config.groups_per_aggregator or math.ceil(math.sqrt(groups))
    aggregators = math.ceil(groups / wanted)
    bounds = [groups * number // aggregators for number in range(aggregators + 1)]
    return [range(bounds[number], bounds[number + 1]) for number in range(aggregators)]


def hedged(config: ServeConfig) -> float | str:
    """When the searchers of a service are called again: never where each has a single replica."""
    return config.fanout.hedge_after if config.searcher_replicas > 1 else "off"


class Hedge:
    """When a call is made a second time.

    Args:
        after: milliseconds; "auto": the median over all targets of the 95th percentile of their calls, which
            one slow target does not raise; "off": never.
    """

    def __init__(self, after: float | str) -> None:
        self._after = after
        self._latencies: dict[int, deque[float]] = {}  # seconds, by target
        self._calls = self._seconds = 0
        self._auto_s: float | None = None

    def observe(self, target: int, seconds: float) -> None:
        """Take in how long a target took to answer."""
        self._latencies.setdefault(target, deque(maxlen=MEASURED_CALLS)).append(seconds)
        self._calls += 1
        if self._after == "auto" and self._calls % MIN_MEASURED == 0:
            measured = [sorted(each) for each in self._latencies.values() if len(each) >= MIN_MEASURED]
            if measured:
                self._auto_s = max(MIN_HEDGE_S, median(each[int(0.95 * len(each))] for each in measured))

    def delay_s(self) -> float | None:
        """Seconds after which a call is made again; None: it is not."""
        if self._seconds > HEDGED_SHARE * (self._calls + MIN_MEASURED):
            return None
        return self._after / 1000 if isinstance(self._after, float | int) else self._auto_s

    def count(self) -> None:
        """Count a second call."""
        self._seconds += 1


_Waiting = tuple[Query, float, asyncio.Future[Answer | None]]  # with the end of its time, of the loop's clock


class Target:
    """The searcher of a group, or an aggregator of several.

    Args:
        number: of the target.
        handle: calls it.
        groups: that it searches.
        hedge: when a call is made again.
    """

    def __init__(self, number: int, handle: Handle, groups: Sequence[int], hedge: Hedge) -> None:
        self.groups = tuple(groups)
        self._number, self._handle, self._hedge = number, handle, hedge
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def search(self, query: Query, left_s: float) -> Answer | None:
        """What the target finds; None when it does not know in time."""
        if isinstance(self._handle, LocalHandle):  # it makes batches of its own
            found: Answer = await self._handle.search.remote(query)
            return found
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer | None] = loop.create_future()
        self._waiting.append((query, loop.time() + left_s, answer))
        if len(self._waiting) == 1:  # queries of the same turn of the loop share a call
            loop.call_soon(self._start_call)
        return await answer

    def _start_call(self) -> None:
        """Call the target with the queries that wait, unless it has enough calls already."""
        if len(self._calls) >= MAX_CALLS:
            return  # the next one starts when one of them ends
        waiting = [each for each in self._waiting if not each[2].done()]  # not cancelled
        batch, self._waiting = waiting[:MAX_QUERIES], waiting[MAX_QUERIES:]
        if batch:
            call = asyncio.create_task(self._call(batch))
            self._calls.add(call)
            call.add_done_callback(self._end_call)

    def _end_call(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            self._start_call()

    async def _call(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        left_s = max(end for _, end, _ in batch) - started
        answers: Sequence[Answer | Exception | None]
        try:
            async with asyncio.timeout(left_s):
                answers = await self._answered([query for query, _, _ in batch], left_s)
            self._hedge.observe(self._number, loop.time() - started)
        except Exception as error:  # for each of the queries, whose callers say what it means
            answers = [error] * len(batch)
        for (_, _, answer), found in zip(batch, answers, strict=True):
            if answer.done():
                continue
            if isinstance(found, Exception):
                answer.set_exception(found)
            else:
                answer.set_result(found)

    async def _answered(self, queries: list[Query], left_s: float) -> Sequence[Answer | None]:
        """The answers of the first call, or of a second one that is faster."""
        delay_s = self._hedge.delay_s()
        calls = {asyncio.create_task(self._send(queries, left_s))}
        try:
            done, pending = await asyncio.wait(calls, timeout=delay_s)
            if delay_s is not None and (pending or done.pop().exception() is not None):
                self._hedge.count()
                calls.add(asyncio.create_task(self._send(queries, left_s - delay_s)))
            pending = set(calls)
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for call in done:
                    if call.exception() is None or not pending:
                        return call.result()
        finally:
            for call in calls:
                call.cancel()

    async def _send(self, queries: list[Query], left_s: float) -> Sequence[Answer | None]:
        response = self._handle.search_many.remote(queries, left_s)
        try:
            answers: Sequence[Answer | None] = await response
            return answers
        except asyncio.CancelledError:
            if hasattr(response, "cancel"):  # a response of Ray Serve, whose replica then stops, too
                response.cancel()
            raise


class FanOut:
    """Searches every group of shards.

    Args:
        targets: handles of searchers or of aggregators.
        groups: the numbers of the groups of each target.
        hedge_after: see :class:`Hedge`.
    """

    def __init__(
        self, targets: Sequence[Handle], groups: Sequence[Sequence[int]], *, hedge_after: float | str
    ) -> None:
        hedge = Hedge(hedge_after)
        pairs = zip(targets, groups, strict=True)
        self._targets = [Target(number, handle, own, hedge) for number, (handle, own) in enumerate(pairs)]

    async def search(self, query: Query, left_s: float) -> Found | Refused:
        """The candidates of all groups that answer within `left_s` seconds."""
        calls = [target.search(query, left_s) for target in self._targets]
        candidates: list[Candidates] = []
        missing: list[int] = []
        for target, answer in zip(self._targets, await gather_in_time(calls, deadline_s=left_s), strict=True):
            match answer:
                case Refused():
                    return answer
                case Found():
                    candidates += answer.candidates
                    missing += answer.missing
                case Candidates():
                    candidates.append(answer)
                case None:
                    missing += target.groups
        return Found(candidates, tuple(sorted(missing)))


class Aggregator:
    """Searches some groups for a gateway, and hands on the best of what they find.

    Args:
        searchers: handles, one for each group.
        groups: their numbers.
        hedge_after: see :class:`Hedge`.
    """

    def __init__(self, searchers: Sequence[Handle], groups: Sequence[int], hedge_after: float | str) -> None:
        self._fan_out = FanOut(searchers, [[group] for group in groups], hedge_after=hedge_after)

    async def search_many(self, queries: Sequence[Query], left_s: float) -> list[Found | Refused]:
        """What the groups find for each query in the time left."""
        own_s = AGGREGATOR_SHARE * left_s
        return await asyncio.gather(*(self._best(query, own_s) for query in queries))

    async def ping(self) -> bool:
        """Answers while the event loop runs."""
        return True

    async def _best(self, query: Query, left_s: float) -> Found | Refused:
        found = await self._fan_out.search(query, left_s)
        if isinstance(found, Refused) or len(found.candidates) < 2 or found.candidates[0].sparse is not None:
            return found  # hybrid scores are joined over the candidates of all groups
        return replace(found, candidates=[merged(found.candidates, k=query.k)])


def merged(answers: Sequence[Candidates], *, k: int) -> Candidates:
    """The `k` best of several groups by their embeddings alone, of equal scores those of the lower id."""
    ids = np.concatenate([answer.ids for answer in answers])
    dense = np.concatenate([answer.dense for answer in answers])
    places = np.lexsort((ids, -dense))[:k].tolist()
    documents = [document for answer in answers for document in answer.documents]
    return Candidates(
        ids=ids[places],
        shards=np.concatenate([answer.shards for answer in answers])[places],
        dense=dense[places],
        sparse=None,
        documents=[documents[place] for place in places],
        searched=sum(answer.searched for answer in answers),
        version=answers[-1].version,
    )
