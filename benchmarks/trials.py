"""Many trials, one after the other: each finished trial appends a line of JSON.

A trial with a line is not repeated, so hours of trials may be interrupted, and more added later. The method's
name identifies a trial: remove the lines of a method after a change of its behaviour. Trials with the same
stage I share its artifacts in --run-dir.
"""

import argparse
import base64
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from benchmarks import report
from benchmarks.trial import TESTED, Outcome, Side, Trial, run
from scalingnote.core.errors import ScalingNoteError
from scalingnote.core.log import get_logger

log = get_logger("trials")


def trial_parser(description: str | None, *, datasets: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark that consists of trials."""
    parser = report.arguments(description)
    parser.add_argument("--datasets", nargs="+", default=datasets)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of stage I; default: by dataset and backbone")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    parser.add_argument("--trials", type=Path, default=Path("runs/trials.jsonl"))
    parser.add_argument("--run-dir", default="runs/trials")
    parser.add_argument("--finished", action="store_true", help="only tables of finished trials; run none")
    return parser


def run_given(trials: Sequence[Trial], options: argparse.Namespace) -> list[Outcome]:
    """Run unfinished trials with the options of :func:`trial_parser`; return outcomes in this order.

    A failed trial has no line and no outcome; the others run. SystemExit if none is finished.
    """
    finished_trials = {outcome.trial for outcome in read(options.trials)}
    remaining = [] if options.finished else [trial for trial in trials if trial not in finished_trials]
    log.info("%d trials to run, %d lines in %s", len(remaining), len(finished_trials), options.trials)
    os.environ["SCALINGNOTE_PRECISION"] = "float32"  # also on CPUs with matrix units for bfloat16
    for trial in remaining:
        _run_one(trial, options.trials, options.run_dir)
    outcomes = {outcome.trial: outcome for outcome in read(options.trials)}
    finished = [outcomes[trial] for trial in trials if trial in outcomes]
    if not finished:
        raise SystemExit(f"none of {len(trials)} trials is in {options.trials}: run without --finished")
    return finished


def require(trials: Sequence[Trial], finished: Sequence[Outcome], options: argparse.Namespace) -> None:
    """Raise SystemExit if a required trial failed."""
    if len(finished) < len(trials) and not options.finished:
        raise SystemExit(f"{len(trials) - len(finished)} of {len(trials)} trials failed: see above")


def read(path: Path) -> list[Outcome]:
    """Return the finished trials of a file; none if there is no file."""
    if not path.exists():
        return []
    return [_parse(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def trial_machines(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the facts of the machines of trials: by name a value, or several joined by commas."""
    values: dict[str, dict[Any, None]] = {}
    for outcome in outcomes:
        for name, value in outcome.environment.items():
            values.setdefault(name, {})[value] = None
    return {
        name: next(iter(distinct)) if len(distinct) == 1 else ", ".join(map(str, distinct))
        for name, distinct in values.items()
    }


def _run_one(trial: Trial, path: Path, run_dir: str) -> None:
    try:
        outcome = run(trial, run_dir=run_dir)
    except ScalingNoteError as error:
        log.error("%s: %s", trial.key, error)
        return
    except Exception:  # a fault of the benchmark, or a Ray that did not start
        log.exception("%s", trial.key)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:  # one write: another command may append, too
        lines.write(_line(outcome))
    best = {name: side.measures[f"R@{TESTED}"] for name, side in outcome.sides.items()}
    log.info("%s: R@%d %s, %.0f s", trial.key, TESTED, best, outcome.seconds)


def _line(outcome: Outcome) -> str:
    sides = {
        name: {
            "measures": side.measures,
            "queries": len(side.success),
            "success": np.packbits(side.success > 0).tobytes().hex(),
            "speed": None if side.speed is None else float(f"{side.speed:.3g}"),
        }
        | ({} if side.gains is None else {"gains": _packed(side.gains)})
        for name, side in outcome.sides.items()
    }
    record = {
        "trial": asdict(outcome.trial),
        "sides": sides,
        "seconds": round(outcome.seconds, 1),
        "environment": outcome.environment,
    }
    return json.dumps(record) + "\n"


def _parse(line: dict[str, Any]) -> Outcome:
    sides = {
        name: Side(
            fields["measures"],
            np.unpackbits(np.frombuffer(bytes.fromhex(fields["success"]), np.uint8))[
                : fields["queries"]
            ].astype(float),
            fields["speed"],
            _unpacked(fields["gains"]) if "gains" in fields else None,
        )
        for name, fields in line["sides"].items()
    }
    trial = Trial(**line["trial"] | {"knobs": tuple(line["trial"]["knobs"])})
    return Outcome(trial, sides, line["seconds"], line["environment"])


def _packed(gains: Float[ndarray, " queries"]) -> str:
    """Compress values in [0, 1] in steps of 1/255."""
    steps = np.round(gains * 255).astype(np.uint8)
    return base64.b85encode(zlib.compress(steps.tobytes(), 9)).decode()


def _unpacked(gains: str) -> Float[ndarray, " queries"]:
    found: ndarray = np.frombuffer(zlib.decompress(base64.b85decode(gains)), np.uint8) / 255
    return found
