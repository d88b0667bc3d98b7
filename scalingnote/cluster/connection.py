"""The only place that calls ray.init: connect to a cluster, or start a private one that ends with us."""

import atexit
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import ray

from scalingnote.errors import ConfigError, ScalingNoteError
from scalingnote.log import LINE

CONNECT_TIMEOUT_S = 10.0  # a cluster's head has for taking a connection
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
        _check_address(address)
        ray.init(address, log_to_driver=True, logging_level=logging.WARNING)
    else:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # C++ logs a line per actor
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # it watches for spot machines
        _set_token()
        try:
            with _delayed_interrupt(), _silent_stderr(), _loopback(), _filtered_worker_lines():
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
    _disable_ray_progress()


def is_private() -> bool:
    """Whether this process started the cluster, and no other machine can join it: it listens on loopback."""
    return _started and all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())


def _set_token() -> None:
    """Give a private cluster a token of its own: without it no process can submit work or read objects.

    The token is passed on in the environment. Ray without one would write a token file to the user's home
    directory. ray.init then sets RAY_AUTH_MODE=token itself: set here, after Ray was imported, it would not
    be read. Any RAY_AUTH_* setting of the user is kept as it is.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


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
    """Silence stderr, where Ray's C++ core prints its log level. Exceptions still propagate."""
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
