"""From a query to every group of shards and back: aggregators, shared calls, hedged calls, deadlines.

    gateway ─► aggregators (above 16 groups) ─► searchers of the groups

A gateway that calls 48 groups for every query spends its time on calls. With aggregators it makes three
calls, and queries that wait for the same target share one call. A call that takes longer than nearly all
others is repeated (hedged): Ray Serve sends the second call to the replica with the fewest calls, which is
not the slow one (Dean and Barroso, "The Tail at Scale", 2013). If the replica of a call died, the call is
repeated in any case (ReadHandle). The answer lists the groups that did not answer in time.

Lists of queries and of answers are pickled here, because Ray's pickler, which also supports functions and
classes, takes twice as long. A searcher answers the queries of a call by :func:`search_batch`.
"""

import asyncio
import math
import pickle
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from statistics import median

import numpy as np

from scalingnote.core.errors import DatabaseError, SearchError
from scalingnote.models.sparse_query import SparseRows
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.backend import SearchBackend
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates, concatenate
from scalingnote.serve.concurrency import Handle, LocalHandle, for_reading, gather_in_time
from scalingnote.serve.telemetry import get_logger
from scalingnote.serve.towers import Refused

MAX_CALLS = 2  # in flight to one target: other queries wait, and share the next call
MAX_CALL_QUERIES = 64  # of one call
MEASURED_CALLS = 200  # latest calls of a target that its 95th percentile is computed from
MIN_HEDGE_CALLS = 20  # calls of a target before its percentile counts
MIN_HEDGE_S = 0.001  # an earlier second call costs more than it saves
HEDGED_SHARE = 0.2  # largest share of calls: if all replicas are slow, hedging adds little load
MAX_SEARCHED = 32  # queries scanned together
AGGREGATOR_SHARE = 0.9  # of the time left, so that the partial answer of an aggregator is still in time
Answer = Candidates | Refused
Find = Callable[[Query, float], Awaitable[Answer]]  # a query and the seconds left; see FanOut.search
SearchCall = tuple[SearchBackend, Query]  # with the searcher of the version when the call arrives
log = get_logger()


