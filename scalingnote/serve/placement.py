"""The resources that Ray reserves for replicas, and a check of them against the nodes before a deployment.

Ray schedules by reservations and does not enforce them. If a reservation is too small, a node gets too many
replicas. If no node has the resources, the replica waits forever without a message. So the memory of a
searcher is computed from the artifact, and :func:`problems` reports parts that can never be scheduled, and
the sizes of the nodes.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve import Application

from scalingnote.core import GIB, ray_internals
from scalingnote.index import families, shard
from scalingnote.run.service_config import ServeConfig, ServicePart
from scalingnote.storage import filesystem as fs
from scalingnote.storage.artifact import Artifact

LIVE_COPIES = 2  # of a live index: the current version, and the one that a compaction changes to
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # Ray's option -> resource of a node
Node = Mapping[str, Any]  # of ray.nodes()
Needs = dict[str, float]  # resource of a node -> amount


def options(config: ServeConfig, part: ServicePart, *, memory: int = 0) -> dict[str, Any]:
    """Return the options of a deployment, from the settings of its part.

    `memory`, in bytes, applies if the settings have none.
    """
    settings = config.deployment(part)
    actor: dict[str, Any] = {
        "num_gpus": settings.num_gpus,
        "memory": memory if settings.memory is None else settings.memory,
        "resources": dict(settings.resources),
        "label_selector": dict(settings.label_selector),
    }
    cpus = config.cpus_per_replica if settings.num_cpus is None else settings.num_cpus
    values: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": cpus} | {name: value for name, value in actor.items() if value},
        "max_surge_percent": settings.max_surge_percent,
        "max_replicas_per_node": settings.max_replicas_per_node,
    }
    if settings.autoscaling_config is None:
        values["num_replicas"] = config.replicas(part)
    else:
        values["autoscaling_config"] = settings.autoscaling_config.model_dump()
    return {name: value for name, value in values.items() if value}


def index_memory(index: Artifact, shards: Sequence[int], config: ServeConfig, *, part: ServicePart) -> int:
    """Compute the bytes to reserve for a process that searches some shards.

    Files that are read to memory count once for each version that is kept open. Mapped files are in the page
    cache: old versions release it, and the replicas on a node share it. Ray counts each replica separately.
    So a replica reserves its share of the mapped files if `max_replicas_per_node` allows several on a node,
    and all of them otherwise, because then it may be the only one on its node. The memory of the process
    itself is left out, as for all other parts: Ray reserves memory on each node for objects, and serving
    hardly uses it.

    Args:
        index: artifact.
        shards: numbers of the shards.
        config: of the service.
        part: that searches; the placement of its replicas determines how much they share.
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
    pinned_versions = sum(arm.index is not None for arm in config.split.arms)  # assumed to have the same size
    live = config.live
    copies = config.versions_kept if live is None else live.keep_versions if live.delta else LIVE_COPIES
    return private * (copies + pinned_versions) + -(-mapped * (1 + pinned_versions) // sharing)


def _is_mapped(name: str, family: str, *, is_local: bool, config: ServeConfig) -> bool:
    """Return whether a searcher maps a file of a shard, and does not read it to memory."""
    if name.endswith("lists.faiss"):
        return config.mapped and family not in families.UNMAPPABLE
    if name.endswith("kept.faiss"):
        return config.mapped
    return is_local or name.endswith("ids.npy")  # a remote ids.npy is copied to a local file


# --- checks ------------------------------------------------------------------------------------------------


def problems(application: Application, nodes: Sequence[Node]) -> list[str]:
    """List the reasons why parts of an application cannot be scheduled on these nodes.

    Each part is checked separately. If all fit, the sum of their reservations is checked.

    Args:
        application: bound.
        nodes: of :func:`ray.nodes`.
    """
    alive = [node for node in nodes if node["Alive"]]
    reasons, together = [], Counter[str]()
    for deployment in ray_internals.serve_deployments(application):
        actor, replicas = deployment.ray_actor_options or {}, _replicas_at_least(deployment)
        needs = {RESOURCES[name]: float(actor[name]) for name in RESOURCES if actor.get(name)}
        needs |= actor.get("resources", {})
        together += Counter({name: amount * replicas for name, amount in needs.items()})
        per_node = deployment._replica_config.max_replicas_per_node
        reason = _misfit(needs, actor.get("label_selector", {}), replicas, per_node, alive)
        if reason:
            reasons.append(f"{deployment.name} {reason}; {_node_sizes(alive)}")
    if reasons:
        return reasons
    return _too_much(together, alive)


def _replicas_at_least(deployment: Any) -> int:
    """Return the smallest number of replicas of a deployment: more may wait for a node added under load."""
    autoscaling = deployment._deployment_config.autoscaling_config
    return int(deployment.num_replicas if autoscaling is None else autoscaling.min_replicas)


def _misfit(
    needs: Needs, selector: Mapping[str, str], replicas: int, per_node: int | None, nodes: Sequence[Node]
) -> str:
    """Return why the replicas of a deployment do not fit on the nodes, without others; empty if they do."""
    for name in needs:
        if not any(node["Resources"].get(name) for node in nodes):
            return f"needs {_amount(name, needs[name])}, no node has any"
    labelled = [node for node in nodes if _has_labels(node.get("Labels", {}), selector)]
    if not labelled:
        return f"needs a node with the labels {dict(selector)}, no node has them"
    fitting = [node for node in labelled if _fits(needs, node)]
    if not fitting:
        amounts = " and ".join(_amount(*need) for need in needs.items())
        return f"needs {amounts} per replica, no node{' with its labels' if selector else ''} has that"
    if per_node is not None and per_node * len(fitting) < replicas:
        return f"has {replicas} replicas, at most {per_node} per node, and {len(fitting)} nodes that fit"
    return ""


def _fits(needs: Needs, node: Node) -> bool:
    return all(node["Resources"].get(name, 0.0) >= amount for name, amount in needs.items())


def _too_much(together: Mapping[str, float], nodes: Sequence[Node]) -> list[str]:
    """List the resources that all replicas together reserve beyond those of the nodes."""
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
    """Return whether a node has the labels: each a value or Ray's ``in(a, b)``; ``!`` negates it."""
    for name, pattern in selector.items():
        values = re.split(r",\s*", re.sub(r"^!?(in\()?|\)$", "", pattern))
        if (labels.get(name) in values) == pattern.startswith("!"):
            return False
    return True


def _node_sizes(nodes: Sequence[Node]) -> str:
    """Return the nodes by size, for example ``2 nodes of 8 CPUs, 61.4 GiB memory``."""
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
