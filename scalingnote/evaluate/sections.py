"""What a report says beside its main table: each part of report.json comes in, a titled table goes out.

Markdown and the page show the same sections. A part that a run has nothing for is not there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scalingnote.evaluate.retrieval import FAMILIES, in_order, is_recall

Report = dict[str, Any]
BETTER, WORSE = "▲", "▼"
DISTANCE = "Distance from the teacher"


@dataclass(frozen=True)
class Section:
    """A title, what to know when reading it, and a table of text; the first column names the row."""

    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def sections(report: Report) -> list[Section]:
    """All of them, in the order in which they are read."""
    parts = (_recall, _significance, _entropy, _auc, _relaxed, _reranking, _slices, _distance)
    return [section for part in parts for section in part(report)]


def mark(report: Report, method: str, measure: str) -> str:
    """How a method compares with the baseline in a measure: significantly better, worse, or nothing."""
    told = report.get("significance", {})
    found = told.get("differences", {}).get(method, {}).get(measure)
    if found is None or found["p_holm"] is None or found["p_holm"] >= told["alpha"]:
        return ""
    return BETTER if found["difference"] > 0 else WORSE


def _significance(report: Report) -> Iterator[Section]:
    told = report.get("significance")
    if not told or not told["differences"]:
        return
    names = in_order(name for row in told["differences"].values() for name in row)
    level = f"{100 * (1 - told['alpha']):g} %"
    text = (
        f"Mean difference over queries, its {level} interval ({told['resamples']:,} bootstrap resamples of "
        "the queries; those of a row hold all at once) and p (paired two-sided t-test, Holm's correction "
        f"over the methods). {BETTER} and {WORSE}: better and worse than {told['baseline']}, "
        f"p < {told['alpha']:g}."
    )
    differences = told["differences"]
    rows = [
        [name, *(_difference(row[name]) + mark(report, method, name) for method, row in differences.items())]
        for name in names
    ]
    yield Section(f"Against {told['baseline']}", text, ["measure", *differences], rows)


def _recall(report: Report) -> Iterator[Section]:
    methods = report["methods"]
    names = [name for name in in_order(n for row in methods.values() for n in row) if is_recall(name)]
    if names:
        text = "The share of a query's relevant documents among its first K: here some queries have several."
        rows = {method: {name: row[name] for name in names} for method, row in methods.items()}
        yield _methods("Recall", text, rows)


def _entropy(report: Report) -> Iterator[Section]:
    if told := report.get("contrastive_entropy"):
        text = (
            "Mean of -log softmax of a query's best document against others drawn from the pool, the same "
            f"for all methods: {told['negatives']:,} of them, cosines over a temperature of "
            f"{told['temperature']:g}, {told['queries']:,} queries. Smaller is better; guessing gives "
            f"{math.log(told['negatives'] + 1):.3f}."
        )
        rows = {method: {"contrastive entropy": value} for method, value in told["methods"].items()}
        yield _methods("Contrastive entropy", text, rows)


def _auc(report: Report) -> Iterator[Section]:
    if told := report.get("auc"):
        text = (
            f"Over {told['pairs']:,} judged pairs of a query and a document, ranked together: how often the "
            f"better of two has the higher score. Not in the pool: {told['not_in_pool']:,}; unusable rows: "
            f"{told['unusable']:,}."
        )
        yield _methods("Judged pairs", text, told["methods"])


def _relaxed(report: Report) -> Iterator[Section]:
    if told := report.get("relaxed"):
        text = (
            f"Relaxed R@K: the share of {told['queries']:,} queries with one of their answers, word by word, "
            "in one of the first K documents."
        )
        yield _methods("Answers found", text, told["methods"])


def _reranking(report: Report) -> Iterator[Section]:
    if told := report.get("reranking"):
        text = (
            f"{told['candidates']:,} given candidates of {told['queries']:,} queries in the order of each "
            f"method's scores; {told['not_in_pool']:,} are not in the pool and come last."
        )
        yield _methods("Re-ranking", text, told["methods"])


def _methods(title: str, text: str, rows: Mapping[str, Mapping[str, float | None]]) -> Section:
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    if all(name.split("@")[0] in FAMILIES for name in names):
        names = in_order(names)
    cells = [
        [method, *("–" if row[name] is None else f"{row[name]:.3f}" for name in names)]
        for method, row in rows.items()
    ]
    return Section(title, text, ["method", *names], cells)


_SLICES = {
    "length": ("By length of the query", "Queries in thirds by their number of words."),
    "topic": ("By topic", "The topic is that of the document judged best for the query."),
    "frequency": (
        "Head and tail",
        "By how many training queries (of 200,000, where there are more) have the query's rarest word; the "
        "head is what is met more often than the median.",
    ),
    "typos": (
        "With typos",
        "The same queries, asked again with a letter swapped, dropped or doubled in a share of their words "
        "(evaluate.typos).",
    ),
}


def _slices(report: Report) -> Iterator[Section]:
    for name, (title, text) in _SLICES.items():
        found = report.get("slices", {}).get(name)
        if not found:
            continue
        measure = in_order(next(iter(found[0]["methods"].values())))[-1]
        rows = [
            [
                one["label"],
                f"{one['queries']:,}",
                *(f"{row[measure]:.3f}" for row in one["methods"].values()),
            ]
            for one in found
        ]
        head = ["slice", "queries", *found[0]["methods"]]
        yield Section(title, f"{measure}. {text}", head, rows)


def _distance(report: Report) -> Iterator[Section]:
    told = report.get("distance")
    if not told:
        return
    text = (
        "Of the student's query embeddings from the teacher's, both of length 1; 2K/n Σ is what the papers' "
        "bound on the student's loss grows by, K being 1. As given: of what the towers put out."
    )
    if pairs := told["discrepancy"]:
        text += (
            f" Over {pairs['pairs']:,} pairs of {pairs['split']} queries the teacher's distance less the "
            f"student's is {pairs['mean']:+.3f} ± {pairs['deviation']:.3f}."
        )
    rows = [
        [
            split,
            f"{row['queries']:,}",
            *(f"{row[n]:.3f}" for n in ("mean", "bound", "cosine", "mean_as_given")),
        ]
        for split, row in told["splits"].items()
    ]
    head = ["queries of", "number", "mean distance", "2K/n Σ", "cosine", "as given"]
    yield Section(DISTANCE, text, head, rows)


def _difference(found: dict[str, float | None]) -> str:
    p = found["p_holm"]
    known = "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.3f}"
    return f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]{known} "
