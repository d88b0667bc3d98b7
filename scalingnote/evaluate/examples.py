"""Test queries to look at: some are drawn, and shown with what each method found first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage.artifact import Artifact

TITLES_PER_EXAMPLE = 3


@dataclass(frozen=True)
class Hit:
    """A result as the page shows it."""

    doc_id: str
    title: str
    relevant: bool


@dataclass(frozen=True)
class Example:
    """A test query, and the first results of each method for it."""

    query: str
    results: Mapping[str, Sequence[Hit]]


def examples(
    dataset: Artifact,
    rankings: Mapping[str, Mapping[str, Sequence[str]]],
    *,
    test: TestSet,
    number: int,
    seed: int,
) -> list[Example]:
    """Test queries drawn at random, with the first results of each method."""
    draw = np.random.default_rng(seed).permutation(len(test.query_ids))[:number]
    chosen = [(test.query_ids[i], test.queries[i]) for i in sorted(draw.tolist())]
    shown = {
        query_id: {name: found[query_id][:TITLES_PER_EXAMPLE] for name, found in rankings.items()}
        for query_id, _ in chosen
    }
    wanted = pa.array(
        sorted({doc for row in shown.values() for docs in row.values() for doc in docs}), pa.string()
    )
    titles: dict[str, Any] = {}
    for batch in dataset.batches("documents", columns=["doc_id", "title"]):
        batch = batch.filter(pc.is_in(batch["doc_id"], value_set=wanted))
        titles.update(zip(batch["doc_id"].to_pylist(), batch["title"].to_pylist(), strict=True))
    return [
        Example(
            query,
            {
                name: [Hit(doc, titles.get(doc) or "", test.qrels[query_id].get(doc, 0) > 0) for doc in docs]
                for name, docs in shown[query_id].items()
            },
        )
        for query_id, query in chosen
    ]
