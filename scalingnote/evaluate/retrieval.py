"""Retrieval measures: a ranking per query and the judgements come in, means over the queries go out."""

from collections.abc import Mapping, Sequence

import ir_measures
from ir_measures import RR, Success, nDCG


def measure(
    rankings: Mapping[str, Sequence[str]],
    qrels: Mapping[str, Mapping[str, int]],
    *,
    recall_at: Sequence[int] = (1, 10, 50, 100),
    mrr_at: int = 10,
    ndcg_at: int = 10,
) -> dict[str, float]:
    """``R@K``, ``MRR@K`` and ``nDCG@K`` over all queries of `qrels`; a query without a ranking scores 0.

    `rankings` are doc_ids, best first. R@K is the share of queries that have a relevant document among
    their first K, as in ScalingNote (section 5.1). Where each query has one relevant document this is
    recall; where it has several, ir-measures calls it Success@K. Relevant is a grade of 1 or more; nDCG
    takes the grade as the gain.
    """
    measures = {f"R@{k}": Success @ k for k in recall_at}
    measures |= {f"MRR@{mrr_at}": RR @ mrr_at, f"nDCG@{ndcg_at}": nDCG @ ndcg_at}
    # Ranks as scores: trec_eval would order equal scores by document id, not as they were ranked.
    run = {
        query_id: {doc_id: -float(rank) for rank, doc_id in enumerate(ranking)}
        for query_id, ranking in rankings.items()
    }
    found = ir_measures.calc_aggregate(list(measures.values()), {q: dict(j) for q, j in qrels.items()}, run)
    return {name: float(found[value]) for name, value in measures.items()}
