"""What the sources of triplets are worth: stage I on one hop, with multi-hop, with mined negatives.

    python -m benchmarks.sources --json docs/results/sources.json

Every model is trained for the same number of steps on a dataset's quickstart sizes, and measured by exact
search over the whole pool; mean and standard deviation over seeds. The second round of ``+ mined`` starts
anew, like the first. Clicks are simulated, so the absolute values say little; read the differences.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import arguments, show, write
from scalingnote import pipeline, topk
from scalingnote.config import load
from scalingnote.encode.encoder import Encoder
from scalingnote.evaluate.job import test_set
from scalingnote.evaluate.retrieval import measure
from scalingnote.log import configure
from scalingnote.storage import vectors

VARIANTS: Mapping[str, Sequence[str]] = {
    "one-hop": ("collect.association=null",),
    "+ multi-hop": (),
    "+ multi-hop + mined": ("rounds=2",),
}
SHOWN = ("R@1", "R@10", "R@50", "MRR@10", "nDCG@10")


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
        for name, overrides in VARIANTS.items():
            found = [
                _train(dataset, [*overrides, *options.overrides], seed=seed, steps=options.steps)
                for seed in range(options.seeds)
            ]
            row: dict[str, Any] = {"dataset": dataset, "triplets": name, "rows": found[0]["rows"]}
            for measured in SHOWN:
                values = [result[measured] for result in found]
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                row[measured] = f"{statistics.mean(values):.3f} ± {spread:.3f}"
                metrics[f"{dataset}/{name}/{measured}"] = round(statistics.mean(values), 4)
            rows.append(row)
            show(f"{options.seeds} seeds, {options.steps} steps", rows)
    write(options.json, metrics=metrics, table=rows)


def _train(dataset: str, overrides: Sequence[str], *, seed: int, steps: int) -> dict[str, float]:
    files = [f"configs/quickstart/{dataset}.yaml", "configs/methods/scalingdual.yaml"]
    config = load(pipeline.RunConfig, files, [*overrides, f"train.seed={seed}"])
    pipeline.run(config, pipeline.select(config, until="collect"), record=False)
    rows = pipeline.locate(config.model_copy(update={"rounds": 1}), "triplets").counts["train"]
    # Mining loses no row here: the old negatives stay where no new one is found.
    epochs = steps / (rows // config.train.global_batch)
    config = config.model_copy(update={"train": config.train.model_copy(update={"epochs": epochs})})
    built = pipeline.run(config, pipeline.select(config, until="encode"), record=False)
    test = test_set(built["dataset"])
    queries = Encoder.load(built["dual_encoder"].directory("query")).encode_queries(test.queries)
    embeddings = built["embeddings"].table("embeddings", ["doc_id", "summary"])
    _, found = topk.search(vectors.unit(queries), vectors.to_numpy(embeddings["summary"]), k=100)
    doc_ids = embeddings["doc_id"].to_pylist()
    rankings = {q: [doc_ids[i] for i in row] for q, row in zip(test.query_ids, found.tolist(), strict=True)}
    return measure(rankings, test.qrels) | {"rows": float(rows)}


if __name__ == "__main__":
    main()
