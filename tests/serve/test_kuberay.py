"""The manifests for Kubernetes, checked by their structure without a cluster."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kuberay_schemas
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import scalingnote
from scalingnote.cli import main as cli
from scalingnote.core.config import Resources, load
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import PROXY_TIMEOUTS

ROOT = Path(scalingnote.__file__).parents[1]
FOLDER = ROOT / "configs" / "kuberay"
PATHS = sorted(FOLDER.glob("*.yaml"))
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in PATHS}
RAY = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
INSIDE = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}

every_manifest = pytest.mark.parametrize("name", MANIFESTS)
every_job = pytest.mark.parametrize(
    "name", [name for name, each in MANIFESTS.items() if each["kind"] == "RayJob"]
)


def cluster_of(name: str) -> dict[str, Any]:
    spec = MANIFESTS[name]["spec"]
    return spec[INSIDE[MANIFESTS[name]["kind"]]] if MANIFESTS[name]["kind"] in INSIDE else spec


def pods(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the Pod of the head and of each group, with its only container."""
    cluster = cluster_of(name)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        yield pod, container


@every_manifest
def test_every_field_is_in_the_schema_of_kuberay(name):
    manifest = MANIFESTS[name]
    assert manifest["apiVersion"] == "ray.io/v1"
    assert re.fullmatch(r"[a-z0-9-]{1,40}", manifest["metadata"]["name"])
    assert list(kuberay_schemas.faults(manifest)) == []
    for group in cluster_of(name)["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


@every_manifest
def test_pods_meet_the_requirements_of_ray(name):
    cluster = cluster_of(name)
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert cluster["authOptions"] == {"mode": "token"}
    for pod, container in pods(name):
        # Ray's scheduler uses the limits; with a lower request, the machine may not have these resources.
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert all(isinstance(container["resources"]["limits"][key], str) for key in ("cpu", "memory"))
        assert pod["securityContext"]["runAsNonRoot"]
        gpus = "nvidia.com/gpu" in container["resources"]["limits"]
        assert gpus == ("tolerations" in pod)
        assert "nodeSelector" in pod or not gpus
        assert container["image"].endswith("-gpu") or not gpus
        # Files in /tmp are on a separate, reserved disk.
        assert {"name": "disk", "mountPath": "/tmp"} in container["volumeMounts"]
        assert {"name": "TMPDIR", "value": "/tmp"} in container["env"]
        assert "ephemeral-storage" in container["resources"]["limits"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}


@every_manifest
def test_images_and_clusters_have_the_locked_versions(name):
    assert cluster_of(name)["rayVersion"] == RAY
    for _, container in pods(name):
        tag = f"{scalingnote.__version__}-ray{RAY}"
        assert re.fullmatch(rf"your-registry/scalingnote:{re.escape(tag)}-(cpu|gpu)", container["image"])


def test_the_image_has_the_locked_ray_and_the_sources():
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG RAY=(.*)$", text, re.MULTILINE)[1] == RAY
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert all(stage.startswith("rayproject/ray:${RAY}-py311-cpu") for stage in stages)
    assert re.findall(r"^USER (.*)$", stages[-1], re.MULTILINE) == ["1000"]
    included = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert included == {
        "pyproject.toml",
        "constraints*.txt",
        "README.md",
        "LICENSE",
        "scalingnote",
        "serve",
        "jobs",
        "configs",
    }
    assert all(list(ROOT.glob(name)) for name in included)


@every_job
def test_a_job_ends_with_its_cluster_and_is_retried(name):
    spec = MANIFESTS[name]["spec"]
    assert spec["shutdownAfterJobFinishes"]
    assert spec["backoffLimit"] == 3  # of clusters; stages resume
    assert spec["submitterConfig"]["backoffLimit"] == 0  # of submissions to one cluster


@every_job
def test_a_driver_has_a_separate_on_demand_node(name):
    assert json.loads(MANIFESTS[name]["spec"]["entrypointResources"]) == {"driver": 1}
    (driver,) = (group for group in cluster_of(name)["workerGroupSpecs"] if group["groupName"] == "driver")
    assert json.loads(json.loads(driver["rayStartParams"]["resources"])) == {"driver": 1}
    # The driver uses its only CPU, so no task of a stage runs on the same node.
    assert driver["rayStartParams"]["num-cpus"] == str(MANIFESTS[name]["spec"]["entrypointNumCpus"])
    assert driver["replicas"] == 1
    assert "nodeSelector" in driver["template"]["spec"]


@every_job
def test_the_job_of_an_entrypoint_fits_into_its_cluster(name):
    python, script, *arguments = shlex.split(MANIFESTS[name]["spec"]["entrypoint"])
    stage = Path(script).stem
    assert python == "python"
    assert in_image(script).is_file()
    options = cli._parser().parse_args(["run", *arguments])
    config = load(RunConfig, [in_image(path) for path in options.config], options.overrides)
    assert "://" in config.run_dir
    assert config.address is None
    if stage == "run":  # nodes are added when a stage needs them
        assert cluster_of(name)["enableInTreeAutoscaling"]
        assert config.nodes_wait_s >= 600
        return
    resources: Resources = getattr(config, stage).resources
    cpus = gpus = workers = 0.0
    for group, (_, container) in zip(cluster_of(name)["workerGroupSpecs"], list(pods(name))[1:], strict=True):
        if group["groupName"] == "driver":
            continue
        limits = container["resources"]["limits"]
        have = {key: float(limits[key]) for key in ("cpu", "nvidia.com/gpu") if key in limits}
        cpus += group["replicas"] * have["cpu"]
        gpus += group["replicas"] * have.get("nvidia.com/gpu", 0)
        if resources.gpus_per_worker and "nvidia.com/gpu" in have:
            fit = min(
                have["cpu"] // resources.cpus_per_worker, have["nvidia.com/gpu"] // resources.gpus_per_worker
            )
            workers += group["replicas"] * fit
    assert workers == resources.workers
    assert gpus == resources.workers * resources.gpus_per_worker
    reader_cpus = 2 * getattr(resources, "readers", 0)
    assert cpus >= resources.workers * resources.cpus_per_worker + reader_cpus


def test_the_service_has_the_deployment_file_of_a_cluster():
    spec = MANIFESTS["service"]["spec"]
    deployment_file = (ROOT / "configs" / "serve" / "cluster.yaml").read_text()
    assert spec["serveConfigV2"] == deployment_file[deployment_file.index("proxy_location:") :]
    schema = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    knobs = schema.applications[0].args["serve"]
    fast = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"} | PROXY_TIMEOUTS
    for _, container in pods("service"):
        assert fast.items() <= {each["name"]: each.get("value") for each in container["env"]}.items()
        assert schema.http_options.port in {port["containerPort"] for port in container["ports"]}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {str(Path(knobs["api_keys"]).parent), knobs["access_log"]} <= mounts
    for _, container in list(pods("service"))[1:]:
        assert container["readinessProbe"]["httpGet"] == {
            "path": "/-/healthz",
            "port": schema.http_options.port,
        }


def in_image(path: str) -> Path:
    """Return the source of a file that is copied to /app."""
    return ROOT / Path(path).relative_to("/app")
