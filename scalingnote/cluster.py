"""Everything that the offline stages ask of Ray: a cluster, its resources, tasks and actors of Ray Data."""

import atexit
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from scalingnote import errors, ray_internals
from scalingnote.config import ElasticResources, Resources
from scalingnote.errors import ConfigError, ScalingNoteError
from scalingnote.log import LINE, elapsed_status, get_logger, note_line, status_lines

T = TypeVar("T")
R = TypeVar("R")
Sized = TypeVar("Sized", bound=Resources)
CONNECT_TIMEOUT_S = 10.0  # a cluster's head has for taking a connection
NODE_POLL_INTERVAL_S = 2.0  # between looks for nodes that were asked for
START_TIMEOUT_S = 180.0  # a local Ray has for starting; its own 30 s are too few beside other programs
# Of one map: the time of a wait and the driver's memory grow with the number of tasks in flight.
MAX_TASKS_IN_FLIGHT = 1_000
# Tasks are idempotent, so an OSError of the storage is retried like the death of a worker.
ATTEMPTS = 4
RETRY_OPTIONS: dict[str, Any] = {"max_retries": ATTEMPTS - 1, "retry_exceptions": [OSError]}
GIB = 2**30
ACCELERATOR_LABEL = "ray.io/accelerator-type"  # Ray sets it on every node that has one
_started = False  # whether the cluster that this process works on is its own
_nodes_wait_s = 0.0  # a stage waits for nodes that it lacks
log = get_logger("cluster")


def connect(address: str | None = None, *, nodes_wait_s: float = 0.0) -> None:
    """Join `address` (or RAY_ADDRESS, set inside every Ray job), else start a private local cluster.

    "local" is passed on purpose: without an address Ray joins whatever cluster it finds on the machine,
    also one left behind by a crash.

    Args:
        address: of the cluster's head.
        nodes_wait_s: seconds that stages of this process wait for nodes that they lack, on a cluster whose
            autoscaler brings them.

    Raises:
        ConfigError: no cluster answers at the address; Ray itself would try for many minutes.
        ScalingNoteError: no local cluster came up.
    """
    global _started, _nodes_wait_s
    _nodes_wait_s = nodes_wait_s
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    _started = not address
    # Ray's own progress bars would interleave with ours.
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    if address:
        _check_address(address)
        ray.init(address, log_to_driver=True, logging_level=logging.WARNING)
    else:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # C++ logs a line per actor
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # it watches for spot machines
        # Ray runs workers at a niceness of 15 above the command's: beside other programs they get no CPU.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A token of its own, without which no process can submit work or read objects; Ray would write one
        # to the user's home directory. RAY_AUTH_MODE=token is left to ray.init: set here, after Ray was
        # imported, it would not be read.
        if not any(name.startswith("RAY_AUTH_") for name in os.environ):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        try:
            with (
                _delayed_interrupt(),
                _silent_stderr(),
                status_lines("cluster", elapsed_status("waiting for Ray to start on this machine")),
                ray_internals.loopback_only(),
                ray_internals.start_timeout(START_TIMEOUT_S),
                ray_internals.shown_worker_lines(_is_ours),
            ):
                ray.init(
                    "local",
                    num_cpus=max(2, os.cpu_count() or 2),
                    include_dashboard=False,
                    log_to_driver=True,
                    logging_level=logging.ERROR,
                )
        except Exception as error:  # Ray raises no class of its own
            raise ScalingNoteError(
                f"Ray did not start on this machine: {error} Where other programs keep all processors busy, "
                "run this again when they have ended: what is finished stays. `scalingnote doctor` looks for "
                "other causes"
            ) from error
        atexit.register(ray.shutdown)
    _disable_ray_progress()


def is_private() -> bool:
    """Whether this process started the cluster, and no other machine can join it: it listens on loopback."""
    return _started and all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())


