"""Measures of rankings, and significance of differences between methods."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ir_measures
import numpy as np
import pyarrow as pa
from ir_measures import AP, RR, R, Success, nDCG
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from scalingnote.storage import trec

Rankings = Mapping[str, Sequence[str]]  # query_id -> doc_ids, best first
Grades = Mapping[str, Mapping[str, int]]  # query_id -> doc_id -> grade
MeasureValues = Mapping[str, Float[ndarray, " queries"]]  # measure -> value of each query
FAMILIES = ("R", "Recall", "MRR", "MAP", "nDCG")  # order in reports
ENTROPY = "contrastive_entropy"
MRR_DEPTH, MAP_DEPTH, NDCG_DEPTH = 10, 100, 10
RECALL_DEPTHS = (1, 10, 50, 100)  # by default
SIGNIFICANCE_LEVEL = 0.05  # smaller corrected p-values are marked; intervals have the confidence 1 - 0.05
RESAMPLES = 1000  # number of resamples of a bootstrap
MAX_DRAWS = 4_000_000  # limit of a bootstrap's numbers in memory: 32 MB


def rankings_of(runs: Mapping[str, trec.Run], query_ids: Sequence[str]) -> dict[str, Rankings]:
    """Return method -> query -> documents for some queries of the runs."""
    return {name: {q: [doc for doc, _ in run[q]] for q in query_ids} for name, run in runs.items()}


def measure(
    rankings: Rankings, qrels: Grades, *, recall_at: Sequence[int] = RECALL_DEPTHS
) -> dict[str, float]:
    """Compute means of :func:`per_query` over all queries of `qrels`."""
    values = per_query(rankings, qrels, recall_at=recall_at)
    return {name: float(value.mean()) for name, value in values.items()}


def per_query(
    rankings: Rankings, qrels: Grades, *, recall_at: Sequence[int] = RECALL_DEPTHS
) -> dict[str, Float[ndarray, " queries"]]:
    """Compute ``R@K``, ``MRR@10``, ``MAP@100`` and ``nDCG@10`` of each query of `qrels`, in this order.

    R@K is 1 if a relevant document is among the first K (ScalingNote, section 4.1.2); its name in ir-measures
    is Success@K. If any query has several relevant documents, ``Recall@K`` is added, the share of these among
    the first K; otherwise both are equal. A grade of 1 or more is relevant; nDCG uses the grade as the gain.
    A query without a ranking has the value 0.
    """
    measures = {f"R@{k}": Success @ k for k in recall_at}
    if any(sum(grade > 0 for grade in judged.values()) > 1 for judged in qrels.values()):
        measures |= {f"Recall@{k}": R @ k for k in recall_at}
    measures |= {
        f"MRR@{MRR_DEPTH}": RR @ MRR_DEPTH,
        f"MAP@{MAP_DEPTH}": AP @ MAP_DEPTH,
        f"nDCG@{NDCG_DEPTH}": nDCG @ NDCG_DEPTH,
    }
    names = {value: name for name, value in measures.items()}
    # Ranks are passed as scores, because trec_eval orders equal scores by document id.
    run = {
        query_id: {doc_id: -float(rank) for rank, doc_id in enumerate(ranking)}
        for query_id, ranking in rankings.items()
    }
    row = {query_id: i for i, query_id in enumerate(qrels)}
    values = {name: np.zeros(len(row)) for name in measures}
    judged = {query_id: dict(judgements) for query_id, judgements in qrels.items()}
    for metric in ir_measures.iter_calc(list(names), judged, run):
        values[names[metric.measure]][row[metric.query_id]] = metric.value
    return values


def measure_names(methods: Mapping[str, Iterable[str]]) -> list[str]:
    """Sort the measures of all methods by family, then by depth; JSON files do not keep the order."""

    def order(name: str) -> tuple[int, int]:
        family, depth = name.split("@")
        return FAMILIES.index(family), int(depth)

    return sorted({name for row in methods.values() for name in row}, key=order)


def is_recall(name: str) -> bool:
    """Return whether a measure is the share of relevant documents that are found."""
    return name.startswith("Recall@")


def ann_recall(found: Sequence[Sequence[str]], exact: Sequence[Sequence[str]], *, k: int) -> float:
    """Compute the mean share of each query's exact first `k` documents that an index has in its first `k`.

    If the pool has fewer than `k` documents, this is the share of all its documents.
    """
    if len(found) != len(exact) or not exact:
        raise ValueError(f"{len(found)} answers for {len(exact)} queries: pass one for each, at least one")
    shares = [
        len(set(approximate[:k]) & set(true[:k])) / max(len(true[:k]), 1)
        for approximate, true in zip(found, exact, strict=True)
    ]
    return sum(shares) / len(shares)


def auc(scores: Float[ndarray, " pairs"], labels: Float[ndarray, " pairs"]) -> float:
    """Compute how often the better of two pairs with different labels has the higher score, from 0 to 1.

    Ties count half. For two labels this is the area under the ROC curve (Mann and Whitney, 1947). With more
    labels, every two pairs with different labels have the same weight. All pairs are ranked together,
    regardless of their query, as in ScalingNote (section 4.1.2, AUC-SAT and AUC-REL). The result is NaN if
    all labels are equal.
    """
    correct = total = 0.0
    for label in np.unique(labels)[1:]:
        better, worse = scores[labels == label], scores[labels < label]
        correct += stats.mannwhitneyu(better, worse, method="asymptotic").statistic
        total += len(better) * len(worse)
    return correct / total if total else math.nan


def significance_section(methods: Mapping[str, MeasureValues], *, baseline: str) -> dict[str, Any]:
    """Build the section of report.json on the difference of each method from the baseline in each measure.

    All methods have values of the same queries. Corrections are over the methods in each measure. So the
    level limits the probability that a column of a table has at least one false mark, and the probability
    that it has at least one interval without the true value. A p-value is None for fewer than two queries.

    Args:
        methods: method -> measure -> value of each query.
        baseline: one of the methods.
    """
    keys = [(name, measure) for name, row in methods.items() if name != baseline for measure in row]
    by_method: dict[str, dict[str, dict[str, float | None]]] = {}
    if keys:
        families = [measure for _, measure in keys]
        differences = np.stack([methods[name][m] - methods[baseline][m] for name, m in keys], axis=1)
        low, high = bootstrap(differences, families=families, seed=0)
        p_values = paired_t_test(differences)
        p_holm = {
            measure: holm(
                {name: float(p) for (name, m), p in zip(keys, p_values, strict=True) if m == measure}
            )
            for measure in dict.fromkeys(families)
        }
        columns = zip(keys, differences.mean(0), low, high, p_values, strict=True)
        for (name, measure), *numbers in columns:
            values = (*numbers, p_holm[measure][name])
            by_method.setdefault(name, {})[measure] = {
                key: None if math.isnan(value) else float(value)
                for key, value in zip(("difference", "low", "high", "p", "p_holm"), values, strict=True)
            }
    return {
        "baseline": baseline,
        "alpha": SIGNIFICANCE_LEVEL,
        "resamples": RESAMPLES,
        "differences": by_method,
    }


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values of several tests by Holm's method (Holm, 1979); NaN is not a test and is kept."""
    tests = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    adjusted, highest = dict(p), 0.0
    for rank, (value, name) in enumerate(tests):
        highest = max(highest, min((len(tests) - rank) * value, 1.0))
        adjusted[name] = highest
    return adjusted


