"""What the jobs of a cluster start: read `--config` and `--set`, run one stage, print one JSON line about it.

    python -m scalingnote.entrypoint encode --config FILE     the same as python jobs/encode.py --config FILE

The stages before it must be finished in the same `run_dir`, which every node of the cluster can reach.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from scalingnote import pipeline, stages
from scalingnote.config import load
from scalingnote.encode.config import IngestConfig
from scalingnote.errors import ConfigError, ScalingNoteError
from scalingnote.experiment.config import ExperimentConfig
from scalingnote.log import configure
from scalingnote.run_config import RunConfig
from scalingnote.storage.artifact import Artifact


def main(stage: str, arguments: Sequence[str] | None = None) -> int:
    """Run `stage`; returns the exit code: 0 done, 2 wrong input."""
    parser = _parser(stage, f"Run the stage {stage!r}.")
    parser.add_argument("--round", type=int, metavar="N", help="of stage I, if it is not the last one")
    options = parser.parse_args(arguments)
    name = stage if options.round is None else f"{stage}@{options.round}"
    return _report(stage, lambda: _run(options, only=name))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the stages of a config in order, except finished ones; after a kill the same job resumes."""
    parser = _parser("run", "Run the stages of a config.")
    parser.add_argument("--until", metavar="STAGE", help="stop after this stage")
    options = parser.parse_args(arguments)
    return _report("run", lambda: _run(options, until=options.until))


def experiment(arguments: Sequence[str] | None = None) -> int:
    """Compare the arms of an experiment, which is no stage: it has a config of its own."""
    options = _parser("experiment", "Compare the arms of an experiment.").parse_args(arguments)

    def work() -> Artifact:
        config = load(ExperimentConfig, options.config, options.overrides)
        _check_run_dir(config.run_dir, None)
        return pipeline.experiment(config)

    return _report("experiment", work)


def ladder(arguments: Sequence[str] | None = None) -> int:
    """Train stage I at several sizes, which is many runs of one stage, and fit the scaling laws."""
    parser = _parser("ladder", "Train stage I at several sizes and fit the scaling laws.")
    options = parser.parse_args(arguments)
    return _report("ladder", lambda: pipeline.ladder(_run_config(options)))


def ingest(arguments: Sequence[str] | None = None) -> int:
    """Take in new documents, which is no stage: its config is that of the last run in a directory."""
    parser = argparse.ArgumentParser(prog="jobs/ingest.py", description="Take in new documents.")
    parser.add_argument("file", help="JSON lines or Parquet: doc_id, title, topic, content, features")
    parser.add_argument("--run", required=True, metavar="DIR", help="a finished run")
    _add_set(parser)
    options = parser.parse_args(arguments)

    def work() -> Artifact:
        config = load(IngestConfig, [], options.overrides)
        return pipeline.ingest(config, options.file, run_dir=options.run)

    return _report("ingest", work)


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"jobs/{name}.py", description=text)
    parser.add_argument("--config", action="append", required=True, metavar="FILE", help="repeatable")
    _add_set(parser)
    return parser


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides")


def _run(options: argparse.Namespace, **chosen: str | None) -> Artifact:
    """Run the chosen stages; the artifact of the last."""
    config = _run_config(options)
    return list(pipeline.run(config, stages.select(config, **chosen)).values())[-1]


def _run_config(options: argparse.Namespace) -> RunConfig:
    config = load(RunConfig, options.config, options.overrides)
    _check_run_dir(config.run_dir, config.address)
    return config


def _check_run_dir(run_dir: str, address: str | None) -> None:
    on_a_cluster = address or os.environ.get("RAY_ADDRESS")  # Ray sets it inside every job
    if on_a_cluster and "://" not in run_dir and not os.path.isabs(run_dir):
        raise ConfigError(
            f"run_dir is {run_dir!r}, and a job's own directory vanishes with it: "
            "--set run_dir=... to a full path or a URI that every node reaches"
        )


def _report(name: str, work: Callable[[], Artifact]) -> int:
    """Do the work; print a JSON line about the artifact, or the error of the input."""
    configure()
    try:
        artifact = work()
    except ScalingNoteError as error:
        if os.environ.get("SCALINGNOTE_DEBUG") == "1":
            raise
        # Ray wraps an error of a remote task together with its traceback; the cause is the error itself.
        print(f"{name}: {getattr(error, 'cause', error)}", file=sys.stderr)
        return 2
    line = {
        "stage": name,
        "kind": artifact.manifest.kind,
        "uri": artifact.uri,
        "digest": artifact.digest,
        "counts": artifact.counts,
    }
    print(json.dumps(line), flush=True)
    return 0


OTHERS = {"run": run, "experiment": experiment, "ladder": ladder, "ingest": ingest}  # than one stage


if __name__ == "__main__":
    name, *given = sys.argv[1:] or ["run", "--help"]
    sys.exit(OTHERS[name](given) if name in OTHERS else main(name, given))
