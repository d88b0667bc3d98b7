"""Reports: the shape of report.json, Markdown, and several reports merged into one.

{"dataset", "num_documents", "num_queries", "simulated_clicks", "sample": {"documents"},
 "methods": {NAME: {"R@1": ..., "MRR@10": ..., "nDCG@10": ...}},
 "index": {"recall@10", "recall@100", "bytes_per_vector"},
 "significance": {"baseline", "alpha", "resamples",
                  "differences": {METHOD: {MEASURE: {"difference", "low", "high", "p", "p_holm"}}}},
 "slices": {SLICING: [{"label", "queries", "methods": as above}]},
 "contrastive_entropy": {"queries", "negatives", "temperature", "methods": {NAME: ...}},
 "auc": {"pairs", "not_in_pool", "unusable", "methods": {NAME: {"AUC-LABEL": ...}}},
 "reranking": {"queries", "candidates", "not_in_pool", "methods": as above},
 "relaxed": {"queries", "methods": {NAME: {"R@1": ...}}},
 "distance": {"splits": {SPLIT: {"queries", "mean", "bound", "cosine", "mean_as_given"}},
              "discrepancy": {"split", "pairs", "mean", "deviation", "counts", "edges"}},
 "seconds": {STAGE: s}, "environment": {...},
 "usage": {STAGE: {"requests", "bytes_read", "bytes_written", "driver_peak_bytes", "worker_peak_bytes"}}}

An undefined number is null. Only dataset, methods, index, seconds and environment are always present;
`sample` and no recall of the index where exact search covered some of the documents.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from scalingnote import reports
from scalingnote.config import validate
from scalingnote.errors import DataError
from scalingnote.evaluate.config import EvaluateConfig
from scalingnote.evaluate.measures import (
    FAMILIES,
    MeasureValues,
    is_recall,
    ordered_measures,
    significance_section,
)
from scalingnote.storage.artifact import Artifact

Report = dict[str, Any]
BETTER, WORSE = "▲", "▼"
DISTANCE = "Distance from the teacher"
PER_INDEX = ("index", "seconds")  # parts of a report that belong to the tower behind its index
SHARED = (
    "dataset",
    "num_documents",
    "num_queries",
    "simulated_clicks",
    "sample",
)  # equal in reports that are merged
READING = (
    "R@K is the share of queries with a relevant document among their first K of the whole pool "
    "(Success@K where a query has several). Methods are searched exactly; “(index)” is the same query "
    "tower searched through the compressed index."
)
SIMULATED = "Training clicks were simulated from judged data (dataset.click_model)."
SLICES = {
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


@dataclass(frozen=True)
class ReportSection:
    """A title, an explanation, and a table of text whose first column names the row."""

    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown(report: Report) -> str:
    """report.md: the comparison table, how to read it, all sections and the time of each stage."""
    lines = ["# Retrieval report", "", comparison_table(merge_reports([report])), "", READING, ""]
    for section in report_sections(report):
        table = reports.markdown(section.head, section.rows)
        lines += [f"## {section.title}", "", section.text, "", table, ""]
    environment = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    return "\n".join([*lines, reports.markdown(*stage_table(report)), "", environment, ""])


def stage_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: time, storage and memory of each stage."""
    head = ["stage", "seconds", "requests", "MB/s read", "MB/s written", "GB of driver", "GB of a worker"]
    rows = []
    for stage, seconds in report["seconds"].items():
        row = [stage, f"{seconds:,.1f}"]
        if used := report.get("usage", {}).get(stage):  # artifacts of earlier releases have none
            speeds = [used[name] / 1e6 / max(seconds, 1e-3) for name in ("bytes_read", "bytes_written")]
            peaks = [used[name] / 1e9 for name in ("driver_peak_bytes", "worker_peak_bytes")]
            row += [f"{used['requests']:,}", *(f"{v:,.1f}" for v in speeds), *(f"{v:.2f}" for v in peaks)]
        rows.append(row + ["–"] * (len(head) - len(row)))
    return head, rows


