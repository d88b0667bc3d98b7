"""report.md and report.html: sections of measures; on the page also plots, example queries and lineage."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from scalingnote import reports
from scalingnote.evaluate.config import METHOD_SUFFIX
from scalingnote.evaluate.measures import FAMILIES, is_recall, measure_names
from scalingnote.evaluate.report import (
    BETTER,
    WORSE,
    Ancestor,
    Report,
    comparison_table,
    main_table,
    measures_of,
    merge_reports,
    notes,
    significance_mark,
    stage_table,
)
from scalingnote.evaluate.test_set import ExampleQuery
from scalingnote.reports import Markup

DISTANCE = "Distance from the teacher"
READING = (
    "R@K is the share of queries with a relevant document among their first K of the whole pool "
    "(Success@K where a query has several). Methods are searched exactly; “(index)” is the same query "
    "tower searched through the compressed index."
)
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

_ENTROPY = (
    "Mean of -log softmax of a query's best document against others drawn from the pool, the same for all "
    "methods: {negatives:,} of them, cosines over a temperature of {temperature:g}, {queries:,} queries. "
    "Smaller is better; guessing gives {guess:.3f}."
)
_BY_METHOD = {
    "auc": (
        "Judged pairs",
        "Over {pairs:,} judged pairs of a query and a document, ranked together: how often the better of two "
        "has the higher score. Not in the pool: {not_in_pool:,}; unusable rows: {unusable:,}.",
    ),
    "relaxed": (
        "Answers found",
        "Relaxed R@K: the share of {queries:,} queries with one of their answers, word by word, in one of "
        "the first K documents.",
    ),
    "reranking": (
        "Re-ranking",
        "{candidates:,} given candidates of {queries:,} queries in the order of each method's scores; "
        "{not_in_pool:,} are not in the pool and come last.",
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
    parts = ["# Retrieval report", comparison_table(merge_reports([report]), differences=False), READING]
    for section in report_sections(report):
        parts += [f"## {section.title}", section.text, reports.markdown(section.head, section.rows)]
    parts += [reports.markdown(*stage_table(report)), reports.environment_line(report["environment"])]
    return "\n\n".join(parts) + "\n"


def report_sections(report: Report) -> list[ReportSection]:
    """All sections beside the main table, in reading order, for Markdown and HTML alike."""
    parts = (_recall, _significance, _by_method, _slices, _distance)
    return [section for part in parts for section in part(report)]


def _recall(report: Report) -> Iterator[ReportSection]:
    names = [name for name in measure_names(report["methods"]) if is_recall(name)]
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
        for name in measure_names(differences)
    ]
    yield ReportSection(f"Against {baseline}", text, ["measure", *differences], rows)


def _difference(difference: dict[str, float | None]) -> str:
    p = difference["p_holm"]
    p_text = "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.3f}"
    return f"{difference['difference']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]{p_text} "


def _by_method(report: Report) -> Iterator[ReportSection]:
    """Sections that are a table of methods and measures."""
    if part := report.get("contrastive_entropy"):
        guess = math.log(part["negatives"] + 1)
        rows = {method: {"contrastive entropy": value} for method, value in part["methods"].items()}
        yield _method_section("Contrastive entropy", _ENTROPY.format(guess=guess, **part), rows)
    for name, (title, text) in _BY_METHOD.items():
        if part := report.get(name):
            yield _method_section(title, text.format(**part), part["methods"])


def _slices(report: Report) -> Iterator[ReportSection]:
    for name, (title, text) in SLICES.items():
        if slices := report.get("slices", {}).get(name):
            methods = slices[0]["methods"]
            measure = measure_names(methods)[-1]
            rows = [
                [one["label"], f"{one['queries']:,}"]
                + [f"{row[measure]:.3f}" for row in one["methods"].values()]
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
    columns = {"mean": "mean distance", "bound": "2K/n Σ", "cosine": "cosine", "mean_as_given": "as given"}
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
        names = measure_names(methods)
    rows = [
        [method, *("–" if row[name] is None else f"{row[name]:.3f}" for name in names)]
        for method, row in methods.items()
    ]
    return ReportSection(title, text, ["method", *names], rows)


# --- HTML --------------------------------------------------------------------------------------------------


def page(report: Report, *, examples: Sequence[ExampleQuery], ancestors: Sequence[Ancestor]) -> str:
    """report.html: Markdown's sections, plots, examples and lineage. All that comes from data is escaped."""
    dataset = str(report["dataset"])
    header = (
        f'<p class="facts"><b>{escape(dataset)}</b> · <b>{report["num_queries"]:,}</b> test queries against '
        f"all <b>{report['num_documents']:,}</b> documents</p>"
    )
    for note in notes(report):
        header += f'\n<p class="note">{note}</p>'
    size = f"A vector takes {report['index']['bytes_per_vector']:g} bytes."
    recalls = {name: report["index"][name] for name in ("recall@10", "recall@100") if name in report["index"]}
    last = measures_of(report["methods"])[-1]
    about_examples = (
        f"Where a method differs most from {report['significance']['baseline']} by {last}: of each "
        "method the greatest win, the greatest loss, and so on; where none differs, drawn at random. ✓ marks "
        "a document judged relevant, beside a method stands the rank of its first."
    )
    shown = [_example_html(example, measure=last) for example in examples] or ["<p>None were asked for.</p>"]
    about_lineage = "Every artifact these numbers rest on. A digest covers settings, inputs and bytes."
    sections = [
        *_quality_and_cost(report, measure=last),
        reports.section(
            "Methods",
            _methods_table(report),
            _recall_bars(report["methods"]),
            f'<p class="small">{READING}</p>',
        ),
        *_tables(report),
        reports.section(
            "Index",
            reports.bars("recall of the index", recalls, number="{:.3f}", end=1) if recalls else "",
            text=f"Against exact search with the same query embeddings. {size}" if recalls else size,
        ),
        reports.section("Example queries", *shown, text=about_examples),
        reports.section(
            "Stages",
            reports.bars("seconds of the stages", report["seconds"]) if report["seconds"] else "",
            reports.html(*stage_table(report)),
        ),
        reports.section("Lineage", _lineage_table(ancestors), text=about_lineage),
        reports.section("Environment", reports.definitions(report["environment"])),
    ]
    return reports.page("Retrieval report", subject=dataset, header=header, sections=sections)


