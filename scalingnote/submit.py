"""Send a run, or one stage, to a Ray cluster: the working directory goes up, log and exit code come back."""

import asyncio
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from scalingnote.config import file_of
from scalingnote.errors import ConfigError
from scalingnote.log import get_logger

# Anchored at the root: `scalingnote/data/` would be code. Ray leaves out what .gitignore names, too.
EXCLUDES = ["/.git", "/.venv", "/runs", "/data", "/build", "/dist", "*.egg-info", "__pycache__", ".*_cache"]
DRIVER_SHARE = 0.001  # of a custom resource: a node that has it takes many drivers
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
    wait: bool = False,
    cpus: float | None = None,
    memory_gb: float | None = None,
    resource: str | None = None,
) -> int:
    """Submit `jobs/{stage}.py` from the current directory.

    Args:
        stage: a stage, or ``run`` for a whole run.
        configs: config files below the current directory.
        run_dir: of the run; a path is pinned to where it is here.
        address: URL of the cluster's dashboard.
        overrides: ``A.B=VALUE`` of the config.
        until: last stage of a whole run.
        submission_id: of the job; one that was used before is refused.
        wait: whether to follow the log. The job goes on if this process ends.
        cpus: that Ray reserves for the driver; by default it runs on the head, with none.
        memory_gb: the same of memory.
        resource: custom resource of the nodes that may run the driver, such as those that are not taken back.

    Returns:
        An exit code, the job's if it was waited for.
    """
    arguments = entrypoint(stage, configs, run_dir=run_dir, overrides=overrides, until=until)
    command = shlex.join(arguments)
    client = _connect(address)
    log.info("%s: %s", address, command)
    try:
        job = client.submit_job(
            entrypoint=command,
            submission_id=submission_id,
            runtime_env={"working_dir": ".", "excludes": EXCLUDES},
            entrypoint_num_cpus=cpus,
            entrypoint_memory=None if memory_gb is None else int(memory_gb * 1e9),
            entrypoint_resources=None if resource is None else {resource: DRIVER_SHARE},
        )
    except RuntimeError as error:
        raise ConfigError(f"{address} refused the job: {_reason(error)}") from None
    if not wait:
        print(job)
        return 0
    try:
        return asyncio.run(_follow(client, job))
    except KeyboardInterrupt:
        print(f"{job} goes on; end it with: ray job stop {job} --address {address}", file=sys.stderr)
        raise


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
    logging.getLogger("ray").setLevel(logging.WARNING)  # its account of the upload is not the job's log
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*Error: ", line)]
    return (named or lines)[-1]


async def _follow(client: JobSubmissionClient, job: str) -> int:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)
    details: JobDetails = client.get_job_info(job)
    while not details.status.is_terminal():  # the log may end a moment before the job does
        await asyncio.sleep(0.2)
        details = client.get_job_info(job)
    print(f"{job}: {details.status.value.lower()}", file=sys.stderr)
    if details.status == JobStatus.SUCCEEDED:
        return 0
    return details.driver_exit_code or 1
