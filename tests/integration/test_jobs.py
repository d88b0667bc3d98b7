"""A stage gives the same digest in this process, from the shell and as a job."""

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest
from ray.job_submission import JobSubmissionClient

from row_files import write_tables
from scalingnote.cli import main as cli
from scalingnote.core.config import load
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.storage.artifact import open_artifact
from tiny_run import run_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # for a busy machine
ROOT = Path(pipeline.__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
STAGES = ("prepare", "planner")
of_rays_client = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")


@dataclass(frozen=True)
class Head:
    """A Ray head node of this module: address for drivers, and URL for submission of jobs."""

    address: str
    dashboard: str


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a checkout with a config and data, which is small enough for a fast upload."""
    base = tmp_path_factory.mktemp("project")
    for name in ("jobs", "scalingnote"):
        shutil.copytree(ROOT / name, base / name, ignore=shutil.ignore_patterns("__pycache__"))
    words = [a + b for a in ("al", "be", "ga", "de") for b in ("pha", "ta", "mma")]
    documents, queries, qrels = [], [], []
    for i in range(80):
        pair = f"{words[i % 12]} {words[i * 7 % 11]} number{i}"
        documents.append({"doc_id": f"d{i}", "title": pair, "content": f"{pair} explained at length"})
        queries.append({"query_id": f"q{i}", "query": f"what is {pair}"})
        qrels.append({"query_id": f"q{i}", "doc_id": f"d{i}", "relevance": 1})
    # The files are outside the project, like data sets, and the config has their full paths.
    data = tmp_path_factory.mktemp("data")
    write_tables(data, documents=documents, queries=queries, qrels=qrels)
    (base / "configs").mkdir()
    (base / "configs" / "tiny.yaml").write_text(
        f"""
run_dir: runs/tiny
dataset:
  name: columns
  documents: {{path: {data}/documents.jsonl}}
  queries: {{path: {data}/queries.jsonl}}
  qrels: {{path: {data}/qrels.jsonl}}
collect: {{top_k: 2, top_t: 20, parts: 2}}
"""
    )
    return base


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    # Names of Unix sockets are limited, so the directory of Ray cannot be below that of pytest.
    place = tempfile.mkdtemp(prefix="sn-", dir="/tmp")
    port, dashboard, client, agent, agent_grpc, metrics, environment = free_ports(7)
    command = [
        SCRIPTS / "ray",
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--num-cpus=2",
        '--resources={"driver": 1}',
        f"--temp-dir={place}",
        f"--port={port}",
        f"--dashboard-port={dashboard}",
        f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}",
        f"--runtime-env-agent-port={environment}",
        "--object-store-memory=100000000",
    ]
    with open(f"{place}/head.log", "w") as log:
        process = psutil.Popen(
            command, stdout=log, stderr=log, env=shell_environment(), start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{dashboard}"
        wait_for(f"{url}/api/jobs/", process, Path(f"{place}/head.log"))
        take_jobs(url)
        yield Head(f"127.0.0.1:{port}", url)
    finally:
        # Only the processes started here; other clusters may run on this machine.
        family = [*process.children(recursive=True), process]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=5)
        for member in alive:
            member.kill()
        psutil.wait_procs(alive, timeout=15)
        shutil.rmtree(place, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def shell_environment(**more: str) -> dict[str, str]:
    """Return this environment with our `python` first, without variables of a cluster of this process."""
    prefixes = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    # Ray requires a token if the user's home has one.
    settings = {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}", "RAY_AUTH_MODE": "disabled"}
    return inherited | settings | more


def wait_for(url: str, process: psutil.Popen, log: Path) -> None:
    for _ in range(240):
        assert process.is_running(), log.read_text()
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no answer from {url}\n{log.read_text()}")


def take_jobs(url: str) -> None:
    """Wait until the head takes a job: it answers before its node takes any."""
    client = JobSubmissionClient(url)
    for _ in range(120):
        try:
            client.submit_job(entrypoint="true")
            return
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise
            time.sleep(0.5)
    raise AssertionError("no node took a job")


def shell(project: Path, *arguments: str, program: str = "scalingnote") -> CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / program), *arguments],
        cwd=project,
        env=shell_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def command(project: Path, *arguments: str) -> CompletedProcess[str]:
    """Run the command line in this process, which has imported Ray already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(project), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    return CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def submit(
    project: Path, head: Head, run_dir: str, *more: str, patch: pytest.MonkeyPatch
) -> CompletedProcess[str]:
    # An address in the environment must not override the argument.
    patch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    target = ("--address", head.dashboard, "--set", f"run_dir={run_dir}")
    return command(project, "submit", "configs/tiny.yaml", *target, *more)


def digests(project: Path, run_dir: str) -> dict[str, str]:
    config = load(RunConfig, [project / "configs" / "tiny.yaml"], [f"run_dir={project / run_dir}"])
    return {stage: pipeline.locate(config, kind).digest for stage, kind in zip(STAGES, KINDS, strict=True)}


KINDS = ("dataset", "planner")


@pytest.fixture(scope="module")
def in_process(project: Path) -> dict[str, str]:
    overrides = [f"run_dir={project}/runs/in-process"]
    run_here(load(RunConfig, [project / "configs" / "tiny.yaml"], overrides), until="planner")
    return digests(project, "runs/in-process")


@of_rays_client
def test_a_complete_run_is_one_job_and_resumes(
    project: Path, head: Head, in_process: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project / "runs" / "in-process" / STAGES[0], project / "runs" / "whole" / STAGES[0])
    driver = ("--driver-cpus", "0.1", "--driver-memory", "0.1", "--driver-resource", "driver")
    process = submit(project, head, "runs/whole", "--until", STAGES[-1], *driver, patch=monkeypatch)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "1/2 prepare: finished before" in process.stdout
    assert digests(project, "runs/whole") == in_process
    refused = submit(project, head, "runs/whole", "--only", "plannr", patch=monkeypatch)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "did you mean 'planner'" in refused.stderr


def test_a_run_is_submitted_without_a_checkout(
    project: Path, head: Head, in_process: dict[str, str], tmp_path: Path
) -> None:
    """Only the config is uploaded, like from a wheel; the nodes have the package."""
    shutil.copytree(project / "runs" / "in-process" / STAGES[0], project / "runs" / "wheel" / STAGES[0])
    config, run_dir = str(project / "configs" / "tiny.yaml"), f"run_dir={project}/runs/wheel"
    more = ("--until", STAGES[-1], "--address", head.dashboard, "--set", run_dir)
    process = shell(tmp_path, "submit", config, *more)
    assert process.returncode == 0, process.stdout + process.stderr
    assert digests(project, "runs/wheel") == in_process
    assert "Uploading" not in process.stderr  # the log of Ray


def test_a_job_refuses_a_run_dir_in_its_working_directory(project: Path) -> None:
    process = subprocess.run(
        [sys.executable, "jobs/run.py", "configs/tiny.yaml", "--only", "prepare"],
        cwd=project,
        env=shell_environment(RAY_JOB_CONFIG_JSON_ENV_VAR="{}"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 2
    assert process.stderr.startswith("scalingnote: run_dir is 'runs/tiny'")


def test_a_submission_id_is_used_once(project: Path, head: Head, in_process: dict[str, str]) -> None:
    job_options = ("--submission-id", "once", "--address", head.dashboard)
    arguments = ("submit", "configs/tiny.yaml", "--only", "prepare", *job_options)
    first, second = command(project, *arguments, "--detach"), shell(project, *arguments)
    assert (first.returncode, first.stdout) == (0, "once\n")
    assert second.returncode == 0, second.stderr
    assert "following it" in second.stderr
    assert second.stderr.count("\n") <= 3  # progress lines, but no traceback
    line = json.loads(next(line for line in second.stdout.splitlines() if line.startswith("{")))
    # The relative run_dir became absolute: the artifact is outside the working directory of the job.
    artifact = open_artifact(line["uri"], kind=KINDS[0])
    assert Path(line["uri"]).is_relative_to(project / "runs" / "tiny")
    assert (line["kind"], line["digest"]) == (KINDS[0], artifact.digest)
    assert line["counts"] == artifact.counts
    assert artifact.digest == in_process[STAGES[0]]


SLOW_JOB = """
import pathlib, sys, time
place = pathlib.Path({place!r})
with open(place / "starts", "a") as starts:
    starts.write("x")
print("first line", flush=True)
number = len((place / "starts").read_text())
while not (place / f"go-{{number}}").exists():
    time.sleep(0.1)
print("last line", flush=True)
sys.exit({codes}[number - 1])
"""


def test_a_job_continues_without_its_client(project: Path, head: Head, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(project / "configs", checkout / "configs")
    (checkout / "scalingnote" / "cli").mkdir(parents=True)
    for package in ("scalingnote", "scalingnote/cli"):
        (checkout / package / "__init__.py").touch()
    slow = SLOW_JOB.format(place=str(tmp_path), codes=[1, 2])
    (checkout / "scalingnote" / "cli" / "main.py").write_text(slow)
    command = ["submit", "configs/tiny.yaml", "--address", head.dashboard, "--retries", "2"]

    def send() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(SCRIPTS / "scalingnote"), *command],
            cwd=checkout,
            env=shell_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with send() as first:
        assert first.stdout is not None
        assert "first line\n" in iter(first.stdout.readline, "")
        first.kill()
    with send() as second:
        assert second.stdout is not None
        assert any("is running already: following it" in line for line in second.stdout)
        for attempt in (1, 2):
            (tmp_path / f"go-{attempt}").touch()
        lines = [line.strip() for line in second.stdout if line.endswith(" line\n")]
    # It is followed from its first line, fails, is retried, and the second time its input is wrong.
    assert lines == ["first line", "last line"] * 2
    assert second.returncode == 2
    assert (tmp_path / "starts").read_text() == "xx"
