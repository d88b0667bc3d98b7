"""What is known of workers and parts whose processes can no longer tell."""

import pytest

from scalingnote.core import attempts
from scalingnote.core.attempts import Attempts


def waits(counted: Attempts, slot: str) -> float:
    return counted.begin_load(slot)[0]


def test_a_slot_that_cannot_load_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attempts, "MAX_BACKOFF_S", 15.0)
    counted = Attempts(backoff_s=4.0)
    assert waits(counted, "a GPU 0") == 0
    for expected in (4, 8, 15, 15):
        counted.fail("a GPU 0", "RuntimeError: CUDA error")
        assert waits(counted, "a GPU 0") == expected
    assert waits(counted, "a GPU 1") == 0
    assert counted.failures() == {"a GPU 0": "RuntimeError: CUDA error"}


def test_a_process_that_ends_without_a_word_has_failed_too():
    counted = Attempts(backoff_s=4.0)
    waits(counted, "slot")
    assert waits(counted, "slot") == 4  # while it loaded
    counted.end_load("slot")
    assert waits(counted, "slot") == 8  # after it had loaded
    counted.end_load("slot")
    counted.begin(0, "node")
    counted.end(0, "slot", finished=False)
    assert waits(counted, "slot") == 16  # a part that failed proves nothing
    counted.end_load("slot")
    counted.end(0, "slot", finished=True)
    assert counted.failures() == {}
    assert waits(counted, "slot") == 4


def test_there_is_hope_as_long_as_one_worker_may_load(monkeypatch: pytest.MonkeyPatch):
    counted = Attempts(backoff_s=4.0, patience_s=1e6)
    counted.start(2)
    assert not counted.hopeless()
    for _ in range(attempts.MAX_LOADS):
        waits(counted, "first")
        counted.fail("first", "no driver")
    assert not counted.hopeless()  # the second one may still come
    waits(counted, "second")
    counted.end_load("second")
    assert not counted.hopeless()
    for _ in range(attempts.MAX_LOADS):
        counted.fail("second", "no memory")
    assert counted.hopeless() == "no memory"
    counted.start(2)
    assert not counted.hopeless()

    impatient = Attempts(backoff_s=4.0, patience_s=0.0)
    impatient.start(2)
    for _ in range(attempts.MAX_LOADS):
        impatient.fail("first", "no driver")
    assert impatient.hopeless() == "no driver"


def test_an_execution_knows_its_own_parts_and_workers_alone():
    counted = Attempts(backoff_s=4.0)
    counted.start(1)
    _, execution = counted.begin_load("slot")
    counted.begin(0, "node")
    counted.begin(1, "node")
    counted.end(1, "slot", finished=True)
    assert counted.underway() == {0: "node"}
    assert not counted.is_over(execution)
    counted.start(1)
    assert counted.underway() == {}
    assert counted.is_over(execution)
