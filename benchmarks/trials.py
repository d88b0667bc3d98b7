"""Trials: a method is trained on a dataset with a seed, and every query side it gives is searched exactly.

    trials ─► groups that share stage I ─► one process each ─► a line of JSON a trial ─► tables

A trial that has its line is not run again, so hours of them may be interrupted, and added to, at any time.
What a query costs is processor time of one thread: trials run beside one another.
"""

import argparse
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from benchmarks import minilm, report, training
from scalingnote import pipeline, stages
from scalingnote.config import load
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.errors import ScalingNoteError
from scalingnote.evaluate import retrieve, taught
from scalingnote.evaluate.encoded import Encoded
from scalingnote.evaluate.given import judged
from scalingnote.evaluate.lineage import lineage
from scalingnote.evaluate.pairs import aucs
from scalingnote.evaluate.retrieval import per_query
from scalingnote.evaluate.test_set import load_test_set
from scalingnote.log import configure, environment, get_logger
from scalingnote.models.sparse_query import SparseQuery
from scalingnote.run_config import RunConfig
from scalingnote.storage.artifact import Artifact

DEPTHS = (1, 5, 10, 20, 50, 100)
TESTED = 50  # depth of the success that t-tests compare
CPU_SECONDS = 1.0  # of timing a query side
TAUGHT = 2_000  # queries over which a student's distance to its teacher is taken
READ = ("dataset", "embeddings", "dual_encoder", "student", "teacher_embeddings")
KEPT = ("python", "torch", "transformers", "processor", "cpus")
log = get_logger("trials")


@dataclass(frozen=True)
class Trial:
    """One training: `method` is a file of configs/, `steps` are those of stage I."""

    dataset: str
    backbone: str
    method: str
    seed: int
    steps: int
    knobs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What tells it from all others."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Side:
    """What one query side finds, and what a query costs."""

    measures: dict[str, float]
    success: Float[ndarray, " queries"]  # whether a relevant document is among the first TESTED
    speed: float | None = None  # queries per processor second, one at a time; None: not ours to time


@dataclass(frozen=True)
class Outcome:
    """A finished trial: its query sides by their names in reports, and stage I's validation."""

    trial: Trial
    sides: dict[str, Side]
    validation: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)


