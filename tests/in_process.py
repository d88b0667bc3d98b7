"""What stages give to Ray, done in this process: for tests of what a stage does, not of where."""

import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import ray
import ray.data

from scalingnote import cluster

R = TypeVar("R")


def without_ray(patch: pytest.MonkeyPatch) -> None:
    """From now on the jobs that are imported work here, one item after the other, on copies as workers do.

    Ray Train is left as it is: with no workers it trains in this process, with some it needs a cluster.
    """
    patch.setattr(cluster, "connect", lambda *_, **__: None)
    patch.setattr(cluster, "check_resources", lambda *_, **__: None)
    patch.setattr(cluster, "check_resources_early", lambda *_, **__: None)
    patch.setattr(cluster, "workers", lambda resources: resources.workers or 2)
    patch.setattr(cluster, "actor_options", lambda _: {})
    patch.setattr(cluster, "_on_cpu_nodes", dict)
    patch.setattr(cluster, "_room_per_node", lambda _: [2])
    patch.setattr(cluster, "Shared", _Shared)
    patch.setattr(cluster, "this_slot", lambda: ("slot", "node"))
    patch.setattr(cluster, "alive_nodes", lambda: {"node"})
    patch.setattr(cluster, "start_again", _start_again)
    patch.setattr("scalingnote.encode.parts.BACKOFF_S", 0.0)
    for name, module in list(sys.modules.items()):
        if name.startswith("scalingnote.") and getattr(module, "ray", None) is ray:
            patch.setattr(module, "ray", _Ray())


def run_without_ray(run: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """What a stage gives without Ray: for tests of what is made of it."""
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        return run(*args, **kwargs)


def killed_after(tasks: int) -> Callable[..., Iterator[Any]]:
    """A runner of a stage's tasks that is killed in the one after so many, counted over all of its steps."""
    budget = iter(range(tasks))

    def run(task: Any, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if next(budget, None) is None:
                task.keywords["task"](item)  # killed after the work and before the record: the worst moment
                raise KeyboardInterrupt
            yield task(item)

    return run


@dataclass(frozen=True, eq=False)
class _Done:
    """A reference to what is there already."""

    value: Any = None
    error: Exception | None = None


class _Ray:
    """What the stages use of Ray to get work done; the rest of it is Ray's own."""

    def __init__(self) -> None:
        self.data = _Data()

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)

    def put(self, value: Any) -> _Done:
        return _Done(_copy(value))

    def get(self, reference: _Done) -> Any:
        if reference.error:
            raise reference.error
        return reference.value

    def wait(self, references: list[_Done], **_: Any) -> tuple[list[_Done], list[_Done]]:
        return references[:1], references[1:]

    def kill(self, _: "_Actor") -> None: ...

    def remote(self, **_: Any) -> Callable[[Any], "_Remote"]:
        return lambda work: _Remote(_copy(work), get=self.get)


class _Remote:
    """A task or an actor's method; of a class, what makes an actor."""

    def __init__(self, work: Callable[..., Any], *, get: Callable[[_Done], Any]) -> None:
        self._work, self._get = work, get

    def options(self, **_: Any) -> "_Remote":
        return self

    def remote(self, *given: Any) -> Any:
        values = [self._get(x) if isinstance(x, _Done) else _copy(x) for x in given]
        if isinstance(self._work, type):
            return _Actor(self._work(*values), get=self._get)
        try:
            found = self._work(*values)
        except Exception as error:
            return _Done(error=error)
        return _Done(_copy(found))


class _Actor:
    def __init__(self, state: Any, *, get: Callable[[_Done], Any]) -> None:
        self._state, self._get = state, get

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(getattr(self._state, name), get=self._get)


class _Shared(cluster.Shared):
    """An object that all copies of this share, as they share its process."""

    _made: ClassVar[dict[str, Any]] = {}

    def __init__(self, made: type, *given: Any) -> None:
        self._name = uuid.uuid4().hex
        self._made[self._name] = made(*given)

    def call(self, method: str, *given: Any) -> Any:
        return getattr(self._made[self._name], method)(*given)

    def ended(self) -> bool:
        return self._name not in self._made

    def close(self) -> None:
        del self._made[self._name]


class _ProcessEndedError(BaseException):
    """In place of the end of a worker's process."""


def _start_again() -> None:
    raise _ProcessEndedError


class _Data:
    """Ray Data: its datasets are made here, its strategies are its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(ray.data, name)

    def from_items(self, items: list[dict[str, Any]], **_: Any) -> "_Dataset":
        return _Dataset(_copy(items))


class _Dataset:
    """Rows through functions, and through classes that are made once."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows = rows

    def map(self, work: Any, **given: Any) -> "_Dataset":
        return _Dataset(_through(work, self._rows, **given))

    def map_batches(self, work: Any, *, batch_size: int, **given: Any) -> "_Dataset":
        assert batch_size == 1  # as all of ours are
        batches = ({name: _column(value) for name, value in row.items()} for row in self._rows)
        done = _through(work, batches, **given)
        return _Dataset({name: column[0] for name, column in batch.items()} for batch in done)

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)


def _through(
    work: Any,
    rows: Iterable[Any],
    *,
    fn_kwargs: dict[str, Any] | None = None,
    fn_constructor_args: tuple[Any, ...] = (),
    fn_constructor_kwargs: dict[str, Any] | None = None,
    **_: Any,  # what it may use of a cluster
) -> Iterator[Any]:
    def start() -> Any:
        if not isinstance(work, type):
            return _copy(work)
        while True:
            with suppress(_ProcessEndedError):
                return work(*_copy(fn_constructor_args), **_copy(fn_constructor_kwargs or {}))

    made = start()
    for row in rows:
        try:
            done = made(row, **_copy(fn_kwargs or {}))
        except _ProcessEndedError:  # the row is lost with it
            made = start()
            continue
        yield done


def _column(value: Any) -> np.ndarray:
    """As Ray Data hands a batch over: numbers as such, all else as objects."""
    return np.array([value], dtype=None if isinstance(value, int | float) else object)


def _copy(value: Any) -> Any:
    """As it reaches a worker."""
    return ray.cloudpickle.loads(ray.cloudpickle.dumps(value))
