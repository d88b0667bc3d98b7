from pathlib import Path

import pytest

from benchmarks import live_kill


@pytest.mark.slow
@pytest.mark.parametrize("delta", [False, True])
def test_a_killed_writer_loses_and_doubles_nothing_acknowledged(tmp_path: Path, delta: bool) -> None:
    """A short history; `python -m benchmarks.live_index` and `benchmarks.delta` run long ones."""
    found = live_kill.run(str(tmp_path), seed=3, operations=40, kills=3, delta=delta)
    assert (found.lost_writes, found.duplicates, found.wrong_answers) == (0, 0, 0)
    assert found.kills >= 2
    assert found.done["upsert"] > 5


def test_what_is_lost_doubled_or_in_flight_is_told_apart() -> None:
    one, two = live_kill.unit_vectors(2, 4, seed=0)
    before, after = {"a": (1, one), "b": (1, one)}, {"a": (2, two), "c": (2, two)}

    class Shows:
        def __init__(self, *state: tuple[str, int]) -> None:
            self._state = list(state)

        def ask(self, _: str) -> list[tuple[str, int]]:
            return self._state

    def judged(
        *state: tuple[str, int], after: live_kill.Truth = after
    ) -> tuple[list[tuple], tuple[int, ...]]:
        tally = live_kill.Tally()
        settled = live_kill.check_state(Shows(*state), before, after, tally)
        counts = tally.lost_writes, tally.duplicates, tally.in_flight_done
        return sorted((name, number) for name, (number, _) in settled.items()), counts

    assert judged(("a", 1), ("b", 1)) == ([("a", 1), ("b", 1)], (0, 0, 0))
    assert judged(("a", 2), ("c", 2)) == ([("a", 2), ("c", 2)], (0, 0, 1))
    assert judged(("a", 2), ("b", 1)) == ([("a", 2), ("b", 1)], (0, 0, 1))  # a part of it
    assert judged(("b", 1))[1] == (1, 0, 0)  # neither the old a nor the new one
    assert judged(("a", 1), ("a", 1), ("b", 1))[1] == (0, 1, 0)
    assert judged(("a", 2), ("c", 2), after={})[1] == (3, 0, 0)
