"""Given pairs of a query and a document, scored by every method: AUC over them, and candidates re-ranked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from scalingnote.evaluate import measured
from scalingnote.evaluate.auc import auc
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.given import Pairs
from scalingnote.evaluate.test_set import TestSet
from scalingnote.storage import trec

# Texts of queries and doc_ids, as long -> a score of each pair; NaN where a document is not in the pool.
Scorer = Callable[[Sequence[str], Sequence[str]], Float[ndarray, " pairs"]]


def aucs(pairs: Pairs, scorers: Mapping[str, Scorer]) -> dict[str, Any]:
    """The report's part on AUC, over the pairs that every method can score."""
    scores = {name: score(pairs.queries, pairs.doc_ids) for name, score in scorers.items()}
    known = np.all([np.isfinite(one) for one in scores.values()], axis=0)
    return {
        "pairs": int(known.sum()),
        "not_in_pool": int((~known).sum()),
        "unusable": pairs.unusable,
        "methods": {
            name: {
                f"AUC-{label}": _known(auc(one[known], values[known]))
                for label, values in pairs.labels.items()
            }
            for name, one in scores.items()
        },
    }


def reranked(
    config: EvaluateConfig, candidates: trec.Run, test: TestSet, scorers: Mapping[str, Scorer]
) -> tuple[dict[str, Any], dict[str, trec.Run]]:
    """The report's part on re-ranking, and the re-ranked runs by method.

    Candidates that are not in the pool come after all others, in the order given.
    """
    text = dict(zip(test.query_ids, test.queries, strict=True))
    pairs = [(query_id, doc_id) for query_id in test.query_ids for doc_id, _ in candidates[query_id]]
    queries, doc_ids = [text[query_id] for query_id, _ in pairs], [doc_id for _, doc_id in pairs]
    runs: dict[str, trec.Run] = {}
    absent = 0
    for name, score in scorers.items():
        scores = score(queries, doc_ids)
        unknown = np.isnan(scores)
        absent = max(absent, int(unknown.sum()))
        scores[unknown] = scores[~unknown].min(initial=0.0) - 1 - np.arange(unknown.sum())
        run: trec.Run = {query_id: [] for query_id in test.query_ids}
        for (query_id, doc_id), value in zip(pairs, scores.tolist(), strict=True):
            run[query_id].append((doc_id, value))
        runs[name] = {q: sorted(found, key=lambda hit: -hit[1]) for q, found in run.items()}
    rankings = {
        name: {q: [doc for doc, _ in found] for q, found in run.items()}
        for name, run in {"as given": candidates, **runs}.items()
    }
    part = {
        "queries": len(test.query_ids),
        "candidates": len(pairs),
        "not_in_pool": absent,
        "methods": measured.means(measured.values(config, rankings, qrels=test.qrels)),
    }
    return part, runs


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value
