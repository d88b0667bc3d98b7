"""Reservations of Ray, and parts that no node can run, which are found before a deployment."""

from typing import Any

import pytest
from ray.serve import Deployment

from scalingnote.core import GIB
from scalingnote.core.config import load
from scalingnote.core.errors import ConfigError
from scalingnote.index.shard import open_layout, vector_files
from scalingnote.run.service_config import AppArgs, DeploymentConfig, ServeConfig
from scalingnote.serve import app, artifacts, placement
from scalingnote.serve.artifacts import ServedArtifacts
from scalingnote.storage.artifact import Artifact

APART = {"shards_per_searcher": 1}  # two groups, each with two replicas


@pytest.fixture
def args(index: Artifact, query_tower: Artifact) -> dict[str, Any]:
    return {"index": index.uri, "query_tower": query_tower.uri}


def served(args: dict[str, Any], **knobs: Any) -> ServedArtifacts:
    if "shards_per_searcher" in knobs:
        deployments = knobs.get("deployments", {})
        searcher = {"num_replicas": 2, **deployments.get("searcher", {})}
        knobs = {**knobs, "deployments": {**deployments, "searcher": searcher}}
    parts = artifacts.find(AppArgs.model_validate({**args, "serve": knobs}))
    assert isinstance(parts, ServedArtifacts)
    return parts


def searchers(parts: ServedArtifacts) -> list[Deployment]:
    return [each._bound_deployment for each in app._searchers(parts)]


def node(cpus: float, memory: float, labels: dict[str, str] | None = None, **resources: float) -> Any:
    amounts = {"CPU": cpus, "memory": memory * GIB, "node:10.0.0.1": 1.0, "object_store_memory": 1e9}
    return {"Alive": True, "Resources": amounts | resources, "Labels": labels or {}}


def files(index: Artifact, shard: int) -> tuple[int, int]:
    """Return the bytes of a shard: of vectors, and of ids with filter columns."""
    layout, parts = open_layout(index), index.manifest.parts
    vectors = vector_files(shard, family=layout.family, refine=layout.refine)
    others = [f"shard-{shard:05d}/{name}" for name in ("columns.arrow", "ids.npy")]
    return sum(parts[name].bytes for name in vectors), sum(parts[name].bytes for name in others)


def test_options_of_ray_reach_ray_by_their_names(args):
    config = {
        "searcher": {
            "num_cpus": 2,
            "memory": 3 * GIB,
            "resources": {"nvme": 1},
            "label_selector": {"disk": "nvme"},
            "max_replicas_per_node": 1,
        },
        "gateway": {"label_selector": {"zone": "!b"}},
        "encoder": {"num_replicas": 1, "num_gpus": 0.25},
    }
    parts = served(args, **APART, deployments=config)
    for each in searchers(parts):
        assert each.ray_actor_options == {
            "num_cpus": 2,
            "memory": 3 * GIB,
            "resources": {"nvme": 1},
            "label_selector": {"disk": "nvme"},
        }
        assert each._replica_config.max_replicas_per_node == 1
    gateway = app.bind(parts)._bound_deployment
    assert gateway.ray_actor_options == {"num_cpus": 0.1, "label_selector": {"zone": "!b"}}
    encoder = app._arm(parts.arms[0], parts.config).encoder._bound_deployment
    assert encoder.ray_actor_options == {"num_cpus": 0.1, "num_gpus": 0.25}


