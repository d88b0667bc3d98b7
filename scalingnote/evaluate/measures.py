"""Measures of a ranking and the significance of differences between methods."""

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
FAMILIES = ("R", "Recall", "MRR", "MAP", "nDCG")  # in the order of reports
ENTROPY = "contrastive_entropy"
MRR_DEPTH, MAP_DEPTH, NDCG_DEPTH = 10, 100, 10
RECALL_DEPTHS = (1, 10, 50, 100)  # by default
SIGNIFICANCE_LEVEL = 0.05  # corrected p-values below it are marked, and intervals are of 1 less it
RESAMPLES = 1000  # of a bootstrap
MAX_DRAWS = 4_000_000  # numbers of a bootstrap in memory at once: 32 MB


def rankings_of(runs: Mapping[str, trec.Run], query_ids: Sequence[str]) -> dict[str, Rankings]:
    """Method -> query -> documents, of the results of some queries."""
    return {name: {q: [doc for doc, _ in run[q]] for q in query_ids} for name, run in runs.items()}


def measure(
    rankings: Rankings, qrels: Grades, *, recall_at: Sequence[int] = RECALL_DEPTHS
) -> dict[str, float]:
    """Means of :func:`per_query` over all queries of `qrels`."""
    values = per_query(rankings, qrels, recall_at=recall_at)
    return {name: float(value.mean()) for name, value in values.items()}


def per_query(
    rankings: Rankings, qrels: Grades, *, recall_at: Sequence[int] = RECALL_DEPTHS
) -> dict[str, Float[ndarray, " queries"]]:
    """``R@K``, ``MRR@10``, ``MAP@100`` and ``nDCG@10`` of each query of `qrels`, in their order.

    R@K is 1 if a relevant document is among the first K (ScalingNote, section 4.1.2); ir-measures calls it
    Success@K. If queries have several relevant documents, ``Recall@K`` is added, the share of them among the
    first K; otherwise both are equal. A grade of 1 or more is relevant; nDCG uses the grade as the gain. A
    query without a ranking scores 0.
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
    """Measures of any of the methods by family, then by depth; JSON files do not keep their order."""

    def order(name: str) -> tuple[int, int]:
        family, depth = name.split("@")
        return FAMILIES.index(family), int(depth)

    return sorted({name for row in methods.values() for name in row}, key=order)


def is_recall(name: str) -> bool:
    """Whether a measure is the share of relevant documents that are found."""
    return name.startswith("Recall@")


def ann_recall(found: Sequence[Sequence[str]], exact: Sequence[Sequence[str]], *, k: int) -> float:
    """Mean share of each query's exact first `k` documents among the `k` found by an index.

    If the pool has fewer than `k` documents, the share is of all of them.
    """
    if len(found) != len(exact) or not exact:
        raise ValueError(f"{len(found)} answers for {len(exact)} queries: both must be the same, above 0")
    shares = [
        len(set(approximate[:k]) & set(true[:k])) / max(len(true[:k]), 1)
        for approximate, true in zip(found, exact, strict=True)
    ]
    return sum(shares) / len(shares)


def auc(scores: Float[ndarray, " pairs"], labels: Float[ndarray, " pairs"]) -> float:
    """The share of pairings of different labels where the better one scores higher; ties count half.

    For two labels this is the area under the ROC curve (Mann and Whitney, 1947). With more labels, every two
    pairs with different labels have the same weight. All pairs are ranked together, whatever their query, as
    in ScalingNote (section 4.1.2, AUC-SAT and AUC-REL). NaN if all labels are equal.
    """
    right = total = 0.0
    for label in np.unique(labels)[1:]:
        better, worse = scores[labels == label], scores[labels < label]
        right += stats.mannwhitneyu(better, worse, method="asymptotic").statistic
        total += len(better) * len(worse)
    return right / total if total else math.nan


def significance_section(methods: Mapping[str, MeasureValues], *, baseline: str) -> dict[str, Any]:
    """The section of report.json: each method minus the baseline in each measure.

    All methods have values of the same queries. Corrections are over the methods in each measure, so the
    level bounds the probability of at least one false mark, and of at least one interval without the true
    value, in each column of a table. A p-value is None for fewer than two queries.

    Args:
        methods: method -> measure -> value of each query.
        baseline: one of the methods.
    """
    keys = [(name, measure) for name, row in methods.items() if name != baseline for measure in row]
    found: dict[str, dict[str, dict[str, float | None]]] = {}
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
            found.setdefault(name, {})[measure] = {
                key: None if math.isnan(value) else float(value)
                for key, value in zip(("difference", "low", "high", "p", "p_holm"), values, strict=True)
            }
    return {"baseline": baseline, "alpha": SIGNIFICANCE_LEVEL, "resamples": RESAMPLES, "differences": found}


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """p-values with Holm's correction for several tests (Holm, 1979); NaN is no test and stays."""
    tests = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    adjusted, highest = dict(p), 0.0
    for rank, (value, name) in enumerate(tests):
        highest = max(highest, min((len(tests) - rank) * value, 1.0))
        adjusted[name] = highest
    return adjusted


