"""Stages in this process: for tests of the results of a stage, without a cluster."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from scalingnote.core import cluster
from scalingnote.core.parts import as_stage
from scalingnote.storage.shuffle import run_slices

R = TypeVar("R")


def without_ray(patch: pytest.MonkeyPatch) -> None:
    """Let stages process their parts in this process, one after the other.

    Ray Train is not changed: without workers it trains in this process, with workers it needs a cluster.
    """
    patch.setattr(cluster, "_in_process", True)


def run_without_ray(run: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Run a stage without Ray, for tests of later steps; return its result."""
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return run(*args, **kwargs)


def killed_after(tasks: int) -> Callable[..., Iterator[Any]]:
    """Return an executor that is killed after this number of tasks, counted over all steps of a stage."""
    budget = iter(range(tasks))

    def run(task: Any, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            if next(budget, None) is None:
                # After the work and before its record: the worst time for a kill.
                task.keywords["task"](part[1])
                raise KeyboardInterrupt
            yield task(part)

    return run


class KilledSteps:
    """Kills of each step of a stage, once after its first item, and the number of runs of each item."""

    def __init__(self, patch: pytest.MonkeyPatch, *modules: str) -> None:
        """Replace `run_slices` in the modules of the stage."""
        self.killed: set[str] = set()
        self.done: Counter[str] = Counter()
        for module in modules:
            patch.setattr(f"{module}.run_slices", self._run_slices)

    def finish(self, run: Callable[[], R]) -> R:
        """Run a stage again after each kill; return its result."""
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return run()

    def _run_slices(self, name: str, task: Any, slices: Sequence[Any], *, each: Any, **given: Any) -> Any:
        process = as_stage(task).start()

        def counted(item: Any) -> Any:
            self.done[f"{name} {item[0]}"] += 1
            return process(item)

        def dying(work: Any, items: Sequence[Any]) -> Iterator[Any]:
            for result in each(work, items):
                yield result
                if name not in self.killed:
                    self.killed.add(name)
                    raise KeyboardInterrupt

        return run_slices(name, counted, slices, each=dying, **given)
