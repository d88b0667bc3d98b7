"""The only place that calls ray.init: connect to a cluster, or start a private one that ends with us."""

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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import ray

from scalingnote import errors
from scalingnote.config import Resources
from scalingnote.errors import ConfigError, ScalingNoteError
from scalingnote.log import LINE, get_logger

T = TypeVar("T")
R = TypeVar("R")
ANSWER_SECONDS = 10.0  # a cluster's head has for taking a connection
NODES_LOOK_S = 2.0  # between looks for nodes that were asked for
# Tasks are idempotent: what storage refuses for a moment is done again, as after a worker that died.
AGAIN: dict[str, Any] = {"max_retries": 3, "retry_exceptions": [OSError]}
log = get_logger("cluster")
_started = False  # whether the cluster that this process works on is its own


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
        _require_answer(address)
        ray.init(address, log_to_driver=True, logging_level=logging.WARNING)
    else:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # C++ remarks on every actor we start
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # nobody reclaims this machine
        _require_token()
        try:
            with _interrupted_afterwards(), _stderr_closed(), _loopback(), _only_our_lines():
                ray.init(
                    "local",
                    num_cpus=max(2, os.cpu_count() or 2),
                    include_dashboard=False,
                    log_to_driver=True,
                    logging_level=logging.ERROR,
                )
        except Exception as error:  # Ray raises no class of its own, and waits 30 s for its processes
            raise ScalingNoteError(
                f"Ray did not start on this machine: {error} Where other programs keep all processors busy, "
                "run this again when they have ended: what is finished stays. `scalingnote doctor` looks for "
                "other causes"
            ) from error
        atexit.register(ray.shutdown)
    _quieten()


def is_private() -> bool:
    """Whether this process started the cluster, and no other machine can join it: it listens on loopback."""
    return _started and all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())


def _require_token() -> None:
    """Give a private cluster a token of its own: without it no process can submit work or read objects.

    The token is passed on in the environment. Ray without one would write a token file to the user's home
    directory. ray.init then sets RAY_AUTH_MODE=token itself: set here, after Ray was imported, it would not
    be read. Any RAY_AUTH_* setting of the user is kept as it is.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Hold CTRL-C back until Ray has started: half started, it leaves processes behind or crashes."""
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


def _require_answer(address: str) -> None:
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
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({error}): start one (ray start --head), correct `address` "
            "or RAY_ADDRESS, or leave both out to run on this machine"
        ) from error


def require(resources: Resources, *, knob: str, beside: int = 0) -> None:
    """Refuse, before work is spent, what the cluster could never schedule.

    `knob` is where a user set them, and `beside` the workers run tasks that need so many CPUs. Where the
    environment says that nodes come when they are asked for (SCALINGNOTE_NODES_WAIT_S seconds at most),
    they are asked for and waited for.
    """
    if not (lack := _lack(resources, beside=beside, knob=knob)):
        return
    if seconds := _nodes_wait():
        log.info("%s; waiting up to %g s for nodes", lack, seconds)
        each = _of_each(resources)
        _ask_for([each] * resources.workers + [{"CPU": 1}] * beside)
        deadline = time.monotonic() + seconds
        try:
            while lack and time.monotonic() < deadline:
                time.sleep(NODES_LOOK_S)
                lack = _lack(resources, beside=beside, knob=knob)
        finally:
            _ask_for([])  # or they would be kept for ever
    if lack:
        raise ConfigError(lack)


def foresee(resources: Resources, *, knob: str, beside: int = 0) -> None:
    """:func:`require` of what comes much later: nodes that come when asked for are not to wait for it."""
    if not _nodes_wait():
        require(resources, knob=knob, beside=beside)


