"""Reports as data and as Markdown: measured numbers in, report.json's shape, tables and comparisons out.

{"dataset", "num_documents", "num_queries", "simulated_clicks",
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
 "seconds": {STAGE: s}, "environment": {...}}

A number that cannot be told is null. What :mod:`scalingnote.evaluate.sections` shows may be missing.
"""

from collections.abc import Mapping, Sequence

from scalingnote import tables
from scalingnote.evaluate.merge import merge_reports
from scalingnote.evaluate.retrieval import in_order, is_recall
from scalingnote.evaluate.sections import Report, Section, mark, sections

READING = (
    "R@K is the share of queries with a relevant document among their first K of the whole pool "
    "(Success@K where a query has several). Methods are searched exactly; “(index)” is the same query "
    "tower searched through the compressed index."
)
SIMULATED = "Training clicks were simulated from judged data (dataset.click_model)."


def comparison_table(merged: Report) -> str:
    """Markdown: a line per method with its measures, then a line per index with recall and size.

    Of one report or several, as :func:`~scalingnote.evaluate.merge.merge_reports` gives them.
    """
    methods: dict[str, dict[str, float]] = merged["methods"]
    names = measures_of(methods)
    best = {name: max(row[name] for row in methods.values() if name in row) for name in names}
    lines = [
        f"{merged['dataset']}: {merged['num_documents']:,} documents, {merged['num_queries']:,} queries",
        "",
        tables.markdown(
            ["method", *names],
            [
                [
                    method,
                    *(_cell(row.get(name), best[name]) + mark(merged, method, name) for name in names),
                ]
                for method, row in sorted(methods.items(), key=lambda item: _rank(item, names))
            ],
        ),
        "",
        tables.markdown(
            ["index of", "recall@10", "recall@100", "bytes per vector", "pipeline"],
            [
                [
                    method,
                    f"{index['recall@10']:.3f}",
                    f"{index['recall@100']:.3f}",
                    f"{index['bytes_per_vector']:g}",
                    f"{sum(merged['seconds'][method].values()):,.0f}s",
                ]
                for method, index in merged["index"].items()
            ],
        ),
    ]
    if merged["simulated_clicks"]:
        lines += ["", SIMULATED]
    return "\n".join(lines)


def markdown(report: Report) -> str:
    """report.md: the comparison table of one report, how to read it, and the time of each stage."""
    return "\n".join(
        [
            "# Retrieval report",
            "",
            comparison_table(merge_reports([report])),
            "",
            READING,
            "",
            *(line for section in sections(report) for line in _section(section)),
            tables.markdown(["stage", "seconds"], [[s, f"{t:,.1f}"] for s, t in report["seconds"].items()]),
            "",
            ", ".join(f"{name} {value}" for name, value in report["environment"].items()),
            "",
        ]
    )


def measures_of(methods: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Names of what the main table shows, in order: all that was measured but Recall."""
    return [name for name in in_order(n for row in methods.values() for n in row) if not is_recall(name)]


def _section(section: Section) -> list[str]:
    return [f"## {section.title}", "", section.text, "", tables.markdown(section.head, section.rows), ""]


def _rank(item: tuple[str, Mapping[str, float]], names: Sequence[str]) -> tuple[float, str]:
    """Best first by the last measure (nDCG), which looks at grades and ranks; then by name."""
    return -item[1].get(names[-1], 0.0), item[0]


def _cell(value: float | None, best: float) -> str:
    if value is None:
        return "–"
    return f"**{value:.3f}**" if value == best else f"{value:.3f}"
