import math

import numpy as np
import pytest

from scalingnote.evaluate.measures import ann_recall, measure, per_query

QRELS = {
    "first": {"a": 1},
    "third": {"c": 1},
    "two": {"b": 2, "d": 1, "e": 0},
    "missing": {"z": 1},
    "unanswered": {"a": 1},
}
RANKINGS = {
    "first": ["a", "b", "c"],
    "third": ["a", "b", "c"],
    "two": ["a", "d", "e", "b"],
    "missing": ["a", "b", "c"],
}


def test_against_hand_computed_values():
    found = measure(RANKINGS, QRELS, recall_at=(1, 2, 3), mrr_at=3, map_at=4, ndcg_at=4)
    gain = 1 / math.log2(3) + 2 / math.log2(5)
    best = 2 / math.log2(2) + 1 / math.log2(3)
    assert found == pytest.approx(
        {
            "R@1": 1 / 5,
            "R@2": 2 / 5,  # d, of grade 1, is enough for "two"
            "R@3": 3 / 5,
            "Recall@1": 1 / 5,
            "Recall@2": (1 + 1 / 2) / 5,  # one of two relevant documents
            "Recall@3": (2 + 1 / 2) / 5,
            "MAP@4": (1 + 1 / 3 + (1 / 2 + 2 / 4) / 2) / 5,
            "MRR@3": (1 + 1 / 3 + 1 / 2) / 5,
            "nDCG@4": (1 + 1 / math.log2(4) + gain / best) / 5,
        }
    )


def test_values_of_queries_are_in_the_order_of_the_judgements_and_average_to_the_measure():
    knobs = {"recall_at": (1,), "mrr_at": 3, "map_at": 4, "ndcg_at": 4}
    rankings = {query: ranking for query, ranking in RANKINGS.items() if query != "third"}
    found = per_query(rankings, QRELS, **knobs)
    assert found["MRR@3"].tolist() == [1, 0, 1 / 2, 0, 0]
    assert {n: v.mean() for n, v in found.items()} == pytest.approx(measure(rankings, QRELS, **knobs))


def test_where_one_document_is_relevant_recall_stands_there_once():
    found = measure({"q": ["a"]}, {"q": {"a": 2, "b": 0}}, recall_at=(1,))
    assert set(found) == {"R@1", "MRR@10", "MAP@100", "nDCG@10"}


def test_recall_does_not_count_relevant_documents_but_queries():
    assert measure({"q": ["a", "x"]}, {"q": {"a": 1, "b": 1, "c": 1}}, recall_at=(1,))["R@1"] == 1


def test_against_loops_on_random_rankings():
    rng = np.random.default_rng(0)
    rankings = {f"q{i}": [f"d{j}" for j in rng.permutation(30)[:20]] for i in range(40)}
    qrels = {q: {f"d{j}": int(rng.integers(0, 3)) for j in rng.permutation(30)[:4]} for q in rankings}
    found = measure(rankings, qrels, recall_at=(5,), mrr_at=10)
    hits, reciprocal = [], []
    for query, ranking in rankings.items():
        ranks = [rank for rank, doc in enumerate(ranking, 1) if qrels[query].get(doc, 0) > 0]
        hits.append(any(rank <= 5 for rank in ranks))
        reciprocal.append(1 / ranks[0] if ranks and ranks[0] <= 10 else 0)
    assert found["R@5"] == pytest.approx(np.mean(hits))
    assert found["MRR@10"] == pytest.approx(np.mean(reciprocal))


def test_index_recall_is_the_mean_overlap():
    exact = [list("abcd"), list("efgh")]
    assert ann_recall(exact, exact, k=4) == 1
    assert ann_recall([list("badc"), list("exyz")], exact, k=4) == pytest.approx((1 + 0.25) / 2)
    assert ann_recall([list("badc"), list("exyz")], exact, k=1) == pytest.approx(0.5)
    assert ann_recall([["a"], []], [["a"], ["b"]], k=10) == pytest.approx(0.5)  # a pool of one
    with pytest.raises(ValueError, match="1 answers for 2 queries"):
        ann_recall([["a"]], exact, k=1)
