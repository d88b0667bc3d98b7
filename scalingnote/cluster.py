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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import ray

from scalingnote import errors
from scalingnote.config import Resources
from scalingnote.errors import ConfigError, ScalingNoteError
from scalingnote.log import LINE, elapsed_status, get_logger, note_line, status_lines

T = TypeVar("T")
R = TypeVar("R")
CONNECT_TIMEOUT_S = 10.0  # a cluster's head has for taking a connection
NODE_POLL_INTERVAL_S = 2.0  # between looks for nodes that were asked for
START_POLL_INTERVAL_S = 0.5
START_TIMEOUT_S = 180.0  # a local Ray has for starting; its own 30 s are too few beside other programs
# Of one map: the time of a wait and the driver's memory grow with the number of tasks in flight.
MAX_TASKS_IN_FLIGHT = 1_000
# Tasks are idempotent, so an OSError of the storage is retried like the death of a worker.
ATTEMPTS = 4
RETRY_OPTIONS: dict[str, Any] = {"max_retries": ATTEMPTS - 1, "retry_exceptions": [OSError]}
_started = False  # whether the cluster that this process works on is its own
log = get_logger("cluster")


def connect(address: str | None = None) -> None:
    """Join `address` (or RAY_ADDRESS, set inside every Ray job), else start a private local cluster.

    "local" is passed on purpose: without an address Ray joins whatever cluster it finds on the machine,
    also one left behind by a crash.

    Raises:
        ConfigError: no cluster answers at the address; Ray itself would try for many minutes.
        ScalingNoteError: no local cluster came up.
    """
    global _started
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
                _loopback(),
                _patience(),
                _filtered_worker_lines(),
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


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Have Ray's processes listen on 127.0.0.1, as it does by default on macOS and Windows.

    On Linux they listen on every interface, the metrics exporters without authentication. Ray reads the
    variable once, when it is imported, so its constant is set too: for the start alone, because a process
    that joins another cluster later needs its real address.
    """
    constants = ray._private.ray_constants
    kept = constants.ENABLE_RAY_CLUSTER
    os.environ.setdefault(constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
    constants.ENABLE_RAY_CLUSTER = os.environ[constants.ENABLE_RAY_CLUSTERS_ENV_VAR] not in ("0", "false")
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Have Ray wait START_TIMEOUT_S for its node: it asks for the node again and again for 30 s, a constant.

    Each of its questions waits until the node is there, and only then fails, once.
    """
    services: Any = ray._private.services
    ask, deadline = services.get_node, time.monotonic() + START_TIMEOUT_S

    def ask_until_there(*given: Any) -> Any:
        while True:
            try:
                return ask(*given)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(START_POLL_INTERVAL_S)

    services.get_node = ask_until_there
    try:
        yield
    finally:
        services.get_node = ask


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


@contextlib.contextmanager
def _filtered_worker_lines() -> Iterator[None]:
    """Show this package's lines of workers without Ray's prefix; Ray's own lines stay in its log files.

    Without a dashboard Ray Train's placement group cleaner logs a warning per second during training. Ray
    registers the function that prints workers' lines when it starts; errors are printed by another one.
    """
    worker: Any = ray._private.worker
    kept = worker.print_to_stdstream

    def show(data: dict[str, Any], **_: Any) -> None:
        for line in data["lines"]:
            if LINE.match(line):
                print(line, file=sys.stderr, flush=True)
                note_line()

    worker.print_to_stdstream = show
    try:
        yield
    finally:
        worker.print_to_stdstream = kept


def _disable_ray_progress() -> None:
    from ray.data import DataContext

    with warnings.catch_warnings():
        # Ray warns of its own default settings when it first makes a context.
        warnings.simplefilter("ignore", DeprecationWarning)
        context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # It logs "Progress bars disabled" for each dataset.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)


# --- resources --------------------------------------------------------------------------------------------


def check_resources(resources: Resources, *, knob: str, task_cpus: int = 0) -> None:
    """Refuse, before work is spent, resources that the cluster can never provide.

    With SCALINGNOTE_NODES_WAIT_S set, the cluster's autoscaler is asked for the missing nodes first, and they
    are awaited for at most that many seconds.

    Args:
        resources: of the stage.
        knob: where the user set them, for the error message.
        task_cpus: CPUs of the tasks that run at the same time as the workers.

    Raises:
        ConfigError: the cluster has too few CPUs or GPUs, or no node is large enough for a worker.
    """
    lack = _missing_resources(resources, task_cpus=task_cpus, knob=knob)
    if lack and (seconds := _nodes_wait()):
        log.info("%s; waiting up to %g s for nodes", lack, seconds)
        each = _needs_per_worker(resources)
        _request_nodes([each] * resources.workers + [{"CPU": 1}] * task_cpus)
        deadline = time.monotonic() + seconds
        try:
            while lack and time.monotonic() < deadline:
                time.sleep(NODE_POLL_INTERVAL_S)
                lack = _missing_resources(resources, task_cpus=task_cpus, knob=knob)
        finally:
            _request_nodes([])  # or they would be kept for ever
    if lack:
        raise ConfigError(lack)


