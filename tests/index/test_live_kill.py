from pathlib import Path

import pytest

from benchmarks import live_kill


@pytest.mark.slow
@pytest.mark.parametrize("delta", [False, True])
def test_a_killed_writer_keeps_every_acknowledged_write_once(tmp_path: Path, delta: bool) -> None:
    """Run a short history; `python -m benchmarks.live_index` and `benchmarks.delta` run long ones."""
    counts = live_kill.run(str(tmp_path), seed=3, operations=40, kills=3, delta=delta)
    assert (counts.lost_writes, counts.duplicates, counts.wrong_answers) == (0, 0, 0)
    assert counts.kills >= 2
    assert counts.done["upsert"] > 5


def test_lost_duplicate_and_unfinished_writes_are_counted() -> None:
    one, two = live_kill.unit_vectors(2, 4, seed=0)
    before, after = {"a": (1, one), "b": (1, one)}, {"a": (2, two), "c": (2, two)}

    class State:
        def __init__(self, *state: tuple[str, int]) -> None:
            self._state = list(state)

        def ask(self, _: str) -> list[tuple[str, int]]:
            return self._state

    def check(*state: tuple[str, int], after: live_kill.Truth = after) -> tuple[list[tuple], tuple[int, ...]]:
        counter = live_kill.Tally()
        state_after = live_kill.check_state(State(*state), before, after, counter)
        counts = counter.lost_writes, counter.duplicates, counter.in_flight_done
        return sorted((name, number) for name, (number, _) in state_after.items()), counts

    assert check(("a", 1), ("b", 1)) == ([("a", 1), ("b", 1)], (0, 0, 0))
    assert check(("a", 2), ("c", 2)) == ([("a", 2), ("c", 2)], (0, 0, 1))
    assert check(("a", 2), ("b", 1)) == ([("a", 2), ("b", 1)], (0, 0, 1))  # a part of the write
    assert check(("b", 1))[1] == (1, 0, 0)  # neither the old "a" nor the new one
    assert check(("a", 1), ("a", 1), ("b", 1))[1] == (0, 1, 0)
    assert check(("a", 2), ("c", 2), after={})[1] == (3, 0, 0)