def sizes(groups: int, config: ServeConfig) -> list[range]:
    """Divide the groups nearly evenly among aggregators; empty if the gateway calls the groups itself."""
    if groups <= config.groups_per_aggregator:
        return []
    aggregators = math.ceil(groups / config.groups_per_aggregator)
    bounds = [groups * number // aggregators for number in range(aggregators + 1)]
    return [range(bounds[number], bounds[number + 1]) for number in range(aggregators)]


def is_hedged(config: ServeConfig) -> bool:
    """Return whether slow calls are repeated: a second call needs another replica of the searcher."""
    return config.replicas("searcher") > 1


class Hedge:
    """The delay before a slow call is repeated: the 95th percentile of a target's calls, median over targets.

    One slow target does not raise the median.
    """

    def __init__(self) -> None:
        self._latencies: dict[int, deque[float]] = {}  # seconds, by target
        self._calls = self._seconds = 0
        self._delay_s: float | None = None

    def observe(self, target: int, seconds: float) -> None:
        """Record the seconds that a target took to answer."""
        self._latencies.setdefault(target, deque(maxlen=MEASURED_CALLS)).append(seconds)
        self._calls += 1
        if self._calls % MIN_HEDGE_CALLS == 0:
            latencies = [sorted(each) for each in self._latencies.values() if len(each) >= MIN_HEDGE_CALLS]
            if latencies:
                self._delay_s = max(MIN_HEDGE_S, median(each[int(0.95 * len(each))] for each in latencies))

    def delay_s(self) -> float | None:
        """Return the seconds after which a call is repeated; None: not known yet, or too many were."""
        too_many = self._seconds > HEDGED_SHARE * (self._calls + MIN_HEDGE_CALLS)
        return None if too_many else self._delay_s

    def count(self) -> None:
        """Count a second call."""
        self._seconds += 1


class _PendingQuery:
    """A query in flight, and the answers of targets so far."""

    def __init__(self, query: Query, end: float, targets: int, loop: asyncio.AbstractEventLoop) -> None:
        self.query, self.end = query, end  # of the loop's clock
        self.answers: list[Answer | None] = [None] * targets
        self.done: asyncio.Future[None] = loop.create_future()
        self._open = targets

    def put(self, target: int, answer: Answer | None) -> None:
        """Store the answer of a target; None if it failed."""
        self.answers[target] = answer
        self._open -= 1
        if not self.done.done() and (self._open == 0 or isinstance(answer, Refused)):
            self.done.set_result(None)


class Target:
    """The searcher of a group, or an aggregator of several.

    Args:
        number: of the target.
        handle: of the searcher or the aggregator.
        groups: numbers of the groups that it searches.
        hedge: delay before a call is repeated; None: no call is repeated.
    """

    def __init__(self, number: int, handle: Handle, groups: Sequence[int], hedge: Hedge | None) -> None:
        self.groups, self.handle = tuple(groups), handle
        self._number, self._hedge = number, hedge
        self._waiting: list[_PendingQuery] = []
        self._calls: set[asyncio.Task[None]] = set()

    def add(self, pending: _PendingQuery, loop: asyncio.AbstractEventLoop) -> None:
        """Add a query to the next call."""
        self._waiting.append(pending)
        if len(self._waiting) == 1:  # queries of one turn of the loop share a call
            loop.call_soon(self._start_call)

    def _start_call(self) -> None:
        """Call the target with the queries that wait, unless it has enough calls already."""
        if len(self._calls) >= MAX_CALLS:
            return  # the next one starts when one of them ends
        waiting = [pending for pending in self._waiting if not pending.done.done()]
        batch, self._waiting = waiting[:MAX_CALL_QUERIES], waiting[MAX_CALL_QUERIES:]
        if batch:
            call = asyncio.create_task(self._call(batch))
            self._calls.add(call)
            call.add_done_callback(self._end_call)

    def _end_call(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            self._start_call()

    async def _call(self, batch: Sequence[_PendingQuery]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        left_s = max(pending.end for pending in batch) - started
        answers: Sequence[Answer | None] = [None] * len(batch)
        try:
            async with asyncio.timeout(left_s):
                answers = pickle.loads(await self._send_hedged([each.query for each in batch], left_s))
            if self._hedge is not None:
                self._hedge.observe(self._number, loop.time() - started)
        except TimeoutError:
            log.warning("target %d of the fan-out took longer than %.3gs", self._number, left_s)
        except Exception:  # an error of one group must not discard the results of the others
            log.exception("target %d of the fan-out failed", self._number)
        for pending, answer in zip(batch, answers, strict=True):
            pending.put(self._number, answer)

    async def _send_hedged(self, queries: list[Query], left_s: float) -> bytes:
        """Return the answers of the first call, or of a second one that is faster."""
        hedge = self._hedge
        delay_s = None if hedge is None else hedge.delay_s()
        calls = {asyncio.create_task(self._send(queries, left_s))}
        try:
            done, pending = await asyncio.wait(calls, timeout=delay_s)
            if hedge and delay_s is not None and (pending or done.pop().exception() is not None):
                hedge.count()
                calls.add(asyncio.create_task(self._send(queries, left_s - delay_s)))
            pending = set(calls)
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                # Both may end in the same turn of the loop, one of them with an error.
                successes = [call for call in done if call.exception() is None]
                if successes or not pending:
                    return (successes or [*done])[0].result()
        finally:
            for call in calls:
                call.cancel()

    async def _send(self, queries: list[Query], left_s: float) -> bytes:
        pickled: bytes = await self.handle.search_many.remote(pickle.dumps(queries), left_s)
        return pickled


class FanOut:
    """A search of every group of shards.

    Args:
        targets: handles of searchers or of aggregators: all in this process, or all in other processes.
        groups: the numbers of the groups of each target.
        hedged: whether slow calls are repeated.
    """

    def __init__(
        self, targets: Sequence[Handle], groups: Sequence[Sequence[int]], *, hedged: bool = False
    ) -> None:
        hedge = Hedge() if hedged else None
        pairs = zip(targets, groups, strict=True)
        self._targets = [Target(n, handle, numbers, hedge) for n, (handle, numbers) in enumerate(pairs)]
        self._is_local = all(isinstance(handle, LocalHandle) for handle in targets)

    @classmethod
    def of(cls, searchers: Sequence[Handle], aggregators: Sequence[Handle], config: ServeConfig) -> "FanOut":
        """Return the fan-out of a gateway: over its aggregators, or over its searchers if it has none."""
        groups: Sequence[Sequence[int]] = sizes(len(searchers), config)
        if not aggregators:
            groups = [[number] for number in range(len(searchers))]
        return cls(aggregators or searchers, groups, hedged=is_hedged(config))

    async def search(self, query: Query, left_s: float) -> Answer:
        """Return the candidates of all groups that answer within `left_s` seconds."""
        answers = await (self._local if self._is_local else self._remote)(query, left_s)
        candidates: list[Candidates] = []
        missing: list[int] = []
        for target, answer in zip(self._targets, answers, strict=True):
            if isinstance(answer, Refused):
                return answer
            if answer is None:
                missing += target.groups
            else:
                candidates.append(answer)
        return concatenate(candidates, missing=missing)

    async def _local(self, query: Query, left_s: float) -> list[Answer | None]:
        """Return the answers of searchers in this process, which form batches themselves."""
        calls = [target.handle.search.remote(query) for target in self._targets]
        return await gather_in_time(calls, deadline_s=left_s)

    async def _remote(self, query: Query, left_s: float) -> list[Answer | None]:
        # One future for all targets: a task for each target would take longer than the rest of a search.
        loop = asyncio.get_running_loop()
        pending = _PendingQuery(query, loop.time() + left_s, len(self._targets), loop)
        for target in self._targets:
            target.add(pending, loop)
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await pending.done
        return pending.answers


class Aggregator:
    """A search of some groups for a gateway, which returns their best candidates.

    Args:
        searchers: handles, one for each group.
        groups: their numbers.
        hedged: whether slow calls are repeated.
    """

    def __init__(self, searchers: Sequence[Handle], groups: Sequence[int], hedged: bool) -> None:
        reading = [for_reading(searcher) for searcher in searchers]
        self._fan_out = FanOut(reading, [[group] for group in groups], hedged=hedged)

    async def search_many(self, pickled: bytes, left_s: float) -> bytes:
        """Search for pickled queries in the time left; return the pickled candidates of each."""
        queries, search_s = pickle.loads(pickled), AGGREGATOR_SHARE * left_s
        return pickle.dumps(await asyncio.gather(*(self._best(query, search_s) for query in queries)))

    async def ping(self) -> bool:
        """Return True, which shows that the event loop runs."""
        return True

    async def _best(self, query: Query, left_s: float) -> Answer:
        candidates = await self._fan_out.search(query, left_s)
        if isinstance(candidates, Refused) or candidates.sparse is not None:
            return candidates  # hybrid scores are joined over the candidates of all groups
        return best_by_embedding(candidates, k=query.k)


def best_by_embedding(candidates: Candidates, *, k: int) -> Candidates:
    """Return the `k` best candidates by embeddings; of equal scores, those with the lower id."""
    if len(candidates) <= k:
        return candidates
    return candidates.take(np.lexsort((candidates.ids, -candidates.dense))[:k].tolist())


# --- the searcher's side -----------------------------------------------------------------------------------


def search_batch(batch: Sequence[SearchCall]) -> list[Answer | Exception]:
    """Return answers in the order of the batch; searches with equal batch keys are done together."""
    groups: dict[object, list[int]] = {}
    for number, (_, query) in enumerate(batch):
        groups.setdefault(query.batch_key, []).append(number)
    answers: dict[int, Answer | Exception] = {}
    for numbers in groups.values():
        searcher = batch[numbers[0]][0]
        answers |= zip(numbers, _search_group(searcher, [batch[n][1] for n in numbers]), strict=True)
    return [answers[number] for number in range(len(batch))]


def _search_group(searcher: SearchBackend, queries: Sequence[Query]) -> Sequence[Answer | Exception]:
    first = queries[0]
    try:
        return searcher.find(
            np.concatenate([query.embedding for query in queries]),
            _stack([query.terms for query in queries if query.terms is not None]),
            k=first.k,
            nprobe=first.nprobe,
            where=first.where,
            exact=first.exact,
        )
    except SearchError as error:
        if len(queries) > 1:  # one query may be the reason: each query is searched separately
            return [answer for query in queries for answer in _search_group(searcher, [query])]
        return [Refused(str(error))]
    except DatabaseError as error:
        return [Refused(str(error), temporary=True)] * len(queries)
    except Exception as error:
        return [error] * len(queries)


def _stack(rows: Sequence[SparseRows]) -> SparseRows | None:
    """Stack sparse matrices of one row each; None for no matrix."""
    if len(rows) <= 1:
        return rows[0] if rows else None
    return SparseRows(
        np.cumsum([0, *(len(each.terms) for each in rows)]),
        np.concatenate([each.terms for each in rows]),
        np.concatenate([each.values for each in rows]),
    )