def paired_t_test(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """Compute two-sided p-values of Student's t-test for the hypothesis that the mean of each column is 0.

    For a constant column t is undefined: it gets the p-value of an exact sign-flip test, which is 1 if the
    constant is 0. The p-values are NaN for fewer than two queries.
    """
    queries, columns = differences.shape
    if queries < 2:
        return np.full(columns, math.nan)
    p_values = np.full(columns, 2.0 ** (1 - queries))  # two of the 2**queries sign vectors are as extreme
    varies = differences.std(0, ddof=1) > _rounding(differences)
    p_values[varies] = stats.ttest_1samp(differences[:, varies], 0.0).pvalue
    p_values[(differences == 0).all(0)] = 1.0
    return p_values


def bootstrap(
    differences: Float[ndarray, "queries columns"], *, families: Sequence[Any], seed: int
) -> Float[ndarray, "2 columns"]:
    """Compute bounds of each mean by resampling queries; the bounds of a family hold jointly.

    The half-width in standard errors is the (1 - SIGNIFICANCE_LEVEL) quantile of the largest deviation in the
    family (max-t; Westfall and Young, 1993). All columns are resampled together, so that one draw is used for
    all of them.

    Args:
        differences: values of each query.
        families: a name per column, equal for the columns of a family.
        seed: of the draws.
    """
    rng, queries = np.random.default_rng(seed), len(differences)
    block_size = max(1, MAX_DRAWS // queries)
    sizes = [min(block_size, RESAMPLES - start) for start in range(0, RESAMPLES, block_size)]
    draws = (rng.multinomial(queries, np.full(queries, 1 / queries), size=size) for size in sizes)
    means = np.concatenate([counts @ differences for counts in draws]) / queries
    mean, error = differences.mean(0), means.std(0)
    deviations = np.abs(means - mean) / np.where(error > _rounding(differences), error, np.inf)
    half_width = np.empty(len(mean))
    family_of = np.array(families)
    for family in np.unique(family_of):
        columns = family_of == family
        half_width[columns] = np.quantile(deviations[:, columns].max(1), 1 - SIGNIFICANCE_LEVEL)
    return np.stack([mean - half_width * error, mean + half_width * error])


def _rounding(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """Return the largest deviation of each column that may be only a rounding error."""
    return np.asarray(1e-12 * np.abs(differences).max(0))


def measure_methods(
    rankings: Mapping[str, Rankings], *, qrels: Grades, recall_at: Sequence[int]
) -> dict[str, MeasureValues]:
    """Return method -> measure -> value of each query, in the order of `qrels`."""
    return {name: per_query(ranking, qrels, recall_at=recall_at) for name, ranking in rankings.items()}


def means(methods: Mapping[str, MeasureValues]) -> dict[str, dict[str, float]]:
    """Return method -> measure -> mean over queries."""
    return {name: {m: float(value.mean()) for m, value in row.items()} for name, row in methods.items()}


def per_query_table(
    methods: Mapping[str, MeasureValues], entropies: MeasureValues, *, query_ids: list[str]
) -> pa.Table:
    """Build a table with a row per method and query and a column per measure, for other significance tests.

    Contrastive `entropies` of some methods are an additional column, with nulls for the others. Values are in
    the order of `query_ids`.
    """
    names, unknown = measure_names(methods), np.full(len(query_ids), math.nan)
    parts = []
    for method, row in methods.items():
        columns: dict[str, Any] = {"method": [method] * len(query_ids), "query_id": query_ids}
        columns |= {name: row[name] for name in names}
        if entropies:
            columns[ENTROPY] = pa.array(entropies.get(method, unknown), from_pandas=True)
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)
