"""Resources of a stage: what Ray is asked for, and what the cluster can never provide."""

import os
import time
from typing import Any

import ray

from scalingnote.config import Resources
from scalingnote.errors import ConfigError
from scalingnote.log import get_logger

NODE_POLL_INTERVAL_S = 2.0  # between looks for nodes that were asked for
log = get_logger("cluster")


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
    if not (lack := _missing_resources(resources, task_cpus=task_cpus, knob=knob)):
        return
    if seconds := _nodes_wait():
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
    each = _needs_per_worker(resources) if workers else {}
    asked = " and ".join(f"{need:g} {key}" for key, need in each.items())
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    # A worker runs on one node: remainders on two nodes do not add up to a third worker.
    workers_per_node = [
        min(int(node.get(key, 0.0) / need + 1e-9) for key, need in each.items()) for node in nodes if each
    ]
    if each and not any(workers_per_node):
        knobs = " or ".join(f"{knob}.{key.lower()}s_per_worker" for key in each)
        return f"{knob} asks for {asked} a worker, no node has that: lower {knobs}, or add a node that has"
    for key, spare in (("CPU", task_cpus), ("GPU", 0)):
        if (need := workers * each.get(key, 0.0) + spare) > have.get(key, 0.0):
            return (
                f"{knob} asks for {need:g} {key}, the cluster has {have.get(key, 0.0):g}: "
                f"lower {knob}.workers or add nodes"
            )
    if each and sum(workers_per_node) < workers:
        return (
            f"{knob} asks for {workers} workers of {asked}, the nodes have room for {sum(workers_per_node)}: "
            f"lower {knob}.workers or add nodes"
        )
    return ""


def _request_nodes(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources  # late: few clusters grow

    request_resources(bundles=bundles)


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