def _lack(resources: Resources, *, beside: int, knob: str) -> str:
    """What the cluster has too little of, for a user to read; empty: nothing."""
    have, workers = ray.cluster_resources(), resources.workers
    each = _of_each(resources) if workers else {}
    asked = " and ".join(f"{need:g} {key}" for key, need in each.items())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # A worker lies on one node: what is left over on two of them is no room for a third.
    room = [
        min(int(node.get(key, 0.0) / need + 1e-9) for key, need in each.items()) for node in nodes if each
    ]
    if each and not any(room):
        knobs = " or ".join(f"{knob}.{key.lower()}s_per_worker" for key in each)
        return f"{knob} asks for {asked} a worker, no node has that: lower {knobs}, or add a node that has"
    for key, spare in (("CPU", beside), ("GPU", 0)):
        if (need := workers * each.get(key, 0.0) + spare) > have.get(key, 0.0):
            return (
                f"{knob} asks for {need:g} {key}, the cluster has {have.get(key, 0.0):g}: "
                f"lower {knob}.workers or add nodes"
            )
    if each and sum(room) < workers:
        return (
            f"{knob} asks for {workers} workers of {asked}, the nodes have room for {sum(room)}: "
            f"lower {knob}.workers or add nodes"
        )
    return ""


def _ask_for(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources  # late: few clusters grow

    request_resources(bundles=bundles)


def _of_each(resources: Resources) -> dict[str, float]:
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


def fetch(reference: Any) -> Any:
    """Result of a task. An error a user can mend is raised as itself, without Ray's wrapping and trace."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ScalingNoteError):
            raise error.cause from None
        raise


def each(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """What `work` gives for each item, as it is finished, in tasks of one CPU wherever there is room."""
    if len(items) == 1:  # done here before a worker has started
        yield work(items[0])
        return
    task: Any = ray.remote(num_cpus=1, **AGAIN)(_apply)
    shared = ray.put(work)
    waiting = [task.remote(shared, item) for item in items]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        yield fetch(done)


def in_order(work: Callable[[T], R], items: Sequence[T], resources: Resources) -> Iterator[R]:
    """What `work` gives for each item, in the items' order, in tasks with the resources of a worker.

    As many run at a time as there are workers, so that memory can be planned. Results wait where they were
    made: the caller holds one at a time.
    """
    task: Any = ray.remote(**actor_options(resources), **AGAIN)(_apply)
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
            yield fetch(results.popleft())


def _apply(work: Callable[[T], R], item: T) -> R:
    return work(item)


def rows(dataset: Any) -> Iterator[Any]:
    """Rows of a Ray Dataset as they are finished; raises what one tells in its column `error`."""
    # Closed here, or a traceback that somebody keeps would keep its actors, and with them their CPUs.
    with contextlib.closing(_generator(dataset.iter_rows())) as found:
        for row in found:
            if row.get("error"):
                kind, text = json.loads(row["error"])
                raise getattr(errors, kind)(text)
            yield row


def told(error: ScalingNoteError) -> str:
    """What a row says in its column `error`, to be raised by :func:`rows`: Ray Data buries exceptions."""
    return json.dumps([type(error).__name__, str(error)])


def _generator(found: Iterable[Any]) -> Generator[Any]:
    yield from found


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Ray's C++ core tells stderr which log level it found, whatever the level. Exceptions still rise."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def _only_our_lines() -> Iterator[None]:
    """Show our workers' progress lines bare, and leave Ray's own remarks in its log files.

    Without a dashboard Ray Train's placement group cleaner warns every second of each training run. Ray
    registers the function that prints lines of workers when it starts; what it says of errors is still shown.
    """
    worker: Any = ray._private.worker
    kept = worker.print_to_stdstream

    def show(data: dict[str, Any], **_: Any) -> None:
        for line in data["lines"]:
            if LINE.match(line):
                print(line, file=sys.stderr, flush=True)

    worker.print_to_stdstream = show
    try:
        yield
    finally:
        worker.print_to_stdstream = kept


def _quieten() -> None:
    from ray.data import DataContext

    with warnings.catch_warnings():
        # Ray warns of its own default settings when it first makes a context.
        warnings.simplefilter("ignore", DeprecationWarning)
        context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # "Progress bars disabled": we know, we did it.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
