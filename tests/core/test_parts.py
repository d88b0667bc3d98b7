"""Parts that fail are tried again or set aside, also if a process ends without a report."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from scalingnote.core import parts
from scalingnote.core.errors import ConfigError, PartsFailedError
from scalingnote.core.parts import Attempts, PartQueue, PartStage, in_order, map_here


def stage(journal: list[Any], faults: dict[int, BaseException], times: int = 99) -> PartStage:
    """Build a stage that squares a part; a part with a fault raises it in its first `times` tries."""

    def load() -> Callable[[int], int]:
        journal.append("load")
        return work

    def work(part: int) -> int:
        journal.append(part)
        if part in faults and journal.count(part) <= times:
            raise faults[part]
        return part * part

    return PartStage(load)


@pytest.mark.parametrize(
    ("fault", "tries", "reason"),
    [
        (ValueError("not a number"), parts.MAX_ERRORS, "ValueError: not a number"),
        (OSError("slow down"), parts.MAX_OS_ERRORS, "OSError: slow down"),
    ],
)
def test_a_failed_part_is_tried_after_the_others(fault: BaseException, tries: int, reason: str):
    journal: list[Any] = []
    assert sorted(map_here(stage(journal, {1: fault}, times=tries - 1), range(4))) == [0, 1, 4, 9]
    assert journal == ["load", 0, 1, 2, 3] + [1] * (tries - 1)

    results = []
    with pytest.raises(PartsFailedError, match=rf"1 of 4 parts failed .*: 1: (?s:.*){reason}") as error:
        results.extend(map_here(stage([], {1: fault}), range(4)))
    assert sorted(results) == [0, 4, 9]
    assert list(error.value.reasons) == [1]


@pytest.mark.parametrize(
    ("node_is_there", "tries", "reason"),
    [
        (True, parts.MAX_PROCESS_LOSSES, r"its process was lost \(2 of 2\): out of memory"),
        (False, parts.MAX_LOSSES, r"its process or its node was lost \(4 of 4\)"),
    ],
)
def test_a_lost_part_has_more_tries_if_its_node_is_lost(node_is_there: bool, tries: int, reason: str):
    queue = PartQueue([("name", 0)])
    for _ in range(tries):
        queue.check()
        queue.lose(queue.left.popleft(), node_is_there=node_is_there)
    assert not queue.left
    with pytest.raises(PartsFailedError, match=f"name: {reason}"):
        queue.check()


def test_an_error_for_the_user_ends_the_run_at_once():
    journal: list[Any] = []
    with pytest.raises(ConfigError, match="wrong"):
        list(map_here(stage(journal, {1: ConfigError("wrong")}), range(4)))
    assert journal == ["load", 0, 1]


def test_only_the_first_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture):
    faults: dict[int, BaseException] = {number: ValueError(f"bad {number}") for number in (1, 2)}
    assert sorted(map_here(stage([], faults, times=1), range(3))) == [0, 1, 4]
    first, second = caplog.messages
    assert "Traceback" in first
    assert second == "a part failed and is tried again after the others: 2: ValueError: bad 2"


def test_remaining_parts_are_given_up_with_a_reason():
    queue = PartQueue(["a", "b"])
    queue.give_up("no worker could load: no driver")
    with pytest.raises(PartsFailedError, match="none of 2 parts could be processed: a: no worker could load"):
        queue.check()


def test_a_stage_runs_three_steps():
    three_steps = PartStage(
        lambda: lambda given: given + 1, read=lambda part: 10 * part, write=lambda *both: both
    )
    assert list(map_here(three_steps, [1, 2])) == [(1, 11), (2, 21)]
    assert list(map_here(PartStage(pytest.fail), [])) == []


def test_in_order_sorts_results():
    assert list(in_order([(2, "c"), (0, "a"), (1, "b"), (3, "d")])) == ["a", "b", "c", "d"]
    assert list(in_order(map(partial(divmod, 0), []))) == []


# --- state of workers ---------------------------------------------------------------------------------------


def waits(counted: Attempts, slot: str) -> float:
    return counted.begin_load(slot)[0]


def test_a_slot_that_cannot_load_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "MAX_BACKOFF_S", 15.0)
    counted = Attempts(backoff_s=4.0)
    assert waits(counted, "a GPU 0") == 0
    for expected in (4, 8, 15, 15):
        counted.fail("a GPU 0", "RuntimeError: CUDA error")
        assert waits(counted, "a GPU 0") == expected
    assert waits(counted, "a GPU 1") == 0
    assert counted.failures() == {"a GPU 0": "RuntimeError: CUDA error"}


def test_a_process_that_ends_without_a_report_has_failed():
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


def test_hopeless_only_if_no_worker_can_load(monkeypatch: pytest.MonkeyPatch):
    counted = Attempts(backoff_s=4.0, patience_s=1e6)
    counted.start(2)
    assert not counted.hopeless()
    for _ in range(parts.MAX_LOADS):
        waits(counted, "first")
        counted.fail("first", "no driver")
    assert not counted.hopeless()  # the second one may still start
    waits(counted, "second")
    counted.end_load("second")
    assert not counted.hopeless()
    for _ in range(parts.MAX_LOADS):
        counted.fail("second", "no memory")
    assert counted.hopeless() == "no memory"
    counted.start(2)
    assert not counted.hopeless()

    impatient = Attempts(backoff_s=4.0, patience_s=0.0)
    impatient.start(2)
    for _ in range(parts.MAX_LOADS):
        impatient.fail("first", "no driver")
    assert impatient.hopeless() == "no driver"


def test_a_new_execution_forgets_parts_and_workers():
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
