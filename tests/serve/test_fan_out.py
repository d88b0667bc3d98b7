"""The fan-out to slow, dead or many groups: shared calls, second calls, partial answers."""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from scalingnote.index.shard import SHARD_DOCUMENTS
from scalingnote.run.service_config import ServeConfig
from scalingnote.search.query_path import Query
from scalingnote.search.searcher import Candidates
from scalingnote.serve.fan_out import (
    HEDGED_SHARE,
    MAX_CALLS,
    MIN_HEDGE_CALLS,
    Aggregator,
    Answer,
    FanOut,
    Hedge,
    best_by_embedding,
    is_hedged,
    sizes,
)
from scalingnote.serve.towers import Refused

GROUPS = 24
ROWS = 5


def query(number: int = 0, k: int = 10) -> Query:
    return Query(np.float32([[number]]), k=k, version="v")


def of_group(group: int, request: Query) -> Candidates:
    """Return five candidates; the scores of groups interleave, and some are equal."""
    ids = group + GROUPS * np.arange(ROWS)
    scores = np.float32((ids * 7 + int(request.embedding[0, 0])) % 50)
    documents = [dict.fromkeys(SHARD_DOCUMENTS.names, str(each)) for each in ids]
    return Candidates(ids, np.full(ROWS, group), scores, None, documents, searched=1, version=request.version)


class Replica:
    """A fake handle of Ray Serve for one group."""

    def __init__(self, group: int, behave: Callable[[int], float] = lambda _: 0.0) -> None:
        self._group, self._behave = group, behave
        self.calls: list[int] = []  # number of queries of each call
        self.in_flight = self.most = 0
        self.cancelled = 0

    @property
    def search_many(self) -> "Replica":
        return self

    def remote(self, pickled: bytes, left_s: float) -> Any:
        assert left_s > 0
        queries: list[Query] = pickle.loads(pickled)
        self.calls.append(len(queries))
        return self._answer(queries, self._behave(len(self.calls)))

    async def _answer(self, queries: Sequence[Query], seconds: float) -> bytes:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            if seconds < 0:
                raise OSError("the replica is gone")
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        return pickle.dumps([self.answer(each) for each in queries])

    def answer(self, request: Query) -> Answer:
        return of_group(self._group, request)


def direct(replicas: Sequence[Any], *, hedged: bool = False) -> FanOut:
    return FanOut(replicas, [[n] for n in range(len(replicas))], hedged=hedged)