def check_resources_early(resources: Resources, *, knob: str, task_cpus: int = 0) -> None:
    """:func:`check_resources` for a later step: skipped where nodes come on demand, which would wait idle."""
    if not _nodes_wait():
        check_resources(resources, knob=knob, task_cpus=task_cpus)


def _missing_resources(resources: Resources, *, task_cpus: int, knob: str) -> str:
    """What the cluster lacks, as a message for the user; empty if it lacks nothing."""
    have, workers = ray.cluster_resources(), resources.workers
    if not workers and resources.gpus_per_worker and not _own_node().get("GPU"):
        return (
            f"{knob} asks for a GPU of this machine, and Ray finds none here: set {knob}.gpus_per_worker=0, "
            f"or {knob}.workers=1 if another machine of the cluster has one"
        )
    each = _needs_per_worker(resources) if workers else {}
    needed = " and ".join(f"{need:g} {key}" for key, need in each.items())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # A worker runs on one node: remainders on two nodes do not add up to a third worker.
    workers_per_node = [
        min(int(node.get(key, 0.0) / need + 1e-9) for key, need in each.items()) for node in nodes if each
    ]
    if each and not any(workers_per_node):
        knobs = " or ".join(f"{knob}.{key.lower()}s_per_worker" for key in each)
        return f"{knob} asks for {needed} a worker, no node has that: lower {knobs}, or add a node that has"
    for key, spare in (("CPU", task_cpus), ("GPU", 0)):
        if (need := workers * each.get(key, 0.0) + spare) > have.get(key, 0.0):
            return (
                f"{knob} asks for {need:g} {key}, the cluster has {have.get(key, 0.0):g}: "
                f"lower {knob}.workers or add nodes"
            )
    if each and sum(workers_per_node) < workers:
        return (
            f"{knob} asks for {workers} workers of {needed}, the nodes have room for "
            f"{sum(workers_per_node)}: lower {knob}.workers or add nodes"
        )
    return ""


def _request_nodes(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources  # late: few clusters grow

    request_resources(bundles=bundles)


def _own_node() -> dict[str, float]:
    """Resources of the node that this process runs on."""
    own = ray.get_runtime_context().get_node_id()
    return next((dict(node["Resources"]) for node in ray.nodes() if node["NodeID"] == own), {})


def _needs_per_worker(resources: Resources) -> dict[str, float]:
    needs = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    return {key: need for key, need in needs.items() if need}


def _nodes_wait() -> float:
    text = os.environ.get("SCALINGNOTE_NODES_WAIT_S", "0")
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"SCALINGNOTE_NODES_WAIT_S is {text!r}: give seconds") from None


def actor_options(resources: Resources) -> dict[str, Any]:
    """Ray options of one actor or task."""
    return {"num_cpus": resources.cpus_per_worker, "num_gpus": resources.gpus_per_worker}


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
    with contextlib.closing(row for row in dataset.iter_rows()) as rows:
        for row in rows:
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
        # Two, Ray's default, where tasks read ahead. Else one: the first actor to start would take parts that
        # the others, still loading, could begin sooner.
        compute=ray.data.ActorPoolStrategy(
            size=min(resources.workers, len(items)), max_tasks_in_flight_per_actor=2 if before else 1
        ),
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

    Items are tuples of JSON values, and results are JSON values.
    """
    rows = [{"item": json.dumps(item)} for item in items]
    for row in dataset_rows(map_with_actors(rows, _Mapper, {"work": ray.put(work)}, resources)):
        yield json.loads(row["result"])


class _Mapper:
    def __init__(self, work: Any) -> None:
        self._work: Callable[[Any], Any] = ray.get(work)

    def __call__(self, batch: dict[str, Any], *, attempts: int = ATTEMPTS) -> dict[str, Any]:
        try:
            result = self._work(tuple(json.loads(batch["item"][0])))
        except ScalingNoteError as error:
            return {"result": [""], "error": [error_column(error)]}
        except OSError:  # storage may recover; the last error ends the stage
            if attempts == 1:
                raise
            return self(batch, attempts=attempts - 1)
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
