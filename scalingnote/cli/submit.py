"""Send a run, or some of its stages, to a Ray cluster: a directory goes up, log and exit code come back.

From a checkout that is all of it, code included. From elsewhere it is the config alone: the nodes have the
package in their image.

The id of a job follows from its command. The same command therefore finds the job that is under way and
follows it from its first line, after a lost connection or from another machine; once it has ended, the
command starts the next attempt, which keeps finished stages and parts.
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

# Anchored at the root: `scalingnote/data/` would be code. Ray leaves out what .gitignore names, too.
EXCLUDES = ["/.git", "/.venv", "/runs", "/data", "/build", "/dist", "*.egg-info", "__pycache__", ".*_cache"]
CODE, CONFIG = "scalingnote/cli/main.py", "config.yaml"  # of a checkout; of what is uploaded from elsewhere
COMMAND = ("python", "-m", "scalingnote.cli.main", "run")  # of the job, with options
DRIVER_SHARE = 0.001  # of a custom resource: a node that has it takes many drivers
WRONG_INPUT = 2  # exit code of a job that the same command would not end better
QUIET_S = 300.0  # without a line of the log, before the connection is made anew: a dead one says nothing
RECONNECT_S = 900.0  # that a cluster may be unreachable
RETRY_INTERVAL_S = 5.0  # between attempts to reach it
UNREACHABLE = (OSError, RuntimeError, TimeoutError, aiohttp.ClientError)  # what Ray's client raises then
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
    """Submit ``scalingnote run``, or find that it runs, and follow its log.

    Args:
        configs: config files, with `overrides` of ``A.B=VALUE``; from a checkout, below it.
        config: the same, read. A path as its run_dir is pinned to where it is here.
        address: URL of the cluster's dashboard.
        selection: of the stages, by option (``--only``, ``--from``, ``--until``); by default all.
        submission_id: of the job; a job that has it already is followed, also one that has ended. None: an id
            that follows from the command, and a number for each attempt after the first.
        detach: whether to print the id and end. The job goes on when this process ends.
        retries: attempts after a failure, other than of wrong input; with a `submission_id` there are none.
        driver: what Ray reserves for the driver, from :func:`driver_options`; by default it runs on the head,
            with none.

    Returns:
        An exit code, the job's if it was followed.
    """
    checkout, text = Path(CODE).is_file(), ""
    if not checkout:
        text = yaml.safe_dump(dump(config))
        configs, overrides = [CONFIG], ()
    chosen = [word for option, stage in selection.items() if stage is not None for word in (option, stage)]
    pins = _pin(overrides, config.run_dir)
    command = shlex.join([*COMMAND, *_files(configs, below=checkout), *chosen, *pins, "--json"])
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
    """Options of a submission for what the driver reserves.

    `resource` is a custom resource of the nodes that may run it, such as those that are not taken back.
    """
    return {
        "entrypoint_num_cpus": cpus,
        "entrypoint_memory": None if memory_gb is None else int(memory_gb * 1e9),
        "entrypoint_resources": None if resource is None else {resource: DRIVER_SHARE},
    }


@contextlib.contextmanager
def _upload_directory(text: str) -> Iterator[str]:
    """The directory to upload: this one, or one with the config alone if its text is given."""
    if not text:
        yield "."
        return
    with TemporaryDirectory(prefix="scalingnote-submit-") as folder:
        Path(folder, CONFIG).write_text(text, encoding="utf-8")
        yield folder


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


def _files(configs: Sequence[str], *, below: bool) -> list[str]:
    """Config files as the job finds them; `below`: the current directory is uploaded, they must lie in it."""
    for config in configs:
        if below and not file_of(config).resolve().is_relative_to(Path.cwd()):
            raise ConfigError(f"{config} is not below {Path.cwd()}, which is uploaded: copy it there")
    return [os.path.relpath(config) for config in configs]


def _pin(overrides: Sequence[str], run_dir: str) -> list[str]:
    """Overrides of the job, as options.

    A job's own working directory vanishes with it, so a relative run_dir is pinned to where it is here; and a
    job belongs to the cluster that runs it, not to the one in its config.
    """
    pinned = run_dir if "://" in run_dir else str(Path(run_dir).absolute())
    others = [each for each in overrides if each.partition("=")[0].strip() not in ("run_dir", "address")]
    return [word for each in (*others, f"run_dir={pinned}", "address=null") for word in ("--set", each)]


def _connect(address: str) -> JobSubmissionClient:
    ray_internals.silence_uploads()
    # These would silently win over the address that was asked for.
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
            succeeded = details.status == JobStatus.SUCCEEDED
            why = "" if succeeded else _failure(details.message, printed)
            print(f"{job}: {details.status.value.lower()}{why}", file=sys.stderr)
            return 0 if succeeded else details.driver_exit_code or 1
        await asyncio.sleep(0.2)  # the log may end a moment before the job does


def _failure(message: str | None, printed: int) -> str:
    """What Ray says of a job that failed: all of it if there was no log, with which it ends otherwise."""
    if not message or not message.strip():
        return ""
    return f": {message.strip().splitlines()[0] if printed else message.strip()}"


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
