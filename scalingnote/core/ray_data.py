"""Execution of parts by Ray Data: actors that load a stage once, and tasks on other CPUs that read and write.

    number and part ─read─► input ─actor─► result ─write─► result of the part

One execution of Ray Data processes all remaining parts. A part that fails, or whose process or node is lost,
returns to the queue (:mod:`.parts`) and is tried in the next execution, that is after the others. A worker
that cannot load, or whose parts fail, waits in its slot (:class:`.parts.Attempts`) while others do its work.

An actor stays until the last part: the driver's memory grows by about 8 KB a part, so 100,000 parts fit.
"""

import logging
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import ray
import ray.data
from ray.data.exceptions import ExecutionTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from scalingnote.core import ray_internals
from scalingnote.core.errors import ScalingNoteError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import Attempts, PartQueue, PartStage

MAX_FAILED_IN_A_ROW = 2  # parts of a worker, which then starts again: an error of a GPU stays in its process
MAX_IDLE_EXECUTIONS = 2  # in a row without a change: another one would change nothing either
WAIT_POLL_INTERVAL_S = 2.0
log = get_logger("parts")


class ActorPool(NamedTuple):
    """Actors, with a number that follows the number of nodes, and the tasks before and after them.

    Attributes:
        least, initial, most: numbers of actors: the minimum, the number at the start, and the maximum.
        options: Ray's options of an actor.
        readers: number of tasks that read ahead of the actors, and the same number that write after them; 0:
            the actors read and write.
        reader_options: Ray's options of such a task.
    """

    least: int
    initial: int
    most: int
    options: Mapping[str, Any]
    readers: int
    reader_options: Mapping[str, Any]


def map_on_actors(
    stage: PartStage, parts: Sequence[Any], pool: ActorPool, *, backoff_s: float
) -> Iterator[Any]:
    """Process parts in actors and yield the results in the order of completion.

    Args:
        stage: that each actor loads.
        parts: of work.
        pool: of actors.
        backoff_s: wait before the second load in a slot, in seconds.

    Raises:
        ScalingNoteError: raised by the stage.
        PartsFailedError: after all results, if parts were set aside.
    """
    queue = PartQueue(parts)
    attempts = SharedObject(Attempts, backoff_s)
    idle = 0
    with closing(attempts):
        while queue.left:
            numbers = [*queue.left]
            queue.left.clear()
            attempts.call("start", min(pool.most, len(numbers)))
            rows = [_row(number, part=parts[number]) for number in numbers]
            dataset = _dataset(stage, rows, attempts, pool)
            unchanged = yield from _execution_results(dataset, numbers, queue, attempts)
            idle = idle + 1 if unchanged else 0
            if idle == MAX_IDLE_EXECUTIONS:
                queue.give_up(unchanged)
    queue.check()


def _execution_results(
    dataset: Any, numbers: Sequence[int], queue: PartQueue, attempts: "SharedObject"
) -> Generator[Any, None, str]:
    """Yield the results of one execution; parts without a result return to the queue.

    Returns:
        The reason if no part was finished, failed or was lost; else an empty string.
    """
    missing, reason = set(numbers), "its result was lost"
    try:
        # Closed here: a stored traceback would otherwise keep the dataset's actors and their CPUs.
        with closing(row for row in dataset.iter_batches(batch_size=1, batch_format="pyarrow")) as rows:
            for row in rows:
                number, values = _values(row)
                result = values["result"]
                if result.error:
                    raise result.error
                missing.discard(number)
                if result.failure:
                    queue.fail(number, result.failure, transient=result.transient)
                else:
                    yield result.value
    except (ray.exceptions.RayError, ExecutionTimeoutError) as error:
        # ExecutionTimeoutError: half an hour without progress; no node started or a part kills all workers.
        reason = f"{error}".strip()
        log.warning("an execution ended early: %s", reason.splitlines()[0])
    for slot, why in attempts.call("failures").items():
        log.warning("a worker is not used: %s: %s", slot, why.strip().splitlines()[-1])
    begun_parts, alive_nodes = attempts.call("underway"), _alive_nodes()
    for number in sorted(missing & begun_parts.keys()):
        queue.lose(number, node_is_there=begun_parts[number] in alive_nodes)
    untried = sorted(missing - begun_parts.keys())
    queue.left.extendleft(reversed(untried))
    if hopeless := attempts.call("hopeless"):
        queue.give_up(f"no worker could load: {hopeless}")
    elif queue.left:
        log.warning("%d parts of %d are left, trying again", len(queue.left), len(numbers))
    return reason if len(untried) == len(numbers) else ""


