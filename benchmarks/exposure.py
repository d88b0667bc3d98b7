"""What a client without a token or key can reach while ScalingNote works on a laptop: one row per listener.

    python -m benchmarks.exposure --run runs/quickstart --json docs/results/exposure.json

Starts `scalingnote run`, `scalingnote serve`, and `serve` with API keys on every interface (HTTP and gRPC),
lists what their processes listen on, and asks each listener without a token: from the machine's own address,
as another machine of the network would, and from loopback, as another user of the machine would.

    closed     nothing answers at this address
    refused    it answers that a token or key is missing
    harmless   it tells numbers only: metrics, statistics
    OPEN       it does what is asked: tasks, actors, jobs, objects, searches, /admin

A Ray client without a token then tries to connect and to run a task. A cluster with Ray's authentication off
and on all interfaces is asked in the same way: if its listeners were not found open, the probes would prove
nothing.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import grpc
import psutil

from benchmarks import report

Answer = Literal["closed", "refused", "harmless", "OPEN"]
ANSWER_S = 3.0  # that a listener has for an answer
CLIENT_S = 25.0  # that a Ray client has to connect and run a task: four times what it needs
START_S = 240.0  # that a command has until all its processes listen
KEY = "a-key-of-the-exposure-benchmark"
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
Row = dict[str, str]


def main() -> None:
    """Print a row per listener of each command, and count those that are open."""
    parser = report.arguments(__doc__)
    parser.add_argument("--run", default="runs/quickstart", help="a finished run, to be served")
    options = parser.parse_args()
    network = network_address()
    command = [sys.executable, "-m", "scalingnote.cli"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(KEY)
        serve = [*command, "serve", "--run", options.run]
        reached = ["serve.host=0.0.0.0", f"serve.grpc_port={_free_port()}", f"serve.api_keys={keys}"]
        started: Mapping[str, Sequence[str]] = {
            "run": [*command, "run", "configs/quickstart/python_docs.yaml", *_set(f"run_dir={folder}/run")],
            "serve": [*serve, *_set("serve.port=0")],
            "serve with keys": [*serve, *_set("serve.port=0", *reached)],
        }
        for name, words in started.items():
            with _running(words, folder, "ray::" if name == "run" else "ServeReplica") as process:
                rows += [{"command": name, **row} for row in examine(process, network)]
        with _running([sys.executable, "-c", CONTROL], folder, "ray::", **UNPROTECTED) as process:
            control = [{"command": "control", **row} for row in examine(process, network)]
    report.show("Listeners, asked without token or key", rows)
    report.show("Control: no authentication, every interface", control)
    metrics = {
        "open_doors": count(rows, "from the network"),
        "open_doors_on_the_machine": count(rows, "from loopback", but_for=("serve",)),
        "control_open_doors": count(control, "from the network"),
        "listeners": len(rows),
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in metrics.items()))
    report.write(options.json, metrics=metrics, table=rows, control=control)


UNPROTECTED = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
CONTROL = "import time; from scalingnote import cluster; cluster.connect(); time.sleep(600)"


def count(rows: Sequence[Row], where: str, *, but_for: Sequence[str] = ()) -> int:
    """Open listeners. `but_for`: commands whose own HTTP service is meant to answer there without keys."""
    return sum(
        row[where] == "OPEN" and not (row["command"] in but_for and "Proxy" in row["process"]) for row in rows
    )


def network_address() -> str:
    """An IPv4 address of this machine that others can reach; SystemExit where it has none."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    sys.exit("this machine has no address but loopback: there is nothing to prove")


def examine(process: psutil.Process, network: str, *, client_s: float = CLIENT_S) -> list[Row]:
    """A row for each listener of a process and its children, and one for each way a Ray client may come."""
    rows, gcs = [], 0
    for member in [process, *process.children(recursive=True)]:
        try:
            title, bound = _title(member), _listens_on(member)
        except psutil.NoSuchProcess:
            continue
        for address, port in bound:
            from_network = ask(network, port) if _is_reached_at(address, network) else "closed"
            row = {"process": title, "listens on": address, "from the network": str(from_network)}
            rows.append(row | {"from loopback": str(ask("127.0.0.1", port))})
            gcs = port if title == "gcs_server" else gcs
    client = {"process": "a Ray client", "listens on": f"port {gcs}"}
    for where, host in (("from the network", network), ("from loopback", "127.0.0.1")):
        client[where] = client_answer(f"{host}:{gcs}", client_s)
    return [*rows, client]


def ask(host: str, port: int) -> Answer:
    """What a listener does for a client without token or key."""
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError:
        return "closed"
    return _ask_http(host, port) or _ask_grpc(host, port)


def _ask_http(host: str, port: int) -> Answer | None:
    """None: it does not speak HTTP/1."""
    try:
        for path in ("/metrics", "/stats"):
            if any(number in _request(host, port, "GET", path)[1] for number in NUMBERS):
                return "harmless"
        found = [_request(host, port, method, path)[0] for method, path in PATHS]
    except http.client.HTTPException:
        return None
    except OSError:
        return None
    if any(status not in (401, 403, 404, 405) for status in found):
        return "OPEN"
    return "refused"


def _request(host: str, port: int, method: str, path: str) -> tuple[int, bytes]:
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
        codes = [_call(channel, method) for method in METHODS]
    absent = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED}
    if set(codes) <= absent and grpc.StatusCode.UNAUTHENTICATED in codes:
        return "refused"
    return "OPEN"  # it answered, or nothing is known of what it does


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


@contextmanager
def _running(words: Sequence[str], folder: str, last: str, **environment: str) -> Iterator[psutil.Process]:
    """A command while it works: it is given when a process titled `last`, which starts late, listens."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    log = Path(folder) / "log"
    with log.open("w") as output:
        process = psutil.Popen(words, env=clean | environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not any(last in _title(member) for member in process.children(recursive=True)):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{' '.join(words)} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.5)
        time.sleep(5)  # for what else starts
        yield process
    finally:
        family = process.children(recursive=True)
        process.send_signal(signal.SIGINT)
        psutil.wait_procs([process], timeout=60)
        for member in [process, *family]:
            if member.is_running():
                member.kill()


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


def _is_reached_at(bound: str, network: str) -> bool:
    return bound in ("0.0.0.0", "::", network, f"::ffff:{network}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _set(*knobs: str) -> list[str]:
    return [word for knob in knobs for word in ("--set", knob)]


if __name__ == "__main__":
    main()
