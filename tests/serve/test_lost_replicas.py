"""Calls to replicas that die: a call that reads is made once more, a call that writes never is."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from scalingnote.serve.concurrency import LocalHandle, ReadHandle, for_reading
from scalingnote.serve.deployed import Deployed, ServedArm
from scalingnote.serve.fan_out import Aggregator

LOST = [
    RayActorError(),
    ActorDiedError(),
    ActorUnavailableError("reset by peer", None),
    ReplicaUnavailableError("replica#1"),
]


class Response:
    """A fake answer of a replica, which may be cancelled."""

    def __init__(self, outcome: Any) -> None:
        self._outcome, self.cancelled = outcome, False

    def __await__(self) -> Any:
        if self._outcome is None:  # it never comes
            yield from asyncio.get_running_loop().create_future()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        self.cancelled = True


class Handle(DeploymentHandle):
    """A fake deployment; its calls have these outcomes, one after the other."""

    def __init__(self, *outcomes: Any) -> None:
        self._outcomes = list(outcomes)
        self.calls: list[tuple[Any, Any]] = []
        self.responses: list[Response] = []

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *args: Any, **options: Any) -> Any:
        self.calls.append((args, options))
        self.responses.append(Response(self._outcomes.pop(0)))
        return self.responses[-1]


def ask(handle: Any) -> Any:
    async def called() -> Any:
        return await handle.encode.remote("a query", user_id="u")

    return asyncio.run(called())


@pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)
def test_a_read_is_repeated_once_on_another_replica(lost):
    handle = Handle(lost, "an answer")
    assert ask(ReadHandle(handle)) == "an answer"
    assert handle.calls == [(("a query",), {"user_id": "u"})] * 2


@pytest.mark.parametrize(
    "outcomes", [[LOST[1], LOST[1]], [ValueError("of the request")]], ids=["lost twice", "of one that lives"]
)
def test_other_errors_are_not_retried(outcomes):
    handle = Handle(*outcomes, "too late")
    with pytest.raises(type(outcomes[0])):
        ask(ReadHandle(handle))
    assert len(handle.calls) == len(outcomes)


@pytest.mark.parametrize("outcomes", [[None], [LOST[1], None]], ids=["first", "second"])
def test_a_cancelled_call_is_cancelled_in_its_replica(outcomes):
    handle = Handle(*outcomes)

    async def called() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ReadHandle(handle).encode.remote("a query")

    asyncio.run(called())
    assert handle.responses[-1].cancelled


def test_the_gateway_repeats_reads_of_all_parts_but_the_writer():
    local = LocalHandle(object())
    assert for_reading(local) is local
    handles = {name: Handle() for name in ("documents", "reranker", "teacher", "document_encoder", "writer")}
    arms = [ServedArm("default", Handle(), "torch", False), ServedArm("own", local, "lookup", False)]
    parts = Deployed(arms, None, [Handle(), local], [Handle()], **handles).for_gateway()
    kinds = [type(arm.encoder) for arm in parts.arms]
    kinds += [type(each) for each in (*parts.searchers, *parts.aggregators)]
    assert kinds == [ReadHandle, LocalHandle, ReadHandle, LocalHandle, ReadHandle]
    assert all(type(getattr(parts, name)) is ReadHandle for name in handles if name != "writer")
    assert parts.writer is handles["writer"]
    assert Deployed(arms).for_gateway().writer is None


def test_an_aggregator_repeats_reads_of_its_searchers():
    (target,) = Aggregator([Handle()], [3], hedged=False)._fan_out._targets
    assert type(target.handle) is ReadHandle
