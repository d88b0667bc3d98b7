"""Contrastive entropy of test queries per query tower.

It is the validation measure of training: -log softmax of a query's positive against documents sampled from
the pool (ScalingNote, section 4.4). Smaller is better.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray

from scalingnote.evaluate.lineage import Ancestor
from scalingnote.evaluate.pool import Pool, document_ids, gather_embeddings
from scalingnote.evaluate.query_embeddings import QueryEmbeddings
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage.artifact import Artifact
from scalingnote.storage.shuffle import TaskRunner
from scalingnote.train.config import Losses
from scalingnote.train.validation_sample import ValidationSample, measure_retrieval

NAME = "contrastive_entropy"


@dataclass(frozen=True)
class Entropies:
    """Contrastive entropy of every tower over the same queries and negatives."""

    values: dict[
        str, Float[ndarray, " queries"]
    ]  # tower -> per query; NaN if its positive is not in all pools
    negatives: int
    temperature: float

    def section(self) -> dict[str, Any]:
        """The section of report.json."""
        known = np.isfinite(next(iter(self.values.values())))
        return {
            "queries": int(known.sum()),
            "negatives": self.negatives,
            "temperature": self.temperature,
            "methods": {name: float(own[known].mean()) for name, own in self.values.items()},
        }


def temperature_of(ancestors: Iterable[Ancestor]) -> float:
    """The temperature that the towers were trained with; stage I's default if their artifact is gone."""
    towers = [a.artifact for a in ancestors if a.kind == "dual_encoder" and a.artifact]
    losses = (towers[-1].manifest.config.get("losses") or {}) if towers else {}
    return float(losses.get("temperature", Losses().temperature))


def entropies(
    embeddings: Mapping[str, Artifact],
    encoded: Mapping[str, QueryEmbeddings],
    *,
    test: TestSet,
    negatives: int,
    temperature: float,
    seed: int,
    each: TaskRunner = map,
) -> Entropies | None:
    """Contrastive entropy of every test query and tower.

    The positive of a query is the document judged best. Negatives are sampled once for all queries and
    towers; those that are relevant to a query are not used for it.

    Args:
        embeddings: tower -> the document embeddings it is searched in.
        encoded: tower -> the test queries' embeddings.
        test: test queries and judgements.
        negatives: per query; fewer if the pool is small.
        temperature: of the softmax.
        seed: of the sample.
        each: runs the tasks.

    Returns:
        None if no positive or no negative is in all pools.
    """
    relevant = [{doc for doc, grade in judged.items() if grade > 0} for judged in test.qrels.values()]
    number = negatives + max(map(len, relevant))
    sampled = _sample_documents(next(iter(embeddings.values())), number, seed=seed, each=each)
    positives = list(dict.fromkeys(test.documents))
    found = {
        name: gather_embeddings(Pool(artifact), positives + sampled, each=each)
        for name, artifact in embeddings.items()
    }
    known = np.all([in_pool for _, in_pool in found.values()], axis=0)
    row = {doc: i for i, doc in enumerate(positives) if known[i]}
    others = {doc: i for i, doc in enumerate(sampled, len(positives)) if known[i]}
    rows = [[i for doc, i in others.items() if doc not in own][:negatives] for own in relevant]
    width = min(map(len, rows))
    if not row or not width:
        return None
    usable = [number for number, doc in enumerate(test.documents) if doc in row]
    chosen = np.array([[row[test.documents[n]], *rows[n][:width]] for n in usable], np.int64)
    values = {}
    for name, (documents, _) in found.items():
        values[name] = np.full(len(test.queries), math.nan)
        queries = encoded[name].of([test.queries[n] for n in usable])
        values[name][usable] = _entropies(queries, documents, chosen, temperature=temperature)
    return Entropies(values, width, temperature)


def _sample_documents(embeddings: Artifact, number: int, *, seed: int, each: TaskRunner) -> list[str]:
    """Ids of random documents of a pool, in random order."""
    total = embeddings.counts["documents"]
    rows = np.random.default_rng(seed).choice(total, min(number, total), replace=False)
    ascending, doc_ids = document_ids(Pool(embeddings), rows[None], each=each)
    sampled: list[str] = doc_ids.take(np.searchsorted(ascending, rows)).to_pylist()
    return sampled


def _entropies(
    queries: Float[ndarray, "queries dim"],
    documents: Float[ndarray, "docs dim"],
    chosen: Int64[ndarray, "queries own"],
    *,
    temperature: float,
) -> Sequence[float]:
    """The validation measure of training per query; the first of its chosen documents is the positive."""
    own = np.arange(chosen.shape[1])[None]
    sample = ValidationSample([], [], own[0, :1], own == 0, own[:, 1:])
    return [
        measure_retrieval(query[None], documents[rows], sample, temperature=temperature)[NAME]
        for query, rows in zip(queries, chosen, strict=True)
    ]
