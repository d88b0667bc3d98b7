"""What the jobs share: read `--config` and `--set`, run one stage, print one JSON line about it.

The stages before it must be finished in the same `run_dir`, which every node of the cluster can reach.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalingnote.run_config import RunConfig
    from scalingnote.storage.artifact import Artifact

HERE = Path(__file__).resolve().parent
if sys.path[0] == str(HERE):
    # `python jobs/encode.py` puts jobs/ on the path; the packages lie beside it.
    sys.path[0] = str(HERE.parent)


def main(stage: str, arguments: Sequence[str] | None = None) -> int:
    """Run `stage`; returns the exit code: 0 done, 2 wrong input."""
    parser = _parser(stage, f"Run the stage {stage!r}.")
    parser.add_argument("--round", type=int, metavar="N", help="of stage I, if it is not the last one")
    options = parser.parse_args(arguments)

    def work() -> "tuple[str, Artifact]":
        from scalingnote import pipeline, stages

        config = _run_config(options)
        name = f"{stage}@{options.round}" if options.round is not None else stage
        ((kind, artifact),) = pipeline.run(config, stages.select(config, only=name)).items()
        return kind, artifact

    return _ended(stage, work)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the stages of a config in order, except finished ones; after a kill the same job resumes."""
    parser = _parser("run", "Run the stages of a config.")
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage")
    options = parser.parse_args(arguments)

    def work() -> "tuple[str, Artifact]":
        from scalingnote import pipeline, stages

        config = _run_config(options)
        built = pipeline.run(config, stages.select(config, until=options.until))
        return list(built.items())[-1]

    return _ended("run", work)


def experiment(arguments: Sequence[str] | None = None) -> int:
    """Compare the arms of an experiment, which is no stage: it has a config of its own."""
    options = _parser("experiment", "Compare the arms of an experiment.").parse_args(arguments)

    def work() -> "tuple[str, Artifact]":
        from scalingnote import pipeline
        from scalingnote.config import load
        from scalingnote.experiment.config import ExperimentConfig

        config = load(ExperimentConfig, options.config, options.overrides)
        _check_place(config.run_dir, None)
        return "experiment", pipeline.experiment(config)

    return _ended("experiment", work)


def ladder(arguments: Sequence[str] | None = None) -> int:
    """Train stage I at several sizes, which is many runs of one stage, and fit the scaling laws."""
    options = _parser("ladder", "Train stage I at several sizes and fit the scaling laws.").parse_args(
        arguments
    )

    def work() -> "tuple[str, Artifact]":
        from scalingnote import pipeline

        config = _run_config(options)
        return "ladder", pipeline.ladder(config)

    return _ended("ladder", work)


def ingest(arguments: Sequence[str] | None = None) -> int:
    """Take in new documents, which is no stage: its config is that of the last run in a directory."""
    parser = argparse.ArgumentParser(prog="jobs/ingest.py", description="Take in new documents.")
    parser.add_argument("file", help="JSON lines or Parquet: doc_id, title, topic, content, features")
    parser.add_argument("--run", required=True, metavar="DIR", help="a finished run")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides")
    options = parser.parse_args(arguments)

    def work() -> "tuple[str, Artifact]":
        from scalingnote import pipeline
        from scalingnote.config import load
        from scalingnote.encode.config import IngestConfig

        config = load(IngestConfig, [], options.overrides)
        return "ready", pipeline.ingest(config, options.file, run_dir=options.run)

    return _ended("ingest", work)


def _run_config(options: argparse.Namespace) -> "RunConfig":
    from scalingnote.config import load
    from scalingnote.run_config import RunConfig

    config = load(RunConfig, options.config, options.overrides)
    _check_place(config.run_dir, config.address)
    return config


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"jobs/{name}.py", description=text)
    parser.add_argument("--config", action="append", required=True, metavar="FILE", help="repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides")
    return parser


def _ended(name: str, work: "Callable[[], tuple[str, Artifact]]") -> int:
    """Do the work; print a JSON line about the artifact, or the error of the input."""
    from scalingnote.errors import ScalingNoteError
    from scalingnote.log import configure

    configure()
    try:
        kind, artifact = work()
    except ScalingNoteError as error:
        if os.environ.get("SCALINGNOTE_DEBUG") == "1":
            raise
        # Ray wraps an error of a remote task together with its traceback; the cause is the error itself.
        print(f"{name}: {getattr(error, 'cause', error)}", file=sys.stderr)
        return 2
    line = {
        "stage": name,
        "kind": kind,
        "uri": artifact.uri,
        "digest": artifact.digest,
        "counts": artifact.counts,
    }
    print(json.dumps(line), flush=True)
    return 0


def _check_place(run_dir: str, address: str | None) -> None:
    from scalingnote.errors import ConfigError

    if not os.path.isabs(run_dir) and "://" not in run_dir and _on_a_cluster(address):
        raise ConfigError(
            f"run_dir is {run_dir!r}, and a job's own directory vanishes with it: "
            "--set run_dir=... to a full path or a URI that every node reaches"
        )


def _on_a_cluster(address: str | None) -> bool:
    return bool(address or os.environ.get("RAY_ADDRESS"))  # Ray sets it inside every job