def given(description: str | None, *, datasets: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of what every benchmark that is made of trials asks for."""
    parser = report.arguments(description)
    parser.add_argument("--datasets", nargs="+", default=datasets)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of stage I; default: by dataset and backbone")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    parser.add_argument("--trials", type=Path, default=Path("runs/trials.jsonl"))
    parser.add_argument("--run-dir", default="runs/trials")
    parser.add_argument("--processes", type=int, default=2, help="trials at the same time, a thread each")
    parser.add_argument(
        "--finished", action="store_true", help="tables of the trials that are there; run none"
    )
    return parser


def run_given(trials: Sequence[Trial], options: argparse.Namespace) -> list[Outcome]:
    """:func:`run_all` as the options of :func:`given` want it."""
    processes = 0 if options.finished else options.processes
    return run_all(trials, options.trials, run_dir=options.run_dir, processes=processes)


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
        os.environ["OMP_NUM_THREADS"] = "1"  # of the processes below
        spawn, parent = multiprocessing.get_context("spawn"), (os.getpid(),)
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_end_with, initargs=parent) as pool:
            # What all trials on the same data share is built once, before they start.
            firsts = {(trial.dataset, _before_stage_two(trial)): trial for trial in left}.values()
            list(pool.map(_collect, firsts, repeat(run_dir)))
            list(pool.map(_group, _groups(left), repeat(path), repeat(run_dir)))
    found = {outcome.trial: outcome for outcome in read(path)}
    return [found[trial] for trial in trials if trial in found]


def read(path: Path) -> list[Outcome]:
    """Finished trials of a file; none where there is no file."""
    if not path.exists():
        return []
    return [_parse(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def run(trial: Trial, *, run_dir: str) -> Outcome:
    """Train, encode, search; what is finished in `run_dir` is not built again."""
    started = time.monotonic()
    config = configured(trial, run_dir=run_dir)
    names = [stage.name for stage in stages.of(config)]
    last = names[names.index("quantize") - 1]
    built = pipeline.run(config, stages.select(config, until=last), record=False)
    if "encode_student" in names:
        first = pipeline.run(config, stages.select(config, until="encode"), record=False)
        built["teacher_embeddings"] = first["embeddings"]
    history = built["dual_encoder"].read_json("validation.json") if "dual_encoder" in built else []
    validation = {name: value for name, value in history[-1].items() if name != "step"} if history else {}
    kept = {name: value for name, value in environment().items() if name in KEPT}
    return Outcome(trial, _sides(config, built), validation, time.monotonic() - started, kept)


def configured(trial: Trial, *, run_dir: str) -> RunConfig:
    """The config of a trial, with as many epochs of stage I as give its steps; collects its triplets."""
    files = [f"configs/quickstart/{trial.dataset}.yaml", f"configs/{trial.method}.yaml"]
    plain = load(RunConfig, files)
    # Short runs in this process: half of their time would be the start of Ray's workers.
    knobs = [f"run_dir={run_dir}", f"train.seed={trial.seed}"]
    if plain.distill is not None:
        knobs += [f"distill.seed={trial.seed}", "distill.resources.workers=0"]
    if trial.backbone == "minilm":
        knobs += minilm.overrides(plain)
    config = load(RunConfig, files, [*knobs, *trial.knobs])
    pipeline.run(config, stages.select(config, until="collect"), record=False)
    return training.shortened(config, steps=trial.steps)


def _sides(config: RunConfig, built: Mapping[str, Artifact]) -> dict[str, Side]:
    """Every query side but a student's teacher, which has a trial of its own, and BM25 beside stage I."""
    parents = {kind: artifact for kind, artifact in built.items() if kind in READ}
    test = load_test_set(parents["dataset"])
    teacher = taught.sample(lineage(parents.values()), queries=TAUGHT, seed=0) if "student" in parents else {}
    texts = list(
        dict.fromkeys([*test.queries, *(query for one in teacher.values() for query in one.queries)])
    )
    encoded = {}
    for name, kind in retrieve.towers(config.evaluate, parents).items():
        tower = QueryEncoder.load(parents[kind].directory("query"), threads=1)
        encoded[name] = Encoded(texts, tower.encode_queries(texts))
    bm25 = retrieve.Words.build(config.evaluate, parents) if config.distill is None else None
    pairs = judged(test)
    graded = (
        aucs(pairs, retrieve.scorers(config.evaluate, parents, encoded, bm25))["methods"] if pairs else {}
    )
    found = {}
    for name, ranked in retrieve.retrieve(config.evaluate, parents, encoded, bm25, test=test).items():
        if config.distill is not None and name == config.evaluate.names.dual_encoder:
            continue
        rankings = {query: [doc for doc, _ in results] for query, results in ranked.items()}
        values = per_query(rankings, test.qrels, recall_at=DEPTHS, mrr_at=10, map_at=100, ndcg_at=10)
        measures = {measure: float(each.mean()) for measure, each in values.items()} | graded.get(name, {})
        if teacher and name == config.evaluate.names.student:
            for split, told in taught.told(teacher, encoded[name])["splits"].items():
                measures[f"distance {split}"] = told["mean"]
        measures = {measure: round(value, 5) for measure, value in measures.items() if value is not None}
        speed = None if name == "bm25" else _speed(config, name, parents, test.queries)
        found[name] = Side(measures, values[f"R@{TESTED}"], speed)
    return found


def _speed(config: RunConfig, name: str, parents: Mapping[str, Artifact], queries: Sequence[str]) -> float:
    """Queries per processor second of this thread, one at a time: string in, embedding and terms out."""
    tower, _, how = name.partition(" ")
    kind = retrieve.towers(config.evaluate, parents)[tower]
    ways: list[Callable[[list[str]], Any]] = []
    if how != "(sparse)":
        ways.append(QueryEncoder.load(parents[kind].directory("query"), threads=1).encode_queries)
    if how in ("(sparse)", "(hybrid)"):
        ways.append(SparseQuery.load(parents["dual_encoder"].directory("sparse_query")).encode)
    for query in queries[:20]:
        for way in ways:
            way([query])
    start, count = time.process_time(), 0
    while time.process_time() - start < CPU_SECONDS:
        for way in ways:
            way([queries[count % len(queries)]])
        count += 1
    return count / (time.process_time() - start)


def _end_with(parent: int) -> None:
    """A process of the pool would work on, for hours, after its parent was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _groups(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Trials that may share stage I's artifact: never built by two processes at once."""
    return [list(group) for _, group in groupby(sorted(trials, key=_shared), key=_shared)]


def _shared(trial: Trial) -> tuple[Any, ...]:
    return trial.seed, trial.dataset, trial.backbone, trial.steps, _before_stage_two(trial)


def _before_stage_two(trial: Trial) -> tuple[str, ...]:
    return tuple(knob for knob in trial.knobs if not knob.startswith("distill."))


def _collect(trial: Trial, run_dir: str) -> None:
    configure()
    configured(trial, run_dir=run_dir)


def _group(trials: Sequence[Trial], path: Path, run_dir: str) -> None:
    configure()
    for trial in trials:
        try:
            outcome = run(trial, run_dir=run_dir)
        except ScalingNoteError as error:
            log.error("%s: %s", trial.key, error)
            continue
        except Exception:  # a fault of ours, or a Ray that did not start: the others still run
            log.exception("%s", trial.key)
            continue
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
        )
        for name, said in line["sides"].items()
    }
    trial = Trial(**line["trial"] | {"knobs": tuple(line["trial"]["knobs"])})
    return Outcome(trial, sides, line["validation"], line["seconds"], line["environment"])
