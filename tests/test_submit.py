"""Following a job of a cluster over connections that are lost."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from ray.job_submission import JobStatus

from scalingnote import submit
from scalingnote.errors import ConfigError

LOG = ("one\n", "two\nthree\n", "four\n")


class Cluster:
    """Tells the log from its beginning at each connection; the first ones are lost after some lines."""

    def __init__(self, *lost_after: int, silent: bool = False) -> None:
        self.lost, self.silent, self.connections = list(lost_after), silent, 0

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        assert job == "job"
        self.connections += 1
        lines = self.lost.pop(0) if self.lost else None
        for text in LOG[:lines]:
            yield text
        if lines is not None and self.silent:
            await asyncio.sleep(3600)
        if lines is not None:
            raise aiohttp.ClientConnectionError("the laptop was closed")

    def get_job_info(self, job: str) -> Any:
        done = not self.lost
        return SimpleNamespace(
            status=JobStatus.SUCCEEDED if done else JobStatus.RUNNING, driver_exit_code=0 if done else None
        )


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(submit, "QUIET_S", 0.05)


@pytest.mark.parametrize("silent", [False, True])
def test_each_line_is_printed_once_over_lost_connections(silent: bool, capsys: pytest.CaptureFixture[str]):
    cluster: Any = Cluster(1, 0, 2, silent=silent)
    assert asyncio.run(submit._follow(cluster, "job")) == 0
    assert capsys.readouterr().out == "".join(LOG)
    assert cluster.connections == 4


def test_a_cluster_that_stays_away_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(submit, "RECONNECT_S", 0.05)
    away: Any = Cluster(*[0] * 1000)
    with pytest.raises(ConfigError, match="the same command follows it again"):
        asyncio.run(submit._follow(away, "job"))


@pytest.mark.parametrize(
    ("known", "attempt"),
    [({}, 1), ({"a": "RUNNING"}, 1), ({"a": "FAILED"}, 2), ({"a": "FAILED", "a-2": "PENDING"}, 2)],
)
def test_an_attempt_under_way_is_found_before_the_next_is_made(known: dict[str, str], attempt: int):
    assert submit._attempt("a", {name: JobStatus(status) for name, status in known.items()}) == attempt
