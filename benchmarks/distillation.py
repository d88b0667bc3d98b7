"""Quality against cost of every query side, to choose one.

    python -m benchmarks.distillation --json docs/results/distillation.json

Every method is trained and measured by exact search on a dataset's quickstart sizes, for several seeds, on
towers from scratch and (encoders only) on MiniLM; methods that share stage I share its artifact. Quality:
means over seeds, with a two-sided paired t-test of success@50 per query against the teacher's. Cost: queries
per processor second of one thread, one query at a time, string in and embedding out, in the fastest form of
the saved folder. Finished trials are in ``--trials`` and are not repeated.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from benchmarks.report import show, write
from benchmarks.trial import Outcome, Side, Trial
from benchmarks.trials import require, run_given, trial_machines, trial_parser
from scalingnote.core.log import configure
from scalingnote.evaluate.measures import paired_t_test

LIGHTRETRIEVER = "lightretriever"  # reads single tokens after an instruction, which needs a decoder
METHODS = (
    *("scalingdual", "scalingnote-1l", "scalingnote-2l", "scalingnote-4l", "scalingnote-2l-corpus"),
    *("scalingdoc", "twinbert"),
    *("lookup-qkd", "lookup-qkd-attention", "lookup-qkd-attention-corpus"),
    *("lookup-qkd-hybrid", "lookup-qkd-hybrid-corpus"),
    LIGHTRETRIEVER,  # reports its dense, sparse and hybrid sides
    *("embeddistill-one-hot", "embeddistill-scores", "embeddistill-inherit", "embeddistill-matching"),
    *("embeddistill-only-matching", "embeddistill-symmetric-matching"),
)
TEACHER = "scalingdual"
SHOWN = ("R@1", "R@10", "R@50", "R@100", "nDCG@10")
STEPS = {"python_docs": 200}  # of stage I, from scratch; elsewhere 100
MINILM_STEPS, MINILM = 24, ("dataset.max_documents=3000",)
# Small batches: a student from scratch needs steps. A row of EmbedDistill has documents: fewer passes.
KNOBS = {"scalingnote": ("distill.global_batch=64",), "embeddistill": ("distill.epochs=3",)}
EQUAL = 1e-9  # a spread below it is rounding


class Row:
    """Results of one query side, by seed."""

    def __init__(self, sides: Mapping[int, Side]) -> None:
        speeds = [side.speed for side in sides.values() if side.speed is not None]
        self.sides = sides
        self.speed = max(speeds) if speeds else None  # slower ones were disturbed

    def mean(self, name: str) -> float:
        """Compute the mean over seeds."""
        return float(np.mean([side.measures[name] for side in self.sides.values()]))

    def spread(self, name: str) -> float:
        """Compute the standard deviation over seeds."""
        values = [side.measures[name] for side in self.sides.values()]
        return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0

    def shown(self, name: str) -> str:
        """Return the mean over seeds as text, with the standard deviation if seeds differ."""
        mean, spread = self.mean(name), self.spread(name)
        return f"{mean:.3f}" if spread < EQUAL else f"{mean:.3f} ± {spread:.3f}"

    def with_common_seeds(self, other: "Row") -> "tuple[Row, Row]":
        """Return this row and another, restricted to their common seeds."""
        both = self.sides.keys() & other.sides.keys()
        mine, theirs = (Row({seed: row.sides[seed] for seed in both}) for row in (self, other))
        return mine, theirs

    @property
    def success(self) -> Float[ndarray, " queries"]:
        """Success of each query, averaged over seeds."""
        return np.asarray(np.mean([side.success for side in self.sides.values()], axis=0))


def main() -> None:
    """Parse arguments, run, print and write."""
    parser = trial_parser(__doc__, datasets=["medquad", "python_docs"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument(
        "--backbones", nargs="+", choices=("scratch", "minilm"), default=["scratch", "minilm"]
    )
    options = parser.parse_args()
    configure()
    trials = [
        trial(dataset, backbone, method, seed, steps=options.steps, knobs=options.overrides)
        for dataset, backbone, method, seed in product(
            options.datasets, options.backbones, options.methods, range(options.seeds)
        )
        if backbone != "minilm" or not method.startswith(LIGHTRETRIEVER)
    ]
    outcomes = run_given(trials, options)
    sides_by_title = {
        f"{dataset}, {backbone}": rows(
            o for o in outcomes if (o.trial.dataset, o.trial.backbone) == (dataset, backbone)
        )
        for dataset, backbone in product(options.datasets, options.backbones)
    }
    sides_by_title = {title: sides for title, sides in sides_by_title.items() if TEACHER in sides}
    tables = {title: table(sides) for title, sides in sides_by_title.items()}
    for title, lines in tables.items():
        show(title, lines)
    write(options.json, metrics=metrics(sides_by_title), machine=trial_machines(outcomes), tables=tables)
    require(trials, outcomes, options)


def trial(
    dataset: str,
    backbone: str,
    method: str,
    seed: int,
    *,
    steps: int | None = None,
    knobs: Sequence[str] = (),
) -> Trial:
    """Return the trial of a method of ``configs/methods`` at the sizes of this benchmark."""
    pretrained = backbone == "minilm"
    usual = MINILM_STEPS if pretrained else STEPS.get(dataset, 100)
    of_method = KNOBS.get(method.split("-")[0], ())
    all_knobs = (*(MINILM if pretrained else ()), *of_method, *knobs)
    return Trial(dataset, backbone, f"methods/{method}", seed, steps or usual, all_knobs)


def rows(outcomes: Iterable[Outcome]) -> dict[str, Row]:
    """Return query side -> results over the seeds, from the first method that reports the side."""
    found: dict[str, dict[int, Side]] = {}
    for outcome in outcomes:
        for name, side in outcome.sides.items():
            found.setdefault(name, {}).setdefault(outcome.trial.seed, side)
    return {name: Row(by_seed) for name, by_seed in found.items()}


def table(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Return the rows of the printed table, the best R@50 first."""
    best = rows[TEACHER]
    lines = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1].mean("R@50")):
        line: dict[str, Any] = {
            "query side": name,
            "seeds": len(row.sides),
            "queries/s": "-" if row.speed is None else round(row.speed),
        }
        line |= {m: row.shown(m) for m in SHOWN}
        of_teacher, p = share(row, best), p_value(row, best)
        line["of the teacher's R@50"] = "-" if math.isnan(of_teacher) else f"{of_teacher:.1%}"
        line["p"] = "-" if row is best or math.isnan(p) else f"{p:.3f}"
        lines.append(line)
    return lines


