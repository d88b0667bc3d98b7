"""Test queries to look at: those that a method answers otherwise than the baseline, and what each found.

Like ScalingNote's Table 9, which lays the results of two methods side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float
from numpy import ndarray

from scalingnote.evaluate.retrieval import Rankings
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
    first_relevant: Mapping[str, int | None] = field(default_factory=dict)  # its rank; None: was not found
    method: str = ""  # the one it was chosen for; none where it was drawn at random
    difference: float = 0.0  # how much better than the baseline that one is


@dataclass(frozen=True)
class Chosen:
    """A row of the test set, and the difference from the baseline that it was chosen for."""

    row: int
    method: str = ""
    difference: float = 0.0


def choose(
    values: Mapping[str, Float[ndarray, " queries"]], *, baseline: str, number: int, seed: int
) -> list[Chosen]:
    """Queries on which methods differ most from the baseline; `values` are theirs, per query.

    In turn the next greatest win and the next greatest loss of each method; of equal ones, and where no
    method differs any more, the seed decides.
    """
    drawn = np.random.default_rng(seed).permutation(len(values[baseline]))
    turns = []
    for method, own in values.items():
        # Equal but for rounding is equal.
        differences = np.round(own - values[baseline], 9)[drawn]
        for sign in (1, -1):
            order = np.argsort(-sign * differences, kind="stable")
            order = order[sign * differences[order] > 0]
            turns.append([Chosen(int(drawn[i]), method, float(differences[i])) for i in order])
    found: dict[int, Chosen] = {}
    for one in chain(chain.from_iterable(zip_longest(*turns)), (Chosen(int(row)) for row in drawn)):
        if one is not None and len(found) < number:
            found.setdefault(one.row, one)
    return list(found.values())


def examples(
    dataset: Artifact, rankings: Mapping[str, Rankings], chosen: Sequence[Chosen], *, test: TestSet
) -> list[Example]:
    """The chosen test queries, with the first results of each method."""
    shown = {
        test.query_ids[one.row]: {
            name: found[test.query_ids[one.row]][:TITLES_PER_EXAMPLE] for name, found in rankings.items()
        }
        for one in chosen
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
            test.queries[one.row],
            {
                name: [Hit(doc, titles.get(doc) or "", test.qrels[query_id].get(doc, 0) > 0) for doc in docs]
                for name, docs in shown[query_id].items()
            },
            {
                name: _first_relevant(found[query_id], test.qrels[query_id])
                for name, found in rankings.items()
            },
            one.method,
            one.difference,
        )
        for one, query_id in zip(chosen, shown, strict=True)
    ]


def _first_relevant(found: Sequence[str], judged: Mapping[str, int]) -> int | None:
    return next((rank for rank, doc in enumerate(found, 1) if judged.get(doc, 0) > 0), None)
