"""What one listener does for a client without token or key: the questions of `benchmarks.exposure`."""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any, Literal

import grpc

Answer = Literal["closed", "refused", "harmless", "silent", "OPEN"]
ANSWER_S = 3.0  # that a listener has for an answer
# One method at least of each gRPC service of a cluster and Ray Serve; an empty request changes nothing.
METHODS = (
    "ray.rpc.CoreWorkerService/PushTask",
    "ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Pull",
    "ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "ray.rpc.ActorInfoGcsService/GetAllActorInfo",
    "ray.rpc.InternalKVGcsService/InternalKVKeys",
    "ray.rpc.ReporterService/GetTraceback",
    "ray.serve.ASGIService/HandleRequest",
    "scalingnote.v1.ScalingNote/Search",
)
PATHS = (
    ("GET", "/metrics"),
    ("GET", "/stats"),
    ("POST", "/get_or_create_runtime_env"),
    ("POST", "/api/jobs/"),
    ("GET", "/api/jobs/"),
    ("GET", "/logs"),
    ("POST", "/search"),
    ("POST", "/documents"),
    ("GET", "/admin/index"),
    ("POST", "/admin/index/roll_back"),
)
NUMBERS = (b"# HELP", b"# TYPE", b"Statistics Report for HAProxy")
CLIENT = """
import sys, ray
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(ray.get(ray.remote(lambda: "ran").remote()))
"""


def ask(host: str | None, port: int) -> Answer:
    """What a listener does for a client without token or key; without a host none reaches it."""
    if host is None:
        return "closed"
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError:
        return "closed"
    return _ask_http(host, port) or _ask_grpc(host, port)


def _ask_http(host: str, port: int) -> Answer | None:
    """None: it does not speak HTTP/1."""
    try:
        answers = [request(host, port, method, path) for method, path in PATHS]
    except (http.client.HTTPException, OSError):
        return None
    others = [status for status, body in answers if not any(number in body for number in NUMBERS)]
    done = [status for status in others if status not in (401, 403, 404, 405)]
    if len(others) == len(answers):
        return "OPEN" if done else "refused"
    # HAProxy's port of numbers says 500 of every other path.
    return "OPEN" if any(status < 500 for status in done) else "harmless"


def request(host: str, port: int, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        body = json.dumps({"query": "a"}) if method == "POST" else None
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(100_000)
    finally:
        connection.close()


def _ask_grpc(host: str, port: int) -> Answer:
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=ANSWER_S)
        except grpc.FutureTimeoutError:
            return "silent"
        codes = {_call(channel, method) for method in METHODS}
    absent = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}
    return "refused" if codes <= absent and grpc.StatusCode.UNAUTHENTICATED in codes else "OPEN"


def _call(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    metadata = [("application", "scalingnote")]  # for Ray Serve's proxy; it is no credential
    try:
        channel.unary_unary(f"/{method}")(b"", timeout=ANSWER_S, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def client_answer(address: str, client_s: float) -> Answer:
    """Whether a Ray client without a token can run a task on the cluster at `address`.

    A client that is refused may try again for minutes: after `client_s` it has been.
    """
    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return "closed"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory() as home:  # Ray would find a user's own token there
        words = [sys.executable, "-c", CLIENT, address]
        given: dict[str, Any] = {"env": environment | {"HOME": home}, "cwd": home, "timeout": client_s}
        try:
            ended = subprocess.run(words, capture_output=True, text=True, check=False, **given)
        except subprocess.TimeoutExpired:
            return "refused"
    return "OPEN" if ended.stdout.strip().endswith("ran") else "refused"