def p_value(row: Row, best: Row) -> float:
    """Compute p of a two-sided paired t-test over queries of success@50; NaN without a common seed."""
    mine, theirs = row.with_common_seeds(best)
    if not mine.sides:
        return math.nan
    return float(paired_t_test((mine.success - theirs.success)[:, None])[0])


def share(row: Row, best: Row) -> float:
    """Return R@50 over the teacher's of the same seeds; NaN without a common seed."""
    mine, theirs = row.with_common_seeds(best)
    return mine.mean("R@50") / theirs.mean("R@50") if mine.sides else math.nan


def metrics(found: Mapping[str, Mapping[str, Row]]) -> dict[str, float]:
    """Return ratios of R@50, each from the table with the smallest.

    The best student over the teacher; the best query side without a model over the teacher, and over BM25.
    """
    best: dict[str, list[float]] = {}
    for rows in found.values():
        students = [row for name, row in rows.items() if name.startswith("scalingnote")]
        light = [row for name, row in rows.items() if is_light(name)]
        compared = [
            ("scalingnote_over_scalingdual_R50", students, rows[TEACHER]),
            ("lookup_best_over_scalingdual_R50", light, rows[TEACHER]),
            ("light_over_bm25_R50", light, rows.get("bm25")),
        ]
        for metric, sides, other in compared:
            shares = [share(side, other) for side in sides] if other is not None else []
            shares = [each for each in shares if not math.isnan(each)]
            if shares:
                best.setdefault(metric, []).append(max(shares))
    return {metric: round(min(values), 4) for metric, values in best.items()}


def is_light(name: str) -> bool:
    """Return whether a query of this row is looked up or counted, without a model."""
    tower, _, what = name.partition(" ")
    return tower.startswith("lookup") or tower == LIGHTRETRIEVER or what == "(sparse)"


if __name__ == "__main__":
    main()
