"""Measures of a ranking and the significance of differences between methods."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ir_measures
import numpy as np
import pyarrow as pa
from ir_measures import AP, RR, R, Success, nDCG
from jaxtyping import Float
from numpy import ndarray
from scipy import stats

from scalingnote.errors import ConfigError
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.experiment.report import holm, resampled_sums
from scalingnote.storage import trec

Rankings = Mapping[str, Sequence[str]]  # query_id -> doc_ids, best first
Grades = Mapping[str, Mapping[str, int]]  # query_id -> doc_id -> grade
MeasureValues = Mapping[str, Float[ndarray, " queries"]]  # measure -> value of each query
FAMILIES = ("R", "Recall", "MRR", "MAP", "nDCG")  # in the order of reports
ENTROPY = "contrastive_entropy"


def rankings_of(runs: Mapping[str, trec.Run], query_ids: Sequence[str]) -> dict[str, Rankings]:
    """Method -> query -> documents, of the results of some queries."""
    return {name: {q: [doc for doc, _ in run[q]] for q in query_ids} for name, run in runs.items()}


def measure(rankings: Rankings, qrels: Grades, **depths: Any) -> dict[str, float]:
    """Means of :func:`per_query` over all queries of `qrels`."""
    return {name: float(values.mean()) for name, values in per_query(rankings, qrels, **depths).items()}


def per_query(
    rankings: Rankings,
    qrels: Grades,
    *,
    recall_at: Sequence[int] = (1, 10, 50, 100),
    mrr_at: int = 10,
    map_at: int = 100,
    ndcg_at: int = 10,
) -> dict[str, Float[ndarray, " queries"]]:
    """``R@K``, ``MRR@K``, ``MAP@K`` and ``nDCG@K`` of each query of `qrels`, in their order.

    R@K is 1 if a relevant document is among the first K (ScalingNote, section 4.1.2); ir-measures calls it
    Success@K. If queries have several relevant documents, ``Recall@K`` is added, the share of them among the
    first K; otherwise both are equal. A grade of 1 or more is relevant; nDCG uses the grade as the gain. A
    query without a ranking scores 0.
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


@dataclass(frozen=True)
class BaselineDifference:
    """A method minus the baseline in one measure; p is NaN for fewer than two queries."""

    difference: float
    low: float  # of the bootstrap interval, corrected for the number of compared methods
    high: float
    p: float  # of the t-test, two-sided
    p_holm: float  # with Holm's correction for the number of compared methods


def differences_from_baseline(
    baseline: str, methods: Mapping[str, MeasureValues], *, alpha: float, resamples: int, seed: int
) -> dict[str, dict[str, BaselineDifference]]:
    """Method -> measure -> difference from the baseline, for every method except the baseline itself.

    All methods have values of the same queries. Corrections are over the methods in each measure, so `alpha`
    bounds the probability of at least one false mark, and of at least one interval without the true value, in
    each column of a table.

    Raises:
        ConfigError: there is no such baseline.
    """
    if baseline not in methods:
        raise ConfigError(f"evaluate.baseline={baseline!r} is none of the methods: {', '.join(methods)}")
    keys = [(name, measure) for name, row in methods.items() if name != baseline for measure in row]
    if not keys:
        return {}
    differences = np.stack([methods[n][m] - methods[baseline][m] for n, m in keys], axis=1)
    p = dict(zip(keys, paired_t_test(differences).tolist(), strict=True))
    families = [measure for _, measure in keys]
    p_holm = {
        measure: holm({name: value for (name, m), value in p.items() if m == measure})
        for measure in dict.fromkeys(families)
    }
    ends = bootstrap(differences, families=families, alpha=alpha, resamples=resamples, seed=seed)
    low, high = ends.tolist()
    result: dict[str, dict[str, BaselineDifference]] = {}
    for i, (name, measure) in enumerate(keys):
        result.setdefault(name, {})[measure] = BaselineDifference(
            float(differences[:, i].mean()), low[i], high[i], p[name, measure], p_holm[measure][name]
        )
    return result


def paired_t_test(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """Two-sided p-values of Student's t-test that the mean of each column is 0.

    t is undefined for a constant column. Then p is 1 if all differences are 0, otherwise that of Fisher's
    randomization test: the share of sign assignments in which all signs are equal. NaN for fewer than two
    queries.
    """
    queries, columns = differences.shape
    if queries < 2:
        return np.full(columns, math.nan)
    varies = differences.std(0, ddof=1) > _rounding(differences)
    p_values = np.where(differences.mean(0) == 0, 1.0, 2.0 ** (1 - queries))
    p_values[varies] = stats.ttest_1samp(differences[:, varies], 0.0).pvalue
    return p_values


def bootstrap(
    differences: Float[ndarray, "queries columns"],
    *,
    families: Sequence[str] | None = None,
    alpha: float,
    resamples: int,
    seed: int,
) -> Float[ndarray, "2 columns"]:
    """Bounds of each mean over resampled queries; those of a family hold jointly at level 1 - `alpha`.

    Their half-width in standard errors is the 1 - `alpha` quantile of the largest deviation within the family
    (max-t; Westfall and Young, 1993). All columns are resampled together, so that one draw serves them all.
    `families` has a name per column, equal within a family; None: every column is a family.
    """
    rng = np.random.default_rng(seed)
    means = resampled_sums(differences, replicates=resamples, rng=rng) / len(differences)
    mean, error = differences.mean(0), means.std(0)
    deviations = np.abs(means - mean) / np.where(error > _rounding(differences), error, np.inf)
    half_width = np.empty(len(mean))
    family_of = np.array(range(len(mean)) if families is None else families)
    for family in np.unique(family_of):
        mine = family_of == family
        half_width[mine] = np.quantile(deviations[:, mine].max(1), 1 - alpha)
    return np.stack([mean - half_width * error, mean + half_width * error])


def _rounding(differences: Float[ndarray, "queries columns"]) -> Float[ndarray, " columns"]:
    """The largest deviation that may be rounding error alone."""
    return np.asarray(1e-12 * np.abs(differences).max(0))


def measure_methods(
    config: EvaluateConfig, rankings: Mapping[str, Rankings], *, qrels: Grades
) -> dict[str, MeasureValues]:
    """Method -> measure -> value per query in the order of `qrels`, at the depths of the config."""
    depths = {name: getattr(config, name) for name in ("recall_at", "mrr_at", "map_at", "ndcg_at")}
    return {name: per_query(ranking, qrels, **depths) for name, ranking in rankings.items()}


def means(methods: Mapping[str, MeasureValues]) -> dict[str, dict[str, float]]:
    """Method -> measure -> mean over queries."""
    return {name: {m: float(value.mean()) for m, value in row.items()} for name, row in methods.items()}


def significance_section(
    config: EvaluateConfig, methods: Mapping[str, MeasureValues], *, baseline: str
) -> dict[str, Any]:
    """The section of report.json: how every method differs from the baseline."""
    alpha, resamples = config.alpha, config.bootstrap
    by_method = differences_from_baseline(
        baseline, methods, alpha=alpha, resamples=resamples, seed=config.seed
    )
    differences = {
        name: {
            measure: {key: None if math.isnan(value) else value for key, value in asdict(difference).items()}
            for measure, difference in row.items()
        }
        for name, row in by_method.items()
    }
    return {"baseline": baseline, "alpha": alpha, "resamples": resamples, "differences": differences}


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
