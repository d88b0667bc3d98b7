"""Train a config for some steps and measure its query tower by exact search over the whole pool."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import public_sets
from scalingnote.core import topk
from scalingnote.encode.query_encoder import QueryEncoder
from scalingnote.evaluate.measures import measure
from scalingnote.evaluate.test_set import load_test_set
from scalingnote.run import pipeline, stages
from scalingnote.run.config import RunConfig
from scalingnote.storage import arrow
from scalingnote.storage.artifact import Artifact
from scalingnote.train.config import Ranks

SHOWN = ("R@1", "R@10", "R@50", "MRR@10", "nDCG@10")


def train(config: RunConfig, *, steps: int) -> dict[str, float]:
    """Measures of stage I's query tower after so many steps, and ``rows``: its training triplets."""
    built = trained(config, steps=steps)
    return search(built["dual_encoder"], built) | {"rows": float(_triplets(config))}


def trained(config: RunConfig, *, steps: int) -> dict[str, Artifact]:
    """Stage I after so many steps, and its documents' embeddings."""
    public_sets.prepare_for(config.dataset)
    pipeline.run(config, stages.select(config, until="collect"), record=False)
    config = shortened(config, steps=steps)
    return pipeline.run(config, stages.select(config, until="encode"), record=False)


def shortened(config: RunConfig, *, steps: int) -> RunConfig:
    """The same with epochs of stage I that give these steps, in this process; triplets are collected."""
    # Mining loses no row here: the old negatives stay if no new one is found.
    epochs = steps / (_triplets(config) // config.train.global_batch)
    # A training takes a minute: half of it would be the start of Ray's workers.
    here = Ranks(workers=0, gpus_per_worker=config.train.resources.gpus_per_worker)
    short = config.train.model_copy(update={"epochs": epochs, "resources": here})
    changed: dict[str, Any] = {"train": short}
    if config.cross_encoder is not None:  # in stage I's place
        epochs = steps / (_triplets(config) // config.cross_encoder.global_batch)
        pairs = config.cross_encoder.model_copy(update={"epochs": epochs, "resources": here})
        changed["cross_encoder"] = pairs
    return config.model_copy(update=changed)


def _triplets(config: RunConfig) -> int:
    first = config.model_copy(update={"rounds": 1})
    return int(pipeline.locate(first, "triplets").counts["train"])


def search(tower: Artifact, built: Mapping[str, Artifact]) -> dict[str, float]:
    """Measures of the query tower of an artifact on the documents and test queries that `built` holds."""
    test = load_test_set(built["dataset"])
    queries = QueryEncoder(tower.directory("query")).encode_queries(test.queries)
    embeddings = built["embeddings"].table("embeddings", ["doc_id", "summary"])
    _, found = topk.search(arrow.l2_normalize(queries), arrow.to_numpy(embeddings["summary"]), k=100)
    doc_ids = embeddings["doc_id"].to_pylist()
    rankings = {q: [doc_ids[i] for i in row] for q, row in zip(test.query_ids, found.tolist(), strict=True)}
    return measure(rankings, test.qrels)


def over_seeds(found: Sequence[Mapping[str, float]]) -> tuple[dict[str, Any], dict[str, float]]:
    """The measures as ``mean ± standard deviation``, to be shown, and their means."""
    shown, means = {}, {}
    for name in SHOWN:
        values = [result[name] for result in found]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        means[name] = round(statistics.mean(values), 4)
        shown[name] = f"{means[name]:.3f} ± {spread:.3f}"
    return shown, means
