"""Contrastive entropy of test queries: embeddings and pools come in, a value per query and tower goes out.

What validates training, asked of the test queries: -log softmax of a query's positive against documents that
are drawn from the pool (ScalingNote, section 4.4). Smaller is better.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray

from scalingnote.evaluate import pool as pools
from scalingnote.evaluate.encoded import Encoded
from scalingnote.evaluate.lineage import Ancestor
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage.artifact import Artifact
from scalingnote.train.config import Losses
from scalingnote.train.validation import ValidationSample, measure_retrieval

NAME = "contrastive_entropy"


@dataclass(frozen=True)
class Entropies:
    """Of every tower, over the same queries and the same negatives."""

    values: dict[str, Float[ndarray, " queries"]]  # NaN where a query's positive is in no pool
    negatives: int
    temperature: float

    def told(self) -> dict[str, Any]:
        """The report's part."""
        known = np.isfinite(next(iter(self.values.values())))
        return {
            "queries": int(known.sum()),
            "negatives": self.negatives,
            "temperature": self.temperature,
            "methods": {name: float(own[known].mean()) for name, own in self.values.items()},
        }


def temperature_of(ancestors: Iterable[Ancestor]) -> float:
    """The one that the towers of a lineage were trained with; where they are gone, the default of stage I."""
    towers = [a.artifact for a in ancestors if a.kind == "dual_encoder" and a.artifact]
    losses = (towers[-1].manifest.config.get("losses") or {}) if towers else {}
    return float(losses.get("temperature", Losses().temperature))


def entropies(
    embeddings: Mapping[str, Artifact],
    encoded: Mapping[str, Encoded],
    *,
    test: TestSet,
    negatives: int,
    temperature: float,
    seed: int,
) -> Entropies | None:
    """Tower -> each test query's; `embeddings` are the documents that it is searched in.

    The positive is the document judged best. `negatives` are drawn once, for all queries and towers, and
    those that are relevant for a query are none of its own; fewer where the pool is small. None where no
    positive is in all pools, or nothing else is.
    """
    relevant = [{doc for doc, grade in judged.items() if grade > 0} for judged in test.qrels.values()]
    drawn = _drawn(next(iter(embeddings.values())), negatives + max(map(len, relevant)), seed=seed)
    positives = list(dict.fromkeys(test.documents))
    found = {name: pools.gather(artifact, positives + drawn) for name, artifact in embeddings.items()}
    known = np.all([there for _, there in found.values()], axis=0)
    row = {doc: i for i, doc in enumerate(positives) if known[i]}
    others = {doc: i for i, doc in enumerate(drawn, len(positives)) if known[i]}
    rows = [[i for doc, i in others.items() if doc not in own][:negatives] for own in relevant]
    width = min(map(len, rows))
    if not row or not width:
        return None
    asked = [number for number, doc in enumerate(test.documents) if doc in row]
    chosen = np.array([[row[test.documents[n]], *rows[n][:width]] for n in asked], np.int64)
    values = {}
    for name, (documents, _) in found.items():
        values[name] = np.full(len(test.queries), math.nan)
        queries = encoded[name].of([test.queries[n] for n in asked])
        values[name][asked] = _entropies(queries, documents, chosen, temperature=temperature)
    return Entropies(values, width, temperature)


def _drawn(embeddings: Artifact, number: int, *, seed: int) -> list[str]:
    """Ids of some documents of a pool, in the order in which they are drawn."""
    total = embeddings.counts["documents"]
    rows = np.random.default_rng(seed).choice(total, min(number, total), replace=False)
    wanted, doc_ids = pools.named(embeddings, rows[None])
    found: list[str] = doc_ids.take(np.searchsorted(wanted, rows)).to_pylist()
    return found


def _entropies(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "docs dim"],
    chosen: Int64[ndarray, "queries own"],
    *,
    temperature: float,
) -> Sequence[float]:
    """As in training, query by query: the first of its own documents is the positive."""
    own = np.arange(chosen.shape[1])[None]
    sample = ValidationSample([], [], own[0, :1], own == 0, own[:, 1:])
    return [
        measure_retrieval(query[None], documents[rows], sample, temperature=temperature)[NAME]
        for query, rows in zip(queries, chosen, strict=True)
    ]
