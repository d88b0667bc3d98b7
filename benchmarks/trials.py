"""Many trials: those that are not finished are run, beside one another, and each leaves a line.

    trials ─► groups that share stage I ─► one process each ─► a line of JSON a trial ─► tables

A trial that has its line is not run again, so hours of them may be interrupted, and added to, at any time. A
line is known by its method's name: whoever changes what a method does removes its lines.
What a query costs is processor time of one thread: trials run beside one another.
"""

import argparse
import base64
import json
import multiprocessing
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from benchmarks import report
from benchmarks.trial import TESTED, Outcome, Side, Trial, configured, run, stage_one
from scalingnote.errors import ScalingNoteError
from scalingnote.log import configure, get_logger

log = get_logger("trials")


def given(description: str | None, *, datasets: Sequence[str] | None) -> argparse.ArgumentParser:
    """A parser of what every benchmark that is made of trials asks for; `datasets` are the default ones."""
    parser = report.arguments(description)
    parser.add_argument("--datasets", nargs="+", default=datasets)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of stage I; default: by dataset and backbone")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    parser.add_argument("--trials", type=Path, default=Path("runs/trials.jsonl"))
    parser.add_argument("--run-dir", default="runs/trials")
    parser.add_argument(
        "--processes", type=int, default=2, help="trials at the same time, a thread each; 1: in their order"
    )
    parser.add_argument(
        "--finished", action="store_true", help="tables of the trials that are there; run none"
    )
    return parser


def run_given(trials: Sequence[Trial], options: argparse.Namespace) -> list[Outcome]:
    """:func:`run_all` as the options of :func:`given` want it. SystemExit when there is nothing to show."""
    processes = 0 if options.finished else options.processes
    found = run_all(trials, options.trials, run_dir=options.run_dir, processes=processes)
    if not found:
        why = f"is in {options.trials}: give --trials FILE" if options.finished else "ended well: see above"
        raise SystemExit(f"none of {len(trials)} trials {why}")
    return found


def require(trials: Sequence[Trial], found: Sequence[Outcome], options: argparse.Namespace) -> None:
    """SystemExit when some that were to be run have failed."""
    if len(found) < len(trials) and not options.finished:
        raise SystemExit(f"{len(trials) - len(found)} of {len(trials)} trials failed: see above")


def run_all(trials: Sequence[Trial], path: Path, *, run_dir: str, processes: int) -> list[Outcome]:
    """Every trial's outcome, in their order; those that `path` has no line of are run now.

    A trial that fails is told, leaves no line and is missing from the answer; the others run. Without
    processes none is run, and what is not there is missing.
    """
    done = {outcome.trial for outcome in read(path)}
    left = [trial for trial in trials if trial not in done]
    log.info("%d trials, %d of them in %s", len(trials), len(trials) - len(left), path)
    if left and processes:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of the processes below: a thread each, and float32 also on CPUs that have tiles for bfloat16.
        os.environ |= {"OMP_NUM_THREADS": "1", "SCALINGNOTE_PRECISION": "float32"}
        spawn, parent = multiprocessing.get_context("spawn"), (os.getpid(),)
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_end_with, initargs=parent) as pool:
            groups = [[trial] for trial in left]  # a single process builds nothing twice
            if processes > 1:
                # What all trials on the same data share is built once, before they start.
                firsts = {(trial.dataset, _before_stage_two(trial)): trial for trial in left}.values()
                list(pool.map(_collect, firsts, repeat(run_dir)))  # of what fails here, trials tell again
                groups = _groups(left)
            list(pool.map(_group, groups, repeat(path), repeat(run_dir)))
    found = {outcome.trial: outcome for outcome in read(path)}
    return [found[trial] for trial in trials if trial in found]