@contextlib.contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delay CTRL-C until Ray has started: an interrupted start leaves processes behind or crashes."""
    by_us = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not by_us or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        ray.shutdown()
        raise KeyboardInterrupt


@contextlib.contextmanager
def restored_interrupt_handler() -> Iterator[None]:
    """Restore the handler of SIGINT: Ray Train leaves its own, which aborts a controller that has ended.

    With it, CTRL-C in a later stage ended the process with exit code 0, or did nothing at all.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _check_address(address: str) -> None:
    """Refuse an address at which nothing listens; one that names no port, as "auto", is left to Ray."""
    scheme, _, place = address.rpartition("://")
    if scheme.startswith("http"):
        raise ConfigError(
            f"{address} takes jobs (`scalingnote submit`), it is no cluster to join: unset RAY_ADDRESS to "
            "run on this machine, or give the head's own address, as HOST:6379"
        )
    host, _, port = place.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}): start one (ray start --head), correct `address` "
            "or RAY_ADDRESS, or leave both out to run on this machine"
        ) from error


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Silence file 2, where Ray's C++ core prints its log level; what Python prints, as our log, is shown."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with (
            open(kept, "w", buffering=1, encoding="utf-8", closefd=False) as shown,
            contextlib.redirect_stderr(shown),
        ):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _is_ours(line: str) -> bool:
    """Whether a worker printed a line of this package's log, which is then counted as shown."""
    if ours := bool(LINE.match(line)):
        note_line()
    return ours


def _disable_ray_progress() -> None:
    context = _data_context()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.WARNING)
    ray_internals.silence_data()


# --- resources --------------------------------------------------------------------------------------------


def check_resources(resources: Resources, *, knob: str, task_cpus: int = 0) -> None:
    """Refuse, before work is spent, resources that the cluster can never provide.

    Where :func:`connect` was told to wait for nodes, the cluster's autoscaler is asked for the missing ones
    first, and they are awaited for at most that time.

    Args:
        resources: of the stage; one with `min_workers` needs no more to start.
        knob: where the user set them, for the error message.
        task_cpus: CPUs of the tasks that run at the same time as the workers.

    Raises:
        ConfigError: the cluster has too little, or no node is large enough for a worker.
    """
    lack = _missing_resources(resources, task_cpus=task_cpus, knob=knob)
    if lack and _nodes_wait_s:
        log.info("%s; waiting up to %g s for nodes", lack, _nodes_wait_s)
        _request_nodes([_needs_per_worker(resources)] * _least(resources) + [{"CPU": 1}] * task_cpus)
        deadline = time.monotonic() + _nodes_wait_s
        try:
            while lack and time.monotonic() < deadline:
                time.sleep(NODE_POLL_INTERVAL_S)
                lack = _missing_resources(resources, task_cpus=task_cpus, knob=knob)
        finally:
            _request_nodes([])  # or they would be kept for ever
    if lack:
        waited = f"; none came in {_nodes_wait_s:g} s (nodes_wait_s)" if _nodes_wait_s else ""
        raise ConfigError(lack + waited)


def check_resources_early(resources: Resources, *, knob: str, task_cpus: int = 0) -> None:
    """:func:`check_resources` for a later step: skipped where nodes come on demand, which would wait idle."""
    if not _nodes_wait_s:
        check_resources(resources, knob=knob, task_cpus=task_cpus)


def workers(resources: Resources) -> int:
    """The number of workers: those asked for, or else as many as the nodes of now have room for."""
    if resources.workers is not None:
        return resources.workers
    return max(sum(_room_per_node(_needs_per_worker(resources))), 1)


def with_memory(resources: Sized, bytes_per_worker: int) -> Sized:
    """The same resources with as many workers as have this much memory, where no number was asked for.

    A machine with many cores has not always the memory for a model on each.
    """
    if resources.workers is not None:
        return resources
    each = _needs_per_worker(resources)
    each["memory"] = max(each.get("memory", 0.0), float(bytes_per_worker))
    return resources.model_copy(update={"workers": max(sum(_room_per_node(each)), 1)})


def _least(resources: Resources) -> int:
    """Workers that a stage needs to start; 0 where the driver's own process does the work."""
    if isinstance(resources, ElasticResources) and resources.min_workers is not None:
        return resources.min_workers
    return 1 if resources.workers is None else resources.workers


