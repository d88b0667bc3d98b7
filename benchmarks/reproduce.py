"""The tables of three papers in small: what holds on public data and what does not.

    python -m benchmarks.reproduce --json docs/results/reproduce.json --trials docs/results/trials.jsonl
    python -m benchmarks.reproduce --backbones smollm minilm --processes 1 --trials docs/results/trials.jsonl

From random weights (`scratch`), at three sizes of training:

    ScalingNote, Tables 3 and 4   methods by training size: AUC over judged pairs where there are any; recall
    ScalingNote, Table 5          the prompt without its title's loss, without its summary
    ScalingNote, Table 6          students of 1, 2 and 4 layers: recall, distance to the teacher, queries/s
    LightRetriever, Table 2       dense, sparse and hybrid beside the whole model in both towers
    EmbedDistill, Table 1         a student trained directly, then with one component after another

Sizes are stage I's steps: small a quarter and median half of large's. Means over seeds; a star marks a paired
two-sided t-test over queries, of success@50 averaged over seeds, against the row that the paper compares
with: p < 0.05 after Holm's correction for all rows of the table. With pretrained towers (`smollm`, `minilm`):
the tables of benchmarks/pretrained.py. Finished trials (benchmarks/trials.py) are not run again: interrupt
it, and start it again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks import distillation, pretrained, pretrained_plot, pretrained_tables
from benchmarks.distillation import Row
from benchmarks.report import show, write
from benchmarks.trial import Outcome, Trial
from benchmarks.trials import given, require, run_given, trial_machines
from scalingnote.experiment.report import holm
from scalingnote.log import configure

DATASETS = (
    *("medquad", "python_docs", "stackexchange_devops"),
    *("chorus_icecat", "zh_reading_titles", "zh_medical_qa"),
)
SIZES = {"small": 0.25, "median": 0.5, "large": 1.0}
BY_SIZE = ("twinbert", "scalingdoc", "scalingnote-2l", "scalingdual")
STUDENTS = ("scalingnote-1l", "scalingnote-2l", "scalingnote-4l")
PROMPTS = ("scalingdual", "without_title_loss", "without_summary")
LADDER = (
    *("embeddistill-one-hot", "embeddistill-scores", "embeddistill-inherit", "embeddistill-matching"),
    "embeddistill-only-matching",
)
LIGHT = ("scalingdual", "lightretriever", "lightretriever (sparse)", "lightretriever (hybrid)")
RECALLS = ("R@1", "R@10", "R@50", "R@100", "nDCG@10")
AUC = "AUC-relevance"
SIGNIFICANT = 0.05
Found = Mapping[tuple[str, str], Mapping[str, Row]]  # by dataset and size: query side -> what it gave


def main() -> None:
    """Parse arguments, run what is missing, print and write."""
    parser = given(__doc__, datasets=None)
    kinds = ("scratch", *pretrained.BACKBONES)
    usual = "default: those for CPUs; with --finished all"
    parser.add_argument("--backbones", nargs="+", choices=kinds, help=usual)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw quality against cost, pretrained")
    options = parser.parse_args()
    configure()
    if options.backbones is None:
        there = options.finished
        options.backbones = [name for name in kinds if there or not name.endswith(pretrained.ON_GPU)]
    wanted = {
        (dataset, size): [
            trial(dataset, size, method, seed, steps=options.steps, knobs=options.overrides)
            for method, seed in product(methods(size), range(options.seeds))
        ]
        for dataset, size in product(options.datasets or DATASETS, SIZES)
        if "scratch" in options.backbones
    }
    others = pretrained.trials(
        options.datasets or pretrained.DATASETS,
        options.backbones,
        seeds=options.seeds,
        steps=options.steps,
        knobs=options.overrides,
    )
    trials = [*(one for some in wanted.values() for one in some), *others]
    outcomes = run_given(trials, options)
    found = by_size(wanted, outcomes)
    tables = {
        "ScalingNote, Table 3: AUC over judged pairs": table_3(found),
        "ScalingNote, Table 4: recall by training size": table_4(found),
        "ScalingNote, Table 5: prompts": table_5(found),
        "ScalingNote, Table 6: students": table_6(found),
        "LightRetriever, Table 2": table_light(found),
        "EmbedDistill, Table 1": table_ladder(found),
    }
    tables = {title: rows for title, rows in tables.items() if rows}
    sides = pretrained.by_dataset(others, outcomes)
    theirs = [outcome for outcome in outcomes if outcome.trial in set(others)]
    more = pretrained_tables.tables(sides, theirs)
    for title, rows in (tables | more).items():
        show(title, rows)
    if options.plot and more:
        pretrained_plot.plot(more, options.plot)
    every = metrics(found) | pretrained_tables.metrics(sides, theirs)
    write(options.json, metrics=every, machine=trial_machines(outcomes), tables=tables, pretrained=more)
    require(trials, outcomes, options)


def methods(size: str) -> Sequence[str]:
    """What is trained at a size: everything at the largest, the methods of Table 4 at all."""
    if size != "large":
        return BY_SIZE
    return [*dict.fromkeys((*BY_SIZE, *STUDENTS, *PROMPTS, "lightretriever", *LADDER))]


def trial(
    dataset: str, size: str, method: str, seed: int, *, steps: int | None, knobs: Sequence[str]
) -> Trial:
    """A method at a share of the steps; at all of them it is the trial of :mod:`benchmarks.distillation`."""
    one = distillation.trial(dataset, "scratch", method, seed, steps=steps, knobs=knobs)
    file = f"ablations/{method}" if method.startswith("without") else one.method
    return Trial(dataset, one.backbone, file, seed, max(1, round(SIZES[size] * one.steps)), one.knobs)


def by_size(wanted: Mapping[tuple[str, str], Sequence[Trial]], outcomes: Iterable[Outcome]) -> Found:
    """What every query side gave at each size."""
    done = {outcome.trial: outcome for outcome in outcomes}
    found = {
        place: distillation.rows(done[one] for one in trials if one in done)
        for place, trials in wanted.items()
    }
    return {place: rows for place, rows in found.items() if rows}


def table_3(found: Found) -> list[dict[str, Any]]:
    """Of datasets whose judgements differ in grade. No test: a pair of documents is no query."""
    rows = [
        {"data": dataset, "size": size} | {name: _auc(sides.get(name)) for name in BY_SIZE}
        for (dataset, size), sides in found.items()
    ]
    return [row for row in rows if any(row[name] != "-" for name in BY_SIZE)]


def table_4(found: Found) -> list[dict[str, Any]]:
    """Stars over ScalingDoc, as in the paper; BM25 beside."""
    return rows_of(
        Line({"data": dataset, "size": size, "method": name}, sides, name, "scalingdoc")
        for (dataset, size), sides in found.items()
        for name in (*BY_SIZE, *(["bm25"] if size == "large" else []))
        if name in sides
    )


def table_5(found: Found) -> list[dict[str, Any]]:
    """Stars over ScalingDual."""
    return _large(found, PROMPTS, over="scalingdual", label="prompt", auc=True)


def table_6(found: Found) -> list[dict[str, Any]]:
    """Distances of embeddings of length 1 on queries that were and were not learnt from."""
    rows = _large(found, (*STUDENTS, "scalingdual"), over="scalingdual", label="query tower", auc=True)
    for row in rows:
        side = found[row["data"], "large"][row["query tower"]]
        distances = _measures(side).keys() >= {"distance train", "distance validation"}
        for split in ("train", "validation"):
            row[f"distance, {split}"] = f"{side.mean(f'distance {split}'):.3f}" if distances else "-"
        row["queries/cpu s"] = round(side.speed or 0)
    return rows


def table_light(found: Found) -> list[dict[str, Any]]:
    """Stars: worse or better than the whole model."""
    return _large(found, LIGHT, over="scalingdual", label="query side")


def table_ladder(found: Found) -> list[dict[str, Any]]:
    """Stars over the row before."""
    lines = []
    for (dataset, size), sides in found.items():
        names = [name for name in LADDER if name in sides] if size == "large" else []
        for before, name in pairwise(["", *names]):
            lines.append(Line({"data": dataset, "student": name}, sides, name, before))
    return rows_of(lines)


@dataclass(frozen=True)
class Line:
    """A row of a table: what stands before its figures, whose they are, and whose it is compared with."""

    labels: Mapping[str, str]
    sides: Mapping[str, Row]
    name: str
    over: str

    @property
    def p(self) -> float:
        """Of its R@50 beside the other's; NaN without another."""
        if self.over not in self.sides or self.over == self.name:
            return math.nan
        return distillation.p_value(self.sides[self.name], self.sides[self.over])


