"""Interface of the offline stages to Ray: a cluster, its resources, and workers for parts."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import ray

from scalingnote.core import GIB, ray_start
from scalingnote.core.config import ElasticResources, Resources
from scalingnote.core.errors import ConfigError, ScalingNoteError
from scalingnote.core.log import get_logger
from scalingnote.core.parts import PartQueue, PartStage, as_stage, map_here

T = TypeVar("T")
R = TypeVar("R")
Sized = TypeVar("Sized", bound=Resources)
IN_PROCESS = "in-process"  # instead of an address: parts are processed in this process, without Ray
BACKOFF_S = 5.0  # before a worker loads again in a slot in which it failed, doubled with each failure
# The duration of `ray.wait` and the driver's memory grow with the number of tasks in flight.
MAX_TASKS_AT_ONCE = 1_000
NODE_POLL_INTERVAL_S = 2.0  # between checks for requested nodes
ACCELERATOR_LABEL = "ray.io/accelerator-type"  # Ray sets it on every node that has one
_in_process = False
_started = False  # whether this process started the cluster that it uses
_nodes_wait_s = 0.0  # maximal wait of a stage for nodes that it lacks
log = get_logger("cluster")


def connect(address: str | None = None, *, nodes_wait_s: float = 0.0) -> None:
    """Join `address` (or RAY_ADDRESS, set inside every Ray job), else start a private local cluster.

    Args:
        address: of the cluster's head; IN_PROCESS to do all work in this process.
        nodes_wait_s: seconds that stages of this process wait for nodes that they lack, on a cluster with an
            autoscaler.

    Raises:
        ConfigError: no cluster answers at the address.
        ScalingNoteError: no local cluster started.
    """
    global _in_process, _started, _nodes_wait_s
    _nodes_wait_s = nodes_wait_s
    _in_process = _in_process or address == IN_PROCESS
    if _in_process or ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    _started = not address
    if address:
        ray_start.join(address)
    else:
        ray_start.start_local()


def is_private() -> bool:
    """Return whether this process started the cluster and no other machine can join it (loopback only)."""
    return _started and all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())


@contextlib.contextmanager
def restored_interrupt_handler() -> Iterator[None]:
    """Restore the handler of SIGINT after the block.

    Ray Train leaves its own handler, which aborts a controller that has ended. With it, CTRL-C in a later
    stage ended the process with exit code 0 or had no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


# --- resources --------------------------------------------------------------------------------------------


def check_resources(resources: Resources, *, knob: str, task_cpus: int = 0) -> None:
    """Check, before any work starts, that the cluster can provide these resources.

    If :func:`connect` got `nodes_wait_s`, this function first requests missing nodes from the cluster's
    autoscaler and waits for them for at most that time.

    Args:
        resources: of the stage; `min_workers`, if set, is the number that it needs to start.
        knob: config section in which the user set them, for the error message.
        task_cpus: CPUs of the tasks that run at the same time as the workers.

    Raises:
        ConfigError: the cluster has too few resources, or no node is large enough for a worker.
    """
    if _in_process:
        return
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
            _request_nodes([])  # otherwise the autoscaler would keep the nodes forever
    if lack:
        waited = f"; no node started in {_nodes_wait_s:g} s (nodes_wait_s)" if _nodes_wait_s else ""
        raise ConfigError(lack + waited)


def check_resources_early(resources: Resources, *, knob: str, task_cpus: int = 0) -> None:
    """Check the resources of a later step, unless nodes start on demand: until then they would be idle."""
    if not _nodes_wait_s:
        check_resources(resources, knob=knob, task_cpus=task_cpus)


def workers(resources: Resources) -> int:
    """Return the number of workers: the configured one, or else what the current nodes have room for."""
    if resources.workers is not None:
        return resources.workers
    if _in_process:
        return 1
    return max(sum(_room_per_node(_needs_per_worker(resources))), 1)


def with_memory(resources: Sized, bytes_per_worker: int) -> Sized:
    """Return the resources with the number of workers for which this memory is available.

    A machine with many cores does not always have the memory for a model on each core. A configured number of
    workers stays.
    """
    if resources.workers is not None or _in_process:
        return resources
    each = _needs_per_worker(resources)
    each["memory"] = max(each.get("memory", 0.0), float(bytes_per_worker))
    return resources.model_copy(update={"workers": max(sum(_room_per_node(each)), 1)})


def _least(resources: Resources) -> int:
    """Return how many workers a stage needs to start; 0 if the driver's own process does the work."""
    if isinstance(resources, ElasticResources) and resources.min_workers is not None:
        return resources.min_workers
    return 1 if resources.workers is None else resources.workers


def _missing_resources(resources: Resources, *, task_cpus: int, knob: str) -> str:
    """Describe the resources that the cluster lacks, as a message for the user; empty if it lacks none."""
    available, least = ray.cluster_resources(), _least(resources)
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
        if (need := least * each.get(key, 0.0) + spare) > available.get(key, 0.0):
            return (
                f"{knob} asks for {need:g} {key}, the cluster has {available.get(key, 0.0):g}: "
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
    """Count the workers with these needs that fit on each node that may run them."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if not each.get("GPU") and _selector_of_cpu_nodes(nodes):
        nodes = [node for node in nodes if not node["Resources"].get("GPU")]
    return [
        min(int(node["Resources"].get(key, 0.0) / need + 1e-9) for key, need in each.items())
        for node in nodes
    ]


def _request_nodes(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources  # late: few clusters have an autoscaler

    request_resources(bundles=bundles)


def _own_node() -> dict[str, Any]:
    """Return Ray's description of the node that this process runs on."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(
        (node for node in ray.nodes() if node["NodeID"] == node_id), {"NodeID": node_id, "Resources": {}}
    )


