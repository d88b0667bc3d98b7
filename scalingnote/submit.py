"""Send a run, or one stage, to a Ray cluster: the working directory goes up, log and exit code come back.

The id of a job follows from its command. The same command therefore finds the job that is under way and
follows it from its first line, after a lost connection or from another machine; once it has ended, the
command starts the next attempt, which keeps finished stages and parts.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from scalingnote.config import file_of
from scalingnote.errors import ConfigError
from scalingnote.log import get_logger

# Anchored at the root: `scalingnote/data/` would be code. Ray leaves out what .gitignore names, too.
EXCLUDES = ["/.git", "/.venv", "/runs", "/data", "/build", "/dist", "*.egg-info", "__pycache__", ".*_cache"]
DRIVER_SHARE = 0.001  # of a custom resource: a node that has it takes many drivers
WRONG_INPUT = 2  # exit code of a job that the same command would not end better
QUIET_S = 300.0  # without a line of the log, before the connection is made anew: a dead one says nothing
RECONNECT_S = 900.0  # that a cluster may be unreachable
RETRY_INTERVAL_S = 5.0  # between attempts to reach it
UNREACHABLE = (OSError, RuntimeError, TimeoutError, aiohttp.ClientError)  # what Ray's client raises then
log = get_logger("submit")


def submit(
    stage: str,
    configs: Sequence[str],
    *,
    run_dir: str,
    address: str,
    overrides: Sequence[str] = (),
    until: str | None = None,
    submission_id: str | None = None,
    detach: bool = False,
    retries: int = 0,
    cpus: float | None = None,
    memory_gb: float | None = None,
    resource: str | None = None,
) -> int:
    """Submit `jobs/{stage}.py` from the current directory, or find that it runs, and follow its log.

    Args:
        stage: a stage, or ``run`` for a whole run, to the stage `until`.
        configs: config files below the current directory, with `overrides` of ``A.B=VALUE``.
        run_dir: of the run; a path is pinned to where it is here.
        address: URL of the cluster's dashboard.
        submission_id: of the job; a job that has it already is followed, also one that has ended. None: an id
            that follows from the command, and a number for each attempt after the first.
        detach: whether to print the id and end. The job goes on when this process ends.
        retries: attempts after a failure, other than of wrong input; with a `submission_id` there are none.
        cpus, memory_gb: that Ray reserves for the driver; by default it runs on the head, with none.
        resource: custom resource of the nodes that may run the driver, such as those that are not taken back.

    Returns:
        An exit code, the job's if it was followed.
    """
    arguments = entrypoint(stage, configs, run_dir=run_dir, overrides=overrides, until=until)
    command = shlex.join(arguments)
    client = _connect(address)
    log.info("%s: %s", address, command)
    options = {
        "entrypoint": command,
        "runtime_env": {"working_dir": ".", "excludes": EXCLUDES},
        "entrypoint_num_cpus": cpus,
        "entrypoint_memory": None if memory_gb is None else int(memory_gb * 1e9),
        "entrypoint_resources": None if resource is None else {resource: DRIVER_SHARE},
    }
    jobs = {job.submission_id: job.status for job in client.list_jobs() if job.submission_id}
    name = submission_id or f"{stage.replace('@', '-')}-{hashlib.sha256(command.encode()).hexdigest()[:12]}"
    attempt = 1 if submission_id else _attempt(name, jobs)
    while True:
        job = name if attempt == 1 else f"{name}-{attempt}"
        if job in jobs:
            log.info("%s is %s already: following it", job, jobs[job].value.lower())
        else:
            _start(client, address, job, options)
        if detach:
            print(job)
            return 0
        code = _exit_code(client, address, job)
        if code in (0, WRONG_INPUT) or retries == 0 or submission_id:
            return code
        retries, attempt = retries - 1, attempt + 1
        log.warning("%s failed with exit code %d, trying again: finished parts are kept", job, code)


def _exit_code(client: JobSubmissionClient, address: str, job: str) -> int:
    """Follow a job to its end; CTRL-C ends the following, not the job."""
    try:
        return asyncio.run(_follow(client, job))
    except KeyboardInterrupt:
        print(f"{job} goes on: the same command follows it again", file=sys.stderr)
        print(f"it ends with: ray job stop {job} --address {address}", file=sys.stderr)
        raise


def _attempt(name: str, jobs: Mapping[str, JobStatus]) -> int:
    """The number of the attempt under way of the job `name`, or of the next one."""
    number = 1
    while (found := jobs.get(name if number == 1 else f"{name}-{number}")) is not None:
        if not found.is_terminal():
            return number
        number += 1
    return number


def _start(client: JobSubmissionClient, address: str, job: str, options: Mapping[str, Any]) -> None:
    try:
        client.submit_job(submission_id=job, **options)
    except RuntimeError as error:
        if any(found.submission_id == job for found in client.list_jobs()):
            return  # another process submitted it meanwhile
        raise ConfigError(f"{address} refused the job: {_reason(error)}") from None


def entrypoint(
    stage: str,
    configs: Sequence[str],
    *,
    run_dir: str,
    overrides: Sequence[str] = (),
    until: str | None = None,
) -> list[str]:
    """The command of the job; ConfigError where it could not find its files on the cluster.

    A stage of an earlier round is named ``train@1``; ``run`` is all stages, or those up to `until`.
    """
    if until is not None and stage != "run":
        raise ConfigError(f"--until is of a whole run: scalingnote submit run ... --until {until}")
    stage, _, number = stage.partition("@")
    script = f"jobs/{stage}.py"
    if not Path(script).is_file():
        raise ConfigError(
            f"no {script} in {Path.cwd()}: submit from the root of the project, which is uploaded"
        )
    command = ["python", script, *(["--round", number] if number else [])]
    command += [] if until is None else ["--until", until]
    for config in configs:
        if not file_of(config).resolve().is_relative_to(Path.cwd()):
            raise ConfigError(f"{config} is not below {Path.cwd()}, which is uploaded: copy it there")
        command += ["--config", os.path.relpath(config)]
    # A job's own working directory vanishes with it, so a relative run_dir is pinned to where it is here;
    # and a job belongs to the cluster that runs it, not to the one in its config.
    pinned = run_dir if "://" in run_dir else str(Path(run_dir).absolute())
    for override in (*overrides, f"run_dir={pinned}", "address=null"):
        command += ["--set", override]
    return command


def _connect(address: str) -> JobSubmissionClient:
    # Their account of the upload is not the job's log; they set their own levels when they are imported.
    for name in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    # These would silently win over the address that was asked for.
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        os.environ.pop(name, None)
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({_reason(error)}): give the dashboard's URL, "
            "e.g. http://head:8265"
        ) from None


def _reason(error: Exception) -> str:
    """The one line that matters: a server answers with its whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = [line for line in lines if re.match(r"[\w.]*Error: ", line)]
    return (named or lines)[-1]