def paired_t_test(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """Two-sided p-values of Student's t-test that the mean of each column is 0.

    Of a constant column t is undefined: it gets the p-value of an exact sign-flip test, 1 if it is 0. NaN for
    fewer than two queries.
    """
    queries, columns = differences.shape
    if queries < 2:
        return np.full(columns, math.nan)
    p_values = np.full(columns, 2.0 ** (1 - queries))  # of 2**queries signs two are as extreme
    varies = differences.std(0, ddof=1) > _rounding(differences)
    p_values[varies] = stats.ttest_1samp(differences[:, varies], 0.0).pvalue
    p_values[(differences == 0).all(0)] = 1.0
    return p_values


def bootstrap(
    differences: Float[ndarray, "queries columns"], *, families: Sequence[Any], seed: int
) -> Float[ndarray, "2 columns"]:
    """Bounds of each mean over resampled queries; those of a family hold jointly.

    Their half-width in standard errors is the quantile of 1 - SIGNIFICANCE_LEVEL of the largest deviation
    within the family (max-t; Westfall and Young, 1993). All columns are resampled together, so that
    one draw serves them all.
    `families` has a name per column, equal within a family.
    """
    rng, queries = np.random.default_rng(seed), len(differences)
    at_once = max(1, MAX_DRAWS // queries)
    sizes = [min(at_once, RESAMPLES - start) for start in range(0, RESAMPLES, at_once)]
    draws = (rng.multinomial(queries, np.full(queries, 1 / queries), size=size) for size in sizes)
    means = np.concatenate([drawn @ differences for drawn in draws]) / queries
    mean, error = differences.mean(0), means.std(0)
    deviations = np.abs(means - mean) / np.where(error > _rounding(differences), error, np.inf)
    half_width = np.empty(len(mean))
    family_of = np.array(families)
    for family in np.unique(family_of):
        mine = family_of == family
        half_width[mine] = np.quantile(deviations[:, mine].max(1), 1 - SIGNIFICANCE_LEVEL)
    return np.stack([mean - half_width * error, mean + half_width * error])


def _rounding(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """The largest deviation that may be rounding error alone."""
    return np.asarray(1e-12 * np.abs(differences).max(0))


def measure_methods(
    rankings: Mapping[str, Rankings], *, qrels: Grades, recall_at: Sequence[int]
) -> dict[str, MeasureValues]:
    """Method -> measure -> value per query in the order of `qrels`."""
    return {name: per_query(ranking, qrels, recall_at=recall_at) for name, ranking in rankings.items()}


def means(methods: Mapping[str, MeasureValues]) -> dict[str, dict[str, float]]:
    """Method -> measure -> mean over queries."""
    return {name: {m: float(value.mean()) for m, value in row.items()} for name, row in methods.items()}


def per_query_table(
    methods: Mapping[str, MeasureValues], entropies: MeasureValues, *, query_ids: list[str]
) -> pa.Table:
    """A table with a row per method and query and a column per measure, for other significance tests.

    Contrastive `entropies` of some of the methods are a column too, with nulls; values are in the order of
    `query_ids`.
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
