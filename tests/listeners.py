"""What a client without a token or key can do at each listener of a process and its children.

Each listener is tried at the machine's own address, as another machine of the network would, and at loopback,
as another user of the machine would. A Ray client without a token then tries to connect and to run a task.

    closed     nothing answers at this address
    refused    the answer is that a token or key is missing
    harmless   the answers are numbers only: metrics, statistics
    silent     a connection is taken, but neither HTTP nor gRPC is spoken: what it would do is not known
    OPEN       it does what is requested: tasks, actors, jobs, objects, searches, /admin
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
CLIENT_S = 20.0  # that a Ray client has to connect and run a task: three times what it needs
SETTLES_S = 2.0  # for what starts later
ASKED_AT_ONCE = 8
START_S = 400.0  # that a command has until all its processes listen
Row = dict[str, str]
Ready = Callable[[psutil.Process, str], bool]  # of a command, and what it has printed


def network_address() -> str:
    """An IPv4 address of this machine that others can reach; SystemExit where it has none."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    sys.exit("this machine has no address but loopback: there is nothing to prove")


def examine(process: psutil.Process, network: str, *, client_s: float = CLIENT_S) -> list[Row]:
    """A row for each listener of a process and its children, and one for each way a Ray client may come."""
    found: list[tuple[str, str, int]] = []
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found += [(_title(member), *bound) for bound in _listens_on(member)]
    gcs = next(port for title, _, port in found if title == "gcs_server")
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        client = [pool.submit(client_answer, f"{host}:{gcs}", client_s) for host in (network, "127.0.0.1")]
        outside = [pool.submit(ask, _reached_at(bound, network), port) for _, bound, port in found]
        inside = [pool.submit(ask, "127.0.0.1", port) for _, _, port in found]
    places = [*((title, bound) for title, bound, _ in found), ("a Ray client", f"port {gcs}")]
    given = zip(places, [*outside, client[0]], [*inside, client[1]], strict=True)
    return [
        {
            "process": title,
            "listens on": bound,
            "from the network": str(outer.result()),
            "from loopback": str(inner.result()),
        }
        for (title, bound), outer, inner in given
    ]


@contextmanager
def running(
    words: Sequence[str], folder: str | Path, ready: Ready, *, ray: Mapping[str, str] | None = None
) -> Iterator[psutil.Process]:
    """A command while it works, from when it is `ready`; `ray`: its RAY_* variables, none are inherited."""
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
    """A rank listens for other ranks, beside what every worker of Ray listens to."""
    for member in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RayTrainWorker" in _title(member) and len(_listens_on(member)) > 1:
                return True
    return False


def _title(process: psutil.Process) -> str:
    """What a process is, as Ray names it."""
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
    """Where others reach what is bound to this address; None: nowhere."""
    bound = bound.removeprefix("::ffff:")
    if bound == "::1" or bound.startswith("127."):
        return None
    return network if bound in ("0.0.0.0", "::") else bound


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
