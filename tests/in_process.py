"""Stages in this process: for tests of what a stage does, not of where."""

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
    """From now on stages process their parts here, one after the other, with copies of what workers get.

    Ray Train is left as it is: with no workers it trains in this process, with some it needs a cluster.
    """
    patch.setattr(cluster, "_in_process", True)


def run_without_ray(run: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """The result of a stage without Ray: for tests of what it is used for."""
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return run(*args, **kwargs)


def killed_after(tasks: int) -> Callable[..., Iterator[Any]]:
    """An executor that is killed in the task after so many, counted over all steps of a stage."""
    budget = iter(range(tasks))

    def run(task: Any, parts: Iterable[Any]) -> Iterator[Any]:
        for part in parts:
            if next(budget, None) is None:
                # After the work and before the record: the worst moment.
                task.keywords["task"](part[1])
                raise KeyboardInterrupt
            yield task(part)

    return run


class KilledSteps:
    """Each step of a stage is killed once, after its first item; counts how often each item is processed."""

    def __init__(self, patch: pytest.MonkeyPatch, *modules: str) -> None:
        """Replace `run_slices` in the modules of the stage."""
        self.killed: set[str] = set()
        self.done: Counter[str] = Counter()
        for module in modules:
            patch.setattr(f"{module}.run_slices", self._run_slices)

    def finish(self, run: Callable[[], R]) -> R:
        """The result of a stage that is run again after each kill."""
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
