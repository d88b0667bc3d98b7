"""Stages in this process: for tests of what a stage does, not of where."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import pytest

from scalingnote.core import cluster

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
