"""Start of Ray on this machine, without output and only for this process, and connection to a cluster."""

import atexit
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import ray

from scalingnote.core import ray_internals
from scalingnote.core.errors import ConfigError, ScalingNoteError
from scalingnote.core.log import LINE, elapsed_status, note_line, status_lines

CONNECT_TIMEOUT_S = 10.0  # of a connection to a cluster's head
START_TIMEOUT_S = 180.0  # of a local Ray; its own 30 s are too short on a machine with other busy programs


def join(address: str) -> None:
    """Join the cluster at an address.

    Raises:
        ConfigError: no cluster answers at the address; Ray itself would try for many minutes.
    """
    _check_address(address)
    _silence_libraries()
    ray.init(address, log_to_driver=True, logging_level=logging.WARNING)


def start_local() -> None:
    """Start a private cluster on this machine, which ends with this process.

    "local" is passed on purpose: without an address Ray joins any cluster that it finds on the machine, also
    one that remains after a crash.

    Raises:
        ScalingNoteError: Ray does not start.
    """
    _silence_libraries()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # C++ logs a line per actor
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # it watches for spot machines
    # Ray adds 15 to the niceness of workers: on a machine with other busy programs they would get no CPU.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A separate token, without which no process can submit work or read objects; Ray would write one to the
    # user's home directory. ray.init sets RAY_AUTH_MODE=token: set here, after the import of Ray, it would
    # have no effect.
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
    except Exception as error:  # Ray has no exception class for this
        raise ScalingNoteError(
            f"Ray did not start on this machine: {error} If other programs keep all processors busy, "
            "run this again when they have ended: finished work is kept. `scalingnote doctor` checks for "
            "other causes"
        ) from error
    atexit.register(ray.shutdown)


@contextlib.contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Delay CTRL-C until Ray has started: an interrupted start crashes or leaves processes running."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts:
        ray.shutdown()
        raise KeyboardInterrupt


def _check_address(address: str) -> None:
    """Raise ConfigError if no process listens at the address; one without a port ("auto") is not checked."""
    scheme, _, place = address.rpartition("://")
    if scheme.startswith("http"):
        raise ConfigError(
            f"{address} is for jobs (`scalingnote submit`), not a cluster to join: unset RAY_ADDRESS to "
            "run on this machine, or set the head's own address, such as HOST:6379"
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
    """Silence file 2, to which Ray's C++ core prints its log level; Python's output (our log) is shown."""
    sys.stderr.flush()
    stderr_copy, null_device = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 2)
    try:
        with (
            open(stderr_copy, "w", buffering=1, encoding="utf-8", closefd=False) as visible_stderr,
            contextlib.redirect_stderr(visible_stderr),
        ):
            yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(null_device)


def _is_ours(line: str) -> bool:
    """Return whether a worker's line is one of this package's log, and if so record that it is shown."""
    if ours := bool(LINE.match(line)):
        note_line()
    return ours


def _silence_libraries() -> None:
    """Silence the messages of Ray Data and Ray Train about their steps, which would interleave with ours."""
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    logging.getLogger("ray.train").setLevel(logging.WARNING)
