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
    """What Ray was asked to join; it joins nothing, and no token is made."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *given, **_: asked.append(given))
    monkeypatch.setattr(cluster, "_started", False)
    return asked


def test_an_address_that_nobody_listens_at_is_refused_at_once(
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


def test_a_ray_that_does_not_start_is_told_without_a_trace(monkeypatch: pytest.MonkeyPatch):
    def init(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        ScalingNoteError, match=r"Ray did not start .* timed out during startup.*run this again"
    ):
        cluster.connect()


def test_a_ray_that_starts_slowly_is_awaited(monkeypatch: pytest.MonkeyPatch):
    """Ray asks for its node for 30 s, whose length no setting changes; workers run at our own niceness."""
    services, asked = ray._private.services, []

    def get_node(address: str, node: str) -> str:
        asked.append(node)
        if len(asked) < 3:
            raise RuntimeError("no such node yet")
        return "the node"

    def init(*_: Any, **__: Any) -> None:
        assert services.get_node("gcs", "0a") == "the node"
        assert os.environ["RAY_worker_niceness"] == "0"  # noqa: SIM112  Ray's name for it

    monkeypatch.setattr(ray_internals, "START_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(ray, "init", init)
    cluster.connect()
    assert asked == ["0a"] * 3
    assert services.get_node is get_node

    monkeypatch.setattr(ray_start, "START_TIMEOUT_S", 0.0)
    asked.clear()
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
    shown = capfd.readouterr().err
    assert "waiting for Ray" in shown
    assert "core" not in shown


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": "/etc/token"}])
def test_a_private_cluster_has_a_token_and_listens_on_loopback(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    seen: dict[str, Any] = {}
    constants = ray._private.ray_constants

    def init(*_: Any, **__: Any) -> None:
        seen["all interfaces"] = constants.ENABLE_RAY_CLUSTER
        seen.update({name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")})

    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray, "init", init)
    before = constants.ENABLE_RAY_CLUSTER
    cluster.connect()
    assert seen.pop("all interfaces") is False
    assert constants.ENABLE_RAY_CLUSTER is before  # a cluster that is joined later needs the real address
    if given:
        assert seen == given
    else:
        assert len(seen.pop("RAY_AUTH_TOKEN")) == 64
        assert seen == {}
    for name in ("RAY_AUTH_TOKEN", constants.ENABLE_RAY_CLUSTERS_ENV_VAR):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("address", "nodes", "private"),
    [
        (None, ["127.0.0.1"], True),
        (None, ["192.0.2.7"], False),  # its user has others join it
        ("127.0.0.1:6379", ["127.0.0.1"], False),  # maybe another user's, who cannot read our files
    ],
)
def test_a_cluster_is_private_if_it_was_started_here_for_this_machine(
    address: str | None, nodes: list[str], private: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": node} for node in nodes])
    monkeypatch.setattr(ray_start, "_check_address", lambda _: None)
    cluster.connect(address)
    assert cluster.is_private() is private


def test_an_interrupt_while_ray_starts_ends_what_was_started(monkeypatch: pytest.MonkeyPatch):
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
