"""What is known of the test queries, read from artifacts, and the slices that come of it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.evaluate import measured, slices
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.significance import Values
from scalingnote.evaluate.slices import Slice
from scalingnote.evaluate.test_set import TestSet
from scalingnote.planner.words import words
from scalingnote.storage import trec
from scalingnote.storage.artifact import Artifact

COUNTED = 200_000  # training queries whose words are counted: a few seconds


def slice_queries(
    config: EvaluateConfig,
    dataset: Artifact,
    values: Mapping[str, Values],
    *,
    test: TestSet,
) -> dict[str, list[Slice]]:
    """Slicing -> its slices; one that does not tell queries apart is left out."""
    documents = test.documents
    topics = _topics(dataset, documents) if config.topics else {}
    slicings = {
        "length": slices.by_length(test.queries),
        "frequency": slices.by_frequency(_met_in_training(dataset, test.queries)),
    }
    if topics:
        slicings["topic"] = slices.by_topic([topics.get(d, "") for d in documents], most=config.topics)
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


def _met_in_training(dataset: Artifact, queries: Sequence[str]) -> list[int]:
    """How many training queries have the rarest word of each query; of many, some are counted, evenly drawn.

    Not how often its document was met: documents of test queries are held out of training.
    """
    asked = [set(words(query)) for query in queries]
    wanted = set().union(*asked)
    step = max(1, ceil(dataset.counts.get("queries", 0) / COUNTED))
    met: Counter[str] = Counter()
    for batch in dataset.batches("queries", columns=["query", "split"]):
        texts = batch.filter(pc.equal(batch["split"], "train"))["query"]
        for text in texts.take(pa.array(range(0, len(texts), step), pa.int64())).to_pylist():
            met.update(wanted.intersection(words(text)))
    return [min((met[word] for word in own), default=0) for own in asked]
