"""What is known of the test queries, read from artifacts, and the slices that come of it."""

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.evaluate import measured, slices
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.lineage import Ancestor
from scalingnote.evaluate.significance import Values
from scalingnote.evaluate.slices import Slice
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact


def slice_queries(
    config: EvaluateConfig,
    dataset: Artifact,
    ancestors: Sequence[Ancestor],
    values: Mapping[str, Values],
    *,
    test: TestSet,
) -> dict[str, list[Slice]]:
    """Slicing -> its slices; one that does not tell queries apart is left out."""
    documents = test.documents
    topics = _topics(dataset, documents) if config.topics else {}
    slicings = {"length": slices.by_length(test.queries)}
    if topics:
        slicings["topic"] = slices.by_topic([topics.get(d, "") for d in documents], most=config.topics)
    triplets = [a.artifact for a in ancestors if a.kind == "triplets" and a.artifact]
    if triplets:
        met = _met_in_training(triplets[-1], documents)
        slicings["frequency"] = slices.by_frequency([met.get(d, 0) for d in documents])
    found = {name: slices.sliced(labels, values, order=order) for name, (labels, order) in slicings.items()}
    return {name: parts for name, parts in found.items() if len(parts) > 1}


def robustness(
    config: EvaluateConfig,
    found: Mapping[str, trec.Run],
    values: Mapping[str, Values],
    *,
    mistyped: TestSet,
) -> list[Slice]:
    """The test queries as they were written and with typos."""
    rankings = {
        name: {q: [doc for doc, _ in run[q]] for q in mistyped.query_ids} for name, run in found.items()
    }
    again = measured.values(config, rankings, qrels=mistyped.qrels)
    return [
        {"label": label, "queries": len(mistyped.query_ids), "methods": measured.means(one)}
        for label, one in (("as written", values), ("with typos", again))
    ]


def _topics(dataset: Artifact, documents: Sequence[str]) -> dict[str, str]:
    wanted = pa.array(sorted(set(documents)), pa.string())
    found: dict[str, str] = {}
    for batch in dataset.batches("documents", columns=["doc_id", "topic"]):
        batch = batch.filter(pc.is_in(batch["doc_id"], value_set=wanted))
        found.update(zip(batch["doc_id"].to_pylist(), batch["topic"].to_pylist(), strict=True))
    return {doc_id: topic for doc_id, topic in found.items() if topic}


def _met_in_training(triplets: Artifact, documents: Sequence[str]) -> dict[str, int]:
    """How many training triplets have each of the documents as their positive."""
    wanted = pa.array(sorted(set(documents)), pa.string())
    found: Counter[str] = Counter()
    for batch in triplets.batches("triplets", columns=["positive", "split"]):
        mine = pc.and_(pc.is_in(batch["positive"], value_set=wanted), pc.equal(batch["split"], "train"))
        found.update(batch.filter(mine)["positive"].to_pylist())
    return found
