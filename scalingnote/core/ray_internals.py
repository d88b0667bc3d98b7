"""All private API of Ray that this package uses, of version 2.60: read this file when Ray is upgraded.

Each function says what Ray's public API lacks; tests/core/test_ray_internals.py looks whether Ray still has
it. Ray is imported where it is used: a module that names this one stays quick to import.
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
    """Whether this process is the driver of a submitted job: Ray says so in a variable for itself."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Have Ray's processes listen on 127.0.0.1, as it does by default on macOS and Windows.

    On Linux they listen on every interface, the metrics exporters without authentication. Ray reads the
    variable once, when it is imported, so its constant is set too: for the start alone, because a process
    that joins another cluster later needs its real address.
    """
    from ray._private import ray_constants as constants

    kept = constants.ENABLE_RAY_CLUSTER
    os.environ.setdefault(constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
    constants.ENABLE_RAY_CLUSTER = os.environ[constants.ENABLE_RAY_CLUSTERS_ENV_VAR] not in ("0", "false")
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


@contextlib.contextmanager
def start_timeout(seconds: float) -> Iterator[None]:
    """Have Ray wait so long for its node: it asks for the node again and again for 30 s, a constant.

    Each of its questions waits until the node is there, and only then fails, once.
    """
    from ray._private import services as private

    services: Any = private
    ask, deadline = services.get_node, time.monotonic() + seconds

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


@contextlib.contextmanager
def shown_worker_lines(show: Callable[[str], bool]) -> Iterator[None]:
    """Print a line of a worker without Ray's prefix if `show` says so; the others stay in Ray's log files.

    Without a dashboard Ray Train's placement group cleaner logs a warning per second during training. Ray
    registers the function that prints workers' lines when it starts; errors are printed by another one.
    """
    from ray._private import worker as private

    worker: Any = private
    kept = worker.print_to_stdstream

    def print_shown(data: dict[str, Any], **_: Any) -> None:
        for line in data["lines"]:
            if show(line):
                print(line, file=sys.stderr, flush=True)

    worker.print_to_stdstream = print_shown
    try:
        yield
    finally:
        worker.print_to_stdstream = kept


def silence_data() -> None:
    """Silence what Ray Data logs of each dataset.

    That progress bars are off, that actors with GPUs have CPUs, too, and the traceback of each part whose
    worker was lost: `encode` tells of it in a line.
    """
    for name in ("progress", "execution.operators.map_operator", "execution.streaming_executor_state"):
        logging.getLogger(f"ray.data._internal.{name}").setLevel(logging.CRITICAL)


def silence_uploads() -> None:
    """Silence the account of an upload that Ray's job client gives, which is not the job's log.

    The loggers set their own levels when they are imported: this comes after that.
    """
    for name in (
        "dashboard.modules.dashboard_sdk",
        "dashboard.modules.job.sdk",
        "_private.runtime_env.packaging",
    ):
        logging.getLogger(f"ray.{name}").setLevel(logging.WARNING)


def serve_client(*, required: bool = True) -> Any:
    """The client of Ray Serve's controller, which knows the address of a running proxy; None without one."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=required)


def serve_deployments(application: Any) -> list[Any]:
    """The deployments of a bound application, with their options, which is not deployed by this."""
    from ray.serve._private.build_app import build_app

    no_handle: Any = lambda *_: None  # noqa: E731
    return list(build_app(application, name="checked", make_deployment_handle=no_handle).deployments)


def ranks_on_one_machine(folder: str, join: Callable[..., None]) -> Any:
    """A config of Ray Train whose ranks connect through a file in `folder`: its own opens a port.

    Args:
        folder: that all ranks reach.
        join: makes the process group of a rank from rank, ranks, file, backend and timeout in seconds.
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
    """`dataset.map_batches` by actors, of whose tasks none is tried again when its process is lost.

    Ray 2.60 takes `max_task_retries` only among options that it will drop in 2.64, and warns of that.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dataset.map_batches(actor, **options, max_task_retries=0)