def _quality_and_cost(report: Report, *, measure: str) -> list[str]:
    """A section with a picture: a measure of each method against the queries that a core encodes."""
    rates: Mapping[str, float] = report.get("queries_per_core_second", {})
    if not rates:  # of an earlier release, or not measured
        return []
    points = {
        method: (rates.get(METHOD_SUFFIX.sub("", method)), row[measure])
        for method, row in report["methods"].items()
    }
    text = (
        f"{measure} against the queries that one core encodes per second, in blocks. Methods of one query "
        "tower encode alike; their search is not counted. Dashed: a method without an encoder."
    )
    picture = reports.scatter(
        "quality and cost of the methods", points, x="queries per second and core", y=measure
    )
    return [reports.section("Quality and cost", picture, text=text)]


def _methods_table(report: Report) -> str:
    def shown(cell: str) -> str:
        return Markup(f'<span class="good">{cell[1:]}</span>') if cell.startswith("*") else cell

    head, rows = main_table(report, list(report["methods"]), best="*{}".format)
    return reports.html(head, [[name, *map(shown, cells)] for name, *cells in rows])


def _recall_bars(methods: Mapping[str, Mapping[str, float]]) -> str:
    """Grouped bars: for each R@K, one bar per method."""
    cutoffs = [name for name in next(iter(methods.values())) if name.startswith("R@")]
    groups = {name: [row[name] for row in methods.values()] for name in cutoffs}
    return reports.columns("recall of the methods", groups, legend=list(methods), end=1)


def _discrepancy_histogram(pairs: Mapping[str, Any]) -> str:
    """Histogram of the teacher's distance between two queries minus the student's."""
    edges, counts = pairs["edges"], pairs["counts"]
    labelled = {0, len(counts) // 2, len(counts) - 1}
    groups = {f"{edges[i]:+.2f}" if i in labelled else "\u200b" * i: [n] for i, n in enumerate(counts)}
    return reports.columns("discrepancy of pairwise distances", groups)


def _tables(report: Report) -> list[str]:
    """The sections that Markdown has too; the distance from the teacher also as a histogram."""
    sections = []
    for part in report_sections(report):
        plot = ""
        if part.title == DISTANCE and (pairs := report["distance"]["discrepancy"]):
            plot = _discrepancy_histogram(pairs)
        sections.append(reports.section(part.title, reports.html(part.head, part.rows), plot, text=part.text))
    return sections


def _example_html(example: ExampleQuery, *, measure: str) -> str:
    columns = []
    for method, documents in example.results.items():
        items = "".join(
            f'<li class="{"relevant" if document.relevant else "other"}">'
            + escape(document.title or document.doc_id)
            + ('<span class="mark" title="judged relevant"> ✓</span>' if document.relevant else "")
            + f"<code>{escape(document.doc_id)}</code></li>"
            for document in documents
        )
        rank = ""
        if method in example.first_relevant:
            rank = f" · first relevant: {example.first_relevant[method] or 'not found'}"
        columns.append(f"<div><h4>{escape(method + rank)}</h4><ol>{items}</ol></div>")
    reason = ""
    if example.method:
        reason = escape(f"{example.method} {example.difference:+.3f} {measure}")
        reason = f' <span class="small">{reason}</span>'
    return (
        f"<details><summary>{escape(example.query)}{reason}</summary>"
        f'<div class="columns">{"".join(columns)}</div></details>'
    )


def _lineage_table(ancestors: Iterable[Ancestor]) -> str:
    rows = []
    for ancestor in ancestors:
        counts = ancestor.artifact.counts if ancestor.artifact else {}
        known = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())
        digest = escape(ancestor.digest)
        rows.append(
            [
                ancestor.stage,
                ancestor.kind,
                Markup(f'<code title="{digest}">{digest[:12]}</code>'),
                known if ancestor.artifact else "no longer there",
                Markup(f"<code>{escape(ancestor.uri)}</code>"),
            ]
        )
    return reports.html(["stage", "artifact", "digest", "counts", "where"], rows, text=5)
