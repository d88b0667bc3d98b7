"""Access of a client without a token or key to each listener of a process and its children.

The client tries each listener at the machine's own address, like another machine of the network, and at
loopback, like another user of the machine. A Ray client without a token then tries to connect and to run a
task.

    closed     no process listens at this address
    refused    the response is that a token or key is missing
    harmless   the responses are only numbers: metrics, statistics
    silent     it accepts a connection, but has neither HTTP nor gRPC: its function is unknown
    OPEN       it executes the request: tasks, actors, jobs, objects, searches, /admin
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import grpc
import psutil

Answer = Literal["closed", "refused", "harmless", "silent", "OPEN"]
ANSWER_S = 3.0  # timeout of a response
# At least one method of each gRPC service of a cluster and Ray Serve; an empty request has no effect.
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
CLIENT_S = 20.0  # for a Ray client to connect and run a task: three times the usual time
SETTLES_S = 2.0  # for processes that start later
ASKED_AT_ONCE = 8
START_S = 400.0  # until all processes of a command listen
Row = dict[str, str]
Ready = Callable[[psutil.Process, str], bool]  # of a command and its output


def network_address() -> str:
    """Return an IPv4 address of this machine that others can reach; SystemExit if it has none."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    sys.exit("this machine has no address except loopback: run this on a machine with a network")


def examine(process: psutil.Process, network: str, *, client_s: float = CLIENT_S) -> list[Row]:
    """Return a row for each listener of a process and its children, and one for a Ray client."""
    listeners: list[tuple[str, str, int]] = []
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            listeners += [(_title(member), *bound) for bound in _listens_on(member)]
    gcs = next(port for title, _, port in listeners if title == "gcs_server")
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        client = [pool.submit(client_answer, f"{host}:{gcs}", client_s) for host in (network, "127.0.0.1")]
        outside = [pool.submit(ask, _reached_at(bound, network), port) for _, bound, port in listeners]
        inside = [pool.submit(ask, "127.0.0.1", port) for _, _, port in listeners]
    places = [*((title, bound) for title, bound, _ in listeners), ("a Ray client", f"port {gcs}")]
    answers = zip(places, [*outside, client[0]], [*inside, client[1]], strict=True)
    return [
        {
            "process": title,
            "listens on": bound,
            "from the network": str(outer.result()),
            "from loopback": str(inner.result()),
        }
        for (title, bound), outer, inner in answers
    ]


@contextmanager
def running(
    words: Sequence[str], folder: str | Path, ready: Ready, *, ray: Mapping[str, str] | None = None
) -> Iterator[psutil.Process]:
    """Run a command during the block, which starts when it is `ready`; `ray`: all its RAY_* variables."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    log = Path(folder) / "log"
    with log.open("w") as output:
        process = psutil.Popen(words, env=clean | dict(ray or {}), stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not ready(process, log.read_text()):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(words)} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        time.sleep(SETTLES_S)
        yield process
    finally:
        if process.poll() is None:
            family = process.children(recursive=True)
            process.send_signal(signal.SIGINT)
            _, alive = psutil.wait_procs([process, *family], timeout=60)
            for member in alive:
                member.kill()


def trains(process: psutil.Process, _: str) -> bool:
    """Return whether a rank listens for other ranks, in addition to the listener of every worker of Ray."""
    for member in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RayTrainWorker" in _title(member) and len(_listens_on(member)) > 1:
                return True
    return False


def _title(process: psutil.Process) -> str:
    """Return the title of a process, as Ray sets it."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    if words and words[0].startswith("ray::"):
        return words[0].partition("(")[0].strip()
    scripts = [Path(word).stem for word in words if word.endswith(".py")]
    return process.name() if not scripts or not process.name().startswith("python") else scripts[0]


def _listens_on(process: psutil.Process) -> list[tuple[str, int]]:
    connections = process.net_connections(kind="inet")
    return sorted({(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN})


def _reached_at(bound: str, network: str) -> str | None:
    """Return the address at which others reach a listener bound to `bound`; None if they cannot."""
    bound = bound.removeprefix("::ffff:")
    if bound == "::1" or bound.startswith("127."):
        return None
    return network if bound in ("0.0.0.0", "::") else bound


def ask(host: str | None, port: int) -> Answer:
    """Return the answer of a listener to a client without token or key; without a host it is closed."""
    if host is None:
        return "closed"
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError:
        return "closed"
    return _ask_http(host, port) or _ask_grpc(host, port)


def _ask_http(host: str, port: int) -> Answer | None:
    """Try the paths of PATHS; None if the listener has no HTTP/1."""
    try:
        answers = [request(host, port, method, path) for method, path in PATHS]
    except (http.client.HTTPException, OSError):
        return None
    others = [status for status, body in answers if not any(number in body for number in NUMBERS)]
    acted = [status for status in others if status not in (401, 403, 404, 405)]
    if len(others) == len(answers):
        return "OPEN" if acted else "refused"
    # HAProxy's port of statistics responds to every other path with 500.
    return "OPEN" if any(status < 500 for status in acted) else "harmless"


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
    metadata = [("application", "scalingnote")]  # for Ray Serve's proxy; it is not a credential
    try:
        channel.unary_unary(f"/{method}")(b"", timeout=ANSWER_S, metadata=metadata)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def client_answer(address: str, client_s: float) -> Answer:
    """Return whether a Ray client without a token can run a task on the cluster at `address`.

    A refused client may try again for minutes: after `client_s` it counts as refused.
    """
    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except OSError:
        return "closed"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory() as home:  # a separate home, because Ray reads a user's own token there
        words = [sys.executable, "-c", CLIENT, address]
        options: dict[str, Any] = {"env": environment | {"HOME": home}, "cwd": home, "timeout": client_s}
        try:
            process = subprocess.run(words, capture_output=True, text=True, check=False, **options)
        except subprocess.TimeoutExpired:
            return "refused"
    return "OPEN" if process.stdout.strip().endswith("ran") else "refused"