def rows_of(lines: Iterable[Line], *, auc: bool = False) -> list[dict[str, Any]]:
    """Recalls with their spread over seeds; R@50 with a star where it differs from that of the other row.

    With `auc` that of judged pairs, too, where some dataset has any.
    """
    lines = list(lines)
    graded = auc and any(AUC in _measures(line.sides[line.name]) for line in lines)
    p = holm({str(at): line.p for at, line in enumerate(lines)})
    rows = []
    for at, line in enumerate(lines):
        row = line.sides[line.name]
        shown = {measure: row.shown(measure) for measure in RECALLS}
        if p[str(at)] < SIGNIFICANT:
            shown["R@50"] += "*"
        if graded:
            shown["AUC"] = _auc(row)
        rows.append({**line.labels, **shown, "seeds": str(len(row.sides))})
    return rows


def metrics(found: Found) -> dict[str, float]:
    """On how many datasets the papers' orders hold at the large size, and of how many."""
    large = {dataset: sides for (dataset, size), sides in found.items() if size == "large"}
    orders = {
        "scalingdual_over_scalingdoc": ("scalingdual", "scalingdoc"),
        "scalingdoc_over_twinbert": ("scalingdoc", "twinbert"),
        "scalingnote_over_scalingdoc": ("scalingnote-2l", "scalingdoc"),
        "summary_helps": ("scalingdual", "without_summary"),
        "title_loss_helps": ("scalingdual", "without_title_loss"),
        "hybrid_over_dense": ("lightretriever (hybrid)", "lightretriever"),
        "matching_helps": ("embeddistill-matching", "embeddistill-inherit"),
        "inheriting_helps": ("embeddistill-inherit", "embeddistill-scores"),
    }
    told: dict[str, float] = {}
    for name, (better, worse) in orders.items():
        both = [sides for sides in large.values() if better in sides and worse in sides]
        if both:
            told[f"datasets_{name}"] = sum(s[better].mean("R@50") > s[worse].mean("R@50") for s in both)
            told[f"datasets_of_{name}"] = len(both)
    return told


def _measures(row: Row) -> Mapping[str, float]:
    return next(iter(row.sides.values())).measures


def _auc(row: Row | None) -> str:
    return row.shown(AUC) if row is not None and AUC in _measures(row) else "-"


def _large(
    found: Found, names: Sequence[str], *, over: str, label: str, auc: bool = False
) -> list[dict[str, Any]]:
    lines = (
        Line({"data": dataset, label: name}, sides, name, over)
        for (dataset, size), sides in found.items()
        for name in names
        if size == "large" and name in sides
    )
    return rows_of(lines, auc=auc)


if __name__ == "__main__":
    main()
