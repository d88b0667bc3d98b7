import logging
import os
import signal
import socket
import time
from typing import Any

import pytest
import ray

from scalingnote.core import cluster, log, ray_internals, ray_start
from scalingnote.core.errors import ConfigError, ScalingNoteError


@pytest.fixture(autouse=True)
def unconnected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace `ray.init`: return its arguments, join no cluster and create no token."""
    join_arguments: list[tuple[Any, ...]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *arguments, **_: join_arguments.append(arguments))
    monkeypatch.setattr(cluster, "_started", False)
    return join_arguments


def test_an_address_without_a_listener_fails_at_once(
    unconnected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=rf"no Ray cluster answers at {address} .*refused.*ray start"):
        cluster.connect()
    with pytest.raises(ConfigError, match="http://head:8265 is for jobs"):
        cluster.connect("http://head:8265")
    assert unconnected == []


@pytest.mark.parametrize("shape", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_that_answers_is_joined(shape: str, unconnected: list[tuple[Any, ...]]):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = shape.format(head.getsockname()[1])
        cluster.connect(address)
    cluster.connect("auto")
    assert unconnected == [(address,), ("auto",)]


def test_a_failed_start_of_ray_is_an_error_without_traceback(monkeypatch: pytest.MonkeyPatch):
    def init(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        ScalingNoteError, match=r"Ray did not start .* timed out during startup.*run this again"
    ):
        cluster.connect()


def test_connect_waits_for_a_slow_start_of_ray(monkeypatch: pytest.MonkeyPatch):
    """Ray's own limit for its node is 30 s, without a setting; workers have the niceness of this process."""
    services, node_requests = ray._private.services, []

    def get_node(address: str, node: str) -> str:
        node_requests.append(node)
        if len(node_requests) < 3:
            raise RuntimeError("no such node yet")
        return "the node"

    def init(*_: Any, **__: Any) -> None:
        assert services.get_node("gcs", "0a") == "the node"
        assert os.environ["RAY_worker_niceness"] == "0"  # noqa: SIM112  Ray's name for it

    monkeypatch.setattr(ray_internals, "START_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "init", init)
    cluster.connect()
    assert node_requests == ["0a"] * 3
    assert services.get_node is get_node

    monkeypatch.setattr(ray_start, "START_TIMEOUT_S", 0.0)
    node_requests.clear()
    with pytest.raises(ScalingNoteError, match="no such node yet"):
        cluster.connect()
    assert services.get_node is get_node


def test_our_log_is_shown_while_ray_is_silent(monkeypatch: pytest.MonkeyPatch, capfd):
    monkeypatch.setattr(logging.getLogger(log.ROOT), "handlers", [])
    log.configure()

    def init(*_: Any, **__: Any) -> None:
        os.write(2, b"a line of Ray's core\n")
        log.get_logger("cluster").info("waiting for Ray")

    monkeypatch.setattr(ray, "init", init)
    cluster.connect()
    stderr = capfd.readouterr().err
    assert "waiting for Ray" in stderr
    assert "core" not in stderr


@pytest.mark.parametrize(
    "variables", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": "/etc/token"}]
)
def test_a_private_cluster_has_a_token_and_listens_on_loopback(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    observed: dict[str, Any] = {}
    constants = ray._private.ray_constants

    def init(*_: Any, **__: Any) -> None:
        observed["all interfaces"] = constants.ENABLE_RAY_CLUSTER
        observed.update({name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")})

    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray, "init", init)
    before = constants.ENABLE_RAY_CLUSTER
    cluster.connect()
    assert observed.pop("all interfaces") is False
    assert constants.ENABLE_RAY_CLUSTER is before  # a cluster that is joined later needs the real address
    if variables:
        assert observed == variables
    else:
        assert len(observed.pop("RAY_AUTH_TOKEN")) == 64
        assert observed == {}
    for name in ("RAY_AUTH_TOKEN", constants.ENABLE_RAY_CLUSTERS_ENV_VAR):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("address", "nodes", "private"),
    [
        (None, ["127.0.0.1"], True),
        (None, ["192.0.2.7"], False),  # other machines may join it
        ("127.0.0.1:6379", ["127.0.0.1"], False),  # may belong to another user, who cannot read our files
    ],
)
def test_a_local_cluster_on_loopback_is_private(
    address: str | None, nodes: list[str], private: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": node} for node in nodes])
    monkeypatch.setattr(ray_start, "_check_address", lambda _: None)
    cluster.connect(address)
    assert cluster.is_private() is private


def test_an_interrupt_during_the_start_shuts_ray_down(monkeypatch: pytest.MonkeyPatch):
    steps: list[str] = []

    def init(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        steps.append("started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: steps.append("ended"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            cluster.connect()
        assert steps == ["started", "ended"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