def _missing_resources(resources: Resources, *, task_cpus: int, knob: str) -> str:
    """What the cluster lacks, as a message for the user; empty if it lacks nothing."""
    have, least = ray.cluster_resources(), _least(resources)
    if not least and resources.gpus_per_worker and not _own_node()["Resources"].get("GPU"):
        return (
            f"{knob} asks for a GPU of this machine, and Ray finds none here: set {knob}.gpus_per_worker=0, "
            f"or {knob}.workers=1 if another machine of the cluster has one"
        )
    each = _needs_per_worker(resources) if least else {}
    needed = " and ".join(_amount(key, need) for key, need in each.items())
    # A worker runs on one node: remainders on two nodes do not add up to a third worker.
    room = _room_per_node(each) if each else []
    if each and not any(room):
        knobs = " or ".join(f"{knob}.{_KNOBS[key]}" for key in each)
        return (
            f"{knob} asks for {needed} a worker, no node has that: lower {knobs}, add a node that has, or "
            "let the run wait for one (nodes_wait_s)"
        )
    fewer = f"lower {knob}.{'workers' if getattr(resources, 'min_workers', None) is None else 'min_workers'}"
    for key, spare in (("CPU", task_cpus), ("GPU", 0)):
        if (need := least * each.get(key, 0.0) + spare) > have.get(key, 0.0):
            return (
                f"{knob} asks for {need:g} {key}, the cluster has {have.get(key, 0.0):g}: "
                f"{fewer} or add nodes"
            )
    if each and sum(room) < least:
        return (
            f"{knob} asks for {least} workers of {needed}, the nodes have room for {sum(room)}: "
            f"{fewer} or add nodes"
        )
    return ""


_KNOBS = {"CPU": "cpus_per_worker", "GPU": "gpus_per_worker", "memory": "memory_per_worker"}


def _amount(key: str, amount: float) -> str:
    return f"{amount / GIB:g} GiB of memory" if key == "memory" else f"{amount:g} {key}"


def _room_per_node(each: Mapping[str, float]) -> list[int]:
    """How many workers with these needs fit on each node that takes them."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not each.get("GPU") and _selector_of_cpu_nodes(nodes):
        nodes = [node for node in nodes if not node["Resources"].get("GPU")]
    return [
        min(int(node["Resources"].get(key, 0.0) / need + 1e-9) for key, need in each.items())
        for node in nodes
    ]


def _request_nodes(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources  # late: few clusters grow

    request_resources(bundles=bundles)


def _own_node() -> dict[str, Any]:
    """The node that this process runs on."""
    own = ray.get_runtime_context().get_node_id()
    return next((node for node in ray.nodes() if node["NodeID"] == own), {"NodeID": own, "Resources": {}})


def _needs_per_worker(resources: Resources) -> dict[str, float]:
    memory = float(int(resources.memory_per_worker * GIB))
    needs = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker, "memory": memory}
    return {key: need for key, need in needs.items() if need}


def actor_options(resources: Resources) -> dict[str, Any]:
    """Ray options of one actor or task: what it reserves, and that CPU work keeps off nodes with GPUs."""
    needs = _needs_per_worker(resources)
    options: dict[str, Any] = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
    if "memory" in needs:
        options["memory"] = int(needs["memory"])
    return options | ({} if "GPU" in needs else _on_cpu_nodes())


def _on_cpu_nodes() -> dict[str, Any]:
    """Ray options by which a task keeps off nodes with GPUs, where other nodes can run it.

    Ray itself only prefers the others: once they are full, tasks would keep GPU nodes from being given back.
    """
    selector = _selector_of_cpu_nodes([node for node in ray.nodes() if node["Alive"]])
    return {"label_selector": selector} if selector else {}


def _selector_of_cpu_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A selector of the nodes without a GPU; empty where none but the driver's own has CPUs.

    The driver's own may have reserved all CPUs of its node for itself.
    """
    with_gpus = [node for node in nodes if node["Resources"].get("GPU")]
    kinds = {node.get("Labels", {}).get(ACCELERATOR_LABEL) for node in with_gpus}
    if not kinds or None in kinds:
        return {}
    own = _own_node()["NodeID"]
    others = [node for node in nodes if node not in with_gpus and node["NodeID"] != own]
    if not any(node["Resources"].get("CPU") for node in others):
        return {}
    return {ACCELERATOR_LABEL: f"!in({', '.join(sorted(kinds))})"}


# --- tasks and actors ---------------------------------------------------------------------------------------


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
    task: Any = ray.remote(num_cpus=1, **_on_cpu_nodes(), **RETRY_OPTIONS)(_apply)
    shared, left = ray.put(work), iter(items)
    waiting = [task.remote(shared, item) for item in islice(left, MAX_TASKS_IN_FLIGHT)]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        waiting += [task.remote(shared, item) for item in islice(left, 1)]
        yield task_result(done)


