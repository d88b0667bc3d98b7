"""A scaling law of decoders from random weights: five sizes, four amounts of data, three laws fitted.

    python -m benchmarks.ladder --json docs/results/ladder.json --folder docs/results

It runs `scalingnote ladder` on medquad's triplets; the plots of the laws (ScalingNote, Figure 5) go to
--folder as ladder_size.png, ladder_data.png and ladder_joint.png. Finished rungs in run_dir are reused.
"""

from pathlib import Path
from typing import Any

from benchmarks import public_sets
from benchmarks.report import arguments, show, write
from scalingnote.core.config import load
from scalingnote.core.log import configure
from scalingnote.run import pipeline
from scalingnote.run.config import RunConfig
from scalingnote.storage import filesystem as fs

FILES = ("configs/quickstart/medquad.yaml", "configs/methods/scalingdual.yaml", "configs/ladder.yaml")


def main() -> None:
    """Parse arguments, train, fit, print, write and copy the plots."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/ladder"), help="of the plots")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="A.B=VALUE")
    options = parser.parse_args()
    configure()
    # A rung takes a minute; the start of Ray's workers would be half of it.
    here = ["train.resources.workers=0"]
    config = load(RunConfig, FILES, [*here, *options.overrides])
    public_sets.prepare_for(config.dataset)
    artifact = pipeline.ladder(config)
    report, rungs = artifact.read_json("report.json"), artifact.table("ladder").to_pylist()
    shown: list[dict[str, Any]] = [
        {
            "parameters": rung["parameters"],
            "pairs": rung["examples"],
            "contrastive entropy": round(rung["contrastive_entropy"], 4),
            "operations": f"{rung['operations']:.3g}",
            "seconds": round(rung["seconds"]),
        }
        for rung in rungs
    ]
    show(f"{len(rungs)} rungs", shown)
    print(fs.read_bytes(artifact.file("report.md")).decode().partition("## ")[2])
    metrics = {f"r2_{kind}": round(law["r2"], 4) for kind, law in report["laws"].items()}
    write(options.json, metrics=metrics, table=shown, laws=report["laws"], splits=report["splits"])
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in artifact.names("", ".png"):
        (options.folder / f"ladder_{name}").write_bytes(fs.read_bytes(artifact.file(name)))


if __name__ == "__main__":
    main()