def comparison_table(merged: Report) -> str:
    """A Markdown table with a line per method, and one with a line per index.

    Args:
        merged: one report or several, as :func:`merge_reports` returns them.
    """
    methods: dict[str, dict[str, float]] = merged["methods"]
    names = measures_of(methods)
    best = {name: max(row[name] for row in methods.values() if name in row) for name in names}
    documents = documents_column(merged)

    def cell(method: str, name: str) -> str:
        value = methods[method].get(name)
        if value is None:
            return "–"
        text = f"**{value:.3f}**" if value == best[name] else f"{value:.3f}"
        return text + significance_mark(merged, method, name)

    # Best first by the last measure, nDCG, which considers both grades and ranks.
    order = sorted(methods, key=lambda method: (-methods[method].get(names[-1], 0.0), method))
    indexes = [
        [
            method,
            *(f"{index[name]:.3f}" if name in index else "–" for name in ("recall@10", "recall@100")),
            f"{index['bytes_per_vector']:g}",
            f"{sum(merged['seconds'][method].values()):,.0f}s",
        ]
        for method, index in merged["index"].items()
    ]
    lines = [
        f"{merged['dataset']}: {merged['num_documents']:,} documents, {merged['num_queries']:,} queries",
        "",
        reports.markdown(
            ["method", *(["documents"] if documents else []), *names],
            [[m, *([documents[m]] if documents else []), *(cell(m, name) for name in names)] for m in order],
        ),
        "",
        reports.markdown(["index of", "recall@10", "recall@100", "bytes per vector", "pipeline"], indexes),
    ]
    return "\n".join([*lines, *(line for note in notes(merged) for line in ("", note))])


def notes(report: Report) -> list[str]:
    """What a reader of the main table has to know of the data."""
    found = [SIMULATED] if report["simulated_clicks"] else []
    if sample := report.get("sample"):
        found.append(
            f"Exact search and BM25 cover a seeded sample of {sample['documents']:,} of "
            f"{report['num_documents']:,} documents, with all judged ones; the index covers all. Among fewer "
            "documents a query finds its own more easily: the index's rows compare with no others, and its "
            "recall against exact search was not measured."
        )
    return found


def documents_column(report: Report) -> dict[str, str]:
    """Method -> number of documents that it searched; empty where all methods searched all."""
    if not (sample := report.get("sample")):
        return {}
    return {
        method: f"{report['num_documents'] if '(index)' in method else sample['documents']:,}"
        for method in report["methods"]
    }


