"""Telling others the numbers of a run: TensorBoard files always, Weights & Biases and MLflow when asked.

Event files hold times, so they are no part of an artifact: they lie beside it, in the run's ``tensorboard``
folder, where they also outlive the work directory. Rank 0 alone tracks.
"""

import importlib
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from scalingnote.errors import ConfigError
from scalingnote.storage import filesystem as fs
from scalingnote.train.config import Tracking

FOLDER = "tensorboard"
_UPLOAD_EVERY = 30.0  # seconds; a remote folder is as old as this when a run is killed


@runtime_checkable
class Tracker(Protocol):
    """Who is told."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by name. A run that resumes tells the steps since its checkpoint again."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


def events_folder(output: str) -> str:
    """Where the events of the stage that builds `output` go.

    ``RUN/train/MARK`` gives ``RUN/tensorboard/train/MARK``, so that one TensorBoard shows a whole run.
    """
    run, stage, mark = output.rstrip("/").rsplit("/", 2)
    return fs.join(run, FOLDER, stage, mark)


def trackers(config: Tracking, folder: str, run_name: str) -> list[Tracker]:
    """Everyone that the config names, and TensorBoard. ConfigError when a package is missing for it."""
    found: list[Tracker] = []
    if config.wandb is not None:
        found.append(WandB(config.wandb, run_name))
    if config.mlflow is not None:
        found.append(MLflow(config.mlflow, run_name))
    return [TensorBoard(folder), *found]


class TensorBoard:
    """Event files in a folder; those of a remote one are written here and copied there."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._remote = "://" in folder
        self._local = tempfile.TemporaryDirectory() if self._remote else None
        self._writer: Any = None
        self._uploaded = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars; what an earlier, killed run wrote of this step and later ones is hidden."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # late: a second of imports

            target = self._local.name if self._local else self._folder
            # Events of steps from here on are those of a run that was killed after its last checkpoint.
            self._writer = SummaryWriter(target, purge_step=step, flush_secs=10)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        if self._remote and time.monotonic() - self._uploaded > _UPLOAD_EVERY:
            self._upload()

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._upload()
        if self._local:
            self._local.cleanup()

    def _upload(self) -> None:
        if self._local:
            self._writer.flush()
            for path in Path(self._local.name).iterdir():
                fs.upload(path, fs.join(self._folder, path.name))
            self._uploaded = time.monotonic()


class WandB:
    """A run of a Weights & Biases project; the same name goes on with the same run."""

    def __init__(self, project: str, run_name: str) -> None:
        wandb = _import("wandb", "tracking.wandb")
        identity = re.sub(r"[^\w-]", "-", run_name)
        # Their console capture and code upload are none of a training rank's business.
        settings = wandb.Settings(console="off", save_code=False, silent=True)
        self._run = wandb.init(project=project, name=run_name, id=identity, resume="allow", settings=settings)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of an MLflow experiment; the same name goes on with the same run.

    ``MLFLOW_TRACKING_URI`` says where it is kept.
    """

    def __init__(self, experiment: str, run_name: str) -> None:
        mlflow = _import("mlflow", "tracking.mlflow")
        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(experiment)
        where = found.experiment_id if found else self._client.create_experiment(experiment)
        name = run_name.replace("'", "")
        runs = self._client.search_runs([where], f"attributes.run_name = '{name}'", max_results=1)
        self._run = (runs[0] if runs else self._client.create_run(where, run_name=name)).info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step. A metric's name may not hold an @ there."""
        for name, value in values.items():
            self._client.log_metric(self._run, name.replace("@", "_at_"), value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


def _import(package: str, knob: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{knob} needs the package {package}: pip install 'scalingnote[track]' ({error})"
        ) from None
