"""The application: a finished run, or an index and a query tower by URI, becomes a gateway and its replicas.

`scalingnote serve` calls :func:`run`; a Serve YAML names ``import_path: serve.app:build`` and gives the
fields of :class:`AppArgs` as its ``args``.
"""

import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from pydantic import Field, model_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig

from scalingnote import cluster, pipeline
from scalingnote.config import Config, load
from scalingnote.encode import exported
from scalingnote.errors import ArtifactError, ConfigError, SearchError
from scalingnote.log import get_logger
from scalingnote.search.config import ServeConfig
from scalingnote.storage.artifact import Artifact, open_artifact
from serve.gateway import Gateway
from serve.index_shard import IndexShard
from serve.query_encoder import QueryEncoder

NAME = "scalingnote"
TOWERS = ("query_encoder", "student", "dual_encoder")
log = get_logger("serve")


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
        given = (self.run_dir is not None, self.index is not None, self.query_tower is not None)
        if given not in {(True, False, False), (False, True, True)}:
            raise ValueError("give either run_dir, or index and query_tower together")
        return self


@dataclass(frozen=True)
class Served:
    """What :class:`AppArgs` name, found and checked."""

    index: Artifact
    query_tower: Artifact
    config: ServeConfig
    address: str | None

    @property
    def shards(self) -> int:
        """Number of shards of the index."""
        return int(self.index.read_json("index.json")["shards"])

    @property
    def cpus(self) -> float:
        """CPU cores that all replicas together reserve."""
        config = self.config
        replicas = config.gateway_replicas + config.encoder_replicas + self.shards * config.shard_replicas
        return replicas * config.cpus_per_replica


def find(args: AppArgs) -> Served:
    """Open the artifacts that `args` name; ConfigError or ArtifactError says what is amiss with them."""
    own = args.serve.model_dump(exclude_unset=True)
    if args.run_dir is not None:
        # Replicas have working directories of their own.
        place = args.run_dir if "://" in args.run_dir else os.path.abspath(args.run_dir)
        run = pipeline.load_run(place)
        index = pipeline.locate(run, "index")
        tower = pipeline.locate(run, "student" if run.distill else "dual_encoder")
        config = run.serve.model_copy(update=own)
        served = Served(index, exported.find(tower, config.query_form, place), config, run.address)
    else:
        assert args.index is not None  # AppArgs saw to it
        assert args.query_tower is not None
        served = Served(open_artifact(args.index, kind="index"), _tower(args.query_tower), args.serve, None)
    dims = (
        served.index.read_json("index.json")["dim"],
        served.query_tower.read_json("query/tower.json")["dim"],
    )
    if dims[0] != dims[1]:
        raise ConfigError(
            f"the index has embeddings of dim {dims[0]}, the query tower of {dims[1]}: not a pair"
        )
    return served


def build(args: AppArgs) -> Application:
    """The Serve application: one gateway, one query encoder, one deployment per shard."""
    return _bind(find(args))


def _bind(served: Served) -> Application:
    config, tower = served.config, served.query_tower
    actor = {"num_cpus": config.cpus_per_replica}
    encoder = QueryEncoder.options(num_replicas=config.encoder_replicas, ray_actor_options=actor)
    gateway = Gateway.options(num_replicas=config.gateway_replicas, ray_actor_options=actor)
    shards = [
        IndexShard.options(
            name=f"IndexShard-{shard:05d}", num_replicas=config.shard_replicas, ray_actor_options=actor
        ).bind(served.index.uri, shard, config.nprobe)
        for shard in range(served.shards)
    ]
    return gateway.bind(
        encoder.bind(tower.uri, tower.manifest.kind, config.query_form, config.query_cache), shards, config
    )


def run(run_dir: str, *, overrides: Sequence[str] = ()) -> int:
    """Serve a run until CTRL-C or SIGTERM, then take down what was started; returns the exit code."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    args = load(AppArgs, (), [f"run_dir={json.dumps(run_dir)}", *overrides])
    served = find(args)
    port = _free_port(served.config.host, served.config.port)
    served = replace(served, config=served.config.model_copy(update={"port": port}))
    cluster.connect(served.address)
    try:
        print(f"{start(served)}  (CTRL-C ends it)", flush=True)
        _wait_for_a_signal()
        log.info("shutting down")
        serve.delete(NAME)  # replicas finish what they are at
    finally:
        ray.shutdown()  # ends a private cluster, leaves one that was joined
    return 0


def start(served: Served) -> str:
    """Start the application on the connected cluster; returns its URL once it answers."""
    have = ray.cluster_resources().get("CPU", 0.0)
    if served.cpus > have:
        raise ConfigError(
            f"the replicas reserve {served.cpus:g} CPUs, the cluster has {have:g}: lower "
            "serve.cpus_per_replica or the numbers of replicas"
        )
    return launch(_bind(served), served.config)


def launch(app: Application, config: ServeConfig) -> str:
    """Run an application behind one HTTP door; returns its URL once it answers."""
    # Three steps, each with its deadline; beyond that a request was stuck before the gateway.
    http = HTTPOptions(host=config.host, port=config.port, request_timeout_s=3 * config.deadline_s + 2)
    serve.start(http_options=http, proxy_location="HeadOnly")
    try:
        serve.run(app, name=NAME, route_prefix="/", logging_config=LoggingConfig(enable_access_log=False))
    except RuntimeError as error:
        raise SearchError(f"Ray Serve could not start the application: {error}") from None
    host = "127.0.0.1" if config.host == "0.0.0.0" else config.host
    return f"http://{host}:{config.port}"


def _wait_for_a_signal() -> None:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, whose own handler aborts the process
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


def _tower(uri: str) -> Artifact:
    for kind in TOWERS:
        try:
            return open_artifact(uri, kind=kind)
        except ArtifactError as error:
            reason = error
    raise ConfigError(f"no query tower at {uri}, it would be one of {TOWERS}: {reason}")


def _free_port(host: str, port: int) -> int:
    """`port` if it can be listened on; 0 picks a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the proxy does
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another with --set serve.port=..."
            ) from None
        return int(probe.getsockname()[1])