class Deployed:
    """An aggregator with the interface of a handle."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self.search_many = self

    def remote(self, pickled: bytes, left_s: float) -> Any:
        return self._aggregator.search_many(pickled, left_s)


def tree(replicas: Sequence[Replica], per_aggregator: int) -> tuple[FanOut, list[Any]]:
    groups = sizes(len(replicas), ServeConfig(groups_per_aggregator=per_aggregator))
    aggregators: list[Any] = [Deployed(Aggregator([replicas[g] for g in own], own, False)) for own in groups]  # type: ignore[misc]
    return FanOut(aggregators, groups), aggregators


def best(candidates: Answer, k: int) -> list[tuple[int, float]]:
    assert isinstance(candidates, Candidates)
    together = best_by_embedding(candidates, k=k)
    return list(zip(together.ids.tolist(), together.dense.tolist(), strict=True))


def test_more_than_sixteen_groups_are_divided_evenly():
    assert [sizes(groups, ServeConfig()) for groups in (1, 8, 16)] == [[], [], []]
    of_48 = sizes(48, ServeConfig())
    assert [len(own) for own in of_48] == [16, 16, 16]
    assert [group for own in of_48 for group in own] == [*range(48)]
    assert [len(own) for own in sizes(17, ServeConfig(groups_per_aggregator=4))] == [3, 3, 4, 3, 4]


def test_aggregators_give_the_results_of_direct_calls():
    replicas = [Replica(group) for group in range(GROUPS)]

    async def both(number: int) -> tuple[Any, Any]:
        through, _ = tree(replicas, 5)
        return await direct(replicas).search(query(number), 5), await through.search(query(number), 5)

    for number in range(20):
        flat, deep = asyncio.run(both(number))
        assert best(deep, 10) == best(flat, 10)
        assert deep.searched == flat.searched == GROUPS
        assert deep.missing == flat.missing == ()
        together = best_by_embedding(deep, k=10)
        assert [row["doc_id"] for row in together.documents] == [str(each) for each in together.ids]


class Hybrid(Replica):
    """A group with scores of terms."""

    def answer(self, request: Query) -> Answer:
        return replace(of_group(self._group, request), sparse=np.arange(ROWS, dtype=np.float32))


def test_an_aggregator_returns_all_candidates_with_terms():
    through, _ = tree([Hybrid(group) for group in range(6)], 3)
    candidates = asyncio.run(through.search(query(k=2), 5))
    assert isinstance(candidates, Candidates)
    assert len(candidates) == ROWS * 6
    np.testing.assert_array_equal(candidates.sparse, [*range(ROWS)] * 6)


def test_queries_that_wait_share_a_call():
    replica = Replica(0, lambda _: 0.02)

    async def crowd() -> list[Any]:
        fan_out = direct([replica])
        first = asyncio.gather(*(fan_out.search(query(n), 5) for n in range(3)))
        await asyncio.sleep(0.005)
        later = []
        for n in range(3, 43):  # each in a separate turn of the loop
            later.append(asyncio.ensure_future(fan_out.search(query(n), 5)))
            await asyncio.sleep(0)
        return [*await first, *await asyncio.gather(*later)]

    answers = asyncio.run(crowd())
    assert [best(found, 3) for found in answers] == [
        best(of_group(0, query(number)), 3) for number in range(43)
    ]
    assert replica.calls[0] == 3
    assert sum(replica.calls) == 43
    assert len(replica.calls) < 10
    assert replica.most == MAX_CALLS


def test_dead_and_late_groups_are_listed_as_missing():
    replicas = [Replica(group) for group in range(GROUPS)]
    replicas[3], replicas[11] = Replica(3, lambda _: -1.0), Replica(11, lambda _: 60.0)
    through, aggregators = tree(replicas, 5)
    candidates = asyncio.run(through.search(query(), 0.5))
    assert isinstance(candidates, Candidates)
    assert candidates.missing == (3, 11)
    assert candidates.searched == GROUPS - 2
    assert replicas[11].cancelled == 1  # no request waits for it any more

    def dead(*_: Any) -> Any:
        raise OSError("the aggregator is gone")

    aggregators[0].remote = dead
    candidates = asyncio.run(through.search(query(), 0.5))
    assert isinstance(candidates, Candidates)
    assert candidates.missing == (0, 1, 2, 3, 11)


def test_scores_of_terms_survive_an_aggregator_without_results():
    through, _ = tree([Hybrid(0), Hybrid(1), Hybrid(2, lambda _: -1.0), Hybrid(3, lambda _: -1.0)], 2)
    candidates = asyncio.run(through.search(query(), 5))
    assert isinstance(candidates, Candidates)
    assert candidates.missing == (2, 3)
    assert candidates.sparse is not None
    assert candidates.sparse.tolist() == [*range(ROWS)] * 2


def test_a_refusal_of_one_group_is_the_answer():
    class Refusing(Replica):
        def answer(self, request: Query) -> Answer:
            return Refused("no such field")

    through, _ = tree([Replica(0), Refusing(1), Replica(2), Replica(3)], 2)
    assert asyncio.run(through.search(query(), 5)) == Refused("no such field")


@pytest.mark.parametrize(
    ("seconds", "hedged", "missing", "calls"),
    [
        ((60.0, 0.0), True, (), [1, 1]),  # the first call is stuck
        ((-1.0, 0.0), True, (), [1, 1]),  # it fails before the delay
        ((-1.0, -1.0), True, (0,), [1, 1]),
        ((60.0, 0.0), False, (0,), [1]),
    ],
)
def test_a_second_call_replaces_a_stuck_or_failed_one(seconds, hedged, missing, calls, monkeypatch):
    monkeypatch.setattr(Hedge, "delay_s", lambda _: 0.005)
    replica = Replica(0, lambda call: seconds[call - 1])
    candidates = asyncio.run(direct([replica], hedged=hedged).search(query(), 5 if hedged else 0.05))
    assert isinstance(candidates, Candidates)
    assert (candidates.missing, replica.calls) == (missing, calls)
    assert replica.cancelled == (seconds[0] > 0)


def test_second_calls_have_a_typical_delay_and_a_budget():
    hedge = Hedge()
    assert hedge.delay_s() is None
    for _ in range(MIN_HEDGE_CALLS):
        for target in range(4):
            hedge.observe(target, 0.010 * (1 + target / 10) if target else 3.0)
    assert 0.010 < (hedge.delay_s() or 0) < 0.020
    for _ in range(int(HEDGED_SHARE * 5 * MIN_HEDGE_CALLS) + 1):
        hedge.count()
    assert hedge.delay_s() is None
    assert not is_hedged(ServeConfig())  # a second call would reach the same replica
    assert is_hedged(ServeConfig(deployments={"searcher": {"num_replicas": 2}}))