async def _follow(client: JobSubmissionClient, job: str) -> int:
    """Print the log of a job to its end, over lost connections; returns the job's exit code.

    ConfigError where the cluster was unreachable for RECONNECT_S.
    """
    printed, heard = 0, monotonic()
    while True:
        whole = False
        try:
            with contextlib.suppress(TimeoutError):  # a quiet job, or a connection that is dead
                async for text in _lines(client, job, printed):
                    print(text, end="", flush=True)
                    printed, heard = printed + len(text), monotonic()
                whole = True
            details: JobDetails = await asyncio.wait_for(
                asyncio.to_thread(client.get_job_info, job), RETRY_INTERVAL_S * 2
            )
            heard = monotonic()
        except UNREACHABLE as error:
            if monotonic() - heard > RECONNECT_S:
                raise ConfigError(
                    f"no answer of the cluster for {RECONNECT_S / 60:.0f} minutes ({_reason(error)}); {job} "
                    "may go on: the same command follows it again"
                ) from None
            await asyncio.sleep(RETRY_INTERVAL_S)
            continue
        if whole and details.status.is_terminal():
            print(f"{job}: {details.status.value.lower()}", file=sys.stderr)
            return 0 if details.status == JobStatus.SUCCEEDED else details.driver_exit_code or 1
        await asyncio.sleep(0.2)  # the log may end a moment before the job does


async def _lines(client: JobSubmissionClient, job: str, printed: int) -> AsyncIterator[str]:
    """The log of a job behind its first `printed` characters; TimeoutError where none comes for QUIET_S."""
    stream = client.tail_job_logs(job)
    seen = 0
    try:
        while True:
            text = await asyncio.wait_for(anext(stream), QUIET_S)
            start, seen = max(printed - seen, 0), seen + len(text)
            if start < len(text):
                yield text[start:]
    except StopAsyncIteration:
        return