def read(path: Path) -> list[Outcome]:
    """Finished trials of a file; none where there is no file."""
    if not path.exists():
        return []
    return [_parse(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def trial_machines(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is known of the machines of trials, by name: a value, or those of several machines in a row."""
    found: dict[str, dict[Any, None]] = {}
    for outcome in outcomes:
        for name, value in outcome.environment.items():
            found.setdefault(name, {})[value] = None
    return {
        name: next(iter(values)) if len(values) == 1 else ", ".join(str(value) for value in values)
        for name, values in found.items()
    }


def add(source: Path, target: Path) -> None:
    """Put the trials of one file among those of another, in the place of the same trials there."""
    files = (path.read_text(encoding="utf-8").splitlines() for path in (target, source) if path.exists())
    lines = {json.dumps(json.loads(line)["trial"]): line for found in files for line in found}
    target.write_text("".join(f"{line}\n" for line in lines.values()), encoding="utf-8")


def _end_with(parent: int) -> None:
    """A process of the pool would work on, for hours, after its parent was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Trials that share stage I's artifact: never built by two processes at once.

    One seed after another, and in it the largest group first: what is short fills the processes at the end.
    """
    groups = [list(group) for _, group in groupby(sorted(trials, key=_shared), key=_shared)]
    return sorted(groups, key=lambda group: (group[0].seed, -len(group)))


def _shared(trial: Trial) -> tuple[Any, ...]:
    before = _before_stage_two(trial)
    learns = stage_one(trial.dataset, trial.method, before)
    return trial.seed, trial.dataset, trial.backbone, trial.steps, before, learns


def _before_stage_two(trial: Trial) -> tuple[str, ...]:
    return tuple(knob for knob in trial.knobs if not knob.startswith("distill."))


def _collect(trial: Trial, run_dir: str) -> None:
    configure()
    with _told(trial):
        configured(trial, run_dir=run_dir)


@contextmanager
def _told(trial: Trial) -> Iterator[None]:
    """What goes wrong is told: the others still run."""
    try:
        yield
    except ScalingNoteError as error:
        log.error("%s: %s", trial.key, error)
    except Exception:  # a fault of ours, or a Ray that did not start
        log.exception("%s", trial.key)


def _group(trials: Sequence[Trial], path: Path, run_dir: str) -> None:
    configure()
    for trial in trials:
        with _told(trial):
            outcome = run(trial, run_dir=run_dir)
            with path.open("a", encoding="utf-8") as lines:  # one write: other processes append, too
                lines.write(_line(outcome))
            best = {
                name: f"R@{TESTED} {side.measures[f'R@{TESTED}']:.3f}" for name, side in outcome.sides.items()
            }
            log.info("%s: %s, %.0f s", trial.key, best, outcome.seconds)


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
    said = {
        "trial": asdict(outcome.trial),
        "sides": sides,
        "validation": outcome.validation,
        "seconds": round(outcome.seconds, 1),
        "environment": outcome.environment,
    }
    return json.dumps(said) + "\n"


def _parse(line: dict[str, Any]) -> Outcome:
    sides = {
        name: Side(
            said["measures"],
            np.unpackbits(np.frombuffer(bytes.fromhex(said["success"]), np.uint8))[: said["queries"]].astype(
                float
            ),
            said["speed"],
            _unpacked(said["gains"]) if "gains" in said else None,
        )
        for name, said in line["sides"].items()
    }
    trial = Trial(**line["trial"] | {"knobs": tuple(line["trial"]["knobs"])})
    return Outcome(trial, sides, line["validation"], line["seconds"], line["environment"])


def _packed(gains: Float[ndarray, " queries"]) -> str:
    """Values in [0, 1] in steps of 1/255."""
    steps = np.round(gains * 255).astype(np.uint8)
    return base64.b85encode(zlib.compress(steps.tobytes(), 9)).decode()


def _unpacked(gains: str) -> Float[ndarray, " queries"]:
    found: ndarray = np.frombuffer(zlib.decompress(base64.b85decode(gains)), np.uint8) / 255
    return found