def _dataset(stage: PartStage, rows: list[pa.Table], attempts: "SharedObject", pool: ActorPool) -> Any:
    """Build the dataset that sends the rows, each in a separate block, through readers, actors and writers.

    A row whose process is lost is left out. Otherwise Ray would hold it until the same actor runs again,
    which may need a node that never starts.
    """
    most, readers = min(pool.most, len(rows)), pool.readers
    with ray.data.DataContext.current(_context(init_deaths=most)):
        dataset: Any = ray.data.from_arrow(rows)
    each: dict[str, Any] = {"batch_size": 1, "batch_format": "pyarrow"}
    around = each | {"compute": ray.data.TaskPoolStrategy(size=max(readers, 1)), **pool.reader_options}
    if readers:
        dataset = dataset.map_batches(partial(read_part, read=stage.read), **around)
    dataset = ray_internals.map_with_one_try(
        dataset,
        PartWorker,
        **each,
        # Two tasks, Ray's default, if tasks read ahead. Otherwise one: the first actor to start would take
        # parts that other actors, still loading, could begin sooner.
        compute=ray.data.ActorPoolStrategy(
            min_size=min(pool.least, most),
            max_size=most,
            initial_size=min(max(pool.initial, pool.least), most),
            max_tasks_in_flight_per_actor=2 if readers else 1,
        ),
        fn_constructor_kwargs={"stage": stage, "whole": not readers, "attempts": attempts},
        **{key: value for key, value in pool.options.items() if value},
    )
    return dataset.map_batches(partial(write_part, write=stage.write), **around) if readers else dataset


def _context(*, init_deaths: int) -> Any:
    """Return settings that let an execution continue, silently, when actors, tasks or nodes are lost."""
    with warnings.catch_warnings():
        # Ray warns of its own default settings when it first creates a context.
        warnings.simplefilter("ignore", DeprecationWarning)
        context = ray.data.DataContext.get_current().copy()
    logging.getLogger("ray.data").setLevel(
        logging.WARNING
    )  # after the import of Ray, which sets the level too
    ray_internals.silence_data()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.max_errored_blocks = -1
    context.max_consecutive_actor_init_deaths = init_deaths
    # The pool grows whenever a node has room, however many actors are still loading.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 1e-3
    context.autoscaling_config.actor_pool_util_downscaling_threshold = 0.0
    return context