def measures_of(methods: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names of the measures of the main table in order: all except Recall@K."""
    return [name for name in _measure_names(methods) if not is_recall(name)]


def significance_mark(report: Report, method: str, measure: str) -> str:
    """A mark for a method that is significantly better or worse than the baseline; else nothing."""
    significance = report.get("significance", {})
    difference = significance.get("differences", {}).get(method, {}).get(measure)
    if difference is None or difference["p_holm"] is None or difference["p_holm"] >= significance["alpha"]:
        return ""
    return BETTER if difference["difference"] > 0 else WORSE


def report_sections(report: Report) -> list[ReportSection]:
    """All sections beside the main table, in reading order, for Markdown and HTML alike."""
    parts = (_recall, _significance, _entropy, _auc, _relaxed, _reranking, _slices, _distance)
    return [section for part in parts for section in part(report)]


def _recall(report: Report) -> Iterator[ReportSection]:
    names = [name for name in _measure_names(report["methods"]) if is_recall(name)]
    if names:
        text = "The share of a query's relevant documents among its first K: here some queries have several."
        rows = {method: {name: row[name] for name in names} for method, row in report["methods"].items()}
        yield _method_section("Recall", text, rows)


def _significance(report: Report) -> Iterator[ReportSection]:
    part = report.get("significance")
    if not part or not part["differences"]:
        return
    baseline, differences = part["baseline"], part["differences"]
    text = (
        f"Mean difference over queries, its {100 * (1 - part['alpha']):g} % interval "
        f"({part['resamples']:,} bootstrap resamples of "
        "the queries; those of a row hold all at once) and p (paired two-sided t-test, Holm's correction "
        f"over the methods). {BETTER} and {WORSE}: better and worse than {baseline}, p < {part['alpha']:g}."
    )
    rows = [
        [
            name,
            *(_difference(row[name]) + significance_mark(report, m, name) for m, row in differences.items()),
        ]
        for name in _measure_names(differences)
    ]
    yield ReportSection(f"Against {baseline}", text, ["measure", *differences], rows)


def _difference(difference: dict[str, float | None]) -> str:
    p = difference["p_holm"]
    p_text = "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.3f}"
    return f"{difference['difference']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]{p_text} "


def _entropy(report: Report) -> Iterator[ReportSection]:
    if part := report.get("contrastive_entropy"):
        text = (
            "Mean of -log softmax of a query's best document against others drawn from the pool, the same "
            f"for all methods: {part['negatives']:,} of them, cosines over a temperature of "
            f"{part['temperature']:g}, {part['queries']:,} queries. Smaller is better; guessing gives "
            f"{math.log(part['negatives'] + 1):.3f}."
        )
        rows = {method: {"contrastive entropy": value} for method, value in part["methods"].items()}
        yield _method_section("Contrastive entropy", text, rows)


def _auc(report: Report) -> Iterator[ReportSection]:
    if part := report.get("auc"):
        text = (
            f"Over {part['pairs']:,} judged pairs of a query and a document, ranked together: how often the "
            f"better of two has the higher score. Not in the pool: {part['not_in_pool']:,}; unusable rows: "
            f"{part['unusable']:,}."
        )
        yield _method_section("Judged pairs", text, part["methods"])


def _relaxed(report: Report) -> Iterator[ReportSection]:
    if part := report.get("relaxed"):
        text = (
            f"Relaxed R@K: the share of {part['queries']:,} queries with one of their answers, word by word, "
            "in one of the first K documents."
        )
        yield _method_section("Answers found", text, part["methods"])


def _reranking(report: Report) -> Iterator[ReportSection]:
    if part := report.get("reranking"):
        text = (
            f"{part['candidates']:,} given candidates of {part['queries']:,} queries in the order of each "
            f"method's scores; {part['not_in_pool']:,} are not in the pool and come last."
        )
        yield _method_section("Re-ranking", text, part["methods"])


def _slices(report: Report) -> Iterator[ReportSection]:
    for name, (title, text) in SLICES.items():
        if slices := report.get("slices", {}).get(name):
            methods = slices[0]["methods"]
            measure = _measure_names(methods)[-1]
            rows = [
                [
                    one["label"],
                    f"{one['queries']:,}",
                    *(f"{row[measure]:.3f}" for row in one["methods"].values()),
                ]
                for one in slices
            ]
            yield ReportSection(title, f"{measure}. {text}", ["slice", "queries", *methods], rows)


def _distance(report: Report) -> Iterator[ReportSection]:
    part = report.get("distance")
    if not part:
        return
    text = (
        "Of the student's query embeddings from the teacher's, both of length 1; 2K/n Σ is what the papers' "
        "bound on the student's loss grows by, K being 1. As given: of what the towers put out."
    )
    if pairs := part["discrepancy"]:
        text += (
            f" Over {pairs['pairs']:,} pairs of {pairs['split']} queries the teacher's distance less the "
            f"student's is {pairs['mean']:+.3f} ± {pairs['deviation']:.3f}."
        )
    columns = {
        "mean": "mean distance",
        "bound": "2K/n Σ",
        "cosine": "cosine",
        "mean_as_given": "as given",
    }
    rows = [
        [split, f"{row['queries']:,}", *(f"{row[name]:.3f}" for name in columns)]
        for split, row in part["splits"].items()
    ]
    yield ReportSection(DISTANCE, text, ["queries of", "number", *columns.values()], rows)


def _method_section(
    title: str, text: str, methods: Mapping[str, Mapping[str, float | None]]
) -> ReportSection:
    """A section with a row per method and a column per measure."""
    names = list(dict.fromkeys(name for row in methods.values() for name in row))
    if all(name.split("@")[0] in FAMILIES for name in names):
        names = ordered_measures(names)
    rows = [
        [method, *("–" if row[name] is None else f"{row[name]:.3f}" for name in names)]
        for method, row in methods.items()
    ]
    return ReportSection(title, text, ["method", *names], rows)


def _measure_names(methods: Mapping[str, Mapping[str, object]]) -> list[str]:
    return ordered_measures(name for row in methods.values() for name in row)


def merge_artifacts(artifacts: Sequence[Artifact]) -> Report:
    """:func:`merge_reports` of report artifacts, with the significance of differences from one baseline.

    Baseline, level and resamples are those of the first report. The measures that all reports have are
    tested.

    Raises:
        DataError: the reports have different documents or queries.
    """
    single = [artifact.read_json("report.json") for artifact in artifacts]
    merged = merge_reports(single)
    if len(single) == 1:
        return merged
    tables = [artifact.table("per_query.parquet") for artifact in artifacts]
    query_ids = tables[0]["query_id"].unique()
    values: dict[str, MeasureValues] = {}
    for artifact, report, names, table in zip(artifacts, single, _merged_names(single), tables, strict=True):
        if not table["query_id"].unique().equals(query_ids):
            raise DataError(f"{artifacts[0].uri} and {artifact.uri} are of different test queries")
        for name, new_name in names.items():
            rows = table.filter(pc.equal(table["method"], name))
            values[new_name] = {m: rows[m].to_numpy() for m in report["methods"][name]}
    common = set.intersection(*(set(row) for row in values.values()))
    values = {name: {m: row[m] for m in row if m in common} for name, row in values.items()}
    stored = artifacts[0].manifest.config  # of this release or an earlier one
    known = {name: value for name, value in stored.items() if name in EvaluateConfig.model_fields}
    config = validate(EvaluateConfig, known, source=artifacts[0].uri)
    baseline = single[0]["significance"]["baseline"]
    merged["significance"] = significance_section(config, values, baseline=baseline)
    return merged


def merge_reports(single: Sequence[Report]) -> Report:
    """One report of several methods over one dataset; without significance, unless it is of one report.

    `methods` is the union; `index` and `seconds` become {METHOD: ...}, under the name of the tower behind the
    index. A name with different numbers in two reports gets the suffix `` #2``, `` #3``...

    Raises:
        DataError: there are no reports, or they have different documents or queries.
    """
    if not single:
        raise DataError("no reports to compare: run at least one method")
    first = single[0]
    for report in single[1:]:
        for name in SHARED:
            if report.get(name) != first.get(name):
                raise DataError(
                    f"reports differ in {name}: {first.get(name)!r} and {report.get(name)!r}; "
                    "compare methods that were run on one dataset"
                )
    merged: Report = {name: first[name] for name in SHARED if name in first}
    merged |= {"methods": {}, "environment": first["environment"]}
    if len(single) == 1:
        merged["significance"] = first.get("significance", {})
    per_index: dict[str, Any] = {}
    for report, names in zip(single, _merged_names(single), strict=True):
        merged["methods"] |= {names[name]: row for name, row in report["methods"].items()}
        through_index = [name for name in report["methods"] if name.endswith(" (index)")]
        served = names[(through_index or list(report["methods"]))[0]].removesuffix(" (index)")
        row = {name: report[name] for name in PER_INDEX}
        # Two indexes may have equal results and differ in size.
        per_index[_free_name(per_index, served, row)] = row
    return merged | {name: {served: row[name] for served, row in per_index.items()} for name in PER_INDEX}


def _merged_names(single: Sequence[Report]) -> list[dict[str, str]]:
    """For each report, the names of its methods in the merged one."""
    taken: dict[str, Mapping[str, float]] = {}
    merged = []
    for report in single:
        names = {name: _free_name(taken, name, row) for name, row in report["methods"].items()}
        taken |= {names[name]: row for name, row in report["methods"].items()}
        merged.append(names)
    return merged


def _free_name(taken: Mapping[str, Any], name: str, row: Mapping[str, Any]) -> str:
    """The first name that is free, or that has the same numbers already."""
    base, index, free, number = name.removesuffix(" (index)"), name.endswith(" (index)"), name, 1
    while free in taken and taken[free] != row:
        number += 1
        free = f"{base} #{number}{' (index)' if index else ''}"
    return free
