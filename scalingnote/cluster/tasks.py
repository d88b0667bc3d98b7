"""Work handed to Ray: items through tasks, or through actors of Ray Data that load something once."""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import ray

from scalingnote import errors
from scalingnote.cluster.resources import actor_options
from scalingnote.config import Resources
from scalingnote.errors import ScalingNoteError

T = TypeVar("T")
R = TypeVar("R")
# Of one map: the time of a wait and the driver's memory grow with the number of tasks in flight.
MAX_TASKS_IN_FLIGHT = 1_000
# Tasks are idempotent, so an OSError of the storage is retried like the death of a worker.
ATTEMPTS = 4
RETRY_OPTIONS: dict[str, Any] = {"max_retries": ATTEMPTS - 1, "retry_exceptions": [OSError]}


def task_result(reference: Any) -> Any:
    """Result of a task. A ScalingNoteError is raised as itself, without Ray's wrapper and traceback."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ScalingNoteError):
            raise error.cause from None
        raise


def map_tasks(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Results of `work` for each item, in the order of completion, from tasks of one CPU each."""
    if len(items) <= 1:  # faster here than a worker starts
        yield from map(work, items)
        return
    task: Any = ray.remote(num_cpus=1, **RETRY_OPTIONS)(_apply)
    shared, left = ray.put(work), iter(items)
    waiting = [task.remote(shared, item) for item in islice(left, MAX_TASKS_IN_FLIGHT)]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        waiting += [task.remote(shared, item) for item in islice(left, 1)]
        yield task_result(done)


def map_tasks_in_order(work: Callable[[T], R], items: Sequence[T], resources: Resources) -> Iterator[R]:
    """Results of `work` for each item, in the items' order, from tasks with the resources of a worker.

    At most `resources.workers` tasks run at a time, which bounds memory. Results stay on the node of their
    task until they are read: the caller holds one at a time.
    """
    task: Any = ray.remote(**actor_options(resources), **RETRY_OPTIONS)(_apply)
    shared, left = ray.put(work), deque(items)
    running: list[Any] = []
    results: deque[Any] = deque()
    while left or results:
        while left and len(running) < max(resources.workers, 1):
            running.append(task.remote(shared, left.popleft()))
            results.append(running[-1])
        if results[0] in running:
            _, running = ray.wait(running, fetch_local=False)
        else:
            yield task_result(results.popleft())


def _apply(work: Callable[[T], R], item: T) -> R:
    return work(item)


def dataset_rows(dataset: Any) -> Iterator[Any]:
    """Rows of a Ray Dataset in the order of completion; raises the error in a row's column `error`."""
    # Closed here: a traceback that is kept would otherwise keep the dataset's actors and their CPUs.
    with contextlib.closing(_generator(dataset.iter_rows())) as found:
        for row in found:
            if row.get("error"):
                kind, text = json.loads(row["error"])
                raise getattr(errors, kind)(text)
            yield row


def map_with_actors(
    items: Sequence[dict[str, Any]],
    actor: type,
    arguments: dict[str, Any],
    resources: Resources,
    *,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    tasks: int = 1,
) -> Any:
    """A Ray Dataset of items that pass through actors, and optionally through tasks before and after them.

    Args:
        items: rows, each in a block of its own, so that each is retried alone.
        actor: a class whose instances map a batch of one row.
        arguments: of its constructor, by name.
        resources: number of actors, and the CPUs and GPUs of each.
        before: maps a batch of one row, in tasks of one CPU, before the actors.
        after: the same after the actors.
        tasks: maximum number of tasks of `before`, and of `after`, that run at the same time.
    """
    dataset: Any = ray.data.from_items(list(items), override_num_blocks=len(items))
    around: dict[str, Any] = {"compute": ray.data.TaskPoolStrategy(size=max(tasks, 1)), "num_cpus": 1}
    if before:
        dataset = dataset.map_batches(before, batch_size=1, **around)
    dataset = dataset.map_batches(
        actor,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(resources.workers, len(items))),
        fn_constructor_kwargs=arguments,
        num_cpus=resources.cpus_per_worker,
        num_gpus=resources.gpus_per_worker or None,
    )
    return dataset.map_batches(after, batch_size=1, **around) if after else dataset


class Loaded:
    """Work of an actor that loads something: `make` returns the work of an item, at the first item.

    Not before, because Ray drops the exception of an actor whose constructor fails.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self._make = make
        self._work: Callable[[Any], Any] | None = None

    def __call__(self, item: Any) -> Any:
        """The work of an item."""
        self._work = self._work or self._make()
        return self._work(item)


def map_loaded(work: Callable[[T], R], items: Sequence[T], resources: Resources) -> Iterator[R]:
    """Results of `work` for each item as they come, from actors, each with its own copy of `work`.

    Items are tuples of JSON values, as results may be.
    """
    rows = [{"item": json.dumps(item)} for item in items]
    for row in dataset_rows(map_with_actors(rows, _Mapper, {"work": ray.put(work)}, resources)):
        yield json.loads(row["result"])


class _Mapper:
    def __init__(self, work: Any) -> None:
        self._work: Callable[[Any], Any] = ray.get(work)

    def __call__(self, batch: dict[str, Any], *, again: int = ATTEMPTS - 1) -> dict[str, Any]:
        try:
            result = self._work(tuple(json.loads(batch["item"][0])))
        except ScalingNoteError as error:
            return {"result": [""], "error": [error_column(error)]}
        except OSError:  # storage may recover; the last error ends the stage
            if not again:
                raise
            return self(batch, again=again - 1)
        return {"result": [json.dumps(result)], "error": [""]}


def execution_errors() -> tuple[type[Exception], ...]:
    """Exceptions by which an execution of Ray Data ends early.

    Ray raises the second after half an hour without progress: no node came, or a part kills every worker.
    """
    from ray.data.exceptions import ExecutionTimeoutError  # late: ray.data takes a second to import

    return ray.exceptions.RayError, ExecutionTimeoutError


def error_column(error: ScalingNoteError) -> str:
    """Value of the column `error`, raised by :func:`dataset_rows`: Ray Data hides exceptions of user code."""
    return json.dumps([type(error).__name__, str(error)])


def _generator(found: Iterable[Any]) -> Generator[Any]:
    yield from found
