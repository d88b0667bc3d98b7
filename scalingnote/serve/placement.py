"""What Ray reserves for replicas and where they run, checked against the nodes before a deployment.

Ray schedules by reservations and enforces none of them: a reservation that is too small crowds a node, one
that no node has leaves the replica waiting for ever, with no word of why. So the memory of what searches is
that of the artifact, and :func:`problems` says what can never be scheduled, and how large the nodes are.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve import Application

from scalingnote.core import GIB, ray_internals
from scalingnote.index import shard
from scalingnote.run.service_config import ServeConfig, ServicePart
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact

UNMAPPABLE = ("ivfpq_fast_scan", "ivf_rabitq")  # families whose lists are read to memory in any case
LIVE_COPIES = 2  # of a live index: what is written, and the version that a compaction changes to
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # Ray's options by the name at nodes
Node = Mapping[str, Any]  # of ray.nodes()
Needs = dict[str, float]  # amounts by the name at nodes


def options(config: ServeConfig, part: ServicePart, *, memory: int = 0) -> dict[str, Any]:
    """Options of a deployment by the settings of the part; `memory` in bytes applies if these have none."""
    placed = config.deployment(part)
    actor: dict[str, Any] = {
        "num_gpus": placed.num_gpus,
        "memory": memory if placed.memory is None else placed.memory,
        "resources": dict(placed.resources),
        "label_selector": dict(placed.label_selector),
    }
    cpus = config.cpus_per_replica if placed.num_cpus is None else placed.num_cpus
    found: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": cpus} | {name: value for name, value in actor.items() if value},
        "max_surge_percent": placed.max_surge_percent,
        "max_replicas_per_node": placed.max_replicas_per_node,
    }
    if placed.autoscaling_config is None:
        found["num_replicas"] = config.replicas(part)
    else:
        found["autoscaling_config"] = placed.autoscaling_config.model_dump()
    return {name: value for name, value in found.items() if value}


def index_memory(index: Artifact, shards: Sequence[int], config: ServeConfig, *, part: ServicePart) -> int:
    """Bytes to reserve for a process that searches some shards.

    What is read to memory counts once for each version that is kept open. What is mapped lies in the page
    cache: old versions give it back, and the replicas on a node share it. Ray counts each replica by itself,
    so each is given its share where `max_replicas_per_node` lets several of them share a node, and all of it
    otherwise: then every replica may be alone on its node. A process's own memory is left out, as for all
    other parts: Ray sets a part of each node apart for objects, which serving hardly uses.

    Args:
        index: artifact.
        shards: numbers of the shards.
        config: of the service.
        part: that searches; how its replicas are placed decides on what they share.
    """
    layout = shard.open_layout(index)
    is_local = fs.is_local(index.uri)
    private = mapped = 0
    for number in shards:
        vectors = shard.vector_files(number, family=layout.family, refine=layout.refine)
        terms = [*shard.term_files(number).values()] if layout.sparse else []
        for name in (*vectors, *terms, shard.columns_file(number), shard.ids_file(number)):
            if name not in index.manifest.parts:
                continue  # an index of an earlier release
            size = index.manifest.parts[name].bytes
            if _is_mapped(name, layout.family, is_local=is_local, config=config):
                mapped += size
            else:
                private += size
    sharing = min(config.replicas(part), config.deployment(part).max_replicas_per_node or 1)
    pinned = sum(arm.index is not None for arm in config.split.arms)  # taken to be of the same size
    live = config.live
    copies = config.versions_kept if live is None else live.keep_versions if live.delta else LIVE_COPIES
    return private * (copies + pinned) + -(-mapped * (1 + pinned) // sharing)


def _is_mapped(name: str, family: str, *, is_local: bool, config: ServeConfig) -> bool:
    """Whether a searcher leaves a file of a shard where it is."""
    if name.endswith("lists.faiss"):
        return config.mapped and family not in UNMAPPABLE
    if name.endswith("kept.faiss"):
        return config.mapped
    return is_local or name.endswith("ids.npy")  # which is copied to a file here


# --- checks ------------------------------------------------------------------------------------------------


def problems(application: Application, nodes: Sequence[Node]) -> list[str]:
    """Why parts of an application can not be scheduled on these nodes; none where they can, each by itself.

    Args:
        application: bound.
        nodes: of :func:`ray.nodes`.
    """
    alive = [node for node in nodes if node["Alive"]]
    found, together = [], Counter[str]()
    for deployment in ray_internals.serve_deployments(application):
        actor, replicas = deployment.ray_actor_options or {}, _replicas_at_least(deployment)
        needs = {RESOURCES[name]: float(actor[name]) for name in RESOURCES if actor.get(name)}
        needs |= actor.get("resources", {})
        together += Counter({name: amount * replicas for name, amount in needs.items()})
        per_node = deployment._replica_config.max_replicas_per_node
        reason = _misfit(needs, actor.get("label_selector", {}), replicas, per_node, alive)
        if reason:
            found.append(f"{deployment.name} {reason}; {_node_sizes(alive)}")
    if found:
        return found
    return _too_much(together, alive)


def _replicas_at_least(deployment: Any) -> int:
    """Replicas without which a deployment does not run: more may wait for a node that is added under load."""
    autoscaling = deployment._deployment_config.autoscaling_config
    return int(deployment.num_replicas if autoscaling is None else autoscaling.min_replicas)


def _misfit(
    needs: Needs, selector: Mapping[str, str], replicas: int, per_node: int | None, nodes: Sequence[Node]
) -> str:
    """Why the replicas of a deployment do not find nodes; empty if they do, as far as they are alone."""
    for name in needs:
        if not any(node["Resources"].get(name) for node in nodes):
            return f"asks for {_amount(name, needs[name])}, no node has any"
    labelled = [node for node in nodes if _has_labels(node.get("Labels", {}), selector)]
    if not labelled:
        return f"asks for a node with the labels {dict(selector)}, no node has them"
    fitting = [node for node in labelled if _fits(needs, node)]
    if not fitting:
        needed = " and ".join(_amount(*need) for need in needs.items())
        return f"asks for {needed} a replica, no node{' with its labels' if selector else ''} has that"
    if per_node is not None and per_node * len(fitting) < replicas:
        return f"has {replicas} replicas, at most {per_node} a node, and {len(fitting)} nodes that fit"
    return ""


def _fits(needs: Needs, node: Node) -> bool:
    return all(node["Resources"].get(name, 0.0) >= amount for name, amount in needs.items())


def _too_much(together: Mapping[str, float], nodes: Sequence[Node]) -> list[str]:
    """What all replicas together reserve beyond what the nodes have."""
    have = Counter[str]()
    for node in nodes:
        have.update({name: node["Resources"].get(name, 0.0) for name in together})
    return [
        f"the replicas reserve {_amount(name, amount)}, the cluster has {_amount(name, have[name])}: lower "
        f"serve.cpus_per_replica or serve.deployments, or add nodes; "
        f"{_node_sizes(nodes)}"
        for name, amount in together.items()
        if amount > have[name] + 1e-6
    ]


def _has_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node has the labels: each a value, or Ray's ``in(a, b)``, with ``!`` the opposite."""
    for name, wanted in selector.items():
        values = re.split(r",\s*", re.sub(r"^!?(in\()?|\)$", "", wanted))
        if (labels.get(name) in values) == wanted.startswith("!"):
            return False
    return True


def _node_sizes(nodes: Sequence[Node]) -> str:
    """Nodes by size, as in ``2 nodes of 8 CPUs, 61.4 GiB memory``."""
    sizes = Counter(
        ", ".join(
            _amount(name, amount)
            for name, amount in sorted(node["Resources"].items())
            if name != "object_store_memory" and not name.startswith("node:")
        )
        for node in nodes
    )
    return "the cluster has " + "; ".join(f"{count} nodes of {size}" for size, count in sizes.items())


def _amount(name: str, amount: float) -> str:
    if name == "memory":
        return f"{amount / GIB:.1f} GiB memory"
    return f"{amount:g} {name}{'s' if name in ('CPU', 'GPU') else ''}"
