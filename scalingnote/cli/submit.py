"""Submit a run, or some of its stages, to a Ray cluster: upload a directory, follow the log to the exit code.

In a checkout, the directory is the complete checkout with its code. Elsewhere it holds only the config, and
the nodes have the package in their image.

The id of a job is derived from its command. So the same command, after a lost connection or on another
machine, finds the running job and follows it from its first line. When the job has ended, the command starts
the next attempt, which keeps finished stages and parts.
"""

import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import aiohttp
import yaml
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from scalingnote.core import ray_internals
from scalingnote.core.config import dump, file_of
from scalingnote.core.errors import ConfigError
from scalingnote.core.log import get_logger
from scalingnote.run.config import RunConfig

# Anchored at the root: `scalingnote/data/` would be code. Ray also leaves out the files of .gitignore.
EXCLUDES = ["/.git", "/.venv", "/runs", "/data", "/build", "/dist", "*.egg-info", "__pycache__", ".*_cache"]
CODE, CONFIG = "scalingnote/cli/main.py", "config.yaml"  # in a checkout; in an upload without one
COMMAND = ("python", "-m", "scalingnote.cli.main", "run")  # of the job, before its options
DRIVER_SHARE = 0.001  # of a custom resource: a node that has it runs many drivers
WRONG_INPUT = 2  # exit code of a job that a retry cannot fix
QUIET_S = 300.0  # time without a line of the log before reconnecting: a dead connection raises no error
RECONNECT_S = 900.0  # time that a cluster may be unreachable
RETRY_INTERVAL_S = 5.0  # between attempts to reach it
UNREACHABLE = (OSError, RuntimeError, TimeoutError, aiohttp.ClientError)  # errors of Ray's client
NO_OPTIONS: Mapping[str, Any] = {}
log = get_logger("submit")


def submit(
    configs: Sequence[str],
    *,
    config: RunConfig,
    address: str,
    overrides: Sequence[str] = (),
    selection: Mapping[str, str | None] = NO_OPTIONS,
    submission_id: str | None = None,
    detach: bool = False,
    retries: int = 0,
    driver: Mapping[str, Any] = NO_OPTIONS,
) -> int:
    """Submit ``scalingnote run``, or find its running job, and follow the log.

    Args:
        configs: config files; in a checkout, files below its root.
        config: the config that these files and `overrides` give. A run_dir that is a path becomes absolute.
        address: URL of the cluster's dashboard.
        overrides: settings of the form ``A.B=VALUE``.
        selection: stages to run, by option (``--only``, ``--from``, ``--until``); by default all.
        submission_id: id of the job. A job that has it already is followed, even if it has ended. None: an id
            derived from the command, with a number for each attempt after the first.
        detach: print the id and return. The job continues without this process.
        retries: number of attempts after a failure that is not wrong input; none with a `submission_id`.
        driver: resources that Ray reserves for the driver, from :func:`driver_options`; by default none.

    Returns:
        An exit code, which is the job's if it was followed.
    """
    checkout, text = Path(CODE).is_file(), ""
    if not checkout:
        text = yaml.safe_dump(dump(config))
        configs, overrides = [CONFIG], ()
    stages = [word for option, stage in selection.items() if stage is not None for word in (option, stage)]
    pins = _pin(overrides, config.run_dir)
    command = shlex.join([*COMMAND, *_files(configs, below=checkout), *stages, *pins, "--json"])
    client = _connect(address)
    log.info("%s: %s", address, command)
    options = {"entrypoint": command, **driver}
    jobs = {job.submission_id: job.status for job in client.list_jobs() if job.submission_id}
    digest = hashlib.sha256((command + text).encode()).hexdigest()
    stage = selection.get("--only") or "run"
    name = submission_id or f"{stage.replace('@', '-')}-{digest[:12]}"
    attempt = 1 if submission_id else _attempt(name, jobs)
    while True:
        job = name if attempt == 1 else f"{name}-{attempt}"
        if job in jobs:
            log.info("%s is %s already: following it", job, jobs[job].value.lower())
        else:
            with _upload_directory(text) as folder:
                environment = {"excludes": EXCLUDES, "working_dir": folder}
                _start(client, address, job, options | {"runtime_env": environment})
        if detach:
            print(job)
            return 0
        code = _exit_code(client, address, job)
        if code in (0, WRONG_INPUT) or retries == 0 or submission_id:
            return code
        retries, attempt = retries - 1, attempt + 1
        log.warning("%s failed with exit code %d, trying again: finished parts are kept", job, code)


def driver_options(cpus: float | None, memory_gb: float | None, resource: str | None) -> dict[str, Any]:
    """Build the options of a submission for the resources of its driver.

    `resource` is a custom resource of the nodes that may run it, for example nodes that are not preemptible.
    """
    return {
        "entrypoint_num_cpus": cpus,
        "entrypoint_memory": None if memory_gb is None else int(memory_gb * 1e9),
        "entrypoint_resources": None if resource is None else {resource: DRIVER_SHARE},
    }


