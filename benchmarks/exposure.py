"""What a client without a token or key can reach while ScalingNote works on a laptop: one row per listener.

    python -m benchmarks.exposure --run runs/quickstart --json docs/results/exposure.json

Starts `scalingnote run --only train`, `scalingnote serve`, and `serve` with API keys on every interface
(HTTP and gRPC), lists what their processes listen on, and asks each listener without a token: from the
machine's own address, as another machine of the network would, and from loopback, as another user of the
machine would.

    closed     nothing answers at this address
    refused    it answers that a token or key is missing
    harmless   it tells numbers only: metrics, statistics
    silent     it takes a connection and speaks neither HTTP nor gRPC: what it would do is not known
    OPEN       it does what is asked: tasks, actors, jobs, objects, searches, /admin

To the network, what is silent counts as open.

A Ray client without a token then tries to connect and to run a task. A cluster with Ray's authentication off
and on all interfaces is asked in the same way: if its listeners were not found open, the probes would prove
nothing.
"""

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks import report
from benchmarks.doors import Answer, ask, client_answer

CLIENT_S = 20.0  # that a Ray client has to connect and run a task: three times what it needs
SETTLES_S = 2.0  # for what starts later
ASKED_AT_ONCE = 8
START_S = 400.0  # that a command has until all its processes listen
KEY = "a-key-of-the-exposure-benchmark"
Row = dict[str, str]
Ready = Callable[[psutil.Process, str], bool]  # of a command, and what it has printed


def main() -> None:
    """Print a row per listener of each command, and count those that are open."""
    parser = report.arguments(__doc__)
    parser.add_argument(
        "--run", default="runs/quickstart", help="a finished run, to be trained anew and served"
    )
    options = parser.parse_args()
    network = network_address()
    command = [sys.executable, "-m", "scalingnote.cli"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(KEY)
        serve = [*command, "serve", "--run", options.run]
        reached = ["serve.host=0.0.0.0", f"serve.grpc_port={_free_port()}", f"serve.api_keys={keys}"]
        shutil.copytree(options.run, f"{folder}/run", ignore=shutil.ignore_patterns("train"))
        trained = _set(f"run_dir={folder}/run", "train.epochs=1000")
        started: Mapping[str, Sequence[str]] = {
            "run": [*command, "run", f"{options.run}/run.yaml", "--only", "train", *trained],
            "serve": [*serve, *_set("serve.port=0")],
            "serve with keys": [*serve, *_set("serve.port=0", *reached)],
        }
        for name, words in started.items():
            with running(words, folder, trains if name == "run" else serves) as process:
                rows += [{"command": name, **row} for row in examine(process, network)]
        with running([sys.executable, "-c", CONTROL], folder, works, ray=UNPROTECTED) as process:
            control = [{"command": "control", **row} for row in examine(process, network)]
    report.show("Listeners, asked without token or key", rows)
    report.show("Control: no authentication, every interface", control)
    metrics = {
        "open_doors": count(rows, "from the network", *UNGUARDED),
        "open_doors_on_the_machine": count(rows, "from loopback", "OPEN", but_for=("serve",)),
        "silent_on_the_machine": count(rows, "from loopback", "silent"),
        "control_open_doors": count(control, "from the network", *UNGUARDED),
        "listeners": len(rows),
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in metrics.items()))
    report.write(options.json, metrics=metrics, table=rows, control=control)


UNPROTECTED = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
UNGUARDED: tuple[Answer, ...] = ("OPEN", "silent")
CONTROL = "import time; from scalingnote import cluster; cluster.connect(); time.sleep(600)"


def count(rows: Sequence[Row], where: str, *answers: Answer, but_for: Sequence[str] = ()) -> int:
    """Listeners with one of these answers. `but_for`: commands whose own HTTP service is meant to answer."""
    return sum(
        row[where] in answers and not (row["command"] in but_for and "Proxy" in row["process"])
        for row in rows
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


def works(process: psutil.Process, _: str) -> bool:
    """Ray has started a worker."""
    return any("ray::IDLE" in _title(member) for member in process.children(recursive=True))


def trains(process: psutil.Process, _: str) -> bool:
    """A rank listens for other ranks, beside what every worker of Ray listens to."""
    for member in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "RayTrainWorker" in _title(member) and len(_listens_on(member)) > 1:
                return True
    return False


def serves(_: psutil.Process, said: str) -> bool:
    """The command has told its URL."""
    return "CTRL-C ends it" in said


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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _set(*knobs: str) -> list[str]:
    return [word for knob in knobs for word in ("--set", knob)]


if __name__ == "__main__":
    main()