def map_tasks_in_order(work: Callable[[T], R], items: Sequence[T], resources: Resources) -> Iterator[R]:
    """Results of `work` for each item, in the items' order, from tasks with the resources of a worker.

    At most `resources.workers` tasks run at a time, which bounds memory; by default twice as many as the
    nodes have room for, so that an autoscaler sees that there is more to do. Results stay on the node of
    their task until they are read: the caller holds one at a time.
    """
    task: Any = ray.remote(**actor_options(resources), **RETRY_OPTIONS)(_apply)
    shared, left = ray.put(work), deque(items)
    running: list[Any] = []
    results: deque[Any] = deque()
    while left or results:
        if left:  # else there is nothing to ask the cluster for
            at_once = resources.workers or 2 * workers(resources)
            for item in [left.popleft() for _ in range(min(at_once - len(running), len(left)))]:
                running.append(task.remote(shared, item))
                results.append(running[-1])
        if results[0] in running:
            _, running = ray.wait(running, fetch_local=False)
        else:
            yield task_result(results.popleft())


def _apply(work: Callable[[T], R], item: T) -> R:
    return work(item)


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

    An item goes to an actor that runs, never to one that still waits for a node. If a process or a node is
    lost, another actor takes its item.

    Raises:
        ScalingNoteError: an item has ended its process ATTEMPTS times, or no actor starts.
    """
    make: Any = ray.remote(**actor_options(resources), max_restarts=-1)(_Mapper)
    shared = ray.put(work)
    actors = [make.remote() for _ in range(min(workers(resources), len(items)))]
    left, deaths = deque(range(len(items))), Counter[Any]()
    idle: list[Any] = []
    # Reference -> its actor, and the number of its item, or None while it starts.
    running: dict[Any, tuple[Any, int | None]] = {_start(actor, shared): (actor, None) for actor in actors}
    done = 0
    try:
        while done < len(items):
            (reference,), _ = ray.wait(list(running))
            actor, number = running.pop(reference)
            try:
                result = task_result(reference)
            except ray.exceptions.RayActorError as error:
                counted = actor if number is None else number
                deaths[counted] += 1
                if number is not None:
                    left.appendleft(number)
                if deaths[counted] < ATTEMPTS:
                    running[_start(actor, shared)] = (actor, None)
                elif number is not None or not (running or idle):
                    what = "no actor starts" if number is None else f"item {items[number]} ended its process"
                    raise ScalingNoteError(f"{what}, {ATTEMPTS} times tried: {error}") from error
            else:
                idle.append(actor)
                if number is not None:
                    done += 1
                    yield result
            while idle and left:
                chosen, number = idle.pop(), left.popleft()
                running[chosen.map.remote(items[number])] = (chosen, number)
    finally:
        for actor in actors:
            ray.kill(actor)


def _start(actor: Any, work: Any) -> Any:
    """A reference that is there when an actor runs and has its work, again if it is lost before."""
    return actor.start.options(max_task_retries=-1).remote(work)


class _Mapper:
    """An actor of :func:`map_loaded`."""

    _work: Callable[[Any], Any] | None = None

    def start(self, work: Callable[[Any], Any]) -> None:
        """Take the work, also after a restart."""
        self._work = work

    def map(self, item: Any, *, attempts: int = ATTEMPTS) -> Any:
        if self._work is None:  # started again while it had no item: the driver starts it as it does others
            start_again()
        assert self._work is not None
        try:
            return self._work(item)
        except OSError:  # storage may recover; the last error ends the stage
            if attempts == 1:
                raise
            return self.map(item, attempts=attempts - 1)


# --- Ray Data -----------------------------------------------------------------------------------------------


class Shared:
    """An object in a process of its own beside the driver; the driver and all workers call its methods."""

    def __init__(self, made: type, *arguments: Any) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
        self._actor: Any = ray.remote(**options)(made).remote(*arguments)

    def call(self, method: str, *given: Any) -> Any:
        """The result of a method."""
        return ray.get(getattr(self._actor, method).remote(*given))

    def ended(self) -> bool:
        """Whether the process has ended."""
        try:
            ray.get(self._actor.__ray_ready__.remote())
        except ray.exceptions.RayActorError:
            return True
        return False

    def close(self) -> None:
        """End the process."""
        ray.kill(self._actor)


def this_slot() -> tuple[str, str]:
    """Where an actor runs: a name for its slot, which is the same if it is started again, and its node.

    Whole GPUs are a slot, whichever actor has them; an actor without one has a slot of its own.
    """
    context = ray.get_runtime_context()
    node, gpus = context.get_node_id(), context.get_accelerator_ids().get("GPU", [])
    whole = context.get_assigned_resources().get("GPU", 0.0) >= 1
    place = f"GPU {','.join(gpus)}" if whole else str(context.get_actor_id())
    return f"{node[:8]} {place}", node


def start_again() -> None:
    """End the process of this actor: Ray starts it again, with nothing kept."""
    os._exit(1)


def exit_actor() -> None:
    """End the process of this actor for ever."""
    ray.actor.exit_actor()


def alive_nodes() -> set[str]:
    """Ids of the nodes that are there."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


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

    As many actors run as there are nodes for, up to `workers(resources)`: the pool shrinks and grows with the
    cluster. An item whose process is lost is left out; Ray would hold it back until the same actor runs
    again, which may need a node that never comes.

    Args:
        items: rows, each in a block of its own.
        actor: a class whose instances map a batch of one row.
        arguments: of its constructor, by name.
        resources: number of actors, and what each reserves.
        before: maps a batch of one row, in tasks of one CPU, before the actors.
        after: the same after the actors.
        tasks: maximum number of tasks of `before`, and of `after`, that run at the same time.
    """
    most = min(workers(resources), len(items))
    least = min(_least(resources), most)
    # Actors that wait for a node are what an autoscaler sees; elsewhere they would wait for ever.
    room = most if _nodes_wait_s else sum(_room_per_node(_needs_per_worker(resources)))
    with ray.data.DataContext.current(_context(init_deaths=most)):
        dataset: Any = ray.data.from_items(list(items), override_num_blocks=len(items))
    around: dict[str, Any] = {"compute": ray.data.TaskPoolStrategy(size=max(tasks, 1)), "num_cpus": 1}
    around |= _on_cpu_nodes()
    if before:
        dataset = dataset.map_batches(before, batch_size=1, **around)
    dataset = ray_internals.map_with_one_try(
        dataset,
        actor,
        batch_size=1,
        # Two tasks, Ray's default, where tasks read ahead. Else one: the first actor to start would take
        # parts that the others, still loading, could begin sooner.
        compute=ray.data.ActorPoolStrategy(
            min_size=least,
            max_size=most,
            initial_size=min(max(room, least), most),
            max_tasks_in_flight_per_actor=2 if before else 1,
        ),
        fn_constructor_kwargs=arguments,
        **{key: value for key, value in actor_options(resources).items() if value},
    )
    return dataset.map_batches(after, batch_size=1, **around) if after else dataset


def _context(*, init_deaths: int) -> Any:
    """Settings by which an execution of Ray Data goes on when single actors, tasks and nodes are lost."""
    context = _data_context().copy()
    context.max_errored_blocks = -1
    context.max_consecutive_actor_init_deaths = init_deaths
    # The pool grows whenever a node has room, however many actors are still loading.
    context.autoscaling_config.actor_pool_util_upscaling_threshold = 1e-3
    context.autoscaling_config.actor_pool_util_downscaling_threshold = 0.0
    return context


def _data_context() -> Any:
    from ray.data import DataContext  # late: ray.data takes a second to import

    with warnings.catch_warnings():
        # Ray warns of its own default settings when it first makes a context.
        warnings.simplefilter("ignore", DeprecationWarning)
        return DataContext.get_current()


def dataset_rows(dataset: Any) -> Iterator[Any]:
    """Rows of a Ray Dataset in the order of completion; raises the error in a row's column `error`."""
    # Closed here: a traceback that is kept would otherwise keep the dataset's actors and their CPUs.
    with contextlib.closing(row for row in dataset.iter_rows()) as rows:
        for row in rows:
            if row.get("error"):
                kind, text = json.loads(row["error"])
                raise getattr(errors, kind)(text)
            yield row


def execution_errors() -> tuple[type[Exception], ...]:
    """Exceptions by which an execution of Ray Data ends early.

    Ray raises the second after half an hour without progress: no node came, or a part kills every worker.
    """
    from ray.data.exceptions import ExecutionTimeoutError  # late: ray.data takes a second to import

    return ray.exceptions.RayError, ExecutionTimeoutError


def error_column(error: ScalingNoteError) -> str:
    """Value of the column `error`, raised by :func:`dataset_rows`: Ray Data hides exceptions of user code."""
    return json.dumps([type(error).__name__, str(error)])