def test_deployments_can_be_set_on_the_command_line():
    knobs = [
        "model=m",
        "serve.deployments.searcher.max_replicas_per_node=1",
        "serve.deployments.writer.memory=5",
    ]
    config = load(AppArgs, (), knobs).serve
    assert config.deployments == {
        "searcher": DeploymentConfig(max_replicas_per_node=1),
        "writer": DeploymentConfig(memory=5),
    }
    for wrong, reason in {
        "serchers.memory=1": "serchers",
        "searcher.memori=1": r"did you mean 'serve\.deployments\.NAME\.memory'",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            load(AppArgs, (), ["model=m", f"serve.deployments.{wrong}"])


def test_a_searcher_reserves_memory_for_each_version(args, index):
    def memory(shard: int, **knobs: Any) -> int:
        deployments = searchers(served(args, **APART | knobs))
        return int((deployments[shard].ray_actor_options or {}).get("memory", 0))

    for shard in (0, 1):
        vectors, others = files(index, shard)
        assert vectors > 0
        assert others > 0
        assert memory(shard, versions_kept=1) == vectors + others
        assert memory(shard, versions_kept=3) == 3 * vectors + others
        two = {"searcher": {"max_replicas_per_node": 2}}
        assert memory(shard, deployments=two, versions_kept=1) == vectors + -(-others // 2)
        one = {"searcher": {"max_replicas_per_node": 1}}
        assert memory(shard, deployments=one, versions_kept=1) == vectors + others
        assert memory(shard, deployments={"searcher": {"memory": 0}}) == 0
    # The kept vectors of this index can stay in their files, but its lists of fast scan cannot.
    kept_bytes = index.manifest.parts["shard-00000/kept.faiss"].bytes
    vectors, others = files(index, 0)
    assert memory(0, mapped=True, versions_kept=2) == 2 * (vectors - kept_bytes) + kept_bytes + others
    both = sum(map(sum, (files(index, shard) for shard in (0, 1))))
    gateway = app.bind(served(args, versions_kept=1))._bound_deployment
    assert gateway.ray_actor_options["memory"] == both


DEAD = {"Alive": False, "Resources": {"memory": 1e15}}
LABELS = {"label_selector": {"disk": "in(nvme, ssd)"}}
NOT_SPOT = {"label_selector": {"market": "!spot"}}
FITS: list[tuple[dict[str, Any], list[Any], str]] = [
    ({"max_replicas_per_node": 1, "memory": 3 * GIB}, [node(4, 8), node(4, 8)], ""),
    (
        {"memory": 9 * GIB},
        [node(4, 8), node(4, 8), node(0, 2), DEAD],
        "IndexSearcher-000 needs 0.1 CPUs and 9.0 GiB memory per replica, no node has that; the cluster has "
        "2 nodes of 4 CPUs, 8.0 GiB memory; 1 nodes of 0 CPUs, 2.0 GiB memory",
    ),
    (  # each fits separately
        {"memory": 5 * GIB},
        [node(4, 8), node(4, 8)],
        "the replicas reserve 20.0 GiB memory, the cluster has 16.0 GiB memory",
    ),
    ({"resources": {"nvme": 1}}, [node(4, 8)], "IndexSearcher-000 needs 1 nvme, no node has any"),
    ({"resources": {"nvme": 1}}, [node(4, 8, nvme=4.0)], ""),
    (LABELS, [node(4, 8, {"disk": "hdd"})], "labels {'disk': 'in(nvme, ssd)'}, no node has them"),
    (LABELS, [node(4, 8, {"disk": "ssd"})], ""),
    (NOT_SPOT, [node(4, 8, {"market": "spot"})], "no node has them"),
    (NOT_SPOT, [node(4, 8)], ""),
    (
        {"max_replicas_per_node": 1},
        [node(4, 8), node(0, 8)],
        "IndexSearcher-000 has 2 replicas, at most 1 per node, and 1 nodes that fit",
    ),
]


@pytest.mark.parametrize(("searcher", "nodes", "reason"), FITS)
def test_a_part_that_no_node_can_run_is_a_problem(args, searcher, nodes, reason):
    parts = served(args, **APART, deployments={"searcher": searcher})
    problems = placement.problems(app.bind(parts), nodes)
    assert reason in problems[0] if reason else problems == []


def test_the_sum_of_all_reservations_is_checked(args):
    application = app.bind(served(args, **APART, cpus_per_replica=1))
    (reason,) = placement.problems(application, [node(2, 8)])
    assert reason.startswith(
        "the replicas reserve 6 CPUs, the cluster has 2 CPUs: lower serve.cpus_per_replica"
    )
    config = ServeConfig(cpus_per_replica=0.0)
    assert placement.options(config, "gateway") == {
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0.0},
    }
