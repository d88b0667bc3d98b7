import socket
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from scalingnote.config import load
from scalingnote.errors import ConfigError
from serve import app, launch

ROOT = Path(app.__file__).parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "serve").glob("*.yaml")), ids=lambda p: p.name)
def test_every_deployment_file_is_one_that_serve_accepts(path):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    assert schema.http_options.host == "127.0.0.1"
    for application in schema.applications:
        module, function = application.import_path.split(":")
        assert (module, getattr(app, function)) == ("serve.app", app.build)
        args = app.AppArgs.model_validate(application.args)
        assert schema.http_options.request_timeout_s >= args.serve.deadline_s


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
        load(app.AppArgs, (), overrides)


def test_only_knobs_of_serving_can_be_overridden():
    with pytest.raises(ConfigError, match="unknown key"):
        load(app.AppArgs, (), ["run_dir=runs", "train.epochs=1"])


def test_a_run_that_is_not_there_is_refused_before_ray_starts(tmp_path):
    with pytest.raises(ConfigError, match="scalingnote run CONFIG"):
        launch.run(str(tmp_path))


def test_a_tower_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no query tower"):
        app._tower(str(tmp_path))


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*serve.port"):
            launch._free_port("127.0.0.1", port)
    assert launch._free_port("127.0.0.1", port) == port
    assert launch._free_port("127.0.0.1", 0) > 0