def _needs_per_worker(resources: Resources) -> dict[str, float]:
    memory = float(int(resources.memory_per_worker * GIB))
    needs = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker, "memory": memory}
    return {key: need for key, need in needs.items() if need}


def actor_options(resources: Resources) -> dict[str, Any]:
    """Return Ray's options of one actor or task: its resources, and for CPU work a node without GPUs."""
    needs = _needs_per_worker(resources)
    options: dict[str, Any] = {"num_cpus": needs.get("CPU", 0), "num_gpus": needs.get("GPU", 0)}
    if "memory" in needs:
        options["memory"] = int(needs["memory"])
    return options | ({} if "GPU" in needs else _on_cpu_nodes())


def _on_cpu_nodes() -> dict[str, Any]:
    """Return Ray's options that keep a task off nodes with GPUs, if other nodes can run it.

    By default Ray only prefers the other nodes: when they are full, tasks on GPU nodes would prevent the
    autoscaler from releasing these.
    """
    selector = _selector_of_cpu_nodes([node for node in ray.nodes() if node["Alive"]])
    return {"label_selector": selector} if selector else {}


def _selector_of_cpu_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a selector of the nodes without a GPU; empty if none of them but the driver's has CPUs.

    The driver may have reserved all CPUs of its own node.
    """
    with_gpus = [node for node in nodes if node["Resources"].get("GPU")]
    kinds = {node.get("Labels", {}).get(ACCELERATOR_LABEL) for node in with_gpus}
    if not kinds or None in kinds:
        return {}
    driver_node_id = _own_node()["NodeID"]
    others = [node for node in nodes if node not in with_gpus and node["NodeID"] != driver_node_id]
    if not any(node["Resources"].get("CPU") for node in others):
        return {}
    return {ACCELERATOR_LABEL: f"!in({', '.join(sorted(kinds))})"}


# --- workers for parts --------------------------------------------------------------------------------------


def map_tasks(work: Callable[[T], R], parts: Sequence[T], resources: Resources | None = None) -> Iterator[R]:
    """Process parts in tasks of Ray and yield the results in the order of completion.

    Results stay on the node of their task until they are read.

    Args:
        work: function of a part.
        parts: arguments of `work`.
        resources: of a task. At most `resources.workers` tasks run at a time, which bounds memory; by default
            twice the number that the nodes have room for, so that an autoscaler starts more nodes. None: a
            task reserves one CPU, and a single part is processed here, which is faster than a worker's start.

    Raises:
        ScalingNoteError: raised by `work`, or PartsFailedError after all results (:mod:`.parts`).
    """
    if _in_process or (resources is None and len(parts) <= 1):
        yield from map_here(work, parts)
        return
    options = {"num_cpus": 1, **_on_cpu_nodes()} if resources is None else actor_options(resources)
    task: Any = ray.remote(max_retries=0, **options)(_apply)
    shared, queue = ray.put(work), PartQueue(parts)
    running: dict[Any, int] = {}
    while queue.left or running:
        if queue.left:  # else the number of workers is not needed, which takes requests to the cluster
            most = MAX_TASKS_AT_ONCE if resources is None else resources.workers or 2 * workers(resources)
            for _ in range(min(most - len(running), len(queue.left))):
                number = queue.left.popleft()
                running[task.remote(shared, parts[number])] = number
        (reference,), _ = ray.wait([*running], fetch_local=False)
        number = running.pop(reference)
        try:
            result = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ScalingNoteError):
                raise cause from None
            queue.fail(number, f"{error}", transient=isinstance(cause, OSError), cause=cause)
        except ray.exceptions.RayError:
            queue.lose(number, node_is_there=False)  # Ray does not report the node of a task
        else:
            yield result
    queue.check()


def _apply(work: Callable[[T], R], part: T) -> R:
    return work(part)


def map_loaded(
    work: PartStage | Callable[[Any], Any], parts: Sequence[Any], resources: Resources, *, readers: int = 0
) -> Iterator[Any]:
    """Process parts in actors that load a stage once, and yield the results in the order of completion.

    The pool of actors shrinks and grows with the cluster, up to `workers(resources)` actors.

    Args:
        work: the stage, or a function of a part.
        parts: of work.
        resources: of an actor.
        readers: number of tasks of one CPU that read ahead of the actors, and the same number that write
            after them; 0: the actors read and write.

    Raises:
        ScalingNoteError: raised by the stage, or PartsFailedError after all results (:mod:`.parts`).
    """
    if _in_process or not parts:
        return map_here(work, parts)
    from scalingnote.core import ray_data  # late: ray.data takes a second to import

    most = min(workers(resources), len(parts))
    # An autoscaler reacts to actors that wait for a node; on other clusters they would wait forever.
    room = most if _nodes_wait_s else sum(_room_per_node(_needs_per_worker(resources)))
    pool = ray_data.ActorPool(
        least=min(_least(resources), most),
        initial=min(room, most),
        most=most,
        options=actor_options(resources),
        readers=min(readers, len(parts)),
        reader_options={"num_cpus": 1, **_on_cpu_nodes()},
    )
    return ray_data.map_on_actors(as_stage(work), parts, pool, backoff_s=BACKOFF_S)