@contextlib.contextmanager
def _upload_directory(text: str) -> Iterator[str]:
    """Yield the directory to upload: this one, or if a text is given, one with only the config."""
    if not text:
        yield "."
        return
    with TemporaryDirectory(prefix="scalingnote-submit-") as folder:
        Path(folder, CONFIG).write_text(text, encoding="utf-8")
        yield folder


def _exit_code(client: JobSubmissionClient, address: str, job: str) -> int:
    """Follow a job to its end; CTRL-C does not end the job."""
    try:
        return asyncio.run(_follow(client, job))
    except KeyboardInterrupt:
        print(f"{job} continues: the same command follows it again", file=sys.stderr)
        print(f"to stop it: ray job stop {job} --address {address}", file=sys.stderr)
        raise


def _attempt(name: str, jobs: Mapping[str, JobStatus]) -> int:
    """Return the number of the running attempt of the job `name`, or of the next one."""
    number = 1
    while (status := jobs.get(name if number == 1 else f"{name}-{number}")) is not None:
        if not status.is_terminal():
            return number
        number += 1
    return number


def _start(client: JobSubmissionClient, address: str, job: str, options: Mapping[str, Any]) -> None:
    try:
        client.submit_job(submission_id=job, **options)
    except RuntimeError as error:
        if any(known_job.submission_id == job for known_job in client.list_jobs()):
            return  # another process has submitted it
        raise ConfigError(f"{address} refused the job: {_reason(error)}") from None


def _files(configs: Sequence[str], *, below: bool) -> list[str]:
    """Make paths of config files relative; `below`: they must be in the current directory."""
    for config in configs:
        if below and not file_of(config).resolve().is_relative_to(Path.cwd()):
            raise ConfigError(f"{config} is not below {Path.cwd()}, which is uploaded: copy it there")
    return [os.path.relpath(config) for config in configs]


def _pin(overrides: Sequence[str], run_dir: str) -> list[str]:
    """Return the overrides of the job, as options.

    The working directory of a job is deleted at its end, so a relative run_dir becomes absolute. A job uses
    the cluster that runs it, not the address in its config.
    """
    absolute = run_dir if "://" in run_dir else str(Path(run_dir).absolute())
    others = [each for each in overrides if each.partition("=")[0].strip() not in ("run_dir", "address")]
    return [word for each in (*others, f"run_dir={absolute}", "address=null") for word in ("--set", each)]


def _connect(address: str) -> JobSubmissionClient:
    ray_internals.silence_uploads()
    # These would silently override the address.
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise ConfigError(f"{address}: {str(error).splitlines()[0]}") from None
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({_reason(error)}): give the dashboard's URL, "
            "e.g. http://head:8265"
        ) from None


def _reason(error: Exception) -> str:
    """Return the line with the error: the answer of a server is a complete traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    errors = [line for line in lines if re.match(r"[\w.]*Error: ", line)]
    return (errors or lines)[-1]


async def _follow(client: JobSubmissionClient, job: str) -> int:
    """Print the log of a job to its end, reconnecting if necessary, and return the job's exit code.

    Raises:
        ConfigError: the cluster was unreachable for RECONNECT_S.
    """
    printed, last_answer = 0, monotonic()
    while True:
        is_complete = False
        try:
            with contextlib.suppress(TimeoutError):  # a quiet job, or a dead connection
                async for text in _lines(client, job, printed):
                    print(text, end="", flush=True)
                    printed, last_answer = printed + len(text), monotonic()
                is_complete = True
            details: JobDetails = await asyncio.wait_for(
                asyncio.to_thread(client.get_job_info, job), RETRY_INTERVAL_S * 2
            )
            last_answer = monotonic()
        except UNREACHABLE as error:
            if monotonic() - last_answer > RECONNECT_S:
                raise ConfigError(
                    f"the cluster has not answered for {RECONNECT_S / 60:.0f} minutes ({_reason(error)}); "
                    f"{job} may be running: the same command follows it again"
                ) from None
            await asyncio.sleep(RETRY_INTERVAL_S)
            continue
        if is_complete and details.status.is_terminal():
            succeeded = details.status == JobStatus.SUCCEEDED
            why = "" if succeeded else _failure(details.message, printed)
            print(f"{job}: {details.status.value.lower()}{why}", file=sys.stderr)
            return 0 if succeeded else details.driver_exit_code or 1
        await asyncio.sleep(0.2)  # the log may end shortly before the job


def _failure(message: str | None, printed: int) -> str:
    """Return Ray's message about a failed job, or only its first line if the log, its end, was printed."""
    if not message or not message.strip():
        return ""
    return f": {message.strip().splitlines()[0] if printed else message.strip()}"


async def _lines(client: JobSubmissionClient, job: str, printed: int) -> AsyncIterator[str]:
    """Yield the log of a job after its first `printed` characters.

    Raises:
        TimeoutError: no line arrived for QUIET_S.
    """
    stream = client.tail_job_logs(job)
    length = 0
    try:
        while True:
            text = await asyncio.wait_for(anext(stream), QUIET_S)
            start, length = max(printed - length, 0), length + len(text)
            if start < len(text):
                yield text[start:]
    except StopAsyncIteration:
        return
