"""Retrieval measures: a ranking per query and the judgements come in, a value per query goes out."""

from collections.abc import Iterable, Mapping, Sequence

import ir_measures
import numpy as np
from ir_measures import AP, RR, R, Success, nDCG
from jaxtyping import Float
from numpy import ndarray

Rankings = Mapping[str, Sequence[str]]  # query_id -> doc_ids, best first
Judged = Mapping[str, Mapping[str, int]]  # query_id -> doc_id -> grade
FAMILIES = ("R", "Recall", "MRR", "MAP", "nDCG")  # in the order they are shown


def measure(
    rankings: Rankings,
    qrels: Judged,
    *,
    recall_at: Sequence[int] = (1, 10, 50, 100),
    mrr_at: int = 10,
    map_at: int = 100,
    ndcg_at: int = 10,
) -> dict[str, float]:
    """Means of :func:`per_query` over all queries of `qrels`."""
    found = per_query(rankings, qrels, recall_at=recall_at, mrr_at=mrr_at, map_at=map_at, ndcg_at=ndcg_at)
    return {name: float(values.mean()) for name, values in found.items()}


def per_query(
    rankings: Rankings,
    qrels: Judged,
    *,
    recall_at: Sequence[int],
    mrr_at: int,
    map_at: int,
    ndcg_at: int,
) -> dict[str, Float[ndarray, " queries"]]:
    """``R@K``, ``MRR@K``, ``MAP@K`` and ``nDCG@K`` of each query of `qrels`, in their order.

    A query without a ranking scores 0. R@K is 1 where a relevant document is among the first K, as in
    ScalingNote (section 5.1); ir-measures calls it Success@K. Where queries have several relevant documents,
    the share of them that is found stands beside it, as ``Recall@K``; elsewhere both are the same. Relevant
    is a grade of 1 or more; nDCG takes the grade as the gain.
    """
    measures = {f"R@{k}": Success @ k for k in recall_at}
    if any(sum(grade > 0 for grade in judged.values()) > 1 for judged in qrels.values()):
        measures |= {f"Recall@{k}": R @ k for k in recall_at}
    measures |= {
        f"MRR@{mrr_at}": RR @ mrr_at,
        f"MAP@{map_at}": AP @ map_at,
        f"nDCG@{ndcg_at}": nDCG @ ndcg_at,
    }
    names = {value: name for name, value in measures.items()}
    # Ranks as scores: trec_eval would order equal scores by document id, not as they were ranked.
    run = {
        query_id: {doc_id: -float(rank) for rank, doc_id in enumerate(ranking)}
        for query_id, ranking in rankings.items()
    }
    row = {query_id: i for i, query_id in enumerate(qrels)}
    found = {name: np.zeros(len(row)) for name in measures}
    judged = {query_id: dict(judgements) for query_id, judgements in qrels.items()}
    for one in ir_measures.iter_calc(list(names), judged, run):
        found[names[one.measure]][row[one.query_id]] = one.value
    return found


def in_order(names: Iterable[str]) -> list[str]:
    """Names of measures, each once: by family, then by depth, whatever order a JSON file gave them."""
    return sorted(set(names), key=lambda name: (FAMILIES.index(name.split("@")[0]), int(name.split("@")[1])))


def is_recall(name: str) -> bool:
    """Whether a measure is the share of relevant documents that are found."""
    return name.startswith("Recall@")
