"""All private API of Ray that this package uses, of version 2.60: read this file when Ray is upgraded.

Each docstring states what Ray's public API lacks. tests/core/test_ray_internals.py checks that Ray still has
the private API. Functions import Ray themselves, so that the import of this module is fast.
"""

import contextlib
import logging
import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

START_POLL_INTERVAL_S = 0.5


def in_submitted_job() -> bool:
    """Return whether this process is the driver of a submitted job, by an internal variable of Ray."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Let Ray's processes listen on 127.0.0.1, as by default on macOS and Windows.

    On Linux they listen on every interface, the metrics exporters without authentication. Ray reads the
    environment variable once, when it is imported, so its constant is set too, but only for the start: a
    process that joins another cluster later needs its real address.
    """
    from ray._private import ray_constants as constants

    original = constants.ENABLE_RAY_CLUSTER
    os.environ.setdefault(constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
    constants.ENABLE_RAY_CLUSTER = os.environ[constants.ENABLE_RAY_CLUSTERS_ENV_VAR] not in ("0", "false")
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = original


@contextlib.contextmanager
def start_timeout(seconds: float) -> Iterator[None]:
    """Let Ray wait for its node for this number of seconds; its own limit of 30 s is a constant.

    Each request of Ray for its node is repeated here until the node has started or the time is over.
    """
    from ray._private import services as private

    services: Any = private
    get_node, deadline = services.get_node, time.monotonic() + seconds

    def get_node_with_retry(*arguments: Any) -> Any:
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(START_POLL_INTERVAL_S)

    services.get_node = get_node_with_retry
    try:
        yield
    finally:
        services.get_node = get_node


@contextlib.contextmanager
def shown_worker_lines(show: Callable[[str], bool]) -> Iterator[None]:
    """Print a line of a worker, without Ray's prefix, if `show` accepts it; others stay in Ray's log files.

    Without a dashboard Ray Train's placement group cleaner logs a warning per second during training. Ray
    registers the function that prints workers' lines when it starts; another function prints errors.
    """
    from ray._private import worker as private

    worker: Any = private
    original = worker.print_to_stdstream

    def print_shown(data: dict[str, Any], **_: Any) -> None:
        for line in data["lines"]:
            if show(line):
                print(line, file=sys.stderr, flush=True)

    worker.print_to_stdstream = print_shown
    try:
        yield
    finally:
        worker.print_to_stdstream = original


def silence_data() -> None:
    """Silence the messages of Ray Data about each dataset.

    They report that progress bars are off, that actors with GPUs also have CPUs, and the traceback of each
    part whose worker was lost, for which :mod:`.ray_data` logs one line.
    """
    for name in ("progress", "execution.operators.map_operator", "execution.streaming_executor_state"):
        logging.getLogger(f"ray.data._internal.{name}").setLevel(logging.CRITICAL)


def silence_uploads() -> None:
    """Silence the messages of Ray's job client about an upload, which are not the job's log.

    Call this after the import of these modules, which sets the levels of their loggers.
    """
    for name in (
        "dashboard.modules.dashboard_sdk",
        "dashboard.modules.job.sdk",
        "_private.runtime_env.packaging",
    ):
        logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)


def serve_client(*, required: bool = True) -> Any:
    """Return the client of Ray Serve's controller, for the address of a running proxy.

    Without a controller this raises an error, or returns None if it is not `required`.
    """
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=required)


def serve_deployments(application: Any) -> list[Any]:
    """Return the deployments of a bound application, with their options, without deploying it."""
    from ray.serve._private.build_app import build_app

    no_handle: Any = lambda *_: None  # noqa: E731
    return list(build_app(application, name="checked", make_deployment_handle=no_handle).deployments)


def ranks_on_one_machine(folder: str, join: Callable[..., None]) -> Any:
    """Return a config of Ray Train with ranks that connect through a file: Ray's own config opens a port.

    Args:
        folder: for the file, which all ranks can open.
        join: creates the process group of a rank from rank, ranks, file, backend and timeout in seconds.
    """
    import ray
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend

    class FileBackend(_TorchBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            worker_group.execute(_set_torch_distributed_env_vars)
            ranks, store = len(worker_group), f"{folder}/{uuid.uuid4().hex}"
            settings = (ranks, store, backend_config.backend, backend_config.timeout_s)
            ray.get([worker_group.execute_single_async(rank, join, rank, *settings) for rank in range(ranks)])

    class OneMachine(TorchConfig):
        @property
        def backend_cls(self) -> type[_TorchBackend]:
            return FileBackend

    return OneMachine()


def map_with_one_try(dataset: Any, actor: type, **options: Any) -> Any:
    """Return `dataset.map_batches` by actors with tasks that are not repeated when their process is lost.

    Ray 2.60 accepts `max_task_retries` only among options that 2.64 will remove, and warns of that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dataset.map_batches(actor, **options, max_task_retries=0)
