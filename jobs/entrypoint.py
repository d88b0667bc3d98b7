"""What the jobs share: read `--config` and `--set`, run one stage, print one JSON line about it.

The stages before it must be finished in the same `run_dir`, which every node of the cluster can reach.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if sys.path[0] == str(HERE):
    # `python jobs/encode.py` puts jobs/ on the path; the packages lie beside it.
    sys.path[0] = str(HERE.parent)


def main(stage: str, arguments: Sequence[str] | None = None) -> int:
    """Run `stage`; returns the exit code: 0 done, 2 wrong input."""
    parser = argparse.ArgumentParser(prog=f"jobs/{stage}.py", description=f"Run the stage {stage!r}.")
    parser.add_argument("--config", action="append", required=True, metavar="FILE", help="repeatable")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides")
    parser.add_argument("--round", type=int, metavar="N", help="of stage I, if it is not the last one")
    options = parser.parse_args(arguments)

    from scalingnote import pipeline
    from scalingnote.config import load
    from scalingnote.errors import ConfigError, ScalingNoteError
    from scalingnote.log import configure

    configure()
    try:
        config = load(pipeline.RunConfig, options.config, options.overrides)
        if (
            not os.path.isabs(config.run_dir)
            and "://" not in config.run_dir
            and _on_a_cluster(config.address)
        ):
            raise ConfigError(
                f"run_dir is {config.run_dir!r}, and a job's own directory vanishes with it: "
                "--set run_dir=... to a full path or a URI that every node reaches"
            )
        name = f"{stage}@{options.round}" if options.round is not None else stage
        built = pipeline.run(config, pipeline.select(config, only=name))
    except ScalingNoteError as error:
        if os.environ.get("SCALINGNOTE_DEBUG") == "1":
            raise
        # Ray wraps an error of a remote task together with its traceback; the cause is the error itself.
        print(f"{stage}: {getattr(error, 'cause', error)}", file=sys.stderr)
        return 2
    ((kind, artifact),) = built.items()
    line = {
        "stage": stage,
        "kind": kind,
        "uri": artifact.uri,
        "digest": artifact.digest,
        "counts": artifact.counts,
    }
    print(json.dumps(line), flush=True)
    return 0


def _on_a_cluster(address: str | None) -> bool:
    return bool(address or os.environ.get("RAY_ADDRESS"))  # Ray sets it inside every job
