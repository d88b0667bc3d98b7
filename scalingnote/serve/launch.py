"""The command `scalingnote serve`: start an application on a Ray cluster, and shut it down on a signal."""

import contextlib
import io
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import HTTPOptions, gRPCOptions

from scalingnote.core import cluster, ray_internals
from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.core.log import get_logger
from scalingnote.run.service_config import ENCODING_DEADLINE_S, ServeConfig
from scalingnote.serve import placement
from scalingnote.serve.artifacts import ServedArtifacts, ServedTower
from scalingnote.serve.grpc.servicer import REGISTER
from scalingnote.serve.telemetry import SERVE_LOGGING

Served = ServedArtifacts | ServedTower
APPLICATION_NAME = "scalingnote"
PROXY_TIMEOUT_S = 240.0  # Ray Serve's default of 60 s is too short for its processes on a busy machine
log = get_logger("serve")


def run(served: Served, application: Application) -> int:
    """Serve until CTRL-C or SIGTERM, then shut down everything that was started; return the exit code."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    cluster.connect(served.address)
    try:
        running = _running_proxy()
        port = _port(served.config, running)
        served = replace(served, config=served.config.model_copy(update={"port": port}))
        try:
            print(f"{start(served, application)}  (CTRL-C ends it)", flush=True)
            _wait_for_a_signal()
            log.info("shutting down")
        finally:
            # Ray prints the end of its controller as a failed task.
            with contextlib.redirect_stdout(io.StringIO()):
                _end_service(shared=running is not None)
    finally:
        ray.shutdown()  # ends a private cluster, and disconnects from an existing one
    return 0


def _end_service(*, shared: bool) -> None:
    """Delete the application, and shut down Ray Serve unless it ran on the cluster before."""
    if _running_proxy() is None:  # Ray Serve did not start
        return
    serve.delete(APPLICATION_NAME)  # replicas finish their requests
    if not shared:
        serve.shutdown()  # without it, the port would be in use for the next application


def _running_proxy() -> HTTPOptions | None:
    """Return the address of Ray Serve, None if it does not run here yet: all applications share its proxy."""
    client = ray_internals.serve_client(required=False)
    return None if client is None else client.http_config


def _port(config: ServeConfig, running: HTTPOptions | None) -> int:
    """Return the port to listen on; ConfigError if it is in use, or if a running proxy does not fit."""
    if running is None:
        if config.grpc_port is not None:
            _free_port("0.0.0.0", config.grpc_port, knob="grpc_port")
        return _free_port(config.host, config.port)
    if APPLICATION_NAME in serve.status().applications:
        raise ConfigError(
            f"this cluster serves {APPLICATION_NAME!r} already, at port {running.port}: end it first "
            "(serve shutdown)"
        )
    if running.host != config.host:
        raise ConfigError(
            f"Ray Serve of this cluster listens on {running.host} already, not on {config.host}: set "
            f"serve.host to {running.host}, or end it first (serve shutdown)"
        )
    log.info("Ray Serve runs on this cluster already: its port is used")
    return int(running.port)


def start(served: Served, application: Application) -> str:
    """Start the application behind proxies for HTTP and gRPC; return its URL when it answers."""
    if problems := placement.problems(application, ray.nodes()):
        raise ConfigError("\n".join(problems))
    config = served.config
    # The gateway has its own deadlines: only a request that never reached it exceeds this timeout.
    timeout_s = max(config.deadline_s, ENCODING_DEADLINE_S) + 2
    http = HTTPOptions(host=config.host, port=config.port, request_timeout_s=timeout_s)
    grpc = None
    if (port := config.grpc_port) is not None:
        grpc = gRPCOptions(port=port, grpc_servicer_functions=[REGISTER], request_timeout_s=timeout_s)
    deadline = time.monotonic() + PROXY_TIMEOUT_S
    _until_it_answers(
        lambda: serve.start(http_options=http, grpc_options=grpc, proxy_location="HeadOnly"), deadline
    )
    try:
        serve.run(application, name=APPLICATION_NAME, route_prefix="/", logging_config=SERVE_LOGGING)
    except RuntimeError as error:
        raise SearchError(f"Ray Serve could not start the application: {error}") from None
    except TimeoutError:  # the application runs, but its proxy does not answer yet
        _until_it_answers(ray_internals.serve_client().wait_for_proxies_serving, deadline)
    host = "127.0.0.1" if config.host == "0.0.0.0" else config.host
    return f"http://{host}:{config.port}"


def _until_it_answers(step: Callable[[], object], deadline: float) -> None:
    """Repeat a step until Ray Serve's proxy answers; SearchError if it does not by the deadline.

    Ray Serve's controller kills a proxy that is slow to start, and starts it again.
    """
    while True:
        try:
            step()
            return
        except (TimeoutError, RayError) as error:
            reason = str(error).strip().splitlines()[0]
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise SearchError(
                f"the proxy of Ray Serve did not start within {PROXY_TIMEOUT_S:g} s ({reason}): run this "
                "again when the machine is less busy, or with --set serve.ingress=python"
            )
        log.info("waiting up to %.0f s more for the proxy of Ray Serve to start (%s)", left_s, reason)
        time.sleep(1)


def _wait_for_a_signal() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, because its handler aborts the process
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


def _free_port(host: str, port: int, *, knob: str = "port") -> int:
    """Return `port` if it is free, for 0 a free one; ConfigError if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like the proxy
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another with "
                f"--set serve.{knob}=..."
            ) from None
        return int(probe.getsockname()[1])