def _alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class SharedObject:
    """An object in a separate process on the driver's node; the driver and all workers call its methods."""

    def __init__(self, object_type: type, *arguments: Any) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
        self._actor: Any = ray.remote(**options)(object_type).remote(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result."""
        return ray.get(getattr(self._actor, method).remote(*arguments))

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        try:
            ray.get(self._actor.__ray_ready__.remote())
        except ray.exceptions.RayActorError:
            return True
        return False

    def close(self) -> None:
        """End the process."""
        ray.kill(self._actor)


class StepResult(NamedTuple):
    """Value of a step, or its error as a value, because Ray Data loses the type of exceptions."""

    value: Any = None
    error: ScalingNoteError | None = None  # ends the run
    failure: str = ""  # traceback of another exception: the part is tried again, the others go on
    transient: bool = False


def _try(step: Callable[..., Any], *arguments: Any) -> StepResult:
    try:
        return StepResult(step(*arguments))
    except ScalingNoteError as error:
        return StepResult(error=error)
    except Exception as error:
        return StepResult(failure=traceback.format_exc(), transient=isinstance(error, OSError))


def _row(number: int, **values: Any) -> pa.Table:
    """Build a row of the dataset; a value may exceed the 2 GiB of Arrow's usual binary columns."""
    columns = {name: pa.array([pickle.dumps(value)], pa.large_binary()) for name, value in values.items()}
    return pa.table({"number": [number], **columns})


def _values(row: pa.Table) -> tuple[int, dict[str, Any]]:
    names = [name for name in row.column_names if name != "number"]
    return row["number"][0].as_py(), {name: pickle.loads(row[name][0].as_buffer()) for name in names}


# Ray's dashboard shows the names of these two functions and the class.


def read_part(row: pa.Table, *, read: Callable[[Any], Any]) -> pa.Table:
    """Read the input of a part, in a task."""
    number, values = _values(row)
    return _row(number, part=values["part"], input=_try(read, values["part"]))


def write_part(row: pa.Table, *, write: Callable[[Any, Any], Any]) -> pa.Table:
    """Write a part, in a task."""
    number, values = _values(row)
    result = values["result"]
    if not (result.error or result.failure):
        result = _try(write, values["part"], result.value)
    return _row(number, result=result)


class PartWorker:
    """Actor that loads a stage and processes parts, in all three steps (`whole`) or only the middle one."""

    def __init__(self, *, stage: PartStage, whole: bool, attempts: SharedObject) -> None:
        self._attempts, (self._slot, self._node) = attempts, _this_slot()
        self._wait(*attempts.call("begin_load", self._slot))
        self._whole, self._failed = whole, 0
        loaded = _try(stage.start if whole else stage.load)
        if loaded.failure:
            attempts.call("fail", self._slot, loaded.failure)
            _end_process()
        self._loaded = loaded
        attempts.call("end_load", self._slot)

    def _wait(self, seconds: float, execution: int) -> None:
        """Occupy this slot for a while after a failure in it: another worker in it would fail too."""
        deadline = time.monotonic() + seconds
        while True:
            if self._attempts.has_ended() or self._attempts.call("is_over", execution):
                ray.actor.exit_actor()  # Ray waits for constructors
            if reason := self._attempts.call("hopeless"):
                raise RuntimeError(f"no worker could load: {reason}")
            if time.monotonic() >= deadline:
                return
            time.sleep(min(WAIT_POLL_INTERVAL_S, seconds))

    def __call__(self, row: pa.Table) -> pa.Table:
        """Process a part."""
        if self._failed >= MAX_FAILED_IN_A_ROW:
            self._attempts.call("fail", self._slot, f"{self._failed} parts in a row failed")
            _end_process()
        number, values = _values(row)
        self._attempts.call("begin", number, self._node)
        part_input = StepResult(values["part"]) if self._whole else values["input"]
        part_input = self._loaded if self._loaded.error else part_input  # the same in every worker
        result = (
            part_input
            if part_input.error or part_input.failure
            else _try(self._loaded.value, part_input.value)
        )
        self._failed = self._failed + 1 if result.failure else 0
        self._attempts.call("end", number, self._slot, not result.failure)
        return (
            _row(number, result=result) if self._whole else _row(number, part=values["part"], result=result)
        )


def _this_slot() -> tuple[str, str]:
    """Return the name of the slot of this actor, which stays when it is started again, and its node.

    Entire GPUs are a slot, independent of the actor; an actor without an entire GPU is a separate slot.
    """
    context = ray.get_runtime_context()
    node, gpus = context.get_node_id(), context.get_accelerator_ids().get("GPU", [])
    has_entire_gpu = context.get_assigned_resources().get("GPU", 0.0) >= 1
    place = f"GPU {','.join(gpus)}" if has_entire_gpu else str(context.get_actor_id())
    return f"{node[:8]} {place}", node


def _end_process() -> None:
    """End the process of this actor: Ray starts it again without state."""
    os._exit(1)
