"""What the sources of triplets are worth: stage I on one hop, with multi-hop, with mined negatives.

    python -m benchmarks.sources --json docs/results/sources.json

Every model is trained for the same number of steps on a dataset's quickstart sizes, and measured by exact
search over the whole pool; mean and standard deviation over seeds of training. The second round of
``+ mined`` starts anew, like the first. Clicks are simulated, so the absolute values say little; read the
differences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import arguments, show, write
from benchmarks.training import over_seeds, train
from scalingnote.config import load
from scalingnote.log import configure
from scalingnote.run_config import RunConfig

VARIANTS: Mapping[str, Sequence[str]] = {
    "one-hop": ("collect.association=null",),
    "+ multi-hop": (),
    "+ multi-hop + mined": ("rounds=2",),
}


def main() -> None:
    """Parse arguments, run, print and write."""
    parser = arguments(__doc__)
    parser.add_argument("--datasets", nargs="+", default=["medquad", "zh_medical_qa"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of each training, batch 128")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    options = parser.parse_args()
    configure()
    rows: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    for dataset in options.datasets:
        files = [f"configs/quickstart/{dataset}.yaml", "configs/methods/scalingdual.yaml"]
        for name, overrides in VARIANTS.items():
            knobs = [*overrides, *options.overrides]
            found = [
                train(load(RunConfig, files, [*knobs, f"train.seed={seed}"]), steps=options.steps)
                for seed in range(options.seeds)
            ]
            shown, means = over_seeds(found)
            rows.append({"dataset": dataset, "triplets": name, "rows": found[0]["rows"], **shown})
            metrics |= {f"{dataset}/{name}/{measured}": value for measured, value in means.items()}
            show(f"{options.seeds} seeds, {options.steps} steps", rows)
            write(options.json, metrics=metrics, table=rows)


if __name__ == "__main__":
    main()
