"""Submission of a job to a cluster, and its log over lost connections."""

import asyncio
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from scalingnote.cli import submit
from scalingnote.core.config import load
from scalingnote.core.errors import ConfigError
from scalingnote.run.config import RunConfig

LOG = ("one\n", "two\nthree\n", "four\n")


class Cluster:
    """A cluster that sends the log from its beginning; the first connections are lost after some lines."""

    def __init__(self, *lost_after: int, silent: bool = False) -> None:
        self.lost, self.silent, self.connections = list(lost_after), silent, 0

    async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
        assert job == "job"
        self.connections += 1
        lines = self.lost.pop(0) if self.lost else None
        for text in LOG[:lines]:
            yield text
        if lines is not None and self.silent:
            await asyncio.sleep(3600)
        if lines is not None:
            raise aiohttp.ClientConnectionError("the laptop was closed")

    def get_job_info(self, job: str) -> Any:
        is_finished = not self.lost
        return SimpleNamespace(
            status=JobStatus.SUCCEEDED if is_finished else JobStatus.RUNNING,
            driver_exit_code=0 if is_finished else None,
            message=None,
        )


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(submit, "QUIET_S", 0.05)


@pytest.mark.parametrize("silent", [False, True])
def test_each_line_is_printed_once_over_lost_connections(silent: bool, capsys: pytest.CaptureFixture[str]):
    cluster: Any = Cluster(1, 0, 2, silent=silent)
    assert asyncio.run(submit._follow(cluster, "job")) == 0
    assert capsys.readouterr().out == "".join(LOG)
    assert cluster.connections == 4


def test_an_unreachable_cluster_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(submit, "RECONNECT_S", 0.05)
    cluster: Any = Cluster(*[0] * 1000)
    with pytest.raises(ConfigError, match="the same command follows it again"):
        asyncio.run(submit._follow(cluster, "job"))


@pytest.mark.parametrize(
    ("known", "attempt"),
    [({}, 1), ({"a": "RUNNING"}, 1), ({"a": "FAILED"}, 2), ({"a": "FAILED", "a-2": "PENDING"}, 2)],
)
def test_a_running_attempt_is_followed_before_a_new_one(known: dict[str, str], attempt: int):
    assert submit._attempt("a", {name: JobStatus(status) for name, status in known.items()}) == attempt


class Submitted(JobSubmissionClient):
    """A cluster that takes a job, and keeps its uploaded files."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.options: dict[str, Any] = {}

    def list_jobs(self) -> list[Any]:
        return []

    def submit_job(self, *, submission_id: str, **options: Any) -> None:
        folder = Path(options["runtime_env"]["working_dir"])
        self.files = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
        self.options = {"submission_id": submission_id, **options}


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Submitted:
    cluster = Submitted()
    monkeypatch.setattr(submit, "_connect", lambda _: cluster)
    return cluster


def run_config(folder: Path) -> RunConfig:
    (folder / "base.yaml").write_text("dataset: {name: python_docs}\nindex: {shards: 3}\n")
    (folder / "mine.yaml").write_text("extends: base.yaml\nrun_dir: runs/x\n")
    return load(RunConfig, [folder / "mine.yaml"], ["encode.dtype=float32"])


def test_without_a_checkout_only_the_config_is_uploaded(
    submitted: Submitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    config = run_config(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "large.bin").write_text("not to be uploaded")
    monkeypatch.chdir(elsewhere)
    options = {"config": config, "address": "http://head:8265", "detach": True}
    selection = {"--only": "encode"}
    overrides = ["encode.dtype=float32"]
    assert submit.submit(["../mine.yaml"], selection=selection, overrides=overrides, **options) == 0
    first = capsys.readouterr().out
    assert list(submitted.files) == ["config.yaml"]
    assert load(RunConfig, [_written(tmp_path, submitted.files["config.yaml"])]) == config
    command = shlex.split(submitted.options["entrypoint"])
    assert command[:7] == [*submit.COMMAND, "config.yaml", "--only", "encode"]
    assert command[7:] == ["--set", f"run_dir={elsewhere}/runs/x", "--set", "address=null", "--json"]
    other = config.model_copy(update={"rounds": 2})
    submit.submit(["../mine.yaml"], selection={"--only": "encode"}, **options | {"config": other})
    assert capsys.readouterr().out != first  # another config gives another job


def test_a_checkout_is_uploaded_with_each_setting_once(
    submitted: Submitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = run_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scalingnote" / "cli").mkdir(parents=True)
    (tmp_path / "scalingnote" / "cli" / "main.py").touch()
    overrides = ["run_dir=s3://bucket/x", "address=head:6379", "encode.dtype=float32"]
    config = config.model_copy(update={"run_dir": "s3://bucket/x"})
    submit.submit(["mine.yaml"], config=config, address="http://h", overrides=overrides, detach=True)
    assert {"base.yaml", "mine.yaml"} <= set(submitted.files)
    sets = shlex.split(submitted.options["entrypoint"])[5:-1]
    assert sets[1::2] == ["encode.dtype=float32", "run_dir=s3://bucket/x", "address=null"]
    with pytest.raises(ConfigError, match="which is uploaded: copy it there"):
        submit.submit(["/etc/mine.yaml"], config=config, address="http://h", detach=True)


def _written(folder: Path, text: str) -> Path:
    (folder / "found.yaml").write_text(text)
    return folder / "found.yaml"
