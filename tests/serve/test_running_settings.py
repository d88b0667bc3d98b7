"""Settings that change while replicas run, and numbers of replicas that change with the load."""

from typing import Any

import numpy as np
import pytest
import yaml
from gateway_here import Client, service
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema
from test_app import AUTO, ROOT, deployed

from scalingnote.core.errors import ConfigError
from scalingnote.encode.query_encoder import QueryCache
from scalingnote.run.service_config import AppArgs, ServeConfig
from scalingnote.serve import api, app, artifacts, placement
from scalingnote.serve.access import Admission
from scalingnote.serve.running_settings import RUNNING_SETTINGS, RunningSettings

GIVEN = ServeConfig(deadline_s=9, limits={"max_k": 7, "rate": 5.0}, canary=0.5)


def test_only_settings_in_the_user_config_change():
    running = RunningSettings(GIVEN, "gateway")
    now = running.take({"limits": {"rate": 6}, "deadline_s": 1})
    assert (now.limits.max_k, now.limits.rate, now.deadline_s, now.canary) == (7, 6, 1, 0.5)
    assert running.take({}) == GIVEN


@pytest.mark.parametrize(
    ("part", "user_config", "message"),
    [
        ("gateway", {"port": 1}, "port cannot change while it runs, only limits, deadline_s.*args"),
        ("encoder", {"deadline_s": 1}, "deadline_s cannot change while it runs, only query_cache"),
        ("gateway", {"limits": {"rates": 1}}, "user_config of the gateway: .*rates.*rate"),
        ("gateway", {"deadline_s": 0}, "user_config of the gateway: .*deadline_s"),
        ("gateway", {"limits": 3}, "user_config of the gateway: .*limits"),
    ],
)
def test_invalid_settings_do_not_change_a_running_replica(part, user_config, message):
    with pytest.raises(ConfigError, match=message):
        RunningSettings(GIVEN, part).take(user_config)
    running = RunningSettings(GIVEN, part)
    before = running.take({"query_cache": 3})
    assert running.take(user_config) == before
    assert running.refused
    assert running.take({}) == GIVEN
    assert not running.refused


def test_a_gateway_applies_the_latest_settings(index, query_tower):
    gateway = service(index, query_tower, GIVEN)
    admission = Admission(GIVEN.limits)
    client = Client(api.build(gateway, GIVEN, admission=admission))
    assert client.search(query="bakoli", k=5).status_code == 200
    now = RunningSettings(GIVEN, "gateway").take({"limits": {"max_k": 2, "max_body_bytes": 1024}})
    admission.limits = now.limits
    gateway.take_settings(now, refused="")
    assert client.search(query="bakoli", k=5).status_code == 422
    assert client.search(query="b" * 2000).status_code == 413
    assert client("GET", "/info").json()["max_k"] == 2
    assert client("GET", "/healthz").json()["status"] == "ok"
    gateway.take_settings(now, refused="a reason")
    assert client("GET", "/healthz").json() | {"shards": 0} == {
        "status": "degraded",
        "encoder_answers": True,
        "shards": 0,
        "shards_answered": 2,
        "silent": ["user_config"],
    }
    client.close()


def test_a_smaller_cache_keeps_the_latest_queries():
    encoded_queries: list[str] = []

    def encode(queries: Any) -> np.ndarray:
        encoded_queries.extend(queries)
        return np.zeros((len(queries), 1), np.float32)

    cache = QueryCache(encode, 3)
    cache.encode(["a", "b", "c"])
    cache.resize(2)
    cache.encode(["b", "c"])
    assert encoded_queries == ["a", "b", "c"]
    cache.encode(["a"])
    assert encoded_queries[3:] == ["a"]


def files() -> list[Any]:
    contents = [
        yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs" / "serve").glob("*.yaml"))
    ]
    return [ServeDeploySchema.model_validate(each) for each in contents]


@pytest.mark.parametrize("schema", files(), ids=lambda schema: schema.applications[0].args["run_dir"])
def test_a_new_user_config_does_not_restart_replicas(schema):
    (application,) = schema.applications
    config = AppArgs.model_validate(application.args).serve
    version = get_app_code_version(application)
    for each in application.deployments:
        part = "gateway" if each.name == "Gateway" else "encoder"
        RunningSettings(config, part).take(each.user_config)
        # Serve passes the user_config to running replicas; any other change is a new version of their code.
        assert {*each.user_config} <= {*RUNNING_SETTINGS[part]}
        each.user_config = dict.fromkeys(RUNNING_SETTINGS[part])
    assert get_app_code_version(application) == version
    application.args["serve"]["deadline_s"] = 3.5
    assert get_app_code_version(application) != version


# --- numbers of replicas -----------------------------------------------------------------------------------


def test_serve_gets_the_options_of_autoscaling(index, query_tower):
    knobs = {
        "gateway": {"autoscaling_config": AUTO},
        "encoder": {"autoscaling_config": AUTO | {"upscale_delay_s": 5}},
        "searcher": {"num_replicas": 2, "max_surge_percent": 50},
    }
    args = {"index": index.uri, "query_tower": query_tower.uri, "serve": {"deployments": knobs}}
    served = artifacts.find(AppArgs.model_validate(args))
    application = app.bind(served)
    gateway = deployed(application)._deployment_config
    assert gateway.autoscaling_config.model_dump(include={*AUTO}) == AUTO
    encoder = deployed(app._arm(served.arms[0], served.config).encoder)._deployment_config
    assert encoder.autoscaling_config.upscale_delay_s == 5
    (searcher,) = app._searchers(served)
    assert deployed(searcher)._deployment_config.max_surge_percent == 50
    assert deployed(searcher).num_replicas == 2
    # The smallest number of replicas must fit; more replicas may wait for a node.
    nodes = [{"Alive": True, "Resources": {"CPU": 1.0, "memory": 1e12}, "Labels": {}}]
    assert placement.problems(application, nodes) == []
    nodes[0]["Resources"]["CPU"] = 0.5  # of 2 gateways, 2 encoders, 2 searchers
    assert "the replicas reserve 0.6 CPUs" in placement.problems(application, nodes)[0]


def test_autoscaled_gateways_do_not_hold_the_index(index, query_tower):
    args = {"index": index.uri, "query_tower": query_tower.uri}
    for gateway, searches in (({}, True), ({"autoscaling_config": AUTO | {"min_replicas": 1}}, False)):
        served = artifacts.find(
            AppArgs.model_validate({**args, "serve": {"deployments": {"gateway": gateway}}})
        )
        assert served.gateway_searches == searches
